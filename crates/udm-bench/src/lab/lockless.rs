//! `lockless`: the share of the raw device's rate that multipath keeps, and the cost of one lock
//! per device.

use super::models::one_lock::{OneLockMultipath, SelectorRule};
use super::outcome::{ExperimentOutcome, Finding, ResultTable};
use super::{Experiment, ExperimentOptions};
use crate::compare::{LEN, NULL, SELECTORS, multipath, path};
use crate::device_contest::{self, DeviceContest, DeviceScore, StopCondition};
use crate::mapped::{NamedTable, make_mapped};
use crate::page::{Axis, AxisUnit, Bar, Bars};
use anyhow::{Context, Result};
use std::sync::Arc;
use udm_core::Device;
use udm_runtime::{CoreOptions, CoreSet};
use udm_wire::uri;

pub(super) const EXPERIMENT: Experiment = Experiment {
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
struct OriginalFigures {
    raw: f64,
    lanes: [f64; 3],
    locked: [f64; 3],
}

const PINNED: OriginalFigures =
    OriginalFigures { raw: 6055.9, lanes: [4169.1, 2729.1, 2778.3], locked: [2083.9, 1728.4, 1655.5] };
const UNPINNED: OriginalFigures =
    OriginalFigures { raw: 2598.8, lanes: [2010.9, 1661.8, 1569.5], locked: [1121.0, 882.5, 889.5] };

fn run(effort: &ExperimentOptions<'_>, outcome: &mut ExperimentOutcome) -> Result<()> {
    let cpus = device_contest::cpus().len().max(1);
    case(effort, outcome, "1 core", device_contest::pinned_cores(1), None)?;
    if cpus > 1 {
        let cores = cpus.min(u32::BITS as usize);
        let name = |how| format!("{cores} cores, {how}");
        case(effort, outcome, &name("pinned"), device_contest::pinned_cores(cores), Some(&PINNED))?;
        case(
            effort,
            outcome,
            &name("not pinned"),
            vec![device_contest::unpinned_core(); cores],
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

fn case(
    effort: &ExperimentOptions<'_>,
    outcome: &mut ExperimentOutcome,
    name: &str,
    cores: Vec<CoreOptions>,
    original: Option<&OriginalFigures>,
) -> Result<()> {
    let count = cores.len();
    let contest = DeviceContest {
        cores,
        depths: &[DEPTH],
        rounds: effort.rounds(ROUNDS),
        until: StopCondition::Requests(effort.requests(REQUESTS)),
        len: LEN,
    };
    let scores = contest.scores(devices, effort.stop)?;
    let (raw, rest) = scores.split_first().context("devices")?;
    let (lanes, locked) = rest.split_at(SELECTORS.len());

    let mut table = ResultTable::new(
        format!("{name}, depth {DEPTH}"),
        ["", "thousand IOPS", "ns per request", "share of raw"],
    );
    let mut row = |what: &str, score: &DeviceScore| {
        table.row(what, [score.iops(count) / 1e3, score.ns, raw.ns / score.ns]);
    };
    row(NULL, raw);
    SELECTORS.iter().zip(lanes).for_each(|(what, score)| row(what, score));
    LOCKED.iter().zip(locked).for_each(|((what, _), score)| row(&format!("{what}, one lock"), score));
    outcome.table(table);

    let axis = Axis::new("share of the raw device", AxisUnit::Ratio);
    let mut bars = Bars::new(name, axis, ["udm", "one lock"]).reference("the original's");
    for (place, (what, _)) in LOCKED.iter().enumerate() {
        let Some(lane) = SELECTORS.iter().position(|name| name == what).map(|at| &lanes[at]) else {
            continue;
        };
        let (kept, kept_locked) = (raw.ns / lane.ns, raw.ns / locked[place].ns);
        let gain = locked[place].ns / lane.ns;
        let (mut ours, mut theirs) = (Bar::new(kept), Bar::new(kept_locked));
        let mut share = Finding::more(format!("{name}: {what}, share of raw"), kept);
        let mut over = Finding::more(format!("{name}: {what}, relative to one lock"), gain);
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
fn devices(core_set: &Arc<CoreSet>) -> Result<Vec<Arc<dyn Device>>> {
    let null = |n| -> Result<Arc<dyn Device>> { Ok(udm_backends::open(&uri::parse(&path(n))?)?) };
    let table = |name: &str| NamedTable { name: name.into(), text: multipath(name, PATHS, core_set.len()) };
    let mut devices = vec![null(0)?];
    devices.extend(make_mapped(core_set, &SELECTORS.map(table))?);
    for (_, rule) in LOCKED {
        devices.push(Arc::new(OneLockMultipath::new(rule, (0..PATHS).map(null).collect::<Result<_>>()?)));
    }
    Ok(devices)
}
