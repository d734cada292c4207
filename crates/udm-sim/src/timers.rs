//! What is to happen at a time.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use udm_core::Nanos;

/// What is to happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum TimedEvent {
    /// A path comes back.
    Restore(usize),
    /// A disk can be written again.
    Writable(usize),
    /// A suspended device is resumed.
    Resume(usize),
}

/// Timers in order of time.
#[derive(Default)]
pub struct TimerQueue {
    heap: BinaryHeap<Reverse<(Nanos, u64, TimedEvent)>>,
    count: u64,
}

impl TimerQueue {
    /// Sets a timer.
    pub fn set(&mut self, at: Nanos, timer: TimedEvent) {
        self.count += 1;
        self.heap.push(Reverse((at, self.count, timer)));
    }

    /// When the next one is due.
    #[must_use]
    pub fn next(&self) -> Nanos {
        self.heap.peek().map_or(Nanos::NEVER, |Reverse((at, ..))| *at)
    }

    /// Takes one that is due.
    pub fn take(&mut self, now: Nanos) -> Option<TimedEvent> {
        if self.next() > now {
            return None;
        }
        self.heap.pop().map(|Reverse((_, _, timer))| timer)
    }

    /// Nothing is to come.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.heap.is_empty()
    }

    /// Forgets all.
    pub fn clear(&mut self) {
        self.heap.clear();
    }
}
