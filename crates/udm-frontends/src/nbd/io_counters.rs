//! I/O counters of the clients of a device.
//!
//! Each core has its own counters and is their only writer. So counting needs no atomic
//! read-modify-write and no shared cache line. Readers add up the cores.

use crossbeam_utils::CachePadded;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use udm_core::latency::{AtomicLatencyHistogram, LatencyHistogramSnapshot};
use udm_core::{CoreId, Nanos, Op};
use udm_wire::nbd::NbdCommand;

/// Counters of one operation of a device, since its first client connected.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OpIoCounters {
    /// Requests at the device, and those that wait for another request.
    pub in_flight: u64,
    /// Answered requests, including errors.
    pub requests: u64,
    /// Bytes read, written, discarded or zeroed by successful requests.
    pub bytes: u64,
    /// Requests answered with an error.
    pub errors: u64,
    /// Latencies of requests that reached the device, in the steps of [`udm_core::latency`]. The
    /// time runs from the turn in which the core had the whole request to the turn in which the
    /// device completed it.
    pub latency: LatencyHistogramSnapshot,
}

/// I/O counters of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceIoReport {
    /// By operation, in the order of [`Op::ALL`].
    pub ops: [OpIoCounters; Op::ALL.len()],
    /// Requests in flight of all operations.
    pub in_flight: u64,
}

/// Counters of a device by core. Those of a core are created with its first client.
#[derive(Default)]
pub(crate) struct DeviceIoCounters {
    cores: Mutex<BTreeMap<CoreId, Arc<CachePadded<CoreDeviceIoCounters>>>>,
    /// What another process has counted before.
    before: OnceLock<Box<DeviceIoReport>>,
}

/// Counters of one core for a device.
#[derive(Default)]
pub(crate) struct CoreDeviceIoCounters {
    ops: [AtomicOpIoCounters; Op::ALL.len()],
}

#[derive(Default)]
struct AtomicOpIoCounters {
    begun: AtomicU64,
    ended: AtomicU64,
    requests: AtomicU64,
    bytes: AtomicU64,
    errors: AtomicU64,
    latency: AtomicLatencyHistogram,
}

/// Adds to a counter whose only writer is this core.
fn add_to_core_counter(to: &AtomicU64, n: u64) {
    to.store(to.load(Relaxed).wrapping_add(n), Relaxed);
}

/// Returns the operation that `command` counts as; `None` if it neither moves nor changes data.
pub(super) const fn nbd_command_to_op(command: NbdCommand) -> Option<Op> {
    match command {
        NbdCommand::Read => Some(Op::Read),
        NbdCommand::Write => Some(Op::Write),
        NbdCommand::Flush => Some(Op::Flush),
        NbdCommand::Trim => Some(Op::Discard),
        NbdCommand::WriteZeroes => Some(Op::WriteZeroes),
        _ => None,
    }
}

impl CoreDeviceIoCounters {
    /// Counts a request that has arrived completely.
    pub(crate) fn begin(&self, op: Op) {
        add_to_core_counter(&self.ops[op as usize].begun, 1);
    }

    /// Counts a request that the device has completed, or that was not submitted after all.
    pub(crate) fn end(&self, op: Op) {
        add_to_core_counter(&self.ops[op as usize].ended, 1);
    }

    /// Counts an answered request for `bytes`. `took` is its time at the device, if it was
    /// submitted.
    pub(crate) fn answer(&self, op: Op, bytes: u64, is_ok: bool, took: Option<Nanos>) {
        let counts = &self.ops[op as usize];
        add_to_core_counter(&counts.requests, 1);
        if is_ok {
            add_to_core_counter(&counts.bytes, bytes);
        } else {
            add_to_core_counter(&counts.errors, 1);
        }
        if let Some(took) = took {
            counts.latency.add(took);
        }
    }
}

impl DeviceIoCounters {
    /// Returns the counters of `core`.
    pub(crate) fn on(&self, core: CoreId) -> Arc<CachePadded<CoreDeviceIoCounters>> {
        self.cores.lock().unwrap_or_else(PoisonError::into_inner).entry(core).or_default().clone()
    }

    /// Sets what another process has counted before, without requests in flight. Only the first
    /// call has an effect.
    pub(super) fn set_before(&self, before: DeviceIoReport) {
        let _ = self.before.set(Box::new(before));
    }

    /// Adds up all cores. The numbers are recent, but not of one instant, because a core may be in
    /// the middle of a turn.
    pub(crate) fn report(&self) -> DeviceIoReport {
        let mut report = self.before.get().map(|before| (**before).clone()).unwrap_or_default();
        for core in self.cores.lock().unwrap_or_else(PoisonError::into_inner).values() {
            for (sum, counts) in report.ops.iter_mut().zip(&core.ops) {
                let ended = counts.ended.load(Relaxed);
                let in_flight = counts.begun.load(Relaxed).saturating_sub(ended);
                sum.in_flight += in_flight;
                report.in_flight += in_flight;
                sum.requests += counts.requests.load(Relaxed);
                sum.bytes += counts.bytes.load(Relaxed);
                sum.errors += counts.errors.load(Relaxed);
                counts.latency.add_to(&mut sum.latency);
            }
        }
        report
    }

    /// Number of answered requests of each core.
    pub(crate) fn requests_by_core(&self) -> Vec<(CoreId, u64)> {
        let cores = self.cores.lock().unwrap_or_else(PoisonError::into_inner);
        let requests =
            |core: &CoreDeviceIoCounters| core.ops.iter().map(|op| op.requests.load(Relaxed)).sum();
        cores.iter().map(|(id, core)| (*id, requests(core))).collect()
    }
}
