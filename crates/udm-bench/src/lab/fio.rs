//! `fio`: the command lines of the originals, with udm's engine.

use super::context_switches::QUIET;
use super::outcome::{ExperimentOutcome, RatioVsPublished, ResultTable};
use super::{ExperimentRunOptions, PublishedExperiment};
use crate::compare::{LEN, SELECTORS, multipath_table_line, nth_null_device_uri};
use crate::device_contest;
use crate::page::{Axis, AxisUnit, Bar, BarPlot};
use crate::stats::median;
use anyhow::{Context, Result, ensure};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::Ordering::Relaxed;

pub(super) const EXPERIMENT: PublishedExperiment = PublishedExperiment {
    name: "fio",
    question: "Through fio: how much of the raw device does multipath keep, and how many context switches does it add?",
    source: "Snitzer, lockless dm-multipath, and a report on dm over blk-mq, both 2016, by their fio command lines",
    run,
};

const DEPTH: usize = 32;
/// Rounds of each device alone. `PAIRS` are the rounds of each device with the raw one.
const ROUNDS: usize = 5;
const PAIRS: usize = 15;
const ALONE_MS: u32 = 150;
const PAIR_MS: u32 = 200;

/// The share of the raw device's rate that the original kept, pinned. `SWITCHES` is its factor of
/// context switches.
const KEPT: [(&str, f64); 3] =
    [("round-robin", 4169.1 / 6055.9), ("queue-length", 2729.1 / 6055.9), ("service-time", 2778.3 / 6055.9)];
const SWITCHES: f64 = 667_784.0 / 1970.0;

/// fio's result of a job.
#[derive(Clone, Copy)]
struct FioResult {
    iops: f64,
    switches: f64,
    /// CPU time per request in nanoseconds.
    cpu_ns: f64,
}

fn run(effort: &ExperimentRunOptions<'_>, outcome: &mut ExperimentOutcome) -> Result<()> {
    let Some(engine) = effort.fio_engine else {
        outcome.note(
            "Not run: it needs udm's engine for fio. Make it with make fio-engine, and name it with --fio-engine.",
        );
        return Ok(());
    };
    let cpus = device_contest::get_process_cpu_affinity().len().clamp(1, u32::BITS as usize / 2);
    compare_devices_with_fio(effort, outcome, engine, 1)?;
    if cpus > 1 {
        compare_devices_with_fio(effort, outcome, engine, cpus)?;
    }
    outcome.note(
        "The share of raw comes from one fio with two jobs on the same CPUs: one on the raw device, one on the other \
         device. The jobs take turns every few milliseconds, so a disturbance of the machine affects both. The share \
         is the CPU time per request of raw, divided by that of the other device; the median counts. The share of raw \
         beside itself shows the noise. fio itself takes a quarter of a microsecond per request, so 0.97 leaves about \
         8 ns for the device. The other figures come from a few short runs of each device alone. Rates below 197 \
         context switches per second, that of the original's raw device, count as 197.",
    );
    let line = fio_job_arguments(engine, "dm_mq", "TABLE", cpus, ALONE_MS).join(" ");
    outcome.note(format!("fio {line}"));
    Ok(())
}

