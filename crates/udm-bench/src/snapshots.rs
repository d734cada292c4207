//! What snapshots cost: first writes of an origin and of a snapshot, beside an origin whose
//! exceptions are behind one mutex, and what a look for one among many costs.
//!
//! A round measures each device once, anew each time, and its result is the median of the rounds.
//! Threads are cores that sleep when they have nothing to do. Requests are 4 KiB, a chunk each, and
//! every chunk is written once, in random order. Below is memory that was touched before, or
//! nothing.

use crate::cores;
use crate::mapped::{Table, make_mapped};
use crate::one_mutex_origin::{CHUNK, Exceptions, OneMutexOrigin};
use anyhow::{Result, ensure};
use serde::Serialize;
use std::fmt::Write;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Barrier};
use std::time::Duration;
use udm_buf::Buf;
use udm_core::{Batch, Bio, Device, Lane, Nanos, Op, Sector, Sectors};
use udm_runtime::{Cluster, CoreOptions, LocalCore};

/// How much to measure.
#[derive(Debug, Clone)]
pub struct SnapshotOptions {
    /// Requests in flight, a thread.
    pub depths: Vec<usize>,
    /// How many threads.
    pub threads: Vec<usize>,
    /// How often each device is measured.
    pub rounds: usize,
    /// Chunks that are written each time: a power of two.
    pub chunks: u64,
    /// Exceptions among which one is looked for.
    pub exceptions: Vec<u64>,
}

impl SnapshotOptions {
    /// Some seconds.
    pub fn quick() -> SnapshotOptions {
        let (depths, threads) = (vec![32], vec![1, 2]);
        SnapshotOptions { depths, threads, rounds: 3, chunks: 1 << 14, exceptions: vec![1_000, 1 << 20] }
    }

    /// Some minutes.
    pub fn full() -> SnapshotOptions {
        let (depths, threads) = (vec![1, 32], vec![1, 2, 4, 8]);
        SnapshotOptions { depths, threads, rounds: 7, chunks: 1 << 16, exceptions: vec![1_000, 16_000_000] }
    }
}

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Kind {
    Linear,
    NoSnapshot,
    MostlyCopied,
    OriginTransient,
    OriginPersistent,
    OneMutex,
    SnapshotTransient,
    SnapshotPersistent,
}

impl Kind {
    const ALL: [Kind; 8] = [
        Kind::Linear,
        Kind::NoSnapshot,
        Kind::MostlyCopied,
        Kind::OriginTransient,
        Kind::OriginPersistent,
        Kind::OneMutex,
        Kind::SnapshotTransient,
        Kind::SnapshotPersistent,
    ];

    fn name(self) -> &'static str {
        match self {
            Kind::Linear => "linear",
            Kind::NoSnapshot => "origin, no snapshot",
            Kind::MostlyCopied => "origin, N, 80% copied",
            Kind::OriginTransient => "origin, N",
            Kind::OriginPersistent => "origin, P",
            Kind::OneMutex => "origin, one mutex",
            Kind::SnapshotTransient => "snapshot N",
            Kind::SnapshotPersistent => "snapshot P",
        }
    }

    /// The type of the snapshot's store, and whether it is its origin that is written.
    fn store(self) -> Option<(char, bool)> {
        match self {
            Kind::MostlyCopied | Kind::OriginTransient => Some(('N', true)),
            Kind::OriginPersistent => Some(('P', true)),
            Kind::SnapshotTransient => Some(('N', false)),
            Kind::SnapshotPersistent => Some(('P', false)),
            Kind::Linear | Kind::NoSnapshot | Kind::OneMutex => None,
        }
    }

    /// Of five chunks, how many are copied before.
    fn copied(self) -> u64 {
        if self == Kind::MostlyCopied { 4 } else { 0 }
    }
}

/// First writes.
#[derive(Debug, Clone, Serialize)]
pub struct FirstWrites {
    /// What is below: `null` or `mem`.
    pub below: &'static str,
    /// Requests in flight, a thread.
    pub depth: usize,
    /// How many threads.
    pub threads: usize,
    device: Kind,
    /// Requests a second.
    pub iops: f64,
}

/// Reads of what is in a store.
#[derive(Debug, Clone, Serialize)]
pub struct Lookups {
    /// Exceptions that there are.
    pub exceptions: u64,
    /// Nanoseconds a request at depth 32, over a device that does nothing.
    pub ns: f64,
}

