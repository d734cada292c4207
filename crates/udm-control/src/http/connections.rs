//! The open connections, and which one is closed if there are too many.
//!
//! Contract: a connection is *busy* while its request is served. Otherwise it is *quiet*: idle, or
//! sending or reading at its own pace. If all slots are taken, a new connection replaces a quiet
//! one: the longest quiet one of the process that has most of them. So a client that opens many
//! idle connections cannot lock out others. A connection that reads an answer counts as quiet since
//! its last progress. A connection that reads an event stream keeps its slot; another limit bounds
//! their number.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;
use tokio::time::Instant;

/// The connection slots of one server.
pub struct Connections {
    max: usize,
    taken: Mutex<HashMap<u64, ConnectionEntry>>,
    /// Notified when a slot may be free.
    left: Notify,
}

struct ConnectionEntry {
    /// PID of the peer; 0 if unknown.
    peer: i32,
    /// Start of the quiet time; `None` while busy.
    quiet: Option<Instant>,
    /// True while it reads an event stream.
    listens: bool,
    leave: Arc<Notify>,
}

/// A connection slot, until dropped.
pub struct ConnectionSlot {
    seats: Arc<Connections>,
    number: u64,
    leave: Arc<Notify>,
}

/// Keeps the slot of a connection that reads an event stream, until dropped.
pub struct StreamGuard(Arc<ConnectionSlot>);

/// Marks a connection as busy until dropped.
pub struct RequestGuard(Arc<ConnectionSlot>);

impl Connections {
    /// `max` slots.
    pub fn new(max: usize) -> Arc<Connections> {
        Arc::new(Connections { max, taken: Mutex::default(), left: Notify::new() })
    }

    fn taken(&self) -> MutexGuard<'_, HashMap<u64, ConnectionEntry>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a free slot. If there is none, asks a quiet connection to close.
    pub async fn wait_for_slot(&self) {
        loop {
            let left = self.left.notified();
            if self.taken().len() < self.max {
                return;
            }
            self.evict_idle();
            left.await;
        }
    }

    /// Asks a quiet connection to close; false if there is none.
    pub fn evict_idle(&self) -> bool {
        let taken = self.taken();
        let quiet = longest_idle(&taken);
        quiet.inspect(|number| taken[number].leave.notify_one()).is_some()
    }

    /// Takes a slot for a peer. The caller has waited for it: [`Connections::wait_for_slot`].
    pub fn take(self: &Arc<Connections>, number: u64, peer: i32) -> Arc<ConnectionSlot> {
        let leave = Arc::new(Notify::new());
        let taken =
            ConnectionEntry { peer, quiet: Some(Instant::now()), listens: false, leave: Arc::clone(&leave) };
        self.taken().insert(number, taken);
        Arc::new(ConnectionSlot { seats: Arc::clone(self), number, leave })
    }
}

/// The connection to close.
fn longest_idle(taken: &HashMap<u64, ConnectionEntry>) -> Option<u64> {
    let mut of_peer: HashMap<i32, usize> = HashMap::new();
    let may_go = || taken.iter().filter(|(_, seat)| !seat.listens);
    let quiet = || may_go().filter_map(|(number, seat)| Some((*number, seat.peer, seat.quiet?)));
    for (_, peer, _) in quiet() {
        *of_peer.entry(peer).or_default() += 1;
    }
    let first = quiet().min_by_key(|&(number, peer, since)| (usize::MAX - of_peer[&peer], since, number));
    first.map(|(number, ..)| number)
}

impl ConnectionSlot {
    /// Marks the connection as busy: a request was received completely.
    pub fn begin_request(self: &Arc<ConnectionSlot>) -> RequestGuard {
        self.set(None);
        RequestGuard(Arc::clone(self))
    }

    /// Marks the connection as reading an event stream.
    pub fn listens(self: &Arc<ConnectionSlot>) -> StreamGuard {
        self.set_listens(true);
        StreamGuard(Arc::clone(self))
    }

    fn set_listens(&self, listens: bool) {
        if let Some(taken) = self.seats.taken().get_mut(&self.number) {
            taken.listens = listens;
        }
    }

    fn set(&self, quiet: Option<Instant>) {
        if let Some(taken) = self.seats.taken().get_mut(&self.number) {
            taken.quiet = quiet;
        }
        if quiet.is_some() {
            self.seats.left.notify_one();
        }
    }

    /// Completes when the connection must close for another one.
    pub async fn evicted(&self) {
        self.leave.notified().await;
    }

    /// Restarts the quiet time, because the peer reads its answer.
    pub fn mark_progress(&self) {
        if let Some(taken) = self.seats.taken().get_mut(&self.number)
            && let Some(since) = &mut taken.quiet
        {
            *since = Instant::now();
        }
    }

    /// Start of the quiet time; `None` while busy.
    pub fn quiet(&self) -> Option<Instant> {
        self.seats.taken().get(&self.number).and_then(|taken| taken.quiet)
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.seats.taken().remove(&self.number);
        self.seats.left.notify_one();
    }
}

impl Drop for StreamGuard {
    fn drop(&mut self) {
        self.0.set_listens(false);
    }
}

impl Drop for RequestGuard {
    fn drop(&mut self) {
        self.0.set(Some(Instant::now()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_one_that_goes_is_quiet_and_of_the_greediest() {
        let seats = Connections::new(5);
        let taken: Vec<_> = [7, 9, 9, 9, 7].iter().zip(0..).map(|(&peer, n)| seats.take(n, peer)).collect();
        assert_eq!(longest_idle(&seats.taken()), Some(1));
        let begin_request = taken[1].begin_request();
        let again = taken[2].begin_request();
        drop(again);
        assert_eq!(longest_idle(&seats.taken()), Some(0), "two each, and this one was quiet first");
        drop(begin_request);
        assert_eq!(longest_idle(&seats.taken()), Some(3), "three of 9's, of which this was quiet longest");
        let listens = [taken[3].listens(), taken[0].listens()];
        taken[3].mark_progress();
        taken[0].mark_progress();
        assert_eq!(longest_idle(&seats.taken()), Some(2), "who listens keeps its seat");
        drop(listens);
        let all: Vec<_> = taken.iter().map(ConnectionSlot::begin_request).collect();
        assert_eq!(longest_idle(&seats.taken()), None);
        drop(all);
    }

    #[tokio::test]
    async fn a_newcomer_waits_for_no_one_but_the_busy() {
        let seats = Connections::new(2);
        let (first, second) = (seats.take(0, 1), seats.take(1, 1));
        let begin_request = second.begin_request();
        let first = tokio::spawn(async move { first.evicted().await });
        seats.wait_for_slot().await;
        first.await.unwrap();
        let third = seats.take(2, 1);
        let _busy = third.begin_request();
        let waits = tokio::time::timeout(std::time::Duration::from_millis(20), seats.wait_for_slot()).await;
        assert!(waits.is_err(), "all are busy");
        drop(begin_request);
        drop(second);
        seats.wait_for_slot().await;
    }
}
