//! `udm demo`: two paths to one disk, under a load that checks every byte, through failures and
//! live reloads.
//!
//! It needs no root and leaves nothing on the machine. Everything runs in this process: the load's
//! threads are the cores, as in `udm bench`.

mod backup;
mod cable;
mod demo_server;
mod disks;
mod images;
mod load;
mod multipath_setup;
mod printer;

use crate::args::OutputFormatArgs;
use crate::{interrupt, private_dir};
use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand};
use load::LoadCounters;
use multipath_setup::MultipathDemoSetup;
use printer::{DemoPrinter, thousands};
use serde::Serialize;
use std::sync::atomic::AtomicBool;
use std::thread::sleep;
use std::time::Duration;
use tempfile::TempDir;

/// The selectors that the live reloads alternate between.
const SELECTORS: [&str; 3] = ["round-robin", "queue-length", "service-time"];

/// Number of live reloads.
const RELOADS: usize = 12;

/// The arguments of `udm demo`.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct DemoArgs {
    #[command(subcommand)]
    pub verb: Option<DemoVerb>,
    #[command(flatten)]
    pub print: OutputFormatArgs,
    /// Seconds of the verified load
    #[arg(long, value_name = "SECONDS", default_value_t = 8, value_parser = clap::value_parser!(u64).range(1..=600))]
    pub runtime: u64,
}

/// The other demonstrations of `udm demo`.
#[derive(Debug, Subcommand)]
pub enum DemoVerb {
    /// A hundred writable disks from one image, each with an NBD client
    Disks(OutputFormatArgs),
    /// Machines that boot from an image on a slow web server, while it is copied
    Images(OutputFormatArgs),
    /// Backups of two volumes at the same instant, under load: full and incremental
    Backup(OutputFormatArgs),
    /// Two NBD servers of one file as paths: under fio, one or both are stopped, killed or cut off
    Cable(OutputFormatArgs),
}

/// A step of the demo, with the counters of its requests.
#[derive(Debug, Serialize)]
struct DemoStepReport {
    name: String,
    paths: Vec<PathCounters>,
    verified_blocks: u64,
}

/// The requests of a path during a step.
#[derive(Debug, Serialize)]
struct PathCounters {
    name: String,
    bios: u64,
    bytes: u64,
    errors: u64,
}

/// The complete result, for `--json`.
#[derive(Debug, Serialize)]
struct DemoReport {
    steps: Vec<DemoStepReport>,
    reloads: usize,
    requests: LoadCounters,
    checked_blocks: u64,
    compare: udm_bench::DmLayerComparison,
}

/// Creates a private folder, which is also removed on a signal. Loads have their files open already
/// and need no names; they end with the process.
fn create_demo_temp_folder() -> Result<TempDir> {
    let folder = private_dir::private_temp_dir("udm-demo-").context("demo: temporary folder")?;
    let leftover = folder.path().to_owned();
    interrupt::call_on_first_stop_signal(move |signal| {
        let _ = std::fs::remove_dir_all(leftover);
        interrupt::exit_with_signal_status(signal);
    })
    .context("demo: signals")?;
    Ok(folder)
}

/// Runs the demo.
pub fn run(args: &DemoArgs) -> Result<()> {
    match &args.verb {
        Some(DemoVerb::Disks(print)) => return disks::run(print.json),
        Some(DemoVerb::Images(print)) => return images::run(print.json),
        Some(DemoVerb::Backup(print)) => return backup::run(print.json),
        Some(DemoVerb::Cable(print)) => return cable::run(print.json),
        None => {}
    }
    let printer = DemoPrinter::new(args.print.json);
    let fixture = MultipathDemoSetup::start()?;
    print_multipath_demo_intro(&printer, &fixture)?;
    let steps = run_multipath_demo_steps(&printer, &fixture, Duration::from_secs(args.runtime))?;
    let (requests, checked_blocks) = fixture.check_all()?;
    drop(fixture);
    let good = print_multipath_demo_summary(&printer, requests, checked_blocks)?;

    printer.section("What a request costs (4 KiB random reads of a null device, side by side)")?;
    let compare =
        udm_bench::compare_dm_layers(&udm_bench::DmLayerComparisonOptions::quick(), &AtomicBool::new(false))?;
    if args.print.json {
        crate::output::print_json_to_stdout(&DemoReport {
            steps,
            reloads: RELOADS,
            requests,
            checked_blocks,
            compare,
        })?;
    } else {
        crate::output::print_to_stdout(&compare.table())?;
    }
    if good { Ok(()) } else { bail!("demo: requests were lost or blocks are wrong: this is a bug in udm") }
}

