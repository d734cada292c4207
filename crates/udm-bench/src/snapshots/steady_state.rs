//! The cost of snapshots when all chunks are copied, on one core over null devices.

use super::SnapshotCostOptions;
use super::load::{FixedDepthChunkLoad, pseudo_random_numbers_below};
use crate::cores;
use crate::mapped::{MappedDevices, NamedTable, make_mapped_devices};
use crate::one_mutex_origin::CHUNK;
use crate::stats::median;
use anyhow::{Context, Result};
use serde::Serialize;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use udm_core::{Batch, Device, Lane, Op};
use udm_runtime::{CoreOptions, LocalCore, ProcessCores};

/// Requests per round. A debug build only tests that the measurement runs.
const REQUESTS: u64 = if cfg!(debug_assertions) { 1 << 14 } else { 1 << 20 };

/// Writes of an origin, in nanoseconds per request.
#[derive(Debug, Clone, Serialize)]
pub struct SteadyOriginWriteCosts {
    /// Requests in flight.
    pub depth: usize,
    /// A linear target instead of the origin.
    pub linear: f64,
    /// An origin that never had a snapshot.
    pub never: f64,
    /// An origin with a snapshot to which every chunk was copied.
    pub copied: f64,
    /// An origin whose snapshot was removed after every chunk was copied. The lane is the same.
    pub removed: f64,
}

/// Reads of chunks in a store.
#[derive(Debug, Clone, Serialize)]
pub struct ExceptionLookupCost {
    /// Number of exceptions.
    pub exceptions: u64,
    /// Nanoseconds per request at depth 32.
    pub ns: f64,
}

fn null_device_uri_of_size(bytes: u64, number: u64) -> String {
    // Each device has another size, so the URIs differ.
    format!("null:size={}", bytes + number * CHUNK * 512)
}

fn single_core_options() -> [CoreOptions; 1] {
    [CoreOptions { ring_optional: true, ..CoreOptions::default() }]
}

/// Measures rounds of random writes or reads through each lane. Each lane has its number of chunks.
/// Returns the median of each lane in nanoseconds per request.
fn measure_median_ns_per_lane(
    core: &mut LocalCore,
    lanes: &mut [Box<dyn Lane>],
    (depth, op): (usize, Op),
    chunks: &[u64],
    (rounds, stop): (usize, &AtomicBool),
    done: &AtomicUsize,
) -> Vec<Option<f64>> {
    let mut load = FixedDepthChunkLoad::new(depth);
    let mut times = vec![Vec::new(); lanes.len()];
    for round in 0..=rounds {
        for ((lane, &chunks), out) in lanes.iter_mut().zip(chunks).zip(&mut times) {
            if stop.load(Relaxed) {
                break;
            }
            let begin = core.clock();
            load.run(core, &mut **lane, op, pseudo_random_numbers_below(0..REQUESTS, chunks));
            // The first round only warms up.
            if round > 0 {
                out.push(core.clock().since(begin).0 as f64 / REQUESTS as f64);
            }
        }
        done.fetch_add(1, Relaxed);
    }
    times.into_iter().map(median).collect()
}

/// Measures writes of origins.
pub(super) fn measure_steady_origin_writes(
    options: &SnapshotCostOptions,
    stop: &AtomicBool,
    done: &AtomicUsize,
) -> Result<Vec<SteadyOriginWriteCosts>> {
    let len = options.chunks * CHUNK;
    let registry = OnceLock::new();
    let make = |core_set: &Arc<ProcessCores>| {
        // The third disk has the exact length of its table, so each chunk of the disk is copied.
        let [a, b, c, d, e, f] = [1, 2, 0, 3, 4, 5].map(|number| null_device_uri_of_size(len * 512, number));
        let tables = [
            ("linear", format!("0 {len} linear {a} 0")),
            ("never", format!("0 {len} snapshot-origin {b}")),
            ("copied", format!("0 {len} snapshot-origin {c}")),
            ("removed", format!("0 {len} snapshot-origin {d}")),
            ("kept", format!("0 {len} snapshot {c} {e} N {CHUNK}")),
            ("gone", format!("0 {len} snapshot {d} {f} N {CHUNK}")),
        ];
        let tables = tables.map(|(name, text)| NamedTable { name: name.into(), text });
        let mapped = MappedDevices::new(core_set, &tables)?;
        let devices: Vec<Arc<dyn Device>> = mapped.devices[..4].to_vec();
        let _ = registry.set(mapped);
        Ok(devices)
    };
    let measured = cores::run_on_attached_cores(
        &single_core_options(),
        make,
        |core, mut lanes| -> Result<Vec<SteadyOriginWriteCosts>> {
            let mut load = FixedDepthChunkLoad::new(32);
            for lane in &mut lanes {
                load.run(core, &mut **lane, Op::Write, 0..options.chunks);
            }
            let mapped = registry.get().context("no mapped device: the core started before its creation")?;
            remove_device_while_polling(core, &mut *lanes[3], mapped, "gone")?;
            let row = |&depth: &usize| {
                let chunks = [options.chunks; 4];
                let limits = (options.rounds, stop);
                let [linear, never, copied, removed] = measure_median_ns_per_lane(
                    core,
                    &mut lanes,
                    (depth, Op::Write),
                    &chunks,
                    limits,
                    done,
                )[..] else {
                    return None;
                };
                let (linear, never) = (linear?, never?);
                Some(SteadyOriginWriteCosts { depth, linear, never, copied: copied?, removed: removed? })
            };
            Ok(options.depths.iter().filter_map(row).collect())
        },
    )?;
    measured.into_iter().next().context("a core")?
}

/// Removes the device `name` while this core takes turns for `lane`.
fn remove_device_while_polling(
    core: &mut LocalCore,
    lane: &mut dyn Lane,
    mapped: &MappedDevices,
    name: &str,
) -> Result<()> {
    std::thread::scope(|scope| {
        let removal = scope.spawn(|| mapped.remove(name));
        while !removal.is_finished() {
            core.turn(|cx| lane.poll(&mut Batch::new(), cx));
            std::thread::yield_now();
        }
        removal.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Measures reads of chunks in the store, at depth 32.
pub(super) fn measure_reads_by_exception_count(
    options: &SnapshotCostOptions,
    stop: &AtomicBool,
    done: &AtomicUsize,
) -> Result<Vec<ExceptionLookupCost>> {
    let make = |core_set: &Arc<ProcessCores>| {
        let table = |(n, &exceptions): (u64, &u64)| {
            let len = exceptions * CHUNK;
            let [origin, store] = [n, n + 100].map(|number| null_device_uri_of_size(len * 512, number));
            let text = format!("0 {len} snapshot {origin} {store} N {CHUNK}");
            NamedTable { name: format!("s{exceptions}"), text }
        };
        make_mapped_devices(core_set, &(0..).zip(&options.exceptions).map(table).collect::<Vec<_>>())
    };
    let measured = cores::run_on_attached_cores(&single_core_options(), make, |core, mut lanes| {
        let mut load = FixedDepthChunkLoad::new(32);
        for (lane, &exceptions) in lanes.iter_mut().zip(&options.exceptions) {
            load.run(core, &mut **lane, Op::Write, (0..exceptions).take_while(|_| !stop.load(Relaxed)));
        }
        let limits = (options.rounds, stop);
        measure_median_ns_per_lane(core, &mut lanes, (32, Op::Read), &options.exceptions, limits, done)
    })?;
    let rows = options.exceptions.iter().zip(measured.into_iter().flatten());
    Ok(rows.filter_map(|(&exceptions, ns)| Some(ExceptionLookupCost { exceptions, ns: ns? })).collect())
}
