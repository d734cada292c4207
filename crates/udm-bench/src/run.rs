//! One measurement: the jobs of one or several loads, on one or several devices.

use crate::cores::{self, ValueOrCancelGate};
use crate::job::{self, JobSpec};
use crate::jobs::BenchJob;
use crate::load::FioLoadOptions;
use crate::progress::JobProgressCounters;
use crate::region::JobRegion;
use crate::report::BenchReport;
use anyhow::{Context, Result};
use rustix::fs::Advice;
use std::fs::File;
use std::path::Path;
use std::slice;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::AcqRel};
use std::sync::{Arc, OnceLock};
use udm_core::{Device, Limits, Sectors};
use udm_runtime::{CoreOptions, ProcessCores};

/// A measurement of one load.
pub struct LoadMeasurementPlan<'a> {
    /// The load.
    pub load: &'a FioLoadOptions,
    /// Counters of completed requests, for a progress line.
    pub progress: Option<&'a JobProgressCounters>,
    /// If set, the jobs stop early, and their results so far are reported.
    pub stop: &'a AtomicBool,
}

/// The number of running threads of a stage, and the gate for the next stage.
struct StageGate {
    left: AtomicUsize,
    over: ValueOrCancelGate<()>,
}

/// The data that the threads get once the devices exist.
struct ProcessCoresAndJobRegions {
    core_set: Arc<ProcessCores>,
    /// Regions by job, then by thread.
    regions: Vec<Vec<JobRegion>>,
}

impl LoadMeasurementPlan<'_> {
    /// Runs the jobs on the device that `make` makes. `make` is called once the cores take turns.
    ///
    /// # Errors
    /// If the load can't begin. Later failures are in the report.
    pub fn measure(
        &self,
        make: impl FnOnce(&Arc<ProcessCores>) -> Result<Arc<dyn Device>>,
    ) -> Result<BenchReport> {
        let job = BenchJob::alone(self.load.clone());
        measure_jobs(slice::from_ref(&job), self.progress, self.stop, |c| Ok(vec![make(c)?]))
    }
}

/// Runs several loads, at the same time or one after another, on the devices that `make` makes.
/// `make` is called once the cores take turns.
///
/// # Errors
/// If a load can't begin. Later failures are in the report.
pub fn measure_jobs(
    jobs: &[BenchJob],
    progress: Option<&JobProgressCounters>,
    stop: &AtomicBool,
    make: impl FnOnce(&Arc<ProcessCores>) -> Result<Vec<Arc<dyn Device>>>,
) -> Result<BenchReport> {
    let mut stages: Vec<StageGate> = Vec::new();
    // The index of each thread's job, and of the thread in the job.
    let mut threads = Vec::new();
    for (at, job) in jobs.iter().enumerate() {
        job.load.check().with_context(|| job_error_prefix(jobs, job))?;
        stages.resize_with(stages.len().max(job.stage + 1), StageGate::new);
        *stages[job.stage].left.get_mut() += usize::from(job.load.numjobs);
        threads.extend((0..usize::from(job.load.numjobs)).map(|n| (at, n)));
    }
    // Each stage is checked alone: its memory is freed before the next stage begins.
    let of_stage = |stage| jobs.iter().enumerate().filter(move |(_, job)| job.stage == stage);
    for stage in 0..stages.len() {
        FioLoadOptions::check_memory(of_stage(stage).map(|(_, job)| &job.load)).context("bench: all jobs")?;
    }
    let options: Vec<_> = threads
        .iter()
        .enumerate()
        .map(|(i, (at, _))| CoreOptions {
            cpus: jobs[*at].load.cpus(i),
            ring_optional: true,
            ..CoreOptions::default()
        })
        .collect();
    let start = OnceLock::new();
    let outcomes = cores::run_on_attached_cores(
        &options,
        |core_set| {
            let devices = make(core_set)?;
            let regions = |job: &BenchJob| {
                job.load
                    .regions(&request_limits_of_bench_device(&*devices[job.device]))
                    .with_context(|| job_error_prefix(jobs, job))
            };
            let regions = jobs.iter().map(regions).collect::<Result<Vec<Vec<_>>>>()?;
            let _ = start.set(ProcessCoresAndJobRegions { core_set: Arc::clone(core_set), regions });
            Ok(devices)
        },
        |core, lanes| {
            let thread = usize::from(core.id().0);
            let (at, n) = threads[thread];
            let ProcessCoresAndJobRegions { core_set, regions } =
                start.get().expect("set before the cores begin");
            let BenchJob { load, device, stage, .. } = &jobs[at];
            let region = regions[at][n];
            let progress = progress.map(|p| p.counter(thread));
            let lane = lanes.into_iter().nth(*device).expect("a lane a device");
            if *stage > 0 {
                stages[*stage - 1].over.wait(core);
            }
            if let Some(file) = &jobs[at].invalidate {
                drop_file_page_cache(file);
            }
            let outcome =
                job::run_job_on_core(core, lane, &JobSpec { load, job: thread, region, progress, stop });
            stages[*stage].one_is_over(core_set);
            outcome
        },
    )?;
    Ok(BenchReport::new(jobs, threads.iter().map(|(at, _)| *at).zip(outcomes)))
}

/// The limits for requests to a device. A mapped device splits requests that are too long for the
/// devices below.
fn request_limits_of_bench_device(device: &dyn Device) -> Limits {
    let limits = device.limits();
    let longest = |most: Sectors| if most > Sectors::ZERO { Sectors(u32::MAX.into()) } else { most };
    match device.stacked() {
        None => limits,
        Some(_) => Limits {
            max_sectors: longest(limits.max_sectors),
            max_discard: longest(limits.max_discard),
            max_write_zeroes: longest(limits.max_write_zeroes),
            ..limits
        },
    }
}

/// Drops the page cache of a file, so that reads come from the disk. Errors are ignored, as in fio.
fn drop_file_page_cache(file: &Path) {
    if let Ok(file) = File::open(file) {
        let _ = rustix::fs::fadvise(&file, 0, None, Advice::DontNeed);
    }
}

/// Prefix of an error of a job. It names the job if there are several.
fn job_error_prefix(jobs: &[BenchJob], job: &BenchJob) -> String {
    if jobs.len() == 1 { "bench".into() } else { format!("bench: job {}", job.load.name) }
}

impl StageGate {
    fn new() -> StageGate {
        StageGate { left: AtomicUsize::new(0), over: ValueOrCancelGate::new() }
    }

    fn one_is_over(&self, core_set: &ProcessCores) {
        if self.left.fetch_sub(1, AcqRel) == 1 {
            self.over.open(Some(()), core_set);
        }
    }
}