fn print_multipath_demo_intro(printer: &DemoPrinter, fixture: &MultipathDemoSetup) -> Result<()> {
    printer.section("One disk, two paths, one device over both")?;
    printer.fact(
        "disk",
        &format!(
            "{} MiB image in {}, under two names",
            multipath_setup::IMAGE_BYTES >> 20,
            fixture.folder().display()
        ),
    )?;
    printer.fact("device", "mp = multipath over both, service-time, queue_if_no_path")?;
    printer.fact(
        "load",
        &format!(
            "{} cores with {} requests in flight each; half are writes, every byte read is checked",
            fixture.cores(),
            load::DEPTH
        ),
    )
}

/// Runs the steps of the demo one after the other under load.
fn run_multipath_demo_steps(
    printer: &DemoPrinter,
    fixture: &MultipathDemoSetup,
    runtime: Duration,
) -> Result<Vec<DemoStepReport>> {
    printer.section("Requests by path")?;
    let [a, b] = multipath_setup::PATHS;
    printer.head(&["requests by path", a, b, "blocks verified"])?;
    let mut steps = Vec::new();
    let part = runtime / 5;
    let mut act = |name: &str, act: &mut dyn FnMut() -> Result<()>| -> Result<()> {
        let step = fixture.step(name, act)?;
        let mut row = vec![step.name.clone()];
        row.extend(step.paths.iter().map(|path| thousands(path.bios)));
        row.push(thousands(step.verified_blocks));
        printer.row(&row)?;
        steps.push(step);
        Ok(())
    };
    let wait = |time: Duration| {
        sleep(time);
        Ok(())
    };
    act("both paths up", &mut || wait(part))?;
    fixture.message("fail_path", a)?;
    act(&format!("{a} failed"), &mut || wait(part))?;
    fixture.message("reinstate_path", a)?;
    act(&format!("{a} back"), &mut || wait(part))?;
    act("both failed: requests wait, go on", &mut || {
        fixture.message("fail_path", a)?;
        fixture.message("fail_path", b)?;
        sleep(part / 2);
        fixture.message("reinstate_path", b)?;
        fixture.message("reinstate_path", a)?;
        wait(part / 2)
    })?;
    act(&format!("table reloaded live, {RELOADS} times"), &mut || {
        for i in 0..RELOADS {
            fixture.reload(SELECTORS[i % SELECTORS.len()])?;
            sleep(part / RELOADS as u32);
        }
        Ok(())
    })?;
    Ok(steps)
}

/// Prints the result; returns false if anything is wrong.
fn print_multipath_demo_summary(
    printer: &DemoPrinter,
    requests: LoadCounters,
    checked_blocks: u64,
) -> Result<bool> {
    printer.section("Lost requests and blocks")?;
    let all_back = requests.submitted == requests.completed;
    let (submitted, completed) = (thousands(requests.submitted), thousands(requests.completed));
    printer.verdict(all_back, &format!("{submitted} requests submitted, {completed} completed"))?;
    printer.verdict(requests.errors == 0, &format!("{} failed", thousands(requests.errors)))?;
    printer.verdict(
        requests.wrong == 0,
        &format!(
            "{} blocks read and compared, {} wrong; at the end all {} blocks once more",
            thousands(requests.verified + requests.wrong),
            thousands(requests.wrong),
            thousands(checked_blocks)
        ),
    )?;
    Ok(all_back && requests.errors == 0 && requests.wrong == 0)
}
