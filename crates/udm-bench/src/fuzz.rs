//! Invariants for any job file. Tests call this with random input, the fuzzer with generated input.

use crate::jobs::{JOBS_MAX, parse_job_file};
use crate::load::FioLoadOptions;
use crate::plan::AccessPlan;
use udm_core::{Limits, Sectors};

/// The size of the device of all loads, in sectors.
const DEVICE: u64 = 2048;

/// Reads any bytes as a job file and panics if an invariant is broken. An invalid file or load is
/// refused with one line. No plan leaves the device, and each plan repeats itself.
pub fn fuzz_job_file_parser(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let file = match parse_job_file(&text, |name| Some(name.repeat(2))) {
        Ok(file) => file,
        Err(error) => return assert_one_line_job_error(&error),
    };
    let threads: usize = file.jobs.iter().map(|job| usize::from(job.load.numjobs)).sum();
    assert!(!file.jobs.is_empty() && threads <= JOBS_MAX);
    for job in &file.jobs {
        assert!(job.device < file.devices.len() && job.group >= job.stage);
        if let Err(error) = check_access_plan_invariants(&job.load) {
            assert_one_line_job_error(&error);
        }
    }
}

fn assert_one_line_job_error(error: &anyhow::Error) {
    let error = format!("{error:#}");
    assert!(!error.is_empty() && !error.contains(|c: char| c.is_control()), "{error:?}");
    assert!(error.len() < 2000, "{error}");
}

fn check_access_plan_invariants(load: &FioLoadOptions) -> anyhow::Result<()> {
    load.check()?;
    let limits = Limits { max_discard: Sectors(DEVICE), ..Limits::new(Sectors(DEVICE)) };
    let regions = load.regions(&limits)?;
    assert_eq!(regions.len(), usize::from(load.numjobs));
    // The seed must not be random, because the plan runs twice.
    let load = &FioLoadOptions { randseed: load.randseed.or(Some(0)), ..load.clone() };
    for (i, region) in regions.into_iter().enumerate().take(3) {
        let mut plan = AccessPlan::new(load, i, region);
        let mut again = plan.clone();
        for _ in 0..100 {
            let next = plan.next();
            assert_eq!(next, again.next());
            let Some((_, span)) = next else { break };
            assert!(span.bytes() == load.block_bytes());
            assert!(span.sector < DEVICE && span.sectors <= DEVICE - span.sector, "{span:?}");
        }
    }
    Ok(())
}
