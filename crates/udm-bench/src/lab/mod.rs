//! The lab: experiments from the publications on which udm is based, each with a reference in the
//! same run.
//!
//! An experiment is a line of [`EXPERIMENTS`]: a name, a question, a source, and a function. The
//! function fills an [`ExperimentOutcome`] with findings, tables and plots. Text, JSON and the page
//! are made only from this outcome.
//!
//! A finding is a ratio, the original's ratio, an aim and a verdict. Ratios can be compared between
//! machines, absolute numbers cannot.
//!
//! * Experiments measure their devices in rotation, round by round, and take medians. So a
//!   disturbance of the machine affects all devices alike.
//! * `selectors` uses simulated paths and no clock, so its result is the same on every machine.
//! * `fio` runs fio with udm's engine, and compares with the raw device in one fio.
//! * The references are the lab's own code (`models`): lanes and devices like udm's, with locks,
//!   queues or limited rates. Only these models have locks.
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
pub use outcome::{
    ExperimentOutcome, RatioVsPublished, RatioVsPublishedVerdict, ResultTable, render_experiments_html,
    render_experiments_text,
};

use anyhow::Result;
use std::path::Path;
use std::sync::atomic::AtomicBool;

/// An experiment.
pub struct PublishedExperiment {
    /// The name for `udm lab run`.
    pub name: &'static str,
    /// The question that the experiment answers.
    pub question: &'static str,
    /// The publication on which it is based.
    pub source: &'static str,
    run: fn(&ExperimentRunOptions<'_>, &mut ExperimentOutcome) -> Result<()>,
}

/// All experiments.
pub const EXPERIMENTS: &[PublishedExperiment] = &[
    lockless::EXPERIMENT,
    context_switches::EXPERIMENT,
    io_affinity::EXPERIMENT,
    snapshot::EXPERIMENT,
    ornl::EXPERIMENT,
    selectors::EXPERIMENT,
    growth::EXPERIMENT,
    fio::EXPERIMENT,
];

/// How much to measure, and when to stop.
pub struct ExperimentRunOptions<'a> {
    /// If set, only a third of the rounds is measured.
    pub quick: bool,
    /// If set, an experiment ends with the rounds that it has.
    pub stop: &'a AtomicBool,
    /// udm's engine for fio, if available.
    pub fio_engine: Option<&'a Path>,
}

impl ExperimentRunOptions<'_> {
    /// Rounds per device: `all`, or a third for a quick run.
    fn rounds(&self, all: usize) -> usize {
        if self.quick { (all / 3).max(1) } else { all }
    }

    /// Requests per measurement: `all`, or a 32nd in a debug build, which only tests that the
    /// experiment runs.
    fn requests(&self, all: u64) -> u64 {
        if cfg!(debug_assertions) { all / 32 } else { all }
    }
}

impl PublishedExperiment {
    /// The experiment of this name.
    #[must_use]
    pub fn find(name: &str) -> Option<&'static PublishedExperiment> {
        EXPERIMENTS.iter().find(|experiment| experiment.name == name)
    }

    /// Runs the experiment.
    ///
    /// # Errors
    /// If cores or devices are not available, or it was stopped before anything was measured.
    pub fn run(&self, effort: &ExperimentRunOptions<'_>) -> Result<ExperimentOutcome> {
        let mut outcome = ExperimentOutcome::new(self);
        (self.run)(effort, &mut outcome)?;
        Ok(outcome)
    }
}
