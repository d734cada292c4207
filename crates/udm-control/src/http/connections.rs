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
pub struct EvictingConnectionLimit {
    max: usize,
    taken: Mutex<HashMap<u64, ControlConnectionEntry>>,
    /// Notified when a slot may be free.
    slot_freed: Notify,
}

struct ControlConnectionEntry {
    /// PID of the peer; 0 if unknown.
    peer: i32,
    /// Start of the quiet time; `None` while busy.
    idle_since: Option<Instant>,
    /// True while it reads an event stream.
    streams: bool,
    evict: Arc<Notify>,
}

/// A connection slot, until dropped.
pub struct ControlConnectionSlot {
    connections: Arc<EvictingConnectionLimit>,
    number: u64,
    evict: Arc<Notify>,
}

/// Keeps the slot of a connection that reads an event stream, until dropped.
pub struct EventStreamSlotGuard(Arc<ControlConnectionSlot>);

/// Marks a connection as busy until dropped.
pub struct BusyConnectionGuard(Arc<ControlConnectionSlot>);

impl EvictingConnectionLimit {
    /// `max` slots.
    pub fn new(max: usize) -> Arc<EvictingConnectionLimit> {
        Arc::new(EvictingConnectionLimit { max, taken: Mutex::default(), slot_freed: Notify::new() })
    }

    fn taken(&self) -> MutexGuard<'_, HashMap<u64, ControlConnectionEntry>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a free slot. If there is none, asks a quiet connection to close.
    pub async fn wait_for_slot(&self) {
        loop {
            let freed = self.slot_freed.notified();
            if self.taken().len() < self.max {
                return;
            }
            self.evict_idle();
            freed.await;
        }
    }

    /// Asks a quiet connection to close; false if there is none.
    pub fn evict_idle(&self) -> bool {
        let taken = self.taken();
        pick_connection_to_evict(&taken).inspect(|number| taken[number].evict.notify_one()).is_some()
    }

    /// Takes a slot for a peer. The caller has waited for it:
    /// [`EvictingConnectionLimit::wait_for_slot`].
    pub fn open_slot(
        self: &Arc<EvictingConnectionLimit>,
        number: u64,
        peer: i32,
    ) -> Arc<ControlConnectionSlot> {
        let evict = Arc::new(Notify::new());
        let taken = ControlConnectionEntry {
            peer,
            idle_since: Some(Instant::now()),
            streams: false,
            evict: Arc::clone(&evict),
        };
        self.taken().insert(number, taken);
        Arc::new(ControlConnectionSlot { connections: Arc::clone(self), number, evict })
    }
}

/// The connection to close.
fn pick_connection_to_evict(taken: &HashMap<u64, ControlConnectionEntry>) -> Option<u64> {
    let mut of_peer: HashMap<i32, usize> = HashMap::new();
    let may_go = || taken.iter().filter(|(_, slot)| !slot.streams);
    let idle = || may_go().filter_map(|(number, slot)| Some((*number, slot.peer, slot.idle_since?)));
    for (_, peer, _) in idle() {
        *of_peer.entry(peer).or_default() += 1;
    }
    let first = idle().min_by_key(|&(number, peer, since)| (usize::MAX - of_peer[&peer], since, number));
    first.map(|(number, ..)| number)
}

impl ControlConnectionSlot {
    /// Marks the connection as busy: a request was received completely.
    pub fn begin_request(self: &Arc<ControlConnectionSlot>) -> BusyConnectionGuard {
        self.set(None);
        BusyConnectionGuard(Arc::clone(self))
    }

    /// Marks the connection as reading an event stream.
    pub fn begin_stream(self: &Arc<ControlConnectionSlot>) -> EventStreamSlotGuard {
        self.set_streams(true);
        EventStreamSlotGuard(Arc::clone(self))
    }

    fn set_streams(&self, streams: bool) {
        if let Some(taken) = self.connections.taken().get_mut(&self.number) {
            taken.streams = streams;
        }
    }

    fn set(&self, idle_since: Option<Instant>) {
        if let Some(taken) = self.connections.taken().get_mut(&self.number) {
            taken.idle_since = idle_since;
        }
        if idle_since.is_some() {
            self.connections.slot_freed.notify_one();
        }
    }

    /// Completes when the connection must close for another one.
    pub async fn evicted(&self) {
        self.evict.notified().await;
    }

    /// Restarts the quiet time, because the peer reads its answer.
    pub fn mark_progress(&self) {
        if let Some(taken) = self.connections.taken().get_mut(&self.number)
            && let Some(since) = &mut taken.idle_since
        {
            *since = Instant::now();
        }
    }

    /// Start of the quiet time; `None` while busy.
    pub fn idle_since(&self) -> Option<Instant> {
        self.connections.taken().get(&self.number).and_then(|taken| taken.idle_since)
    }
}

impl Drop for ControlConnectionSlot {
    fn drop(&mut self) {
        self.connections.taken().remove(&self.number);
        self.connections.slot_freed.notify_one();
    }
}

impl Drop for EventStreamSlotGuard {
    fn drop(&mut self) {
        self.0.set_streams(false);
    }
}

impl Drop for BusyConnectionGuard {
    fn drop(&mut self) {
        self.0.set(Some(Instant::now()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_one_that_goes_is_quiet_and_of_the_greediest() {
        let connections = EvictingConnectionLimit::new(5);
        let taken: Vec<_> =
            [7, 9, 9, 9, 7].iter().zip(0..).map(|(&peer, n)| connections.open_slot(n, peer)).collect();
        assert_eq!(pick_connection_to_evict(&connections.taken()), Some(1));
        let request = taken[1].begin_request();
        let again = taken[2].begin_request();
        drop(again);
        assert_eq!(
            pick_connection_to_evict(&connections.taken()),
            Some(0),
            "two each, and this one was idle first"
        );
        drop(request);
        assert_eq!(
            pick_connection_to_evict(&connections.taken()),
            Some(3),
            "three of 9's, of which this was quiet longest"
        );
        let streams = [taken[3].begin_stream(), taken[0].begin_stream()];
        taken[3].mark_progress();
        taken[0].mark_progress();
        assert_eq!(
            pick_connection_to_evict(&connections.taken()),
            Some(2),
            "a connection with a stream keeps its slot"
        );
        drop(streams);
        let all: Vec<_> = taken.iter().map(ControlConnectionSlot::begin_request).collect();
        assert_eq!(pick_connection_to_evict(&connections.taken()), None);
        drop(all);
    }

    #[tokio::test]
    async fn a_newcomer_waits_for_no_one_but_the_busy() {
        let connections = EvictingConnectionLimit::new(2);
        let (first, second) = (connections.open_slot(0, 1), connections.open_slot(1, 1));
        let request = second.begin_request();
        let first = tokio::spawn(async move { first.evicted().await });
        connections.wait_for_slot().await;
        first.await.unwrap();
        let third = connections.open_slot(2, 1);
        let _busy = third.begin_request();
        let waits =
            tokio::time::timeout(std::time::Duration::from_millis(20), connections.wait_for_slot()).await;
        assert!(waits.is_err(), "all are busy");
        drop(request);
        drop(second);
        connections.wait_for_slot().await;
    }
}
