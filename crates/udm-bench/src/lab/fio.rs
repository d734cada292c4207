//! `fio`: the originals' own command lines, with udm's engine.

use super::context_switches::QUIET;
use super::outcome::{Finding, Grid, Outcome};
use super::{Effort, Experiment};
use crate::compare::{LEN, SELECTORS, multipath, path};
use crate::contest;
use crate::page::{Axis, Bar, Bars, Unit};
use crate::stats::{median, quantile};
use anyhow::{Context, Result, ensure};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::Ordering::Relaxed;

pub(super) const EXPERIMENT: Experiment = Experiment {
    name: "fio",
    question: "Through fio: how much of the raw device does multipath keep, and how many context switches does it add?",
    source: "Snitzer, lockless dm-multipath, and a report on dm over blk-mq, both 2016, by their fio command lines",
    run,
};

const DEPTH: usize = 32;
const ROUNDS: usize = 15;
/// How long fio runs: many short runs see more of the moments in which nobody else takes of the
/// machine than a few long ones.
const RUNTIME_MS: u32 = 150;
/// The part of the rounds whose figures are left out as luck, above the one that counts.
const LUCK: f64 = 0.1;

/// What the original kept of the raw device, pinned, and what it made of its context switches.
const KEPT: [(&str, f64); 3] =
    [("round-robin", 4169.1 / 6055.9), ("queue-length", 2729.1 / 6055.9), ("service-time", 2778.3 / 6055.9)];
const SWITCHES: f64 = 667_784.0 / 1970.0;

/// What a run of fio said.
#[derive(Clone, Copy)]
struct Ran {
    iops: f64,
    switches: f64,
    /// Nanoseconds of a CPU that a request took.
    cpu_ns: f64,
}

fn run(effort: &Effort<'_>, outcome: &mut Outcome) -> Result<()> {
    let Some(engine) = effort.fio_engine else {
        outcome.note(
            "Not run: it needs udm's engine for fio. Make it with make fio-engine, and name it with --fio-engine.",
        );
        return Ok(());
    };
    let cpus = contest::cpus().len().clamp(1, u32::BITS as usize);
    case(effort, outcome, engine, 1)?;
    if cpus > 1 {
        case(effort, outcome, engine, cpus)?;
    }
    outcome.note(
        "Of raw: what one round in ten exceeds, of IOPS, and the same of CPU time. Other work only takes from a run, \
         and fio alone differs by a tenth from run to run. Raw is measured twice: the second shows what a difference \
         is worth. fio itself takes a quarter of a microsecond a request, so that 0.97 leaves some 7 ns for what is \
         below. Fewer context switches than the 197 a second that the raw device of the original had count as so many.",
    );
    outcome.note(format!("fio {}", command(engine, "dm_mq=TABLE", cpus).join(" ")));
    Ok(())
}