/// What the measurement came to.
#[derive(Debug, Clone, Serialize)]
pub struct SnapshotCosts {
    /// CPUs that the threads share.
    pub cpus: usize,
    /// A row for each device, by what is below, depth and threads.
    pub first_writes: Vec<FirstWrites>,
    /// By their number.
    pub lookups: Vec<Lookups>,
    /// It was stopped: rows are missing, or are of fewer rounds.
    pub stopped: bool,
}

/// Measures. Once `stop` says so it ends with the rounds that it has.
///
/// # Errors
/// When cores or devices can't be had, or it was stopped before anything was measured.
pub fn snapshots(options: &SnapshotOptions, stop: &AtomicBool) -> Result<SnapshotCosts> {
    ensure!(options.chunks.is_power_of_two() && options.rounds > 0, "nothing to measure");
    let mut first_writes = Vec::new();
    for below in ["null", "mem"] {
        for &depth in &options.depths {
            let cases: Vec<(Kind, usize)> =
                Kind::ALL.iter().flat_map(|&kind| options.threads.iter().map(move |&n| (kind, n))).collect();
            let mut rounds = vec![Vec::with_capacity(options.rounds); cases.len()];
            for _ in 0..options.rounds {
                for (&(kind, threads), out) in cases.iter().zip(&mut rounds) {
                    if !stop.load(Relaxed) {
                        let case = Case { kind, below, threads, depth, chunks: options.chunks };
                        out.push(case.measure()?);
                    }
                }
            }
            for ((device, threads), rounds) in cases.into_iter().zip(rounds) {
                let row = |iops| FirstWrites { below, depth, threads, device, iops };
                first_writes.extend(median(rounds).map(row));
            }
        }
    }
    ensure!(!first_writes.is_empty(), "stopped before anything was measured");
    let lookups = if stop.load(Relaxed) { Vec::new() } else { lookups(options)? };
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    Ok(SnapshotCosts { cpus, first_writes, lookups, stopped: stop.load(Relaxed) })
}

fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

/// One measurement.
struct Case {
    kind: Kind,
    below: &'static str,
    threads: usize,
    depth: usize,
    chunks: u64,
}

impl Case {
    /// Requests a second.
    fn measure(&self) -> Result<f64> {
        let exceptions = Arc::new(Exceptions::new());
        let copier = usize::from(self.kind == Kind::OneMutex);
        let option = CoreOptions { ring_optional: true, ..CoreOptions::default() };
        let (barrier, left) = (Barrier::new(self.threads), AtomicUsize::new(self.threads));
        let make = |cluster: &Arc<Cluster>| self.devices(cluster, &exceptions);
        let times = cores::run(&vec![option; self.threads + copier], make, |core, lanes| {
            let [mut top, mut origin, mut store] = <[_; 3]>::try_from(lanes).ok()?;
            let thread = usize::from(core.id().0);
            if thread == self.threads {
                exceptions.copy(core, &mut *origin, &mut *store);
                return None;
            }
            let mut load = Load::new(self.depth);
            if thread == 0 && self.below == "mem" {
                load.run(core, &mut *origin, Op::Write, 0..self.chunks);
                load.run(core, &mut *store, Op::Write, 0..self.chunks * 5 / 4);
            }
            barrier.wait();
            let mine = |chunk: &u64| chunk % self.threads as u64 == thread as u64;
            let all = (0..self.chunks).filter(mine).map(|chunk| shuffled(chunk, self.chunks));
            let before = all.clone().filter(|chunk| chunk % 5 < self.kind.copied());
            load.run(core, &mut *top, Op::Write, before);
            self.join(core, &mut *top, &left, &barrier);
            left.store(self.threads, Relaxed);
            barrier.wait();
            let begin = core.clock();
            load.run(core, &mut *top, Op::Write, all);
            let end = core.clock();
            self.join(core, &mut *top, &left, &barrier);
            exceptions.end();
            Some((begin, end))
        })?;
        let times: Vec<(Nanos, Nanos)> = times.into_iter().flatten().collect();
        let begin = times.iter().map(|(begin, _)| begin.0).min().unwrap_or_default();
        let end = times.iter().map(|(_, end)| end.0).max().unwrap_or_default();
        Ok(self.chunks as f64 * 1e9 / (end - begin) as f64)
    }

