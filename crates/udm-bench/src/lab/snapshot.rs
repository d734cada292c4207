//! `snapshot`: first writes, compared with exceptions under one mutex, and the later cost of a
//! snapshot.

use super::outcome::{ExperimentOutcome, RatioVsPublished, ResultTable};
use super::{ExperimentRunOptions, PublishedExperiment};
use crate::page::{Axis, AxisUnit, LinePlot};
use crate::snapshots::{
    FirstChunkWriteResult, SnapshotCostOptions, SteadyOriginWriteCosts, measure_snapshot_costs,
};
use anyhow::Result;
use std::sync::atomic::AtomicUsize;

pub(super) const EXPERIMENT: PublishedExperiment = PublishedExperiment {
    name: "snapshot",
    question: "How many first writes per second, by number of workers, without and with one mutex?",
    source: "Tsironis, fine-grained dm-snapshot, 2018 and 2019: null_blk, 4 KiB random writes, chunks of 4 KiB",
    run,
};

const DEPTH: usize = 32;
const THREADS: [usize; 3] = [1, 2, 4];

/// The original's gain for writes of an origin from its first step, by number of workers.
const ORIGINAL: [(usize, f64); 3] =
    [(1, 66_421.0 / 57_708.0), (2, 77_589.0 / 63_415.0), (4, 98_839.0 / 67_276.0)];

/// Names of [`FirstChunkWriteResult::device`].
const MUTEX: &str = "origin, one mutex";
const TRANSIENT: &str = "origin, N";

fn run(effort: &ExperimentRunOptions<'_>, outcome: &mut ExperimentOutcome) -> Result<()> {
    let options = SnapshotCostOptions {
        depths: vec![DEPTH],
        threads: THREADS.to_vec(),
        rounds: effort.rounds(5),
        chunks: effort.requests(1 << 14),
        exceptions: vec![1_000, effort.requests(1 << 20)],
    };
    let costs = measure_snapshot_costs(&options, effort.stop, &AtomicUsize::new(0))?;
    for rows in costs.first_writes.chunk_by(|a, b| a.below == b.below) {
        report_first_chunk_writes(rows, outcome);
    }
    for SteadyOriginWriteCosts { linear, never, copied, removed, .. } in
        costs.later_writes.iter().filter(|r| r.depth == DEPTH)
    {
        let mut table =
            ResultTable::new(format!("writes of an origin, depth {DEPTH}"), ["", "ns per request"]);
        table.row("linear", [*linear]);
        table.row("origin before its first snapshot", [*never]);
        table.row("with a snapshot, all copied", [*copied]);
        table.row("after the snapshot was removed", [*removed]);
        outcome.table(table);
        outcome.found(
            RatioVsPublished::less("origin: after a snapshot, relative to before", removed / never).aim(1.1),
        );
    }
    if let [few, .., many] = &costs.lookups[..] {
        let what = format!("reads among {} exceptions, relative to {}", many.exceptions, few.exceptions);
        outcome.found(RatioVsPublished::less(what, many.ns / few.ns));
    }
    outcome.note(
        "The original's ratios are those of its first step, the finer locks; all of its steps together were meant to \
         reach 4. The model with the mutex does less than the kernel did: it copies many chunks at a time and wakes \
         all writers at once. Mean times follow from the rates: requests in flight divided by requests per second.",
    );
    Ok(())
}

/// Reports the first writes over one kind of disk.
fn report_first_chunk_writes(rows: &[FirstChunkWriteResult], outcome: &mut ExperimentOutcome) {
    let Some(below) = rows.first().map(|row| row.below) else { return };
    let of = |device: &str, threads: usize| {
        rows.iter().find(|row| row.device() == device && row.threads == threads).map(|row| row.iops)
    };
    let mut names: Vec<&str> = Vec::new();
    for row in rows {
        if !names.contains(&row.device()) {
            names.push(row.device());
        }
    }
    let heads = THREADS
        .iter()
        .flat_map(|n| [format!("thousand IOPS, {}", format_worker_count(*n)), "mean us".into()]);
    let mut table = ResultTable::new(
        format!("first writes over {below}, depth {DEPTH} per worker"),
        std::iter::once(String::new()).chain(heads),
    );
    let axis = Axis::new("workers", AxisUnit::Number).log2();
    let mut lines =
        LinePlot::new(format!("First writes over {below}"), axis, Axis::new("IOPS", AxisUnit::Number).log());
    for &name in &names {
        let cells = |&n: &usize| {
            let iops = of(name, n).unwrap_or(f64::NAN);
            [iops / 1e3, (n * DEPTH) as f64 * 1e6 / iops]
        };
        table.row(name, THREADS.iter().flat_map(cells));
        lines = lines.line(name, THREADS.iter().filter_map(|&n| Some((n as f64, of(name, n)?))));
    }
    outcome.table(table);
    outcome.lines(lines);
    for (workers, original) in ORIGINAL {
        if let (Some(ours), Some(theirs)) = (of(TRANSIENT, workers), of(MUTEX, workers)) {
            let what = format!(
                "over {below}, {}: transient, relative to one mutex",
                self::format_worker_count(workers)
            );
            outcome.found(RatioVsPublished::more(what, ours / theirs).beside(original));
        }
    }
}

fn format_worker_count(count: usize) -> String {
    format!("{count} worker{}", if count == 1 { "" } else { "s" })
}
