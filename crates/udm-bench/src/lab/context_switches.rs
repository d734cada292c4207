//! `context-switches`: the context switches per request that a second queue with its own thread
//! adds.

use super::models::two_queues::RequestBasedDmModel;
use super::outcome::{ExperimentOutcome, RatioVsPublished, ResultTable};
use super::{ExperimentRunOptions, PublishedExperiment};
use crate::compare::{LEN, multipath_table_line, nth_null_device_uri};
use crate::device_contest::{self, InterleavedDeviceBenchmark, StopCondition};
use crate::mapped::{NamedTable, make_mapped_devices};
use crate::page::{Axis, AxisUnit, Bar, BarPlot};
use anyhow::Result;
use std::sync::Arc;
use udm_core::{Device, Nanos};
use udm_runtime::ProcessCores;
use udm_wire::uri;

pub(super) const EXPERIMENT: PublishedExperiment = PublishedExperiment {
    name: "context-switches",
    question: "How many more context switches does a stacked device have than the raw device?",
    source: "a report on dm over blk-mq, 2016: 10 s of 4 KiB reads, nr_hw_queues 1 and 4",
    run,
};

const DEPTH: usize = 32;
const ROUNDS: usize = 9;
const TIME: Nanos = Nanos(200_000_000);

/// Number of hardware queues, and the original's context switches in 10 s, raw and stacked.
const ORIGINAL: [(usize, f64, f64); 2] = [(1, 1970.0, 667_784.0), (4, 2067.0, 2_314_901.0)];

/// Context switches per second of a program that never waits, as the original counted them. Lower
/// values count as this one, because a ratio of very few switches has no meaning.
pub(super) const QUIET: f64 = 197.0;

/// The devices besides the models of [`ORIGINAL`].
const NAMES: [&str; 3] = ["raw", "linear", "multipath, queue-length"];

fn run(effort: &ExperimentRunOptions<'_>, outcome: &mut ExperimentOutcome) -> Result<()> {
    let cores = device_contest::get_process_cpu_affinity().len().clamp(1, u32::BITS as usize);
    let contest = InterleavedDeviceBenchmark {
        cores: vec![device_contest::unpinned_core_options(); cores],
        depths: &[DEPTH],
        rounds: effort.rounds(ROUNDS),
        until: StopCondition::Time(TIME),
        len: LEN,
    };
    let scores = contest.scores(make_context_switch_devices, effort.stop)?;

    let models = ORIGINAL.map(|(queues, ..)| format!("two queues, {queues} in hardware"));
    let names: Vec<&str> = NAMES.into_iter().chain(models.iter().map(String::as_str)).collect();
    let mut table = ResultTable::new(
        format!("{cores} cores that sleep when idle, depth {DEPTH}"),
        ["", "thousand IOPS", "switches per million requests", "switches in 10 s", "ns per request"],
    );
    let axis = Axis::new("context switches per million requests, plus one", AxisUnit::Number).log();
    let mut bars = BarPlot::new("Context switches", axis, ["switches"]);
    for (name, score) in names.iter().zip(&scores) {
        let ten_seconds = score.switches * score.iops(cores) * 10.0 / 1e6;
        table.row(*name, [score.iops(cores) / 1e3, score.switches, ten_seconds, score.ns]);
        bars = bars.group(*name, [Bar::new(score.switches + 1.0)]);
    }
    outcome.table(table);
    outcome.bars(bars);

    let per_second = |i: usize| (scores[i].switches * scores[i].iops(cores) / 1e6).max(QUIET);
    let of_raw: Vec<f64> = (1..scores.len()).map(|i| per_second(i) / per_second(0)).collect();
    for (name, ratio) in NAMES[1..].iter().zip(&of_raw) {
        outcome.found(
            RatioVsPublished::less(format!("{name}: switches per second, relative to raw"), *ratio).aim(1.1),
        );
    }
    for ((queues, before, behind), ratio) in ORIGINAL.iter().zip(&of_raw[NAMES.len() - 1..]) {
        let what = format!("two queues, {queues} in hardware: switches per second, relative to raw");
        outcome.found(RatioVsPublished::less(what, *ratio).of_model(behind / before));
    }
    let stacked = &scores[NAMES.len()..];
    for ((queues, ..), score) in ORIGINAL.iter().zip(stacked) {
        let what = format!("requests per second: linear, relative to two queues, {queues} in hardware");
        outcome.found(RatioVsPublished::more(what, score.ns / scores[1].ns));
    }
    outcome.note(format!(
        "No thread waits for the raw device, so its switches come from the machine. Rates below the original's \
         {QUIET} per second count as {QUIET}. The model with two queues passes each request to another thread and \
         back."
    ));
    Ok(())
}

fn make_context_switch_devices(core_set: &Arc<ProcessCores>) -> Result<Vec<Arc<dyn Device>>> {
    let raw = udm_backends::open_standalone_device(&uri::parse_device_uri(&nth_null_device_uri(0))?)?;
    let tables = [
        ("linear", format!("0 {LEN} linear {} 0", nth_null_device_uri(0))),
        ("multipath", multipath_table_line("queue-length", 2, core_set.len())),
    ];
    let tables = tables.map(|(name, text)| NamedTable { name: name.into(), text });
    let mut devices = vec![Arc::clone(&raw)];
    devices.extend(make_mapped_devices(core_set, &tables)?);
    for (queues, ..) in ORIGINAL {
        devices.push(Arc::new(RequestBasedDmModel::new(queues, raw.limits())));
    }
    Ok(devices)
}