    /// Takes turns until all threads have come here: one may have to write what others wait for.
    fn join(&self, core: &mut LocalCore, lane: &mut dyn Lane, left: &AtomicUsize, barrier: &Barrier) {
        left.fetch_sub(1, Relaxed);
        while left.load(Relaxed) > 0 {
            core.turn(|cx| lane.poll(&mut Batch::new(), cx));
            std::thread::sleep(Duration::from_micros(20));
        }
        barrier.wait();
    }

    /// What is measured, and the devices of its origin and its store.
    fn devices(&self, cluster: &Arc<Cluster>, exceptions: &Arc<Exceptions>) -> Result<Vec<Arc<dyn Device>>> {
        let len = self.chunks * CHUNK;
        // A little more than all chunks, for records.
        let room = len * 5 / 4;
        let below = |bytes: u64| match self.below {
            "mem" => format!("mem:{bytes}"),
            // Two are told apart by their size.
            _ => format!("null:size={bytes}"),
        };
        let mut tables = vec![
            ("a", format!("0 {len} linear {} 0", below(len * 512))),
            ("b", format!("0 {room} linear {} 0", below(room * 512))),
        ];
        match self.kind.store() {
            None if self.kind == Kind::OneMutex => {}
            None if self.kind == Kind::Linear => tables.push(("top", format!("0 {len} linear @a 0"))),
            None => tables.push(("top", format!("0 {len} snapshot-origin @a"))),
            Some((store, of_origin)) => {
                let [origin, snapshot] = if of_origin { ["top", "other"] } else { ["other", "top"] };
                tables.push((snapshot, format!("0 {len} snapshot @a @b {store} {CHUNK}")));
                if of_origin {
                    tables.push((origin, format!("0 {len} snapshot-origin @a")));
                }
            }
        }
        let tables: Vec<Table> =
            tables.into_iter().map(|(name, text)| Table { name: name.into(), text }).collect();
        let made = make_mapped(cluster, &tables)?;
        let (origin, store) = (Arc::clone(&made[0]), Arc::clone(&made[1]));
        let top = match tables.iter().position(|table| table.name == "top") {
            Some(at) => Arc::clone(&made[at]),
            None => Arc::new(OneMutexOrigin::new(Arc::clone(&origin), exceptions)),
        };
        Ok(vec![top, origin, store])
    }
}

/// Another order of the numbers below `count`, a power of two.
fn shuffled(number: u64, count: u64) -> u64 {
    number.wrapping_mul(0x9e37_79b9_7f4a_7c15) & (count - 1)
}

/// The load: the same requests over and over.
struct Load {
    idle: Batch,
    batch: Batch,
    done: Batch,
}

impl Load {
    fn new(depth: usize) -> Load {
        let bio = |_| Bio::write(Sector(0), Sectors(CHUNK), Buf::zeroed(CHUNK as usize * 512).into());
        Load { idle: (0..depth).map(bio).collect(), batch: Batch::new(), done: Batch::new() }
    }

    /// A request for each of `chunks`.
    fn run(&mut self, core: &mut LocalCore, lane: &mut dyn Lane, op: Op, chunks: impl Iterator<Item = u64>) {
        let (mut chunks, depth) = (chunks.fuse(), self.idle.len());
        loop {
            let moved = core.turn(|cx| {
                lane.poll(&mut self.done, cx);
                let came_back = !self.done.is_empty();
                for mut bio in self.done.drain(..) {
                    bio.finish();
                    assert!(bio.status.is_ok(), "a request failed: {}", bio.status);
                    self.idle.push(bio);
                }
                while let Some(mut bio) = self.idle.pop() {
                    let Some(chunk) = chunks.next() else {
                        self.idle.push(bio);
                        break;
                    };
                    (bio.op, bio.sector) = (op, Sector(chunk * CHUNK));
                    bio.start();
                    self.batch.push(bio);
                }
                let more = !self.batch.is_empty();
                if more {
                    lane.submit(&mut self.batch, cx);
                }
                came_back || more
            });
            if self.idle.len() == depth {
                return;
            }
            if !moved {
                core.park();
            }
        }
    }
}

