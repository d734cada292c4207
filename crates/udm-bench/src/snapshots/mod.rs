//! The cost of snapshots, in four measurements:
//!
//! * first writes of an origin and of a snapshot, compared with an origin whose exceptions are
//!   under one mutex;
//! * writes of an origin whose chunks are all copied;
//! * writes after the snapshot is removed;
//! * the look-up of one exception among many.
//!
//! A round measures each device once, and the result is the median of the rounds. Threads are cores
//! that sleep when idle. Requests are 4 KiB, one chunk each, in random order.
//!
//! First writes ([`first_write_case`]) use new devices each time and write every chunk once, over
//! touched memory or a null device. The others ([`steady_state`]) use a null device.

mod first_write_case;
mod load;
mod steady_state;
mod text;

use crate::stats::median;
use anyhow::{Result, ensure};
use first_write_case::FirstChunkWriteDeviceKind;
use first_write_case::FirstChunkWriteMeasurement;
pub use first_write_case::FirstChunkWriteResult;
use serde::Serialize;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
pub use steady_state::{ExceptionLookupCost, SteadyOriginWriteCosts};

/// How much to measure.
#[derive(Debug, Clone)]
pub struct SnapshotCostOptions {
    /// Requests in flight per thread.
    pub depths: Vec<usize>,
    /// Numbers of threads.
    pub threads: Vec<usize>,
    /// Measurements per device.
    pub rounds: usize,
    /// Chunks that are written each time: a power of two.
    pub chunks: u64,
    /// Numbers of exceptions for the look-ups.
    pub exceptions: Vec<u64>,
}

impl SnapshotCostOptions {
    /// Options for a run of some seconds.
    pub fn quick() -> SnapshotCostOptions {
        let (depths, threads) = (vec![32], vec![1, 2]);
        SnapshotCostOptions { depths, threads, rounds: 3, chunks: 1 << 14, exceptions: vec![1_000, 1 << 20] }
    }

    /// Options for a run of about two minutes on two CPUs.
    pub fn full() -> SnapshotCostOptions {
        let exceptions = vec![1_000, 1 << 20, 16_000_000];
        SnapshotCostOptions {
            depths: vec![1, 32],
            threads: vec![1, 2, 8],
            rounds: 3,
            chunks: 1 << 15,
            exceptions,
        }
    }

    /// Number of measurements.
    pub fn steps(&self) -> usize {
        let first =
            2 * self.depths.len() * self.threads.len() * FirstChunkWriteDeviceKind::ALL.len() * self.rounds;
        first + (self.depths.len() + 1) * (self.rounds + 1)
    }
}

/// The result of the measurement.
#[derive(Debug, Clone, Serialize)]
pub struct SnapshotCostResults {
    /// Number of CPUs that the threads share.
    pub cpus: usize,
    /// One row per device, grouped by device below, depth and threads.
    pub first_writes: Vec<FirstChunkWriteResult>,
    /// Writes of an origin, one row per depth.
    pub later_writes: Vec<SteadyOriginWriteCosts>,
    /// Look-ups, one row per number of exceptions.
    pub lookups: Vec<ExceptionLookupCost>,
    /// If set, the measurement was stopped: rows are missing or have fewer rounds.
    pub stopped: bool,
}

/// Measures, and counts in `done` the completed steps of [`SnapshotCostOptions::steps`]. If `stop`
/// is set, the measurement ends with the rounds that it has.
///
/// # Errors
/// If cores or devices are not available, or it was stopped before anything was measured.
pub fn measure_snapshot_costs(
    options: &SnapshotCostOptions,
    stop: &AtomicBool,
    done: &AtomicUsize,
) -> Result<SnapshotCostResults> {
    ensure!(options.chunks.is_power_of_two() && options.rounds > 0, "nothing to measure");
    // The shortest and most important measurements come first.
    let later_writes = steady_state::measure_steady_origin_writes(options, stop, done)?;
    let lookups = steady_state::measure_reads_by_exception_count(options, stop, done)?;
    let first_writes = measure_first_chunk_writes(options, stop, done)?;
    let any = !(later_writes.is_empty() && lookups.is_empty() && first_writes.is_empty());
    ensure!(any, "stopped before anything was measured");
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    Ok(SnapshotCostResults { cpus, first_writes, later_writes, lookups, stopped: stop.load(Relaxed) })
}

fn measure_first_chunk_writes(
    options: &SnapshotCostOptions,
    stop: &AtomicBool,
    done: &AtomicUsize,
) -> Result<Vec<FirstChunkWriteResult>> {
    let mut rows = Vec::new();
    for below in ["null", "mem"] {
        for &depth in &options.depths {
            let cases: Vec<(FirstChunkWriteDeviceKind, usize)> = FirstChunkWriteDeviceKind::ALL
                .iter()
                .flat_map(|&kind| options.threads.iter().map(move |&n| (kind, n)))
                .collect();
            let mut rounds = vec![Vec::with_capacity(options.rounds); cases.len()];
            for _ in 0..options.rounds {
                for (&(kind, threads), out) in cases.iter().zip(&mut rounds) {
                    if !stop.load(Relaxed) {
                        let case = FirstChunkWriteMeasurement {
                            kind,
                            below,
                            threads,
                            depth,
                            chunks: options.chunks,
                        };
                        out.push(case.measure()?);
                        done.fetch_add(1, Relaxed);
                    }
                }
            }
            for ((device, threads), rounds) in cases.into_iter().zip(rounds) {
                let row = |iops| FirstChunkWriteResult { below, depth, threads, device, iops };
                rows.extend(median(rounds).map(row));
            }
        }
    }
    Ok(rows)
}
