//! Counters of a server: each core writes its own, readers add them up.

use super::admission::Peer;
use super::balance::{ConnectionMoveThrottle, PublishedLoad};
use crossbeam_utils::CachePadded;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use udm_core::DeviceId;

/// Current state and counters of a server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NbdServerStats {
    /// Open connections, including handshakes, without those whose client has disconnected.
    pub connections: usize,
    /// Connections in the handshake.
    pub handshakes: usize,
    /// Connections whose client has disconnected while the device still has requests of it.
    pub orphans: usize,
    /// Served connections that use TLS.
    pub tls: usize,
    /// Connections accepted so far.
    pub accepted: u64,
    /// Connections closed, or refused an export, because there were too many.
    pub refused: u64,
    /// Moves of connections to another core.
    pub moves: u64,
    /// Requests that were received and whose answer has not been sent completely.
    pub in_flight: u64,
    /// Requests answered so far, errors included.
    pub requests: u64,
    /// Requests answered with an error.
    pub errors: u64,
    /// Bytes of data received with writes.
    pub bytes_in: u64,
    /// Bytes of data sent with reads.
    pub bytes_out: u64,
}

/// Counters of the connections of one core. Only that core writes them, except `connections`.
#[derive(Default)]
pub(super) struct CoreConnectionCounters {
    pub(super) connections: AtomicUsize,
    in_flight: AtomicU64,
    requests: AtomicU64,
    errors: AtomicU64,
    bytes_in: AtomicU64,
    bytes_out: AtomicU64,
    pub(super) load: PublishedLoad,
}

/// Handle to the counters of a server. They can be read even after the server has stopped.
#[derive(Clone)]
pub struct ServerCountersHandle(pub(super) Arc<ServerCounters>);

impl ServerCountersHandle {
    /// Current state and counters.
    #[must_use]
    pub fn read(&self) -> NbdServerStats {
        self.0.read()
    }

    /// Number of answered requests of each core.
    #[must_use]
    pub fn requests(&self) -> Vec<u64> {
        self.0.requests()
    }
}

/// The counters of a server.
pub(crate) struct ServerCounters {
    pub(super) cores: Box<[CachePadded<CoreConnectionCounters>]>,
    pub(super) handshakes: AtomicUsize,
    pub(super) serving: AtomicUsize,
    pub(super) orphans: AtomicUsize,
    tls: AtomicUsize,
    pub(super) accepted: AtomicU64,
    pub(super) refused: AtomicU64,
    pub(super) moves: AtomicU64,
    pub(super) next_move: ConnectionMoveThrottle,
    /// Served connections per peer, in all and for each device. Changed when a connection begins
    /// and ends.
    pub(super) peers: Mutex<HashMap<(Peer, Option<DeviceId>), usize>>,
}

/// Counts a served connection that uses TLS while it exists.
pub(super) struct TlsConnectionGuard(Arc<ServerCounters>);

impl TlsConnectionGuard {
    pub(super) fn new(counters: &Arc<ServerCounters>) -> TlsConnectionGuard {
        counters.tls.fetch_add(1, Ordering::Relaxed);
        TlsConnectionGuard(Arc::clone(counters))
    }
}

impl Drop for TlsConnectionGuard {
    fn drop(&mut self) {
        self.0.tls.fetch_sub(1, Ordering::Release);
    }
}

/// Changes of the counters since a connection last published.
#[derive(Default, Debug)]
pub(super) struct UnpublishedConnectionCounters {
    /// Requests received.
    pub(super) begun: u64,
    /// Requests answered, or dropped with their connection.
    pub(super) ended: u64,
    pub(super) errors: u64,
    pub(super) bytes_in: u64,
    pub(super) bytes_out: u64,
}

impl ServerCounters {
    pub(crate) fn new(cores: usize) -> Arc<ServerCounters> {
        Arc::new(ServerCounters {
            cores: (0..cores).map(|_| CachePadded::default()).collect(),
            handshakes: AtomicUsize::new(0),
            serving: AtomicUsize::new(0),
            orphans: AtomicUsize::new(0),
            tls: AtomicUsize::new(0),
            accepted: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            moves: AtomicU64::new(0),
            next_move: ConnectionMoveThrottle::default(),
            peers: Mutex::default(),
        })
    }

    pub(crate) fn read(&self) -> NbdServerStats {
        // Acquire: a reader that sees a connection closed also sees its last counters.
        let handshakes = self.handshakes.load(Ordering::Acquire);
        let mut stats = NbdServerStats {
            connections: handshakes + self.serving.load(Ordering::Acquire),
            handshakes,
            orphans: self.orphans.load(Ordering::Acquire),
            tls: self.tls.load(Ordering::Acquire),
            accepted: self.accepted.load(Ordering::Relaxed),
            refused: self.refused.load(Ordering::Relaxed),
            moves: self.moves.load(Ordering::Relaxed),
            ..NbdServerStats::default()
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

    /// Number of answered requests of each core.
    pub(super) fn requests(&self) -> Vec<u64> {
        self.cores.iter().map(|core| core.requests.load(Ordering::Relaxed)).collect()
    }

    /// Adds the changes of a connection on `core` since the last call. Called on the core, once per
    /// turn.
    pub(super) fn publish(&self, core: usize, delta: &mut UnpublishedConnectionCounters) {
        let core = &self.cores[core];
        // Plain loads and stores: all connections of a core run on its thread. Readers need recent
        // numbers, but no order among them.
        let add = |to: &AtomicU64, n: u64| {
            if n != 0 {
                to.store(to.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
            }
        };
        add(&core.in_flight, delta.begun.wrapping_sub(delta.ended));
        add(&core.requests, delta.ended);
        add(&core.errors, delta.errors);
        add(&core.bytes_in, delta.bytes_in);
        add(&core.bytes_out, delta.bytes_out);
        *delta = UnpublishedConnectionCounters::default();
    }
}
