//! What runs the operations of a ring: the kernel, or a world that is made up.
//!
//! A simulator hands a core a [`SimulatedKernel`] in place of an io_uring. All else of the ring is the
//! same: who waits for what, quick sends, what finds no room, users that go away.

use super::op::RingOp;
use super::sys::{Cqe, Entry, Uring};
use super::{ENTRIES, InFlightOp};
use slab::Slab;
use std::io;
use std::time::Duration;

/// The kernel of a world that is made up. It has the operations that it was given, their memory and
/// their files, until it gives them back.
pub trait SimulatedKernel {
    /// Takes an operation in. A `quick` send does not wait for room: it has ended when this
    /// returns.
    fn begin(&mut self, key: u64, op: RingOp, quick: bool);

    /// Calls an operation off. It comes back all the same.
    fn cancel(&mut self, key: u64);

    /// True when something has ended that was not given back.
    fn has_finished(&self) -> bool;

    /// Gives back what has ended.
    fn finished(&mut self, out: &mut Vec<FinishedOp>);
}

/// An operation that has ended.
#[derive(Debug)]
pub struct FinishedOp {
    /// Its key at the begin.
    pub key: u64,
    /// The operation, with its memory.
    pub op: RingOp,
    /// What the system call would return, a negative errno included; `None` for a quick send that
    /// sent all it had, of which the kernel says nothing.
    pub result: Option<i32>,
}

/// A made-up kernel, and the queue in front of it.
pub(super) struct SimulatedRing {
    kernel: Box<dyn SimulatedKernel>,
    queue: Vec<QueuedOp>,
    /// How long that may be.
    room: usize,
    finished: Vec<FinishedOp>,
}

/// What waits for the next submit.
enum QueuedOp {
    Begin(u64, RingOp, bool),
    Cancel(u64),
}

/// See the module's documentation.
#[expect(clippy::large_enum_variant, reason = "one a core, and the real one is reached without a detour")]
pub(super) enum RingBackend {
    Uring(Uring),
    SimulatedRing(Box<SimulatedRing>),
}

impl RingBackend {
    pub(super) fn new() -> io::Result<RingBackend> {
        Uring::new(ENTRIES).map(RingBackend::Uring)
    }

    /// One with a submission queue of `room` entries, at least 1.
    pub(super) fn simulated(kernel: Box<dyn SimulatedKernel>, room: usize) -> RingBackend {
        let room = room.max(1);
        RingBackend::SimulatedRing(Box::new(SimulatedRing {
            kernel,
            queue: Vec::new(),
            room,
            finished: Vec::new(),
        }))
    }

    /// See [`Uring::supports_quick_send`].
    pub(super) fn supports_quick_send(&self) -> bool {
        match self {
            RingBackend::Uring(uring) => uring.supports_quick_send(),
            RingBackend::SimulatedRing(_) => true,
        }
    }

    /// See [`Uring::is_flushed`].
    pub(super) fn is_flushed(&mut self) -> bool {
        match self {
            RingBackend::Uring(uring) => uring.is_flushed(),
            RingBackend::SimulatedRing(simulated) => simulated.queue.is_empty(),
        }
    }

    /// See [`Uring::push`].
    pub(super) fn push(&mut self, entry: &mut Entry, user_data: u64, quick: bool) -> bool {
        match self {
            RingBackend::Uring(uring) => uring.push(entry, user_data, quick),
            RingBackend::SimulatedRing(simulated) => {
                simulated.push(|| Some(QueuedOp::Begin(user_data, entry.lend()?, quick)))
            }
        }
    }

    /// See [`Uring::push_cancel`].
    pub(super) fn push_cancel(&mut self, user_data: u64) -> bool {
        match self {
            RingBackend::Uring(uring) => uring.push_cancel(user_data),
            RingBackend::SimulatedRing(simulated) => simulated.push(|| Some(QueuedOp::Cancel(user_data))),
        }
    }

    /// See [`Uring::has_submissions`].
    pub(super) fn has_submissions(&mut self) -> bool {
        match self {
            RingBackend::Uring(uring) => uring.has_submissions(),
            RingBackend::SimulatedRing(simulated) => !simulated.queue.is_empty(),
        }
    }

    /// See [`Uring::has_completions`].
    pub(super) fn has_completions(&mut self) -> bool {
        match self {
            RingBackend::Uring(uring) => uring.has_completions(),
            RingBackend::SimulatedRing(simulated) => simulated.kernel.has_finished(),
        }
    }

    /// See [`Uring::submit`].
    pub(super) fn submit(&mut self) {
        match self {
            RingBackend::Uring(uring) => uring.submit(),
            RingBackend::SimulatedRing(simulated) => simulated.submit(),
        }
    }

    /// See [`Uring::wait`]. In a made-up world nobody waits: who steps the core knows whether it
    /// sleeps.
    pub(super) fn wait(&mut self, timeout: Option<Duration>) {
        match self {
            RingBackend::Uring(uring) => uring.wait(timeout),
            RingBackend::SimulatedRing(simulated) => simulated.submit(),
        }
    }

    /// Appends what has completed of `entries`.
    pub(super) fn completions(&mut self, entries: &mut Slab<InFlightOp>, out: &mut Vec<Cqe>) {
        match self {
            RingBackend::Uring(uring) => uring.completions(out),
            RingBackend::SimulatedRing(simulated) => simulated.completions(entries, out),
        }
    }

    /// See [`Uring::cancel_all`]. A made-up world keeps what it has.
    pub(super) fn cancel_all(&mut self) -> bool {
        if let RingBackend::Uring(uring) = self {
            uring.cancel_all();
        }
        matches!(self, RingBackend::Uring(_))
    }
}

impl SimulatedRing {
    fn push(&mut self, queued_op: impl FnOnce() -> Option<QueuedOp>) -> bool {
        let room = self.queue.len() < self.room;
        if room {
            self.queue.extend(queued_op());
        }
        room
    }

    fn submit(&mut self) {
        for queued_op in self.queue.drain(..) {
            match queued_op {
                QueuedOp::Begin(key, op, quick) => self.kernel.begin(key, op, quick),
                QueuedOp::Cancel(key) => self.kernel.cancel(key),
            }
        }
    }

    fn completions(&mut self, entries: &mut Slab<InFlightOp>, out: &mut Vec<Cqe>) {
        self.kernel.finished(&mut self.finished);
        for FinishedOp { key, op, result } in self.finished.drain(..) {
            if let Some(in_flight) = entries.get_mut(key as usize) {
                in_flight.entry.give_back(op);
            }
            out.extend(result.map(|result| Cqe { user_data: key, result }));
        }
    }
}
