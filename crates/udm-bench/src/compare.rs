//! Comparison of layers: what a layer costs per request, and what the same layer costs with one
//! lock.
//!
//! All devices are measured in one run on the same cores. Each round measures each device once. The
//! result of a device is the median of its rounds, so a disturbance affects all devices alike.
//!
//! Requests carry no data, and the null device at the bottom does nothing. The absolute numbers
//! depend on the machine; the ratios can be compared between machines.

use crate::device_contest::{self, DeviceCostPerRequest, InterleavedDeviceBenchmark, StopCondition};
use crate::lab::models::one_lock::{OneLockMultipath, SelectorRule};
use crate::mapped::{NamedTable, make_mapped_devices};
use anyhow::{Result, ensure};
use serde::Serialize;
use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use udm_core::Device;
use udm_runtime::ProcessCores;
use udm_wire::uri;

/// The devices, in order. A device with a table is a mapped device as `udm serve` makes it.
pub(crate) const NULL: &str = "null";
const QUEUE_LENGTH: &str = "queue-length";
const ONE_MUTEX: &str = "one mutex";
const LINEAR: &str = "linear";
pub(crate) const SELECTORS: [&str; 5] =
    ["round-robin", QUEUE_LENGTH, "service-time", "historical-service-time", IO_AFFINITY];
const IO_AFFINITY: &str = "io-affinity";
const NAMES: [&str; 8] =
    [NULL, LINEAR, SELECTORS[0], SELECTORS[1], SELECTORS[2], SELECTORS[3], SELECTORS[4], ONE_MUTEX];

/// Maximum number of paths of a device.
pub const PATHS_MAX: usize = 256;

/// Maximum number of cores: the number of bits in a word of an io-affinity mask.
const CORES_MAX: usize = u32::BITS as usize;

/// Length of the tables in sectors.
pub(crate) const LEN: u64 = 4 << 21;

/// How much to measure.
#[derive(Debug, Clone)]
pub struct DmLayerComparisonOptions {
    /// Requests in flight per core.
    pub depths: Vec<usize>,
    /// Numbers of cores, each at most 32.
    pub cores: Vec<usize>,
    /// Measurements per device. Many short rounds are better than a few long ones: the median
    /// ignores disturbed rounds.
    pub rounds: usize,
    /// Requests per measurement and core.
    pub requests: u64,
    /// Paths of a multipath device, 1 to [`PATHS_MAX`]. With io-affinity each path needs a core of
    /// its own, so it has at most as many paths as cores.
    pub paths: usize,
}

impl DmLayerComparisonOptions {
    /// Options for a run of about two seconds.
    pub fn quick() -> DmLayerComparisonOptions {
        DmLayerComparisonOptions {
            depths: vec![1, 32],
            cores: vec![1, 2],
            rounds: 21,
            requests: 40_000,
            paths: 2,
        }
    }

    /// Options for a run of one to two minutes.
    pub fn full() -> DmLayerComparisonOptions {
        DmLayerComparisonOptions {
            depths: vec![1, 32, 128],
            cores: vec![1, 2],
            rounds: 51,
            requests: 200_000,
            paths: 2,
        }
    }
}

/// The result of one device.
#[derive(Debug, Clone, Serialize)]
pub struct DmLayerComparisonRow {
    /// The name of the device.
    pub device: &'static str,
    /// Requests in flight per core.
    pub depth: usize,
    /// Number of cores.
    pub cores: usize,
    /// Nanoseconds per request, as seen by one core.
    pub ns: f64,
    /// Nanoseconds per request that the layer adds to the null device.
    pub added_ns: f64,
    /// `ns` as a multiple of the null device's.
    pub ratio: f64,
    /// Context switches per million requests, voluntary and involuntary.
    pub switches: f64,
}

/// The result of a comparison.
#[derive(Debug, Clone, Serialize)]
pub struct DmLayerComparison {
    /// One row per device, grouped by cores and depth.
    pub rows: Vec<DmLayerComparisonRow>,
    /// If set, the comparison was stopped: rows are missing or have fewer rounds.
    pub stopped: bool,
}

