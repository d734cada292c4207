//! Counters of a server: each core writes its own, readers add them up.

use crossbeam_utils::CachePadded;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use udm_core::CoreId;

/// What a server is doing and has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Open connections, those in the handshake included.
    pub connections: usize,
    /// Connections accepted so far.
    pub accepted: u64,
    /// Connections closed at once because there were too many.
    pub refused: u64,
    /// Requests that were received and whose answer has not been sent whole.
    pub in_flight: u64,
    /// Requests answered so far, errors included.
    pub requests: u64,
    /// Of these, answered with an error.
    pub errors: u64,
    /// Bytes of data received with writes.
    pub bytes_in: u64,
    /// Bytes of data sent with reads.
    pub bytes_out: u64,
}

/// What the connections of one core count. Only that core writes, but for `connections`.
#[derive(Default)]
struct CoreCounters {
    connections: AtomicUsize,
    in_flight: AtomicU64,
    requests: AtomicU64,
    errors: AtomicU64,
    bytes_in: AtomicU64,
    bytes_out: AtomicU64,
}

/// The counters of a server.
pub(super) struct Counters {
    cores: Box<[CachePadded<CoreCounters>]>,
    open: AtomicUsize,
    accepted: AtomicU64,
    refused: AtomicU64,
}

/// What a connection did since it last published.
#[derive(Default, Debug)]
pub(super) struct Tally {
    /// Requests taken in.
    pub(super) begun: u64,
    /// Requests answered, or given up with their connection.
    pub(super) ended: u64,
    pub(super) errors: u64,
    pub(super) bytes_in: u64,
    pub(super) bytes_out: u64,
}

impl Counters {
    pub(super) fn new(cores: usize) -> Arc<Counters> {
        Arc::new(Counters {
            cores: (0..cores).map(|_| CachePadded::default()).collect(),
            open: AtomicUsize::new(0),
            accepted: AtomicU64::new(0),
            refused: AtomicU64::new(0),
        })
    }

    /// A place for one more connection on the core with the fewest, beginning the search at `from`; `None` when `max` are open.
    /// Called by one thread at a time.
    pub(super) fn place(self: &Arc<Self>, max: usize, from: usize) -> Option<Place> {
        if self.open.load(Ordering::Relaxed) >= max {
            self.refused.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        let n = self.cores.len();
        let order = (0..n).map(|i| (from + i) % n);
        let core = order.min_by_key(|&i| self.cores[i].connections.load(Ordering::Relaxed))?;
        self.accepted.fetch_add(1, Ordering::Relaxed);
        self.open.fetch_add(1, Ordering::Relaxed);
        self.cores[core].connections.fetch_add(1, Ordering::Relaxed);
        Some(Place { counters: self.clone(), core })
    }

    pub(super) fn read(&self) -> Stats {
        let mut stats = Stats {
            connections: self.open.load(Ordering::Acquire),
            accepted: self.accepted.load(Ordering::Relaxed),
            refused: self.refused.load(Ordering::Relaxed),
            ..Stats::default()
        };
        for core in &self.cores {
            stats.in_flight += core.in_flight.load(Ordering::Relaxed);
            stats.requests += core.requests.load(Ordering::Relaxed);
            stats.errors += core.errors.load(Ordering::Relaxed);
            stats.bytes_in += core.bytes_in.load(Ordering::Relaxed);
            stats.bytes_out += core.bytes_out.load(Ordering::Relaxed);
        }
        stats
    }
}

/// One open connection, counted for as long as this lives.
pub(super) struct Place {
    counters: Arc<Counters>,
    core: usize,
}

impl Place {
    pub(super) fn core(&self) -> CoreId {
        CoreId(self.core as u16)
    }

    /// Adds what was done since the last call. Called on the core, once a turn.
    pub(super) fn publish(&self, tally: &mut Tally) {
        let core = &self.counters.cores[self.core];
        // Plain loads and stores: all connections of a core run on its one thread. Readers want recent numbers and no order among them.
        let add = |to: &AtomicU64, n: u64| {
            if n != 0 {
                to.store(to.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
            }
        };
        add(&core.in_flight, tally.begun.wrapping_sub(tally.ended));
        add(&core.requests, tally.ended);
        add(&core.errors, tally.errors);
        add(&core.bytes_in, tally.bytes_in);
        add(&core.bytes_out, tally.bytes_out);
        *tally = Tally::default();
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.counters.cores[self.core].connections.fetch_sub(1, Ordering::Relaxed);
        // Release: who sees the connection gone sees its last numbers.
        self.counters.open.fetch_sub(1, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_go_to_the_emptiest_core() {
        let c = Counters::new(3);
        let places: Vec<_> = (0..6).map(|i| c.place(6, i).unwrap()).collect();
        let cores: Vec<_> = places.iter().map(|p| p.core().0).collect();
        assert_eq!(cores, [0, 1, 2, 0, 1, 2]);
        assert!(c.place(6, 0).is_none());
        assert_eq!((c.read().connections, c.read().refused), (6, 1));
        drop(places.into_iter().nth(4));
        assert_eq!(c.read().connections, 0);
        let kept = c.place(6, 2).unwrap();
        assert_eq!((kept.core().0, c.place(6, 2).unwrap().core().0), (2, 0));
    }
}
