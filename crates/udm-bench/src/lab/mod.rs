//! The lab: experiments from the publications on which udm is based, each beside a reference in one
//! run.
//!
//! An experiment is a line of [`EXPERIMENTS`]: a name, a question, a source, and a function. The
//! function fills an `ExperimentOutcome` with findings, tables and plots; text, JSON and the page are made of
//! that alone. A finding is a ratio, the original's ratio, an aim and a verdict, because absolute
//! numbers belong to a machine.
//!
//! * Experiments measure their devices in turn, round by round, and take medians. A disturbance of
//!   the machine then affects all alike.
//! * `selectors` uses simulated paths and no clock, so its result is the same on every machine.
//! * `fio` runs fio with udm's engine, and compares with the raw device in one fio.
//! * The references are the lab's own code (`models`): lanes and devices like udm's, with locks,
//!   queues or a pace. Locks exist in these models alone.
//! * An unoptimised build runs a 32nd of the requests and says so.

mod context_switches;
mod fio;
mod growth;
mod io_affinity;
mod lockless;
mod machine;
pub(crate) mod models;
mod ornl;
mod outcome;
mod over;
mod selectors;
mod snapshot;

pub use machine::MachineInfo;
pub use outcome::{ExperimentOutcome, Finding, FindingVerdict, ResultTable, page, text};

use anyhow::Result;
use std::path::Path;
use std::sync::atomic::AtomicBool;

/// An experiment.
pub struct Experiment {
    /// What `udm lab run` calls it.
    pub name: &'static str,
    /// What it asks.
    pub question: &'static str,
    /// Where it comes from.
    pub source: &'static str,
    run: fn(&ExperimentOptions<'_>, &mut ExperimentOutcome) -> Result<()>,
}

/// All experiments.
pub const EXPERIMENTS: &[Experiment] = &[
    lockless::EXPERIMENT,
    context_switches::EXPERIMENT,
    io_affinity::EXPERIMENT,
    snapshot::EXPERIMENT,
    ornl::EXPERIMENT,
    selectors::EXPERIMENT,
    growth::EXPERIMENT,
    fio::EXPERIMENT,
];

/// How much to measure.
pub struct ExperimentOptions<'a> {
    /// A third of the rounds.
    pub quick: bool,
    /// Once it is set an experiment ends with the rounds that it has.
    pub stop: &'a AtomicBool,
    /// udm's engine for fio, where there is one.
    pub fio_engine: Option<&'a Path>,
}

impl ExperimentOptions<'_> {
    /// How often each device is measured, where that is `all` for the whole of it.
    fn rounds(&self, all: usize) -> usize {
        if self.quick { (all / 3).max(1) } else { all }
    }

    /// How many requests a measurement has, where that is `all` for one that says something: a
    /// build that is not optimised only shows that it runs.
    fn requests(&self, all: u64) -> u64 {
        if cfg!(debug_assertions) { all / 32 } else { all }
    }
}

impl Experiment {
    /// The one of that name.
    #[must_use]
    pub fn find(name: &str) -> Option<&'static Experiment> {
        EXPERIMENTS.iter().find(|experiment| experiment.name == name)
    }

    /// Runs it.
    ///
    /// # Errors
    /// When cores or devices can't be had, or it was stopped before anything was measured.
    pub fn run(&self, effort: &ExperimentOptions<'_>) -> Result<ExperimentOutcome> {
        let mut outcome = ExperimentOutcome::new(self);
        (self.run)(effort, &mut outcome)?;
        Ok(outcome)
    }
}
