//! Limits the memory that the queues of one core may hold for data of commands.
//!
//! *Full is not failed*: a command that gets no memory waits, and starts when other commands have
//! returned theirs. A queue without data may always take [`FLOOR`] bytes, so that each queue makes
//! progress, and one command of any length may start if no queue of the core holds data.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use udm_runtime::{FrontCx, FrontKey};

/// Bytes that a queue without data may always take.
const FLOOR: usize = 128 << 10;

/// The memory of a core.
#[derive(Default)]
struct CoreDataMemory {
    used: Cell<usize>,
    /// Queues that wait, each once.
    waiting: RefCell<Vec<FrontKey>>,
}

/// A queue's part of the memory of its core.
pub(super) struct DataMemory {
    core: Rc<CoreDataMemory>,
    max: usize,
    held: usize,
    /// Limit of this queue.
    queue_max: usize,
}

impl DataMemory {
    /// A part of the memory of this core, of which all queues have `max` bytes and this one at most
    /// `queue_max`.
    pub(super) fn new(cx: &mut FrontCx<'_, '_>, max: usize, queue_max: usize) -> DataMemory {
        DataMemory { core: cx.local(CoreDataMemory::default), max, held: 0, queue_max }
    }

    /// Takes `bytes`, if they are available. Otherwise the queue is called when some are.
    pub(super) fn try_take(&mut self, bytes: usize, cx: &FrontCx<'_, '_>) -> bool {
        let used = self.core.used.get();
        let is_first = self.held == 0 && (bytes <= FLOOR || used == 0);
        let fits = self.held + bytes <= self.queue_max && used + bytes <= self.max;
        if is_first || fits {
            self.take(bytes);
            return true;
        }
        let mut waiting = self.core.waiting.borrow_mut();
        if !waiting.contains(&cx.me()) {
            waiting.push(cx.me());
        }
        false
    }

    /// Counts `bytes` that have arrived already.
    pub(super) fn take(&mut self, bytes: usize) {
        self.held += bytes;
        self.core.used.set(self.core.used.get() + bytes);
    }

    /// Returns `bytes`.
    pub(super) fn give_back(&mut self, bytes: usize, cx: &mut FrontCx<'_, '_>) {
        if bytes == 0 {
            return;
        }
        self.held -= bytes;
        self.core.used.set(self.core.used.get() - bytes);
        for front in self.core.waiting.borrow_mut().drain(..) {
            cx.schedule(front);
        }
    }

    /// Returns everything.
    pub(super) fn give_back_all(&mut self, cx: &mut FrontCx<'_, '_>) {
        self.give_back(self.held, cx);
    }
}
