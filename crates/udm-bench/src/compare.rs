//! The comparison that udm stands on: what a layer costs a request, and what the same layer costs
//! behind one lock.
//!
//! Everything is measured in one run on the same cores, in turn: a round measures each device once,
//! and the result of a device is the median of its rounds, so that what disturbs the machine
//! disturbs all alike. Requests carry no data; the null device at the bottom does nothing. Digits
//! belong to the machine, ratios travel.

use crate::device_contest::{self, DeviceContest, DeviceScore, StopCondition};
use crate::lab::models::one_lock::{OneLockMultipath, SelectorRule};
use crate::mapped::{NamedTable, make_mapped};
use anyhow::{Result, ensure};
use serde::Serialize;
use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use udm_core::Device;
use udm_runtime::CoreSet;
use udm_wire::uri;

/// The devices, in order. Those with a table are mapped devices as `udm serve` makes them.
pub(crate) const NULL: &str = "null";
const QUEUE_LENGTH: &str = "queue-length";
const ONE_MUTEX: &str = "one mutex";
const LINEAR: &str = "linear";
pub(crate) const SELECTORS: [&str; 5] =
    ["round-robin", QUEUE_LENGTH, "service-time", "historical-service-time", IO_AFFINITY];
const IO_AFFINITY: &str = "io-affinity";
const NAMES: [&str; 8] =
    [NULL, LINEAR, SELECTORS[0], SELECTORS[1], SELECTORS[2], SELECTORS[3], SELECTORS[4], ONE_MUTEX];

/// The most paths of a device.
pub const PATHS_MAX: usize = 256;

/// The most cores: a word of a mask of io-affinity has so many bits.
const CORES_MAX: usize = u32::BITS as usize;

/// Sectors of the tables.
pub(crate) const LEN: u64 = 4 << 21;

/// How much to measure.
#[derive(Debug, Clone)]
pub struct CompareOptions {
    /// Requests in flight, a core.
    pub depths: Vec<usize>,
    /// How many cores, 32 at the most.
    pub cores: Vec<usize>,
    /// How often each device is measured. Many short rounds are better than few long ones: the
    /// median leaves out those that were disturbed.
    pub rounds: usize,
    /// How many requests each time, a core.
    pub requests: u64,
    /// Paths of a multipath device, 1 to [`PATHS_MAX`]. With io-affinity a path is at least a
    /// core's, so there are as many as cores at the most.
    pub paths: usize,
}

impl CompareOptions {
    /// About two seconds.
    pub fn quick() -> CompareOptions {
        CompareOptions { depths: vec![1, 32], cores: vec![1, 2], rounds: 21, requests: 40_000, paths: 2 }
    }

    /// A minute or two.
    pub fn full() -> CompareOptions {
        CompareOptions {
            depths: vec![1, 32, 128],
            cores: vec![1, 2],
            rounds: 51,
            requests: 200_000,
            paths: 2,
        }
    }
}

/// What one device came to.
#[derive(Debug, Clone, Serialize)]
pub struct ComparisonRow {
    /// Which device.
    pub device: &'static str,
    /// Requests in flight, a core.
    pub depth: usize,
    /// How many cores.
    pub cores: usize,
    /// Nanoseconds a request, as one core sees it.
    pub ns: f64,
    /// How many of them the layer adds to the null device.
    pub added_ns: f64,
    /// `ns` as a multiple of the null device's.
    pub ratio: f64,
    /// Context switches in a million requests, wanted and not.
    pub switches: f64,
}

/// What a comparison came to.
#[derive(Debug, Clone, Serialize)]
pub struct Comparison {
    /// A row for each device, by cores and depth.
    pub rows: Vec<ComparisonRow>,
    /// It was stopped: rows are missing, or are of fewer rounds.
    pub stopped: bool,
}

/// Measures layers over a null device against each other and against the same layer behind one
/// lock. Numbers of cores that this machine does not have are left out. Once `stop` says so it ends
/// with the rounds that it has.
///
/// # Errors
/// When cores or devices can't be had, or it was stopped before its first round was over.
pub fn compare(options: &CompareOptions, stop: &AtomicBool) -> Result<Comparison> {
    ensure!(options.rounds > 0 && options.requests > 0, "nothing to measure");
    ensure!((1..=PATHS_MAX).contains(&options.paths), "paths: from 1 to {PATHS_MAX}");
    let cpus = device_contest::cpus().len();
    let mut rows = Vec::new();
    for &cores in options.cores.iter().filter(|&&n| n <= cpus.clamp(1, CORES_MAX)) {
        let contest = DeviceContest {
            cores: device_contest::pinned_cores(cores),
            depths: &options.depths,
            rounds: options.rounds,
            until: StopCondition::Requests(options.requests),
            len: LEN,
        };
        let scores = contest.run(|cluster| devices(cluster, options.paths), stop)?;
        for (&depth, scores) in options.depths.iter().zip(&scores) {
            rows.extend(comparison_rows(depth, cores, scores));
        }
        if stop.load(Relaxed) {
            break;
        }
    }
    ensure!(!rows.is_empty(), "stopped before anything was measured");
    Ok(Comparison { stopped: stop.load(Relaxed), rows })
}

