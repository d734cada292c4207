//! What runs the operations of a ring: the kernel, or a world that is made up.
//!
//! A simulator hands a core a [`MadeKernel`] in place of an io_uring. All else of the ring is the
//! same: who waits for what, quick sends, what finds no room, users that go away.

use super::op::RingOp;
use super::sys::{Completion, Entry, Uring};
use super::{ENTRIES, InFlight};
use slab::Slab;
use std::io;
use std::time::Duration;

/// The kernel of a world that is made up. It has the operations that it was given, their memory and
/// their files, until it gives them back.
pub trait MadeKernel {
    /// Takes an operation in. A `quick` send does not wait for room: it has ended when this
    /// returns.
    fn begin(&mut self, key: u64, op: RingOp, quick: bool);

    /// Calls an operation off. It comes back all the same.
    fn cancel(&mut self, key: u64);

    /// True when something has ended that was not given back.
    fn has_finished(&self) -> bool;

    /// Gives back what has ended.
    fn finished(&mut self, out: &mut Vec<Finished>);
}

/// An operation that has ended.
#[derive(Debug)]
pub struct Finished {
    /// Its key at the begin.
    pub key: u64,
    /// The operation, with its memory.
    pub op: RingOp,
    /// What the system call would return, a negative errno included; `None` for a quick send that
    /// sent all it had, of which the kernel says nothing.
    pub result: Option<i32>,
}

/// A made-up kernel, and the queue in front of it.
pub(super) struct Made {
    kernel: Box<dyn MadeKernel>,
    queue: Vec<Asked>,
    /// How long that may be.
    room: usize,
    finished: Vec<Finished>,
}

/// What waits for the next submit.
enum Asked {
    Begin(u64, RingOp, bool),
    Cancel(u64),
}

/// See the module's documentation.
#[expect(clippy::large_enum_variant, reason = "one a core, and the real one is reached without a detour")]
pub(super) enum Kernel {
    Uring(Uring),
    Made(Box<Made>),
}

impl Kernel {
    pub(super) fn new() -> io::Result<Kernel> {
        Uring::new(ENTRIES).map(Kernel::Uring)
    }

    /// One with a submission queue of `room` entries, at least 1.
    pub(super) fn made(kernel: Box<dyn MadeKernel>, room: usize) -> Kernel {
        let room = room.max(1);
        Kernel::Made(Box::new(Made { kernel, queue: Vec::new(), room, finished: Vec::new() }))
    }

    /// See [`Uring::knows_quick`].
    pub(super) fn knows_quick(&self) -> bool {
        match self {
            Kernel::Uring(uring) => uring.knows_quick(),
            Kernel::Made(_) => true,
        }
    }

    /// See [`Uring::is_settled`].
    pub(super) fn is_settled(&mut self) -> bool {
        match self {
            Kernel::Uring(uring) => uring.is_settled(),
            Kernel::Made(made) => made.queue.is_empty(),
        }
    }

    /// See [`Uring::push`].
    pub(super) fn push(&mut self, entry: &mut Entry, user_data: u64, quick: bool) -> bool {
        match self {
            Kernel::Uring(uring) => uring.push(entry, user_data, quick),
            Kernel::Made(made) => made.push(|| Some(Asked::Begin(user_data, entry.lend()?, quick))),
        }
    }

    /// See [`Uring::push_cancel`].
    pub(super) fn push_cancel(&mut self, user_data: u64) -> bool {
        match self {
            Kernel::Uring(uring) => uring.push_cancel(user_data),
            Kernel::Made(made) => made.push(|| Some(Asked::Cancel(user_data))),
        }
    }

    /// See [`Uring::has_submissions`].
    pub(super) fn has_submissions(&mut self) -> bool {
        match self {
            Kernel::Uring(uring) => uring.has_submissions(),
            Kernel::Made(made) => !made.queue.is_empty(),
        }
    }

    /// See [`Uring::has_completions`].
    pub(super) fn has_completions(&mut self) -> bool {
        match self {
            Kernel::Uring(uring) => uring.has_completions(),
            Kernel::Made(made) => made.kernel.has_finished(),
        }
    }

    /// See [`Uring::submit`].
    pub(super) fn submit(&mut self) {
        match self {
            Kernel::Uring(uring) => uring.submit(),
            Kernel::Made(made) => made.submit(),
        }
    }

    /// See [`Uring::wait`]. In a made-up world nobody waits: who steps the core knows whether it
    /// sleeps.
    pub(super) fn wait(&mut self, timeout: Option<Duration>) {
        match self {
            Kernel::Uring(uring) => uring.wait(timeout),
            Kernel::Made(made) => made.submit(),
        }
    }

    /// Appends what has completed of `entries`.
    pub(super) fn completions(&mut self, entries: &mut Slab<InFlight>, out: &mut Vec<Completion>) {
        match self {
            Kernel::Uring(uring) => uring.completions(out),
            Kernel::Made(made) => made.completions(entries, out),
        }
    }

    /// See [`Uring::cancel_all`]. A made-up world keeps what it has.
    pub(super) fn cancel_all(&mut self) -> bool {
        if let Kernel::Uring(uring) = self {
            uring.cancel_all();
        }
        matches!(self, Kernel::Uring(_))
    }
}

impl Made {
    fn push(&mut self, asked: impl FnOnce() -> Option<Asked>) -> bool {
        let room = self.queue.len() < self.room;
        if room {
            self.queue.extend(asked());
        }
        room
    }

    fn submit(&mut self) {
        for asked in self.queue.drain(..) {
            match asked {
                Asked::Begin(key, op, quick) => self.kernel.begin(key, op, quick),
                Asked::Cancel(key) => self.kernel.cancel(key),
            }
        }
    }

    fn completions(&mut self, entries: &mut Slab<InFlight>, out: &mut Vec<Completion>) {
        self.kernel.finished(&mut self.finished);
        for Finished { key, op, result } in self.finished.drain(..) {
            if let Some(in_flight) = entries.get_mut(key as usize) {
                in_flight.entry.give_back(op);
            }
            out.extend(result.map(|result| Completion { user_data: key, result }));
        }
    }
}