/// Reads of chunks that are in the store, at depth 32.
fn lookups(options: &SnapshotOptions) -> Result<Vec<Lookups>> {
    const READS: u64 = 1 << 20;
    let name = |exceptions: u64| format!("s{exceptions}");
    let make = |cluster: &Arc<Cluster>| {
        let table = |(n, &exceptions): (u64, &u64)| {
            let len = exceptions * CHUNK;
            let [origin, store] =
                [n, n + 100].map(|more| format!("null:size={}", (len + CHUNK * more) * 512));
            let text = format!("0 {len} snapshot {origin} {store} N {CHUNK}");
            Table { name: name(exceptions), text }
        };
        make_mapped(cluster, &(0..).zip(&options.exceptions).map(table).collect::<Vec<_>>())
    };
    let option = CoreOptions { ring_optional: true, ..CoreOptions::default() };
    let measured = cores::run(&[option], make, |core, mut lanes| {
        let mut load = Load::new(32);
        for (lane, &exceptions) in lanes.iter_mut().zip(&options.exceptions) {
            load.run(core, &mut **lane, Op::Write, 0..exceptions);
        }
        let mut rounds = vec![Vec::new(); lanes.len()];
        for round in 0..=options.rounds {
            for ((lane, &exceptions), out) in lanes.iter_mut().zip(&options.exceptions).zip(&mut rounds) {
                let begin = core.clock();
                load.run(core, &mut **lane, Op::Read, random(0..READS, exceptions));
                // The first warms up.
                if round > 0 {
                    out.push(core.clock().since(begin).0 as f64 / READS as f64);
                }
            }
        }
        rounds
    })?;
    let rounds = options.exceptions.iter().zip(measured.into_iter().flatten());
    Ok(rounds.filter_map(|(&exceptions, rounds)| Some(Lookups { exceptions, ns: median(rounds)? })).collect())
}

/// A number below `count` for each of `numbers`.
fn random(numbers: Range<u64>, count: u64) -> impl Iterator<Item = u64> {
    let mix = |number: u64| {
        (number.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ number << 7).wrapping_mul(0xbf58_476d_1ce4_e5b9)
    };
    numbers.map(move |number| ((u128::from(mix(number)) * u128::from(count)) >> 64) as u64)
}

impl SnapshotCosts {
    /// The rows for people.
    pub fn table(&self) -> String {
        let mut out = String::new();
        let of_block = |a: &FirstWrites, b: &FirstWrites| (a.below, a.depth) == (b.below, b.depth);
        for block in self.first_writes.chunk_by(of_block) {
            // Writing to a string can't fail.
            let _ = self.block_text(&mut out, block);
        }
        let least = self.lookups.first().map_or(0.0, |few| few.ns);
        for Lookups { exceptions, ns } in &self.lookups {
            let _ = writeln!(out, "{exceptions:>10} exceptions: {ns:.1} ns a read, {:.2} times", ns / least);
        }
        if self.stopped {
            out.push_str("stopped before its end\n");
        }
        out
    }

    fn block_text(&self, out: &mut String, block: &[FirstWrites]) -> std::fmt::Result {
        let Some(first) = block.first() else { return Ok(()) };
        let threads: Vec<usize> =
            block.iter().filter(|row| row.device == first.device).map(|row| row.threads).collect();
        write!(out, "{:<24}", format!("{}, depth {}", first.below, first.depth))?;
        for n in &threads {
            let shared = if *n > self.cpus { format!(" on {}", self.cpus) } else { String::new() };
            write!(out, " {:>15}", format!("{n} thread{}{shared}", if *n == 1 { "" } else { "s" }))?;
        }
        writeln!(out, "   (thousand writes a second, each chunk once)")?;
        let of =
            |kind, n| block.iter().find(|row| row.device == kind && row.threads == n).map(|row| row.iops);
        for kind in Kind::ALL {
            write!(out, "{:<24}", kind.name())?;
            for &n in &threads {
                write!(out, " {:>15.1}", of(kind, n).unwrap_or_default() / 1e3)?;
            }
            writeln!(out)?;
        }
        write!(out, "{:<24}", "  N over one mutex")?;
        for &n in &threads {
            let [ours, theirs] =
                [Kind::OriginTransient, Kind::OneMutex].map(|kind| of(kind, n).unwrap_or(f64::NAN));
            write!(out, " {:>15.2}", ours / theirs)?;
        }
        writeln!(out, "\n")
    }
}
