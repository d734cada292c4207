//! `udm demo backup`: two volumes, a load that checks itself, and backups of both at one instant.
//!
//! A *round* begins and ends without snapshots. It makes a full copy from a group of snapshots,
//! then copies the changes since that group from a second group. Each pair of copies must show both
//! volumes at one instant ([`model`]). It needs no root and leaves nothing on the machine.

mod copy;
mod load;
mod model;

use super::demo_server::DemoServer;
use super::printer::{DemoPrinter, thousands};
use anyhow::{Result, bail};
use load::MarkWriters;
use model::{BYTES, BlockCheckCounts, VOLUMES, WRITERS, compare_volume_copies, create_patterned_volume};
use serde::Serialize;
use std::path::PathBuf;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Number of rounds; odd, for the median of each rate.
const ROUNDS: usize = 3;

/// Time to measure the load without a copy.
const WATCH: Duration = Duration::from_millis(400);

/// The parts of a round, in order.
const PARTS: [&str; 5] = ["no snapshot", "first run", "between", "second run", "no snapshot again"];

/// The results, for `--json`.
#[derive(Debug, Default, Serialize)]
struct BackupDemoReport {
    rounds: usize,
    volumes_bytes: u64,
    /// Median over the rounds.
    first_run_bytes: u64,
    second_run_bytes: u64,
    first_run_ns: u64,
    second_run_ns: u64,
    /// The longest time to take a group of snapshots.
    snapshot_ns: u64,
    /// Write rate during each part of a round.
    rates: Vec<BackupPartWriteRate>,
    instants: u64,
    blocks_checked: u64,
    blocks_wrong: u64,
    load_blocks_checked: u64,
    load_blocks_wrong: u64,
    stores_bytes_left: u64,
}

/// The write rate of one part of a round, as a median over the rounds.
#[derive(Debug, Serialize)]
struct BackupPartWriteRate {
    part: &'static str,
    writes_a_second: f64,
}

/// The results of one round.
struct BackupDemoRoundResult {
    rates: [f64; 5],
    bytes: [u64; 2],
    times: [Duration; 2],
    snapshots: [Duration; 2],
    checked: BlockCheckCounts,
}

/// Runs the demo.
///
/// # Errors
/// A step fails, or a result is wrong, which is a bug in udm.
pub fn run(json: bool) -> Result<()> {
    let printer = DemoPrinter::new(json);
    let server = DemoServer::start()?;
    for (volume, name) in VOLUMES.iter().enumerate() {
        let image = server.folder().join(format!("{name}.img"));
        create_patterned_volume(volume, &image)?;
        server.map(name, &image, BYTES)?;
    }
    printer.section("Two volumes, kept at one instant while they are written")?;
    let [data, log] = VOLUMES;
    printer.fact(
        "volumes",
        &format!("{data} and {log}, {} MiB each, in {}", BYTES >> 20, server.folder().display()),
    )?;
    let how = "each puts its marks on both volumes in turn and reads some back";
    printer.fact("load", &format!("{WRITERS} writers over NBD; {how}"))?;
    let load = MarkWriters::start(&server)?;
    let rounds = (0..ROUNDS).map(|_| run_backup_demo_round(&server, &load)).collect::<Result<Vec<_>>>()?;
    let mut report = summarize_backup_rounds(&rounds);
    let (last, read, wrong) = load.end()?;
    (report.load_blocks_checked, report.load_blocks_wrong) = (read, wrong);
    // At the end the volumes themselves are compared.
    let last: Vec<_> = last.into_iter().map(|last| (last, last)).collect();
    let end = compare_volume_copies(&VOLUMES.map(|name| server.folder().join(format!("{name}.img"))), &last)?;
    report.load_blocks_checked += end.blocks;
    report.load_blocks_wrong += end.wrong;
    report.stores_bytes_left = server.stores_bytes()?;
    print_backup_demo_report(&printer, &report)?;
    if json {
        crate::output::print_json_to_stdout(&report)?;
    }
    match report.blocks_wrong + report.load_blocks_wrong + report.stores_bytes_left {
        0 => Ok(()),
        _ => bail!("demo: a copy is not what the volumes were: this is a bug in udm"),
    }
}

/// The name of a volume's snapshot in the first or second group.
fn volume_snapshot_name(volume: &str, group: usize) -> String {
    format!("{volume}-{}", ["monday", "tuesday"][group])
}

/// Takes snapshots of both volumes. Returns the time needed, and bounds for the last mark of each
/// writer in them.
fn snapshot_both_volumes(
    server: &DemoServer,
    load: &MarkWriters,
    group: usize,
) -> Result<(Duration, Vec<(u64, u64)>)> {
    let least = load.acknowledged();
    let pairs = VOLUMES.iter().map(|volume| (volume_snapshot_name(volume, group), (*volume).into()));
    // The snapshots are persistent, as for backups that continue after a restart.
    let time = server.take_snapshots(pairs)?;
    Ok((time, least.into_iter().zip(load.sent()).collect()))
}

