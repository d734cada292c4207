//! Timed events of a world.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use udm_core::Nanos;

/// A timed event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum TimedEvent {
    /// A path recovers.
    Restore(usize),
    /// A disk becomes writable.
    Writable(usize),
    /// A suspended device is resumed.
    Resume(usize),
}

/// A queue of timers, ordered by time.
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

    /// Time of the next event.
    #[must_use]
    pub fn next(&self) -> Nanos {
        self.heap.peek().map_or(Nanos::NEVER, |Reverse((at, ..))| *at)
    }

    /// Takes an event that is due.
    pub fn take(&mut self, now: Nanos) -> Option<TimedEvent> {
        if self.next() > now {
            return None;
        }
        self.heap.pop().map(|Reverse((_, _, timer))| timer)
    }

    /// True if no event is left.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.heap.is_empty()
    }

    /// Removes all events.
    pub fn clear(&mut self) {
        self.heap.clear();
    }
}