fn compare_devices_with_fio(
    effort: &ExperimentRunOptions<'_>,
    outcome: &mut ExperimentOutcome,
    engine: &Path,
    jobs: usize,
) -> Result<()> {
    let fio = |devices: &[&str], ms| {
        ensure!(!effort.stop.load(Relaxed), "stopped before anything was measured");
        run_fio_on_devices(engine, devices, jobs, ms)
    };
    let linear = format!("0 {LEN} linear {} 0", nth_null_device_uri(0));
    let mut devices =
        vec![("raw", nth_null_device_uri(0), nth_null_device_uri(0)), ("linear", linear.clone(), linear)];
    // In a pair, fio has twice as many jobs, each of which is a core.
    devices
        .extend(SELECTORS.map(|name| {
            (name, multipath_table_line(name, 2, jobs), multipath_table_line(name, 2, 2 * jobs))
        }));
    let (mut alone, mut shares) = (vec![Vec::new(); devices.len()], vec![Vec::new(); devices.len()]);
    for round in 0..effort.rounds(ROUNDS) {
        for i in 0..devices.len() {
            // Each round begins with another device.
            let i = (round + i) % devices.len();
            alone[i].extend(fio(&[&devices[i].1], ALONE_MS)?);
        }
    }
    for round in 0..effort.rounds(PAIRS) {
        for ((_, _, device), shares) in devices.iter().zip(&mut shares) {
            let mut pair = [devices[0].1.as_str(), device];
            // The second device runs alone for a moment at the end.
            let second = round % 2;
            pair.rotate_left(second);
            let ran = fio(&pair, PAIR_MS)?;
            shares.push(ran[second].cpu_ns / ran[1 - second].cpu_ns);
        }
    }

    let s = if jobs == 1 { "" } else { "s" };
    let heads =
        ["", "thousand IOPS", "CPU ns per request", "share of raw", "context switches", "relative to raw"];
    let mut table = ResultTable::new(format!("fio, {jobs} job{s}, depth {DEPTH}"), heads);
    let axis = Axis::new("share of the raw device", AxisUnit::Ratio);
    let mut bars =
        BarPlot::new(format!("Through fio, {jobs} job{s}"), axis, ["udm"]).reference("the original's");
    let of = |i: usize, what: fn(&FioResult) -> f64| {
        median(alone[i].iter().map(what).collect()).unwrap_or_default()
    };
    let counted = |i| of(i, |ran| ran.switches).max(QUIET * f64::from(ALONE_MS) / 1e3);
    for (i, ((name, ..), shares)) in devices.iter().zip(shares).enumerate() {
        let (share, added) = (median(shares).unwrap_or_default(), counted(i) / counted(0));
        let (iops, cpu_ns) = (of(i, |ran| ran.iops), of(i, |ran| ran.cpu_ns));
        table.row(*name, [iops / 1e3, cpu_ns, share, of(i, |ran| ran.switches), added]);
        if i == 0 {
            continue;
        }
        let original = KEPT.iter().find(|(selector, _)| selector == name);
        let mut finding =
            RatioVsPublished::more(format!("{name}, {jobs} job{s}: share of raw"), share).aim(0.97);
        let mut bar = Bar::new(share);
        if let Some((_, original)) = original {
            (finding, bar) = (finding.beside(*original), bar.beside(*original));
        }
        outcome.found(finding);
        bars = bars.group(*name, [bar]);
        let finding = RatioVsPublished::less(
            format!("{name}, {jobs} job{s}: context switches, relative to raw"),
            added,
        );
        outcome.found(finding.beside(SWITCHES).aim(1.1));
    }
    outcome.table(table);
    outcome.bars(bars);
    Ok(())
}

/// fio's arguments for a job: those of the original, except for engine and file name.
fn fio_job_arguments(engine: &Path, name: &str, device: &str, jobs: usize, ms: u32) -> Vec<String> {
    let engine = engine.display();
    let named = [
        format!("--name=task_{name}"),
        format!("--ioengine=external:{engine}"),
        format!("--udm_device={name}={device}"),
        format!("--filename={name}"),
        format!("--iodepth={DEPTH}"),
        format!("--numjobs={jobs}"),
        format!("--runtime={ms}ms"),
    ];
    let fixed = [
        "--rw=randread",
        "--bs=4k",
        "--direct=1",
        "--cpus_allowed_policy=split",
        "--new_group",
        "--group_reporting",
        "--time_based",
        "--norandommap",
        "--randrepeat=1",
        // Otherwise fio sometimes reads the system's clock, which makes a request a third slower.
        "--clocksource=cpu",
    ];
    named.into_iter().chain(fixed.map(str::to_owned)).collect()
}

/// Runs one fio with a job per device, all at the same time.
fn run_fio_on_devices(engine: &Path, devices: &[&str], jobs: usize, ms: u32) -> Result<Vec<FioResult>> {
    let cpus: Vec<String> =
        device_contest::get_process_cpu_affinity().iter().take(jobs).map(usize::to_string).collect();
    let mut command = Command::new("fio");
    command.arg("--output-format=json");
    for (nth, device) in devices.iter().enumerate() {
        command.args(fio_job_arguments(engine, &format!("dm_mq{nth}"), device, jobs, ms));
        command.arg(format!("--cpus_allowed={}", cpus.join(",")));
    }
    let out = command.output().context("fio")?;
    let (text, error) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    ensure!(
        out.status.success(),
        "fio: {}",
        error.lines().next().or(text.lines().next()).unwrap_or("failed")
    );
    // fio may print warnings before its JSON.
    let begin = text.find('{').context("fio printed no JSON")?;
    let output: serde_json::Value = serde_json::from_str(&text[begin..]).context("fio's output")?;
    (0..devices.len()).map(|nth| parse_fio_json_job_result(&output["jobs"][nth])).collect()
}

/// Reads the result of a job from fio's JSON.
fn parse_fio_json_job_result(job: &serde_json::Value) -> Result<FioResult> {
    let number = |value: &serde_json::Value| value.as_f64().context("fio's JSON lacks a number");
    let (read, spent) = (&job["read"], number(&job["usr_cpu"])? + number(&job["sys_cpu"])?);
    Ok(FioResult {
        iops: number(&read["iops"])?,
        switches: number(&job["ctx"])?,
        // The share is in percent of the run time of all threads of the job.
        cpu_ns: spent / 100.0 * number(&job["job_runtime"])? * 1e6 / number(&read["total_ios"])?.max(1.0),
    })
}