/// Compares layers over a null device with each other and with the same layer under one lock.
/// Numbers of cores that this machine does not have are skipped. If `stop` is set, the comparison
/// ends with the rounds that it has.
///
/// # Errors
/// If cores or devices are not available, or it was stopped before its first round ended.
pub fn compare_dm_layers(options: &DmLayerComparisonOptions, stop: &AtomicBool) -> Result<DmLayerComparison> {
    ensure!(options.rounds > 0 && options.requests > 0, "nothing to measure");
    ensure!((1..=PATHS_MAX).contains(&options.paths), "paths: from 1 to {PATHS_MAX}");
    let cpus = device_contest::get_process_cpu_affinity().len();
    let mut rows = Vec::new();
    for &cores in options.cores.iter().filter(|&&n| n <= cpus.clamp(1, CORES_MAX)) {
        let contest = InterleavedDeviceBenchmark {
            cores: device_contest::pinned_core_options(cores),
            depths: &options.depths,
            rounds: options.rounds,
            until: StopCondition::Requests(options.requests),
            len: LEN,
        };
        let scores = contest.run(|core_set| make_dm_layer_devices(core_set, options.paths), stop)?;
        for (&depth, scores) in options.depths.iter().zip(&scores) {
            rows.extend(dm_layer_comparison_rows(depth, cores, scores));
        }
        if stop.load(Relaxed) {
            break;
        }
    }
    ensure!(!rows.is_empty(), "stopped before anything was measured");
    Ok(DmLayerComparison { stopped: stop.load(Relaxed), rows })
}

/// URI of null device `n`, which does nothing. Each `n` has another size, so the URIs differ.
pub(crate) fn nth_null_device_uri(n: usize) -> String {
    format!("null:size={}G,submit_queues=1024,hw_queue_depth=10240", 4 + n)
}

/// A table of one group. Each path has only the arguments that the selector requires.
pub(crate) fn multipath_table_line(selector: &str, paths: usize, cores: usize) -> String {
    let own = selector == IO_AFFINITY;
    let paths = if own { paths.min(cores) } else { paths };
    let words: Vec<_> = (0..paths)
        .map(|n| match own {
            true => format!("{} {:x}", nth_null_device_uri(n), path_core_mask(n, paths, cores)),
            false => nth_null_device_uri(n),
        })
        .collect();
    format!("0 {LEN} multipath 0 0 1 1 {selector} 0 {paths} {} {}", u8::from(own), words.join(" "))
}

/// The mask of the cores of a path. Cores are assigned to paths in rotation.
fn path_core_mask(path: usize, paths: usize, cores: usize) -> u32 {
    (path..cores).step_by(paths).fold(0, |mask, core| mask | 1 << core)
}

/// Makes the devices of [`NAMES`].
fn make_dm_layer_devices(core_set: &Arc<ProcessCores>, paths: usize) -> Result<Vec<Arc<dyn Device>>> {
    let null = |n| -> Result<Arc<dyn Device>> {
        Ok(udm_backends::open_standalone_device(&uri::parse_device_uri(&nth_null_device_uri(n))?)?)
    };
    let linear = (LINEAR, format!("0 {LEN} linear {} 0", nth_null_device_uri(0)));
    let groups = SELECTORS.map(|name| (name, multipath_table_line(name, paths, core_set.len())));
    let tables: Vec<_> = std::iter::once(linear)
        .chain(groups)
        .map(|(name, text)| NamedTable { name: name.into(), text })
        .collect();
    let mut devices = vec![null(0)?];
    devices.extend(make_mapped_devices(core_set, &tables)?);
    devices.push(Arc::new(OneLockMultipath::new(
        SelectorRule::QueueLength,
        (0..paths).map(null).collect::<Result<_>>()?,
    )));
    debug_assert_eq!(devices.len(), NAMES.len());
    Ok(devices)
}

/// The rows of one depth.
fn dm_layer_comparison_rows(
    depth: usize,
    cores: usize,
    scores: &[DeviceCostPerRequest],
) -> impl Iterator<Item = DmLayerComparisonRow> {
    let null = scores[0].ns;
    NAMES.into_iter().zip(scores).map(move |(device, &DeviceCostPerRequest { ns, switches, .. })| {
        DmLayerComparisonRow { device, depth, cores, ns, added_ns: ns - null, ratio: ns / null, switches }
    })
}

impl DmLayerComparison {
    /// The rows as text, with the cost of the lock below each block.
    pub fn table(&self) -> String {
        let mut out = String::new();
        for block in self.rows.chunk_by(|a, b| (a.cores, a.depth) == (b.cores, b.depth)) {
            // Writing to a string can't fail.
            let _ = write_dm_layer_comparison_block(&mut out, block);
        }
        if self.stopped {
            out.push_str("stopped early\n");
        }
        out
    }
}

fn write_dm_layer_comparison_block(out: &mut String, block: &[DmLayerComparisonRow]) -> std::fmt::Result {
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
