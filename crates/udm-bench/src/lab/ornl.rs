//! `ornl`: the time that multipath adds to a request, and its effect on the rate of many requests.

use super::outcome::{ExperimentOutcome, RatioVsPublished, ResultTable};
use super::{ExperimentRunOptions, PublishedExperiment};
use crate::compare::LEN;
use crate::device_contest::{self, InterleavedDeviceBenchmark, StopCondition};
use crate::mapped::{NamedTable, make_mapped_devices};
use crate::page::{Axis, AxisUnit, LinePlot};
use anyhow::Result;
use std::sync::Arc;
use udm_core::{Device, Nanos};
use udm_runtime::ProcessCores;
use udm_wire::uri;

pub(super) const EXPERIMENT: PublishedExperiment = PublishedExperiment {
    name: "ornl",
    question: "What does multipath add to the time of a request, and how much does it reduce the rate?",
    source: "Caldwell, blk-mq and scsi-mq at ORNL, 2015: SRP, 4 KiB, direct and indirect paths",
    run,
};

/// Time of a request on a direct path, about as in the original, and on an indirect path, in
/// nanoseconds.
const DIRECT: u64 = 100_000;
const INDIRECT: u64 = 120_000;
/// Number of requests that are sent one at a time.
const SYNCHRONOUS: u64 = 100;
const ROUNDS: usize = 9;
const TIME: Nanos = Nanos(150_000_000);
const DEPTH: usize = 32;

/// The original's time per request in microseconds and IOPS: direct and by multipath.
const TIMES: (f64, f64) = (103.58, 130.56);
const RATES: (f64, f64) = (217_468.0, 100_658.0);

const NAMES: [&str; 4] =
    ["direct path", "indirect path", "multipath, direct path", "multipath, indirect path"];

fn run(effort: &ExperimentRunOptions<'_>, outcome: &mut ExperimentOutcome) -> Result<()> {
    // One request at a time, on a core that sleeps in between.
    let contest = InterleavedDeviceBenchmark {
        cores: device_contest::pinned_core_options(1),
        depths: &[1],
        rounds: effort.rounds(ROUNDS),
        until: StopCondition::Time(Nanos(SYNCHRONOUS * (DIRECT + INDIRECT) / 2)),
        len: LEN,
    };
    let scores = contest.scores(make_delayed_multipath_devices, effort.stop)?;
    let heads = ["", "us per request", "added us", "CPU, percent"];
    let mut table = ResultTable::new(format!("{SYNCHRONOUS} requests, one at a time"), heads);
    for (i, name) in NAMES.iter().enumerate() {
        let added = if i < 2 { f64::NAN } else { (scores[i].ns - scores[i - 2].ns) / 1e3 };
        table.row(*name, [scores[i].ns / 1e3, added, scores[i].cpu * 100.0]);
    }
    outcome.table(table);
    for i in 0..2 {
        let what = format!("{}: time per request, relative to no multipath", NAMES[i]);
        let finding = RatioVsPublished::less(what, scores[i + 2].ns / scores[i].ns);
        outcome.found(if i == 0 { finding.beside(TIMES.1 / TIMES.0) } else { finding });
    }

    // Many requests at a time, on more and more threads of one device.
    let cpus = device_contest::get_process_cpu_affinity().len().max(1);
    let heads = ["", "direct: thousand IOPS", "CPU, percent", "multipath: thousand IOPS", "CPU, percent"];
    let mut table = ResultTable::new(format!("threads on one device, depth {DEPTH} each"), heads);
    let (mut direct, mut stacked) = (Vec::new(), Vec::new());
    for threads in [1, 2, 4] {
        let contest = InterleavedDeviceBenchmark {
            cores: vec![device_contest::unpinned_core_options(); threads],
            depths: &[DEPTH],
            rounds: effort.rounds(ROUNDS),
            until: StopCondition::Time(TIME),
            len: LEN,
        };
        let scores = contest.scores(make_delayed_multipath_devices, effort.stop)?;
        let (raw, multipath) = (scores[0], scores[2]);
        let cells = [raw, multipath].map(|score| [score.iops(threads) / 1e3, score.cpu * 100.0]);
        table.row(
            format!("{threads} threads on {} of the CPUs", cpus.min(threads)),
            cells.into_iter().flatten(),
        );
        direct.push((threads as f64, raw.iops(threads)));
        stacked.push((threads as f64, multipath.iops(threads)));
        let what = format!("depth {}: IOPS of multipath, relative to direct", threads * DEPTH);
        outcome.found(RatioVsPublished::more(what, raw.ns / multipath.ns).beside(RATES.1 / RATES.0));
    }
    outcome.table(table);
    outcome.lines(
        LinePlot::new(
            "Requests per second",
            Axis::new("threads", AxisUnit::Number).log2(),
            Axis::new("IOPS", AxisUnit::Number),
        )
        .line("direct", direct)
        .line("multipath", stacked),
    );
    outcome.note(
        "A path completes each request after a fixed time, no matter how many are in flight, so the rate is the \
         depth divided by that time. Multipath adds far less than the wake-up delay of a sleeping core.",
    );
    Ok(())
}

/// Makes the devices of [`NAMES`].
fn make_delayed_multipath_devices(core_set: &Arc<ProcessCores>) -> Result<Vec<Arc<dyn Device>>> {
    // Each path has another size, so the URIs differ.
    let path = |time: u64, n: u64| {
        let size = (4u64 << 30) + 4096 * n;
        format!("null:size={size},irqmode=2,completion_nsec={time},submit_queues=1024,hw_queue_depth=10240")
    };
    let open = |word: String| -> Result<Arc<dyn Device>> {
        Ok(udm_backends::open_standalone_device(&uri::parse_device_uri(&word)?)?)
    };
    let table = |name: &str, word| {
        let text = format!("0 {LEN} multipath 0 0 1 1 service-time 0 1 0 {word}");
        NamedTable { name: name.into(), text }
    };
    let tables = [table("direct", path(DIRECT, 2)), table("indirect", path(INDIRECT, 3))];
    let mut devices = vec![open(path(DIRECT, 0))?, open(path(INDIRECT, 1))?];
    devices.extend(make_mapped_devices(core_set, &tables)?);
    Ok(devices)
}
