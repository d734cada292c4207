//! One measurement: the jobs of a load, on one device.

use crate::cores;
use crate::job::{self, Outcome, Spec};
use crate::load::Load;
use crate::progress::Progress;
use crate::report::{Entry, Report};
use anyhow::{Context, Result};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use udm_core::Device;
use udm_runtime::{Cluster, CoreOptions};

/// What is to be measured, and who looks on.
pub struct Run<'a> {
    /// The load.
    pub load: &'a Load,
    /// Where the jobs count what they have done, for whoever looks on.
    pub progress: Option<&'a Progress>,
    /// Set by whoever wants the jobs to stop where they are; what they have measured by then is
    /// reported.
    pub stop: &'a AtomicBool,
}

impl Run<'_> {
    /// Runs the jobs on the device that `make` makes once the cores of the cluster take turns.
    ///
    /// # Errors
    /// When the load can't begin. What fails later is in the report.
    pub fn measure(&self, make: impl FnOnce(&Arc<Cluster>) -> Result<Arc<dyn Device>>) -> Result<Report> {
        let load = self.load;
        load.check().context("bench")?;
        let jobs = usize::from(load.numjobs);
        let options: Vec<_> = (0..jobs)
            .map(|job| CoreOptions { cpu: load.cpu(job), ring_optional: true, ..CoreOptions::default() })
            .collect();
        let regions = OnceLock::new();
        let outcomes = cores::run(
            &options,
            |cluster| {
                let device = make(cluster)?;
                let _ = regions.set(load.regions(&device.limits()).context("bench")?);
                Ok(vec![device])
            },
            |core, lanes| {
                let job = usize::from(core.id().0);
                let region = regions.get().expect("set before the cores begin")[job];
                let progress = self.progress.map(|p| p.counter(job));
                let lane = lanes.into_iter().next().expect("a lane a device");
                job::run(core, lane, &Spec { load, job, region, progress, stop: self.stop })
            },
        )?;
        Ok(Report { entries: entries(load, outcomes) })
    }
}

/// An entry for each job, or one for all with `--group_reporting`.
pub(crate) fn entries(load: &Load, outcomes: Vec<Outcome>) -> Vec<Entry> {
    let entry = |o: Outcome| Entry {
        name: load.name.clone(),
        jobs: 1,
        thread: o.thread,
        stats: o.stats,
        failure: o.failure,
    };
    let mut entries: Vec<Entry> = outcomes.into_iter().map(entry).collect();
    if load.group_reporting && !entries.is_empty() {
        let rest = entries.split_off(1);
        let all = &mut entries[0];
        for other in rest {
            all.jobs += 1;
            all.stats.add(&other.stats);
            all.failure = all.failure.take().or(other.failure);
        }
    }
    entries
}
