//! The comparison that udm stands on: what a layer costs a request, and what the same layer costs
//! behind one lock.
//!
//! Everything is measured in one run on the same cores, in turn: a round measures each device once,
//! and the result of a device is the median of its rounds, so that what disturbs the machine
//! disturbs all alike. Requests carry no data; the null device at the bottom does nothing. Digits
//! belong to the machine, ratios travel.

use crate::cores;
use crate::mapped::{Table, make_mapped};
use crate::one_mutex::OneMutex;
use crate::stats::Usage;
use anyhow::{Result, ensure};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use serde::Serialize;
use std::fmt::Write;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Barrier};
use std::time::Duration;
use udm_core::{Batch, Bio, CoreId, Device, Lane, Sector, Sectors};
use udm_runtime::{Cluster, CoreOptions, LocalCore};
use udm_wire::uri;

/// The devices, in order. Those with a table are mapped devices as `udm serve` makes them.
const NULL: &str = "null";
const QUEUE_LENGTH: &str = "queue-length";
const ONE_MUTEX: &str = "one mutex";
const LINEAR: &str = "linear";
const SELECTORS: [&str; 5] =
    ["round-robin", QUEUE_LENGTH, "service-time", "historical-service-time", IO_AFFINITY];
const IO_AFFINITY: &str = "io-affinity";
const NAMES: [&str; 8] =
    [NULL, LINEAR, SELECTORS[0], SELECTORS[1], SELECTORS[2], SELECTORS[3], SELECTORS[4], ONE_MUTEX];

/// The most paths of a device.
pub const PATHS_MAX: usize = 256;

/// The most cores: a word of a mask of io-affinity has so many bits.
const CORES_MAX: usize = u32::BITS as usize;

/// Sectors of the tables, and of a request.
const LEN: u64 = 4 << 21;
const REQUEST: u64 = 8;

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
pub struct Row {
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
    pub rows: Vec<Row>,
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
    let cpus = cpus();
    let mut rows = Vec::new();
    for &cores in options.cores.iter().filter(|&&n| n <= cpus.len().clamp(1, CORES_MAX)) {
        let threads: Vec<_> = (0..cores)
            .map(|i| CoreOptions { cpu: cpus.get(i).copied(), ring_optional: true, ..CoreOptions::default() })
            .collect();
        let start = Start { barrier: Barrier::new(cores), stop, last: AtomicUsize::new(usize::MAX) };
        let make = |cluster: &Arc<Cluster>| devices(cluster, options.paths);
        let measured = cores::run(&threads, make, |core, lanes| measure(core, lanes, options, &start))?;
        for (d, &depth) in options.depths.iter().enumerate() {
            rows.extend(summary(depth, cores, options, &measured, d));
        }
        if stop.load(Relaxed) {
            break;
        }
    }
    ensure!(!rows.is_empty(), "stopped before anything was measured");
    Ok(Comparison { stopped: stop.load(Relaxed), rows })
}

/// Where cores begin a measurement together, or all stop in front of the same one.
struct Start<'a> {
    barrier: Barrier,
    stop: &'a AtomicBool,
    /// The number of the first that is not made. Core 0 sets it, in front of the barrier.
    last: AtomicUsize,
}

impl Start<'_> {
    /// Waits for the others in front of measurement `number`; false when it is not made.
    fn wait(&self, core: CoreId, number: usize) -> bool {
        if core == CoreId(0) && self.stop.load(Relaxed) {
            self.last.fetch_min(number, Relaxed);
        }
        self.barrier.wait();
        number < self.last.load(Relaxed)
    }
}