fn case(effort: &Effort<'_>, outcome: &mut Outcome, engine: &Path, jobs: usize) -> Result<()> {
    let linear = format!("0 {LEN} linear {} 0", path(0));
    let mut devices = vec![("raw", path(0)), ("raw, once more", path(0)), ("linear", linear)];
    devices.extend(SELECTORS.map(|selector| (selector, multipath(selector, 2, jobs))));
    let mut rounds = vec![Vec::new(); devices.len()];
    for round in 0..effort.rounds(ROUNDS) {
        for i in 0..devices.len() {
            ensure!(!effort.stop.load(Relaxed), "stopped before anything was measured");
            // None is always the first.
            let i = (round + i) % devices.len();
            rounds[i].push(measure(engine, &devices[i].1, jobs)?);
        }
    }
    let all = |i: usize, what: fn(&Ran) -> f64| rounds[i].iter().map(what).collect::<Vec<_>>();
    let switches = |ran: &Ran| ran.switches.max(QUIET * RUNTIME_MS as f64 / 1e3);
    // IOPS, CPU time, context switches; those that count as so many.
    let of = |i: usize| {
        let least = [quantile(all(i, |ran| ran.iops), 1.0 - LUCK), quantile(all(i, |ran| ran.cpu_ns), LUCK)];
        [least[0], least[1], median(all(i, |ran| ran.switches)), median(all(i, switches))]
            .map(Option::unwrap_or_default)
    };
    let raw = of(0);

    let s = if jobs == 1 { "" } else { "s" };
    let heads = ["", "thousand IOPS", "of raw", "CPU ns a request", "of raw", "context switches", "of raw"];
    let mut table = Grid::new(format!("fio, {jobs} job{s}, depth {DEPTH}"), heads);
    let axis = Axis::new("of what the raw device does", Unit::Ratio);
    let mut bars =
        Bars::new(format!("Through fio, {jobs} job{s}"), axis, ["udm"]).reference("the original's");
    for (i, (name, _)) in devices.iter().enumerate() {
        let [iops, cpu_ns, switches, counted] = of(i);
        let (share, added) = (iops / raw[0], counted / raw[3]);
        table.row(*name, [iops / 1e3, share, cpu_ns, cpu_ns / raw[1], switches, added]);
        if i <= 1 {
            continue;
        }
        let original = KEPT.iter().find(|(selector, _)| selector == name);
        let mut finding = Finding::more(format!("{name}, {jobs} job{s}: of raw"), share).aim(0.97);
        let mut bar = Bar::new(share);
        if let Some((_, original)) = original {
            (finding, bar) = (finding.beside(*original), bar.beside(*original));
        }
        outcome.found(finding);
        bars = bars.group(*name, [bar]);
        let finding = Finding::less(format!("{name}, {jobs} job{s}: context switches, of raw"), added);
        outcome.found(finding.beside(SWITCHES).aim(1.1));
    }
    outcome.table(table);
    outcome.bars(bars);
    Ok(())
}

/// fio's arguments, as the original printed them but for engine and file name.
fn command(engine: &Path, device: &str, jobs: usize) -> Vec<String> {
    let jobs = format!("--numjobs={jobs}");
    let (engine, depth) = (format!("--ioengine=external:{}", engine.display()), format!("--iodepth={DEPTH}"));
    let (device, runtime) = (format!("--udm_device={device}"), format!("--runtime={RUNTIME_MS}ms"));
    let fixed = ["--filename=dm_mq", "--name=task_dm_mq", "--rw=randread", "--bs=4k", "--direct=1"]
        .map(str::to_owned);
    let more = [
        "--cpus_allowed_policy=split",
        "--group_reporting",
        "--time_based",
        "--norandommap",
        "--randrepeat=1",
        // Or fio takes the system's clock now and then, which makes a request a third dearer.
        "--clocksource=cpu",
    ];
    [engine, device, depth, jobs, runtime].into_iter().chain(fixed).chain(more.map(str::to_owned)).collect()
}

fn measure(engine: &Path, device: &str, jobs: usize) -> Result<Ran> {
    let cpus: Vec<String> = contest::cpus().iter().map(usize::to_string).collect();
    let out = Command::new("fio")
        .args(command(engine, &format!("dm_mq={device}"), jobs))
        .arg(format!("--cpus_allowed={}", cpus.join(",")))
        .arg("--output-format=json")
        .output()
        .context("fio")?;
    let (text, error) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    ensure!(
        out.status.success(),
        "fio: {}",
        error.lines().next().or(text.lines().next()).unwrap_or("failed")
    );
    // Warnings come before it.
    let begin = text.find('{').context("fio printed no JSON")?;
    let said: serde_json::Value = serde_json::from_str(&text[begin..]).context("what fio printed")?;
    let job = &said["jobs"][0];
    let number = |value: &serde_json::Value| value.as_f64().context("fio left something out");
    let (read, spent) = (&job["read"], number(&job["usr_cpu"])? + number(&job["sys_cpu"])?);
    Ok(Ran {
        iops: number(&read["iops"])?,
        switches: number(&job["ctx"])?,
        // Percent of the milliseconds of all jobs.
        cpu_ns: spent / 100.0 * number(&job["job_runtime"])? * 1e6 / number(&read["total_ios"])?.max(1.0),
    })
}