fn run_backup_demo_round(server: &DemoServer, load: &MarkWriters) -> Result<BackupDemoRoundResult> {
    let copies: [PathBuf; 2] = VOLUMES.map(|volume| server.folder().join(format!("{volume}.copy")));
    let watch = || {
        sleep(WATCH);
        Ok(())
    };
    let mut checked = BlockCheckCounts::default();
    let mut compare = |bounds: &[(u64, u64)]| -> Result<()> {
        let found = compare_volume_copies(&copies, bounds)?;
        checked.blocks += found.blocks;
        checked.wrong += found.wrong;
        Ok(())
    };
    let both = |copy: &dyn Fn(&str, &PathBuf) -> Result<u64>| -> Result<(u64, Duration)> {
        let begin = Instant::now();
        let mut sent = 0;
        for (volume, to) in VOLUMES.iter().zip(&copies) {
            sent += copy(volume, to)?;
        }
        Ok((sent, begin.elapsed()))
    };
    let (before, ()) = load.rate(watch)?;
    let (monday, bounds) = snapshot_both_volumes(server, load, 0)?;
    let (first, (all, first_time)) =
        load.rate(|| both(&|volume, to| copy::full_backup(server, &volume_snapshot_name(volume, 0), to)))?;
    compare(&bounds)?;
    let (between, ()) = load.rate(watch)?;
    let (tuesday, bounds) = snapshot_both_volumes(server, load, 1)?;
    let (second, (changed, second_time)) = load.rate(|| {
        both(&|volume, to| {
            copy::incremental_backup(
                server,
                &volume_snapshot_name(volume, 1),
                &volume_snapshot_name(volume, 0),
                to,
            )
        })
    })?;
    compare(&bounds)?;
    for group in 0..2 {
        VOLUMES.iter().try_for_each(|volume| server.remove(&volume_snapshot_name(volume, group)))?;
    }
    let (after, ()) = load.rate(watch)?;
    Ok(BackupDemoRoundResult {
        rates: [before, first, between, second, after],
        bytes: [all, changed],
        times: [first_time, second_time],
        snapshots: [monday, tuesday],
        checked,
    })
}

/// The median over the rounds.
fn median_over_rounds<T: PartialOrd + Copy>(
    rounds: &[BackupDemoRoundResult],
    of: impl Fn(&BackupDemoRoundResult) -> T,
) -> T {
    let mut all: Vec<T> = rounds.iter().map(of).collect();
    all.sort_by(|a, b| a.partial_cmp(b).unwrap_or(std::cmp::Ordering::Equal));
    all[all.len() / 2]
}

fn summarize_backup_rounds(rounds: &[BackupDemoRoundResult]) -> BackupDemoReport {
    let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    let rate = |(i, part): (usize, &&'static str)| BackupPartWriteRate {
        part,
        writes_a_second: median_over_rounds(rounds, |r| r.rates[i]),
    };
    BackupDemoReport {
        rounds: rounds.len(),
        volumes_bytes: BYTES * VOLUMES.len() as u64,
        first_run_bytes: median_over_rounds(rounds, |r| r.bytes[0]),
        second_run_bytes: median_over_rounds(rounds, |r| r.bytes[1]),
        first_run_ns: nanos(median_over_rounds(rounds, |r| r.times[0])),
        second_run_ns: nanos(median_over_rounds(rounds, |r| r.times[1])),
        snapshot_ns: nanos(rounds.iter().flat_map(|r| r.snapshots).max().unwrap_or_default()),
        rates: PARTS.iter().enumerate().map(rate).collect(),
        instants: 2 * rounds.len() as u64,
        blocks_checked: rounds.iter().map(|r| r.checked.blocks).sum(),
        blocks_wrong: rounds.iter().map(|r| r.checked.wrong).sum(),
        ..BackupDemoReport::default()
    }
}

/// Prints the results.
fn print_backup_demo_report(printer: &DemoPrinter, report: &BackupDemoReport) -> Result<()> {
    let mib = |bytes: u64| format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20));
    let seconds = |nanos: u64| format!("{:.2} s", nanos as f64 / 1e9);
    let BackupDemoReport { first_run_bytes: first, second_run_bytes: second, .. } = *report;
    let group = format!(
        "persistent, both at one instant, {:.1} ms at the most until they were there",
        report.snapshot_ns as f64 / 1e6
    );
    printer.fact("snapshots", &group)?;
    printer.fact(
        "first run",
        &format!("{} in {}, by {}", mib(first), seconds(report.first_run_ns), copy::full_copy_program_name()),
    )?;
    let context = "the changes in qemu:dirty-bitmap:NAME";
    printer
        .fact("second run", &format!("{} in {}: {context}", mib(second), seconds(report.second_run_ns)))?;
    printer.section(&format!("Writes of the load during each part (medians of {} rounds)", report.rounds))?;
    for rate in &report.rates {
        printer.fact(
            &format!("{:<18}", rate.part),
            &format!("{:.1} thousand writes/s", rate.writes_a_second / 1e3),
        )?;
    }
    printer.section("Results")?;
    let BackupDemoReport { instants, blocks_checked, blocks_wrong, .. } = *report;
    let backups = format!("{instants} backups of both volumes, each one instant of both");
    printer.verdict(
        blocks_wrong == 0,
        &format!("{backups}: {} blocks, {blocks_wrong} wrong", thousands(blocks_checked)),
    )?;
    let wrong = report.load_blocks_wrong;
    printer.verdict(
        wrong == 0,
        &format!("blocks read by the load, and the volumes at the end: {wrong} blocks wrong"),
    )?;
    let left = report.stores_bytes_left;
    printer.verdict(
        left == 0,
        &format!("the snapshots are removed, and {} KiB of their stores are left", left.div_ceil(1024)),
    )
}
