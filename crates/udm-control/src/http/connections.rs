//! Who is connected, and who has to go when there is no seat left.
//!
//! Contract: a connection is *busy* while a request of its is served and *quiet* otherwise: idle,
//! or sending or reading at its own pace. With all seats taken a newcomer gets that of a quiet
//! connection: of the process that has most of them the one that was quiet longest. So a client
//! that opens connections and says nothing locks out nobody else. One that reads an answer is quiet
//! since it last read something. One that *listens* keeps its seat: how many may listen is bounded
//! elsewhere.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;
use tokio::time::Instant;

/// The seats of one server.
pub struct Connections {
    max: usize,
    taken: Mutex<HashMap<u64, ConnectionEntry>>,
    /// Told when somebody may have left.
    left: Notify,
}

struct ConnectionEntry {
    /// The process of the peer; 0 when it is not known.
    peer: i32,
    /// Since when it is quiet; `None` while it is busy.
    quiet: Option<Instant>,
    /// It reads an answer that has no end.
    listens: bool,
    leave: Arc<Notify>,
}

/// A seat, until it is dropped.
pub struct ConnectionSlot {
    seats: Arc<Connections>,
    number: u64,
    leave: Arc<Notify>,
}

/// An answer without an end that is being read, until it is dropped.
pub struct StreamGuard(Arc<ConnectionSlot>);

/// A request that is being served, until it is dropped.
pub struct RequestGuard(Arc<ConnectionSlot>);

impl Connections {
    /// `max` seats.
    pub fn new(max: usize) -> Arc<Connections> {
        Arc::new(Connections { max, taken: Mutex::default(), left: Notify::new() })
    }

    fn taken(&self) -> MutexGuard<'_, HashMap<u64, ConnectionEntry>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until there is a seat, having somebody leave if need be.
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

    /// Has a quiet connection leave, when there is one.
    pub fn evict_idle(&self) -> bool {
        let taken = self.taken();
        let quiet = longest_idle(&taken);
        quiet.inspect(|number| taken[number].leave.notify_one()).is_some()
    }

    /// A seat for a peer. There is room: see [`Connections::wait_for_slot`].
    pub fn take(self: &Arc<Connections>, number: u64, peer: i32) -> Arc<ConnectionSlot> {
        let leave = Arc::new(Notify::new());
        let taken =
            ConnectionEntry { peer, quiet: Some(Instant::now()), listens: false, leave: Arc::clone(&leave) };
        self.taken().insert(number, taken);
        Arc::new(ConnectionSlot { seats: Arc::clone(self), number, leave })
    }
}

/// The connection to part with.
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
    /// A request is whole and is being served.
    pub fn begin_request(self: &Arc<ConnectionSlot>) -> RequestGuard {
        self.set(None);
        RequestGuard(Arc::clone(self))
    }

    /// An answer without an end is being read.
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

    /// Comes to an end when somebody else needs the seat.
    pub async fn evicted(&self) {
        self.leave.notified().await;
    }

    /// Its answer goes on being read.
    pub fn mark_progress(&self) {
        if let Some(taken) = self.seats.taken().get_mut(&self.number)
            && let Some(since) = &mut taken.quiet
        {
            *since = Instant::now();
        }
    }

    /// Since when it is quiet.
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
