//! `udm lab`: the command line of the experiments in `udm_bench::lab`.

use crate::bench::{progress, stop};
use crate::output::{print_json_to_stdout, print_to_stdout};
use anyhow::{Context, Result};
use clap::builder::PossibleValuesParser;
use clap::{Args, Subcommand};
use std::fs::OpenOptions;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use udm_bench::lab::{
    self, EXPERIMENTS, ExperimentOutcome, ExperimentRunOptions, MachineInfo, PublishedExperiment,
};

/// The arguments of `udm lab`.
#[derive(Debug, Args)]
pub struct LabArgs {
    #[command(subcommand)]
    verb: LabVerb,
}

/// The verbs of `udm lab`.
#[derive(Debug, Subcommand)]
enum LabVerb {
    /// List the experiments
    List,
    /// Run experiments, and print the results next to those of the originals
    #[command(
        after_help = "The variants of an experiment are measured in turn in one run, and the figures are medians. Compare ratios, not absolute figures, between machines. The verdict is \
met or missed if udm has a goal; otherwise better, alike or worse than the ratio of the original, or empty if the original has none. Ctrl-C prints the experiments that have finished.\n\n\
Examples:\n  udm lab run lockless --quick\n  udm lab run --html lab.html"
    )]
    Run(LabRunArgs),
}

/// The arguments of `udm lab run`.
#[derive(Debug, Args)]
struct LabRunArgs {
    /// The experiments to run [default: all]
    #[arg(value_name = "NAME", value_parser = PossibleValuesParser::new(EXPERIMENTS.iter().map(|e| e.name)))]
    names: Vec<String>,
    /// Run a third of the rounds
    #[arg(long)]
    quick: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Also write a page with plots
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// The engine for fio, which make fio-engine builds; without it the experiment fio is skipped
    #[arg(long, value_name = "FILE")]
    fio_engine: Option<PathBuf>,
}

/// Runs `udm lab`.
///
/// # Errors
/// If an experiment fails, or the page cannot be written.
pub fn run(args: &LabArgs) -> Result<ExitCode> {
    match &args.verb {
        LabVerb::List => print_experiment_list(),
        LabVerb::Run(args) => run_experiments(args),
    }
}

fn print_experiment_list() -> Result<ExitCode> {
    let width = EXPERIMENTS.iter().map(|experiment| experiment.name.len()).max().unwrap_or(0);
    let line = |PublishedExperiment { name, question, source, .. }: &PublishedExperiment| {
        format!("{name:<width$}  {question}\n{:<width$}  ({source})\n", "")
    };
    print_to_stdout(&EXPERIMENTS.iter().map(line).collect::<String>())?;
    Ok(ExitCode::SUCCESS)
}

fn run_experiments(args: &LabRunArgs) -> Result<ExitCode> {
    let stop = stop::install_stop_handler().context("lab: signals")?;
    if let Some(file) = &args.html {
        // Opens the file now, so that an error is reported before minutes of measurements.
        let opened = OpenOptions::new().append(true).create(true).open(file);
        opened.with_context(|| format!("lab: {}", file.display()))?;
    }
    let is_asked =
        |e: &&PublishedExperiment| args.names.is_empty() || args.names.iter().any(|name| name == e.name);
    let effort = ExperimentRunOptions { quick: args.quick, stop, fio_engine: args.fio_engine.as_deref() };
    let experiments: Vec<_> = EXPERIMENTS.iter().filter(is_asked).collect();
    let outcomes = progress::run_with_step_progress(experiments.len(), |done| {
        run_experiments_until_stopped(&experiments, &effort, done)
    })?;
    let machine = MachineInfo::this();
    if let Some(file) = &args.html {
        let page = lab::render_experiments_html(&machine, &outcomes);
        std::fs::write(file, page).with_context(|| format!("lab: {}", file.display()))?;
    }
    if args.json {
        print_json_to_stdout(&serde_json::json!({ "machine": machine, "experiments": outcomes }))?;
    } else {
        print_to_stdout(&lab::render_experiments_text(&machine, &outcomes))?;
    }
    Ok(stop::measurement_exit_code(stop))
}

/// Runs the experiments; if stopped, returns those that have finished.
fn run_experiments_until_stopped(
    experiments: &[&PublishedExperiment],
    effort: &ExperimentRunOptions<'_>,
    done: &AtomicUsize,
) -> Result<Vec<ExperimentOutcome>> {
    let mut outcomes = Vec::new();
    for experiment in experiments {
        match experiment.run(effort) {
            Ok(outcome) => outcomes.push(outcome),
            Err(_) if effort.stop.load(Relaxed) => {}
            Err(why) => return Err(why.context(format!("lab: {}", experiment.name))),
        }
        if effort.stop.load(Relaxed) {
            break;
        }
        done.fetch_add(1, Relaxed);
    }
    Ok(outcomes)
}
