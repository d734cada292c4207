//! `udm bench`: load on a device, in fio's words, with fio's report.
//!
//! Each job is a thread that attaches as a core and drives the device's lane itself, as any program that links udm can: no socket, no protocol, no
//! other thread. [`compare()`] measures layers against each other.

mod compare;
mod cores;
mod device;
mod job;
mod json;
mod one_mutex;
mod options;
mod plan;
mod progress;
mod report;
mod stats;
mod stop;
#[cfg(test)]
mod tests;
mod units;
mod verify;

pub use compare::{CompareOptions, Comparison, compare};
pub use options::BenchArgs;

use crate::verbs::{say, say_json};
use anyhow::{Context, Result, bail};
use job::{Outcome, Spec};
use options::Format;
use progress::Progress;
use report::Entry;
use std::process::ExitCode;
use std::sync::{OnceLock, mpsc};
use udm_runtime::CoreOptions;

/// Runs the load and prints the report.
///
/// # Errors
/// When the load can't begin, or a request failed; the report is printed then all the same.
pub fn run(args: &BenchArgs) -> Result<ExitCode> {
    if args.compare {
        return run_compare(args).map(|()| ExitCode::SUCCESS);
    }
    stop::on_signals().context("bench: signals")?;
    let entries = measure(args)?;
    match args.format() {
        Format::Normal => say(&report::text(args, &entries))?,
        Format::Json => say_json(&json::report(args, &entries))?,
    }
    match entries.iter().find_map(|e| e.failure.as_ref()) {
        Some(failure) => bail!("{}: {}", args.name, failure.text),
        None => Ok(stop::status()),
    }
}

fn run_compare(args: &BenchArgs) -> Result<()> {
    let options = if args.quick { CompareOptions::quick() } else { CompareOptions::full() };
    let comparison = compare(&options)?;
    match args.format() {
        Format::Normal => say(&comparison.table()),
        Format::Json => say_json(&comparison),
    }
}

/// Runs the jobs; an entry for each, or one for all with `--group_reporting`.
fn measure(args: &BenchArgs) -> Result<Vec<Entry>> {
    args.check().context("bench")?;
    let jobs = usize::from(args.numjobs);
    let options: Vec<_> = (0..jobs)
        .map(|job| CoreOptions { cpu: args.cpu(job), ring_optional: true, ..CoreOptions::default() })
        .collect();
    let regions = OnceLock::new();
    let progress = Progress::new(args);
    let (running, over) = mpsc::channel::<()>();
    let outcomes = std::thread::scope(|scope| {
        if let Some(progress) = &progress {
            scope.spawn(move || progress.draw(args, &over));
        }
        let outcomes = cores::run(
            &options,
            |cluster| {
                let device = device::make(cluster, &args.devices)?;
                let _ = regions.set(args.regions(&device.limits()).context("bench")?);
                Ok(vec![device])
            },
            |core, lanes| {
                let job = usize::from(core.id().0);
                let region = regions.get().expect("set before the cores begin")[job];
                let progress = progress.as_ref().map(|p| p.counter(job));
                let lane = lanes.into_iter().next().expect("a lane a device");
                job::run(core, lane, &Spec { args, job, region, progress })
            },
        );
        drop(running);
        outcomes
    })?;
    Ok(entries(args, outcomes))
}

fn entries(args: &BenchArgs, outcomes: Vec<Outcome>) -> Vec<Entry> {
    let entry = |o: Outcome| Entry {
        name: args.name.clone(),
        jobs: 1,
        thread: o.thread,
        stats: o.stats,
        failure: o.failure,
    };
    let mut entries: Vec<Entry> = outcomes.into_iter().map(entry).collect();
    if args.group_reporting && !entries.is_empty() {
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