/// The CPUs that this process may use.
fn cpus() -> Vec<usize> {
    let Ok(set) = rustix::thread::sched_getaffinity(None) else { return Vec::new() };
    (0..rustix::thread::CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect()
}

/// A device that does nothing. They are told apart by their sizes.
fn path(n: usize) -> String {
    format!("null:size={}G,submit_queues=1024,hw_queue_depth=10240", 4 + n)
}

/// A table of one group. The arguments of a path are as few as the selector takes.
fn multipath(selector: &str, paths: usize, cores: usize) -> String {
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
fn devices(cluster: &Arc<Cluster>, paths: usize) -> Result<Vec<Arc<dyn Device>>> {
    let null = |n| -> Result<Arc<dyn Device>> { Ok(udm_backends::open(&uri::parse(&path(n))?)?) };
    let linear = (LINEAR, format!("0 {LEN} linear {} 0", path(0)));
    let groups = SELECTORS.map(|name| (name, multipath(name, paths, cluster.len())));
    let tables: Vec<_> =
        std::iter::once(linear).chain(groups).map(|(name, text)| Table { name: name.into(), text }).collect();
    let mut devices = vec![null(0)?];
    devices.extend(make_mapped(cluster, &tables)?);
    devices.push(Arc::new(OneMutex::new((0..paths).map(null).collect::<Result<_>>()?)));
    debug_assert_eq!(devices.len(), NAMES.len());
    Ok(devices)
}

/// One measurement of one device on one core.
#[derive(Clone, Copy)]
struct Measured {
    ns: f64,
    switches: u64,
}

/// By depth, device and round.
type OfCore = Vec<Vec<Vec<Measured>>>;

fn measure(
    core: &mut LocalCore,
    mut lanes: Vec<Box<dyn Lane>>,
    options: &CompareOptions,
    start: &Start<'_>,
) -> OfCore {
    let mut load = Reads::new(u64::from(core.id().0));
    let mut number = 0;
    let all = options.depths.iter().map(|&depth| {
        load.set_depth(depth);
        let mut of_depth = vec![Vec::with_capacity(options.rounds); lanes.len()];
        // One round more than is counted: the first warms up.
        for round in 0..=options.rounds {
            for (lane, out) in lanes.iter_mut().zip(&mut of_depth) {
                if !start.wait(core.id(), number) {
                    return of_depth;
                }
                number += 1;
                let measured = load.run(core, &mut **lane, options.requests);
                if round > 0 {
                    out.push(measured);
                }
            }
        }
        of_depth
    });
    all.collect()
}

/// The load: the same bios over and over, to random places.
struct Reads {
    idle: Batch,
    batch: Batch,
    done: Batch,
    rng: SmallRng,
}

impl Reads {
    fn new(seed: u64) -> Reads {
        Reads {
            idle: Batch::new(),
            batch: Batch::new(),
            done: Batch::new(),
            rng: SmallRng::seed_from_u64(seed),
        }
    }

    fn set_depth(&mut self, depth: usize) {
        self.idle.resize_with(depth, Bio::new);
    }

    fn run(&mut self, core: &mut LocalCore, lane: &mut dyn Lane, requests: u64) -> Measured {
        let (mut left, mut in_flight) = (requests, 0);
        let (before, begin) = (Usage::now(), core.clock());
        loop {
            core.turn(|cx| {
                lane.poll(&mut self.done, cx);
                in_flight -= self.done.len();
                for mut bio in self.done.drain(..) {
                    bio.finish();
                    self.idle.push(bio);
                }
                while left > 0
                    && let Some(mut bio) = self.idle.pop()
                {
                    left -= 1;
                    bio.sector = Sector((self.rng.next_u64() % (LEN / REQUEST)) * REQUEST);
                    bio.sectors = Sectors(REQUEST);
                    bio.start();
                    self.batch.push(bio);
                }
                in_flight += self.batch.len();
                lane.submit(&mut self.batch, cx);
            });
            if left == 0 && in_flight == 0 {
                break;
            }
        }
        let took = core.clock().since(begin).0;
        let switches = Usage::now().since(&before, Duration::ZERO).switches;
        Measured { ns: took as f64 / requests as f64, switches }
    }
}

/// The rows of a depth, by the rounds in which each device was measured; none when there are none.
fn summary(depth: usize, cores: usize, options: &CompareOptions, measured: &[OfCore], d: usize) -> Vec<Row> {
    let counts = measured.iter().flat_map(|core| core[d].iter().map(Vec::len));
    let count = counts.min().unwrap_or_default();
    if count == 0 {
        return Vec::new();
    }
    let ns = |device: usize| -> f64 {
        // A round's result is the mean of its cores.
        let round = |r: usize| measured.iter().map(|core| core[d][device][r].ns).sum::<f64>() / cores as f64;
        let mut rounds: Vec<f64> = (0..count).map(round).collect();
        rounds.sort_by(f64::total_cmp);
        rounds[rounds.len() / 2]
    };
    let null = ns(0);
    let row = |(i, device): (usize, &'static str)| {
        let switches: u64 = measured.iter().flat_map(|core| &core[d][i][..count]).map(|m| m.switches).sum();
        let requests = (options.requests * (count * cores) as u64) as f64;
        let ns = ns(i);
        Row {
            device,
            depth,
            cores,
            ns,
            added_ns: ns - null,
            ratio: ns / null,
            switches: switches as f64 * 1e6 / requests,
        }
    };
    NAMES.into_iter().enumerate().map(row).collect()
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

fn block_text(out: &mut String, block: &[Row]) -> std::fmt::Result {
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
