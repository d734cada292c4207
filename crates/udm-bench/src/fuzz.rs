//! What must hold for any job file; run by the tests with drawn input and by the fuzzer with found
//! input.

use crate::jobs::{JOBS_MAX, read_jobs};
use crate::load::Load;
use crate::plan::AccessPlan;
use udm_core::{Limits, Sectors};

/// The device of all loads, in sectors.
const DEVICE: u64 = 2048;

/// Reads any bytes as a job file and panics when something does not hold: the file or a load that
/// can't be is refused in one line; no plan leaves the device, and each repeats itself.
pub fn job_file(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let file = match read_jobs(&text, |name| Some(name.repeat(2))) {
        Ok(file) => file,
        Err(error) => return one_line(&error),
    };
    let threads: usize = file.jobs.iter().map(|job| usize::from(job.load.numjobs)).sum();
    assert!(!file.jobs.is_empty() && threads <= JOBS_MAX);
    for job in &file.jobs {
        assert!(job.device < file.devices.len() && job.group >= job.stage);
        if let Err(error) = plans(&job.load) {
            one_line(&error);
        }
    }
}

fn one_line(error: &anyhow::Error) {
    let error = format!("{error:#}");
    assert!(!error.is_empty() && !error.contains(|c: char| c.is_control()), "{error:?}");
    assert!(error.len() < 2000, "{error}");
}

fn plans(load: &Load) -> anyhow::Result<()> {
    load.check()?;
    let limits = Limits { max_discard: Sectors(DEVICE), ..Limits::new(Sectors(DEVICE)) };
    let regions = load.regions(&limits)?;
    assert_eq!(regions.len(), usize::from(load.numjobs));
    // No seed of chance: a plan is looked at twice.
    let load = &Load { randseed: load.randseed.or(Some(0)), ..load.clone() };
    for (i, region) in regions.into_iter().enumerate().take(3) {
        let mut plan = AccessPlan::new(load, i, region);
        let mut again = plan.clone();
        for _ in 0..100 {
            let next = plan.next();
            assert_eq!(next, again.next());
            let Some((_, span)) = next else { break };
            assert!(span.sectors > 0 && span.bytes() <= load.longest());
            assert!(span.sector < DEVICE && span.sectors <= DEVICE - span.sector, "{span:?}");
        }
    }
    Ok(())
}
