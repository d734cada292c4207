//! `lockless`: the share of the raw device's rate that multipath keeps, and the cost of one lock
//! per device.

use super::models::one_lock::{OneLockMultipath, SelectorRule};
use super::outcome::{ExperimentOutcome, RatioVsPublished, ResultTable};
use super::{ExperimentRunOptions, PublishedExperiment};
use crate::compare::{LEN, NULL, SELECTORS, multipath_table_line, nth_null_device_uri};
use crate::device_contest::{self, DeviceCostPerRequest, InterleavedDeviceBenchmark, StopCondition};
use crate::mapped::{NamedTable, make_mapped_devices};
use crate::page::{Axis, AxisUnit, Bar, BarPlot};
use anyhow::{Context, Result};
use std::sync::Arc;
use udm_core::Device;
use udm_runtime::{CoreOptions, ProcessCores};
use udm_wire::uri;

pub(super) const EXPERIMENT: PublishedExperiment = PublishedExperiment {
    name: "lockless",
    question: "How much of the raw device's rate does multipath keep, without locks and with one lock per device?",
    source: "Snitzer, lockless dm-multipath, 2016: 192 CPUs, null_blk, 4 KiB random reads, depth 32",
    run,
};

const PATHS: usize = 2;
const DEPTH: usize = 32;
const ROUNDS: usize = 15;
/// Enough requests that all cores work for most of a round, even if one wakes up late.
const REQUESTS: u64 = 200_000;

/// The models with one lock, by the selector that they imitate.
const LOCKED: [(&str, SelectorRule); 3] = [
    ("round-robin", SelectorRule::RoundRobin),
    ("queue-length", SelectorRule::QueueLength),
    ("service-time", SelectorRule::ServiceTime),
];

/// The original's thousand requests per second, with one queue and one job per CPU of one or two
/// nodes. The figures are for the raw device, and for each of [`LOCKED`] without locks and with
/// one.
struct PublishedLocklessIops {
    raw: f64,
    lanes: [f64; 3],
    locked: [f64; 3],
}

const PINNED: PublishedLocklessIops =
    PublishedLocklessIops { raw: 6055.9, lanes: [4169.1, 2729.1, 2778.3], locked: [2083.9, 1728.4, 1655.5] };
const UNPINNED: PublishedLocklessIops =
    PublishedLocklessIops { raw: 2598.8, lanes: [2010.9, 1661.8, 1569.5], locked: [1121.0, 882.5, 889.5] };

fn run(effort: &ExperimentRunOptions<'_>, outcome: &mut ExperimentOutcome) -> Result<()> {
    let cpus = device_contest::get_process_cpu_affinity().len().max(1);
    measure_lockless_on_cores(effort, outcome, "1 core", device_contest::pinned_core_options(1), None)?;
    if cpus > 1 {
        let cores = cpus.min(u32::BITS as usize);
        let name = |how| format!("{cores} cores, {how}");
        measure_lockless_on_cores(
            effort,
            outcome,
            &name("pinned"),
            device_contest::pinned_core_options(cores),
            Some(&PINNED),
        )?;
        measure_lockless_on_cores(
            effort,
            outcome,
            &name("not pinned"),
            vec![device_contest::unpinned_core_options(); cores],
            Some(&UNPINNED),
        )?;
    }
    outcome.note(
        "The raw device does nothing and takes a few ns per request; a request of null_blk through a system \
         call takes a thousand. So multipath keeps a smaller share of this device than of any other. \
         Through a program like fio it keeps nearly everything (docs/internals/benchmarks.md).",
    );
    Ok(())
}

fn measure_lockless_on_cores(
    effort: &ExperimentRunOptions<'_>,
    outcome: &mut ExperimentOutcome,
    name: &str,
    cores: Vec<CoreOptions>,
    original: Option<&PublishedLocklessIops>,
) -> Result<()> {
    let count = cores.len();
    let contest = InterleavedDeviceBenchmark {
        cores,
        depths: &[DEPTH],
        rounds: effort.rounds(ROUNDS),
        until: StopCondition::Requests(effort.requests(REQUESTS)),
        len: LEN,
    };
    let scores = contest.scores(make_locked_and_lockless_devices, effort.stop)?;
    let (raw, rest) = scores.split_first().context("devices")?;
    let (lanes, locked) = rest.split_at(SELECTORS.len());

    let mut table = ResultTable::new(
        format!("{name}, depth {DEPTH}"),
        ["", "thousand IOPS", "ns per request", "share of raw"],
    );
    let mut row = |what: &str, score: &DeviceCostPerRequest| {
        table.row(what, [score.iops(count) / 1e3, score.ns, raw.ns / score.ns]);
    };
    row(NULL, raw);
    SELECTORS.iter().zip(lanes).for_each(|(what, score)| row(what, score));
    LOCKED.iter().zip(locked).for_each(|((what, _), score)| row(&format!("{what}, one lock"), score));
    outcome.table(table);

    let axis = Axis::new("share of the raw device", AxisUnit::Ratio);
    let mut bars = BarPlot::new(name, axis, ["udm", "one lock"]).reference("the original's");
    for (place, (what, _)) in LOCKED.iter().enumerate() {
        let Some(lane) = SELECTORS.iter().position(|name| name == what).map(|at| &lanes[at]) else {
            continue;
        };
        let (kept, kept_locked) = (raw.ns / lane.ns, raw.ns / locked[place].ns);
        let gain = locked[place].ns / lane.ns;
        let (mut ours, mut theirs) = (Bar::new(kept), Bar::new(kept_locked));
        let mut share = RatioVsPublished::more(format!("{name}: {what}, share of raw"), kept);
        let mut over = RatioVsPublished::more(format!("{name}: {what}, relative to one lock"), gain);
        if let Some(o) = original {
            (ours, theirs) = (ours.beside(o.lanes[place] / o.raw), theirs.beside(o.locked[place] / o.raw));
            share = share.beside(o.lanes[place] / o.raw);
            over = over.beside(o.lanes[place] / o.locked[place]).aim(8.0);
        }
        outcome.found(share);
        outcome.found(over);
        bars = bars.group(*what, [ours, theirs]);
    }
    outcome.bars(bars);
    Ok(())
}

/// Makes the raw device, [`SELECTORS`] and [`LOCKED`].
fn make_locked_and_lockless_devices(core_set: &Arc<ProcessCores>) -> Result<Vec<Arc<dyn Device>>> {
    let null = |n| -> Result<Arc<dyn Device>> {
        Ok(udm_backends::open_standalone_device(&uri::parse_device_uri(&nth_null_device_uri(n))?)?)
    };
    let table = |name: &str| NamedTable {
        name: name.into(),
        text: multipath_table_line(name, PATHS, core_set.len()),
    };
    let mut devices = vec![null(0)?];
    devices.extend(make_mapped_devices(core_set, &SELECTORS.map(table))?);
    for (_, rule) in LOCKED {
        devices.push(Arc::new(OneLockMultipath::new(rule, (0..PATHS).map(null).collect::<Result<_>>()?)));
    }
    Ok(devices)
}