/// A device that does nothing. They are told apart by their sizes.
pub(crate) fn path(n: usize) -> String {
    format!("null:size={}G,submit_queues=1024,hw_queue_depth=10240", 4 + n)
}

/// A table of one group. The arguments of a path are as few as the selector takes.
pub(crate) fn multipath(selector: &str, paths: usize, cores: usize) -> String {
    let own = selector == IO_AFFINITY;
    let paths = if own { paths.min(cores) } else { paths };
    let words: Vec<_> = (0..paths)
        .map(|n| match own {
            true => format!("{} {:x}", path(n), mask(n, paths, cores)),
            false => path(n),
        })
        .collect();
    format!("0 {LEN} multipath 0 0 1 1 {selector} 0 {paths} {} {}", u8::from(own), words.join(" "))
}

/// The cores of a path, dealt out in turn.
fn mask(path: usize, paths: usize, cores: usize) -> u32 {
    (path..cores).step_by(paths).fold(0, |mask, core| mask | 1 << core)
}

/// Each of [`NAMES`].
fn devices(cluster: &Arc<CoreSet>, paths: usize) -> Result<Vec<Arc<dyn Device>>> {
    let null = |n| -> Result<Arc<dyn Device>> { Ok(udm_backends::open(&uri::parse(&path(n))?)?) };
    let linear = (LINEAR, format!("0 {LEN} linear {} 0", path(0)));
    let groups = SELECTORS.map(|name| (name, multipath(name, paths, cluster.len())));
    let tables: Vec<_> = std::iter::once(linear)
        .chain(groups)
        .map(|(name, text)| NamedTable { name: name.into(), text })
        .collect();
    let mut devices = vec![null(0)?];
    devices.extend(make_mapped(cluster, &tables)?);
    devices.push(Arc::new(OneLockMultipath::new(
        SelectorRule::QueueLength,
        (0..paths).map(null).collect::<Result<_>>()?,
    )));
    debug_assert_eq!(devices.len(), NAMES.len());
    Ok(devices)
}

/// The rows of a depth.
fn comparison_rows(
    depth: usize,
    cores: usize,
    scores: &[DeviceScore],
) -> impl Iterator<Item = ComparisonRow> {
    let null = scores[0].ns;
    NAMES.into_iter().zip(scores).map(move |(device, &DeviceScore { ns, switches, .. })| ComparisonRow {
        device,
        depth,
        cores,
        ns,
        added_ns: ns - null,
        ratio: ns / null,
        switches,
    })
}

impl Comparison {
    /// The rows for people, with what the lock costs under each block.
    pub fn table(&self) -> String {
        let mut out = String::new();
        for block in self.rows.chunk_by(|a, b| (a.cores, a.depth) == (b.cores, b.depth)) {
            // Writing to a string can't fail.
            let _ = block_text(&mut out, block);
        }
        if self.stopped {
            out.push_str("stopped before its end\n");
        }
        out
    }
}

fn block_text(out: &mut String, block: &[ComparisonRow]) -> std::fmt::Result {
    let Some(first) = block.first() else { return Ok(()) };
    let s = if first.cores == 1 { "" } else { "s" };
    let title = format!("{} core{s}, depth {}", first.cores, first.depth);
    writeln!(out, "{title:<26} {:>10} {:>8} {:>8} {:>14}", "ns/request", "added", "x null", "switches/1e6")?;
    for r in block {
        let device = if r.device == NULL { "null".into() } else { format!("  {}", r.device) };
        let added = if r.device == NULL { String::new() } else { format!("{:+.1}", r.added_ns) };
        writeln!(out, "{device:<26} {:>10.1} {added:>8} {:>8.2} {:>14.1}", r.ns, r.ratio, r.switches)?;
    }
    let added = |name| block.iter().find(|r| r.device == name).map_or(0.0, |r| r.added_ns);
    let (ours, locked) = (added(QUEUE_LENGTH), added(ONE_MUTEX));
    if ours > 0.0 && locked > 0.0 {
        writeln!(out, "{:<26} the lock adds {:.1} times what udm's queue-length adds", "", locked / ours)?;
    }
    writeln!(out)
}
