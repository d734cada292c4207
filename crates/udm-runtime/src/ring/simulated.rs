//! The executor of ring operations: the kernel, or a simulated kernel.
//!
//! The simulator passes a [`SimulatedKernel`] to a core in place of an io_uring. All other code of
//! the ring is the same: waits, quick sends, full queues, dropped users.

use super::op::RingOp;
use super::sys::{Cqe, RingOpKernelArgs, Uring};
use super::{ENTRIES, InFlightOp};
use slab::Slab;
use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

/// A simulated kernel. It owns the operations in flight, with their memory and files, until it
/// returns them.
pub trait SimulatedKernel {
    /// Starts an operation. A `quick` send does not wait for room: it has completed when this
    /// returns.
    fn begin(&mut self, key: u64, op: RingOp, quick: bool);

    /// Cancels an operation, which still completes.
    fn cancel(&mut self, key: u64);

    /// True if a completed operation has not been returned yet.
    fn has_finished(&self) -> bool;

    /// Returns the completed operations.
    fn finished(&mut self, out: &mut Vec<SimulatedCqe>);
}

/// A completed operation.
#[derive(Debug)]
pub struct SimulatedCqe {
    /// The key passed to `begin`.
    pub key: u64,
    /// The operation, with its memory.
    pub op: RingOp,
    /// Result of the system call, or a negative errno. `None` for a quick send that sent all its
    /// data, for which the kernel posts no completion.
    pub result: Option<i32>,
}

/// A simulated kernel and its submission queue.
pub(super) struct SimulatedRing {
    kernel: Box<dyn SimulatedKernel>,
    queue: Vec<SimulatedSqe>,
    /// Capacity of the submission queue.
    room: usize,
    finished: Vec<SimulatedCqe>,
}

/// An entry of the submission queue.
enum SimulatedSqe {
    Begin(u64, RingOp, bool),
    Cancel(u64),
}

/// The executor of a ring's operations: io_uring or a simulation.
#[expect(clippy::large_enum_variant, reason = "one per core, and the real one needs no indirection")]
pub(super) enum RingBackend {
    Uring(Uring),
    SimulatedRing(Box<SimulatedRing>),
}

impl RingBackend {
    pub(super) fn new() -> io::Result<RingBackend> {
        Uring::new(ENTRIES).map(RingBackend::Uring)
    }

    /// Creates a simulation with a submission queue of `room` entries, at least 1.
    pub(super) fn simulated(kernel: Box<dyn SimulatedKernel>, room: usize) -> RingBackend {
        let room = room.max(1);
        RingBackend::SimulatedRing(Box::new(SimulatedRing {
            kernel,
            queue: Vec::new(),
            room,
            finished: Vec::new(),
        }))
    }

    pub(super) fn supports_quick_send(&self) -> bool {
        match self {
            RingBackend::Uring(uring) => uring.supports_quick_send(),
            RingBackend::SimulatedRing(_) => true,
        }
    }

    /// See [`Uring::register_file`]. A simulated kernel has no use for it.
    pub(super) fn register_file(&self, file: &OwnedFd) -> io::Result<()> {
        match self {
            RingBackend::Uring(uring) => uring.register_file(file),
            RingBackend::SimulatedRing(_) => Ok(()),
        }
    }

    pub(super) fn is_flushed(&mut self) -> bool {
        match self {
            RingBackend::Uring(uring) => uring.is_flushed(),
            RingBackend::SimulatedRing(simulated) => simulated.queue.is_empty(),
        }
    }

    pub(super) fn push(&mut self, entry: &mut RingOpKernelArgs, user_data: u64, quick: bool) -> bool {
        match self {
            RingBackend::Uring(uring) => uring.push(entry, user_data, quick),
            RingBackend::SimulatedRing(simulated) => {
                simulated.push(|| Some(SimulatedSqe::Begin(user_data, entry.lend()?, quick)))
            }
        }
    }

    pub(super) fn push_cancel(&mut self, user_data: u64) -> bool {
        match self {
            RingBackend::Uring(uring) => uring.push_cancel(user_data),
            RingBackend::SimulatedRing(simulated) => simulated.push(|| Some(SimulatedSqe::Cancel(user_data))),
        }
    }

    pub(super) fn has_submissions(&mut self) -> bool {
        match self {
            RingBackend::Uring(uring) => uring.has_submissions(),
            RingBackend::SimulatedRing(simulated) => !simulated.queue.is_empty(),
        }
    }

    pub(super) fn has_completions(&mut self) -> bool {
        match self {
            RingBackend::Uring(uring) => uring.has_completions(),
            RingBackend::SimulatedRing(simulated) => simulated.kernel.has_finished(),
        }
    }

    pub(super) fn submit(&mut self) {
        match self {
            RingBackend::Uring(uring) => uring.submit(),
            RingBackend::SimulatedRing(simulated) => simulated.submit(),
        }
    }

    /// See [`Uring::wait`]. A simulation does not wait: the simulator knows when the core sleeps.
    pub(super) fn wait(&mut self, timeout: Option<Duration>) {
        match self {
            RingBackend::Uring(uring) => uring.wait(timeout),
            RingBackend::SimulatedRing(simulated) => simulated.submit(),
        }
    }

    /// Appends completions, and returns the operations of simulated ones to `entries`.
    pub(super) fn completions(&mut self, entries: &mut Slab<InFlightOp>, out: &mut Vec<Cqe>) {
        match self {
            RingBackend::Uring(uring) => uring.completions(out),
            RingBackend::SimulatedRing(simulated) => simulated.completions(entries, out),
        }
    }

    /// See [`Uring::cancel_all`]. Returns false for a simulation, which keeps its operations.
    pub(super) fn cancel_all(&mut self) -> bool {
        if let RingBackend::Uring(uring) = self {
            uring.cancel_all();
        }
        matches!(self, RingBackend::Uring(_))
    }
}

impl SimulatedRing {
    fn push(&mut self, queued_op: impl FnOnce() -> Option<SimulatedSqe>) -> bool {
        let room = self.queue.len() < self.room;
        if room {
            self.queue.extend(queued_op());
        }
        room
    }

    fn submit(&mut self) {
        for queued_op in self.queue.drain(..) {
            match queued_op {
                SimulatedSqe::Begin(key, op, quick) => self.kernel.begin(key, op, quick),
                SimulatedSqe::Cancel(key) => self.kernel.cancel(key),
            }
        }
    }

    fn completions(&mut self, entries: &mut Slab<InFlightOp>, out: &mut Vec<Cqe>) {
        self.kernel.finished(&mut self.finished);
        for SimulatedCqe { key, op, result } in self.finished.drain(..) {
            if let Some(in_flight) = entries.get_mut(key as usize) {
                in_flight.entry.give_back(op);
            }
            out.extend(result.map(|result| Cqe { user_data: key, result }));
        }
    }
}
