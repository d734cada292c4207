//! What clients of a device have asked for and got.
//!
//! Each core counts on its own, in numbers that it alone writes: counting costs no atomic
//! read-modify-write and no shared cache line. Whoever asks adds the cores up.

use crossbeam_utils::CachePadded;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use udm_core::latency::{LatencyCounters, LatencyHistogram};
use udm_core::{CoreId, Nanos, Op};
use udm_wire::nbd::Command;

/// What one operation of a device has come to, since its first client came.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OpIoCounters {
    /// Requests that the device has, and those that wait for one of them to end.
    pub in_flight: u64,
    /// Requests answered, errors included.
    pub requests: u64,
    /// Bytes of those that went well: read, written, discarded or zeroed.
    pub bytes: u64,
    /// Requests answered with an error.
    pub errors: u64,
    /// How many requests that reached the device took how long, in the steps of
    /// [`udm_core::latency`]: from the turn in which the core had the whole request to the one in
    /// which the device was done with it.
    pub latency: LatencyHistogram,
}

/// What clients of a device have asked for and got.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceIoReport {
    /// By operation, in the order of [`Op::ALL`].
    pub ops: [OpIoCounters; Op::ALL.len()],
    /// Of all operations.
    pub in_flight: u64,
}

/// The counts of a device, by core. A core's are made when its first client comes.
#[derive(Default)]
pub(super) struct DeviceIoCounters(Mutex<BTreeMap<CoreId, Arc<CachePadded<CoreIoCounters>>>>);

/// What one core counts for a device.
#[derive(Default)]
pub(super) struct CoreIoCounters {
    ops: [OpCounters; Op::ALL.len()],
}

#[derive(Default)]
struct OpCounters {
    begun: AtomicU64,
    ended: AtomicU64,
    requests: AtomicU64,
    bytes: AtomicU64,
    errors: AtomicU64,
    latency: LatencyCounters,
}

/// Adds to a number that this core alone writes.
fn add(to: &AtomicU64, n: u64) {
    to.store(to.load(Relaxed).wrapping_add(n), Relaxed);
}

/// The operation that `command` counts as. `None` for those that move and change nothing.
const fn op_of(command: Command) -> Option<Op> {
    match command {
        Command::Read => Some(Op::Read),
        Command::Write => Some(Op::Write),
        Command::Flush => Some(Op::Flush),
        Command::Trim => Some(Op::Discard),
        Command::WriteZeroes => Some(Op::WriteZeroes),
        _ => None,
    }
}

impl CoreIoCounters {
    /// A request is whole, and goes on its way.
    pub(super) fn begin(&self, command: Command) {
        if let Some(op) = op_of(command) {
            add(&self.ops[op as usize].begun, 1);
        }
    }

    /// The device is done with it, or it does not go there after all.
    pub(super) fn end(&self, command: Command) {
        if let Some(op) = op_of(command) {
            add(&self.ops[op as usize].ended, 1);
        }
    }

    /// A request for `bytes` is answered, and how; `took` is how long the device had it, when it
    /// did.
    pub(super) fn answer(&self, command: Command, bytes: u32, is_ok: bool, took: Option<Nanos>) {
        let Some(op) = op_of(command) else { return };
        let counts = &self.ops[op as usize];
        add(&counts.requests, 1);
        if is_ok {
            add(&counts.bytes, bytes.into());
        } else {
            add(&counts.errors, 1);
        }
        if let Some(took) = took {
            counts.latency.add(took);
        }
    }
}

impl DeviceIoCounters {
    /// The counts of `core`.
    pub(super) fn on(&self, core: CoreId) -> Arc<CachePadded<CoreIoCounters>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(core).or_default().clone()
    }

    /// All cores together. A core may be in the middle of a turn: its numbers are recent, and not
    /// of one instant.
    pub(super) fn report(&self) -> DeviceIoReport {
        let mut report = DeviceIoReport::default();
        for core in self.0.lock().unwrap_or_else(PoisonError::into_inner).values() {
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
}
