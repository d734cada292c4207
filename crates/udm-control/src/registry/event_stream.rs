//! The ordered stream of the events of all devices, for its subscribers.
//!
//! Contract: any thread, cores included, puts events into a bounded queue and wakes the
//! subscribers. It never waits. Before the first subscription an event costs one load of a flag.
//! The last [`KEPT`] events are kept. Subscribers read at their own pace; a slow subscriber gets
//! the number of lost events and delays no other.

use crate::api;
use crate::error::escape_control_chars;
use crossbeam_queue::ArrayQueue;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::sync::Notify;
use tokio::sync::futures::Notified;
use udm_dm::DeviceEvent;

/// Number of events that are kept.
pub(crate) const KEPT: usize = 1024;

/// History of device events with its subscribers.
pub(crate) struct EventStream {
    /// True after the first subscription.
    has_subscribers: AtomicBool,
    /// Events that are not yet in the history.
    queue: ArrayQueue<api::DeviceEventDescription>,
    /// Number of events dropped from the full queue.
    dropped: AtomicU64,
    history: Mutex<EventHistory>,
    listeners: AtomicUsize,
    wake: Notify,
}

#[derive(Default)]
struct EventHistory {
    /// The number of the last event.
    last: u64,
    /// Events by ascending number; dropped events leave gaps.
    events: VecDeque<Arc<api::DeviceEventDescription>>,
}

impl Default for EventStream {
    fn default() -> EventStream {
        EventStream {
            has_subscribers: AtomicBool::new(false),
            queue: ArrayQueue::new(KEPT),
            dropped: AtomicU64::new(0),
            history: Mutex::default(),
            listeners: AtomicUsize::new(0),
            wake: Notify::new(),
        }
    }
}

impl EventStream {
    /// Adds an event.
    pub fn publish(&self, event: &dyn Fn() -> DeviceEvent) {
        // The change precedes the load of `has_subscribers`, and a subscriber sets the flag before
        // it reads the device's state. So either the event is queued, or the subscriber sees the
        // change.
        fence(Ordering::SeqCst);
        if !self.has_subscribers.load(Ordering::SeqCst) {
            return;
        }
        if self.queue.force_push(describe_device_event(event())).is_some() {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
        fence(Ordering::SeqCst);
        if self.listeners.load(Ordering::SeqCst) > 0 {
            self.wake.notify_waiters();
        }
    }

    /// Subscribes to events from now on or after event `after`. Numbers are greater than `base`;
    /// every call passes the same `base`.
    pub fn listen(self: &Arc<EventStream>, base: u64, after: Option<u64>) -> EventSubscription {
        self.listeners.fetch_add(1, Ordering::SeqCst);
        let mut history = self.history();
        if !self.has_subscribers.swap(true, Ordering::SeqCst) {
            history.last = base;
        }
        fence(Ordering::SeqCst);
        history.take_in(self);
        let is_ours = |after: &u64| (base..=history.last).contains(after);
        // If `after` is a number of another server, all kept events are new to the subscriber.
        let other = after.is_some_and(|after| !is_ours(&after));
        let first = || history.events.front().map_or(history.last, |event| event.id - 1);
        let seen = if other { first() } else { after.unwrap_or(history.last) };
        drop(history);
        EventSubscription { stream: Arc::clone(self), seen, other }
    }

    /// Completes at the next event after this call.
    pub fn next(&self) -> Notified<'_> {
        self.wake.notified()
    }

    fn history(&self) -> MutexGuard<'_, EventHistory> {
        self.history.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl EventHistory {
    /// Moves events from the queue to the history.
    fn take_in(&mut self, stream: &EventStream) {
        // Dropped events are older than the queued ones.
        self.last += stream.dropped.swap(0, Ordering::Relaxed);
        while let Some(mut event) = stream.queue.pop() {
            self.last += 1;
            event.id = self.last;
            if self.events.len() == KEPT {
                self.events.pop_front();
            }
            self.events.push_back(Arc::new(event));
        }
    }
}

/// A subscriber's position in the stream, until dropped.
pub(crate) struct EventSubscription {
    stream: Arc<EventStream>,
    /// Number of the last event read.
    seen: u64,
    /// True if the subscriber last read another server, which is not reported yet.
    other: bool,
}

impl EventSubscription {
    /// Number of the last event read.
    pub fn seen(&self) -> u64 {
        self.seen
    }

    /// The stream of this subscription.
    pub fn stream(&self) -> Arc<EventStream> {
        Arc::clone(&self.stream)
    }

    /// The next events, at most `max`, and an event for lost ones.
    pub fn read(&mut self, max: usize) -> Vec<Arc<api::DeviceEventDescription>> {
        let mut history = self.stream.history();
        history.take_in(&self.stream);
        let from = history.events.partition_point(|event| event.id <= self.seen);
        let mut read = Vec::new();
        if std::mem::take(&mut self.other) {
            read.push(Arc::new(lost_event(self.seen, None)));
        }
        for event in history.events.range(from..).take(max) {
            if event.id > self.seen + 1 {
                read.push(Arc::new(lost_event(event.id - 1, Some(event.id - 1 - self.seen))));
            }
            self.seen = event.id;
            read.push(Arc::clone(event));
        }
        read
    }
}

impl Drop for EventSubscription {
    fn drop(&mut self) {
        self.stream.listeners.fetch_sub(1, Ordering::SeqCst);
    }
}

fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

fn describe_device_event(event: DeviceEvent) -> api::DeviceEventDescription {
    api::DeviceEventDescription {
        id: 0,
        time_ms: now_ms(),
        kind: event.change.kind.text().into(),
        device: event.device,
        uuid: event.uuid,
        number: event.number.to_string(),
        event_nr: event.event_nr,
        path: event.change.path.map(|path| path.to_string()),
        group: event.change.group.map(|group| group as u64),
        lost: None,
        line: escape_control_chars(&event.change.line),
    }
}

/// The event that stands for lost events up to number `id`.
fn lost_event(id: u64, count: Option<u64>) -> api::DeviceEventDescription {
    let line = match count {
        Some(1) => "1 change is lost".into(),
        Some(count) => format!("{count} changes are lost"),
        None => "the changes of another server are lost".into(),
    };
    api::DeviceEventDescription {
        id,
        time_ms: now_ms(),
        kind: "lost".into(),
        lost: count,
        line,
        ..api::DeviceEventDescription::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use udm_core::DevNo;
    use udm_dm::{DeviceEventDetails, EventKind};

    const BASE: u64 = 1000;

    fn publish_line(stream: &EventStream, line: u64) {
        stream.publish(&|| DeviceEvent {
            device: "d".into(),
            uuid: None,
            number: DevNo { major: 254, minor: 0 },
            event_nr: 0,
            change: DeviceEventDetails::new(EventKind::Event, line.to_string()),
        });
    }

    /// All events read: the number, and the line or how many were lost.
    fn all(listening: &mut EventSubscription) -> Vec<(u64, String)> {
        let mut all = Vec::new();
        loop {
            let read = listening.read(100);
            if read.is_empty() {
                return all;
            }
            all.extend(read.iter().map(|event| (event.id, event.line.clone())));
        }
    }

    #[test]
    fn nothing_is_kept_before_anybody_listens() {
        let stream = Arc::new(EventStream::default());
        stream.publish(&|| panic!("an event without subscribers is not formatted"));
        let mut first = stream.listen(BASE, None);
        assert_eq!((first.seen(), all(&mut first)), (BASE, vec![]));
        publish_line(&stream, 7);
        assert_eq!(all(&mut first), [(BASE + 1, "7".into())]);
        drop(first);
        // Events are kept from the first subscription on.
        publish_line(&stream, 8);
        assert_eq!(all(&mut stream.listen(BASE, Some(BASE + 1))), [(BASE + 2, "8".into())]);
        assert_eq!(all(&mut stream.listen(BASE, None)), []);
    }

    #[test]
    fn each_is_read_once_and_what_is_lost_is_said() {
        let stream = Arc::new(EventStream::default());
        let (mut slow, mut quick) = (stream.listen(BASE, None), stream.listen(BASE, None));
        let kept = KEPT as u64;
        let mut seen = Vec::new();
        for line in 1..=3 * kept {
            publish_line(&stream, line);
            if line % 100 == 0 {
                seen.extend(all(&mut quick));
            }
        }
        seen.extend(all(&mut quick));
        assert_eq!(seen, (1..=3 * kept).map(|n| (BASE + n, n.to_string())).collect::<Vec<_>>());
        let late = all(&mut slow);
        assert_eq!(late[0], (BASE + 2 * kept, format!("{} changes are lost", 2 * kept)));
        assert_eq!(late[1..], seen[2 * KEPT..]);
        // Without a subscriber the queue overflows as well; a later subscriber gets the same
        // report.
        (1..=kept + 5).for_each(|line| publish_line(&stream, line));
        let again = all(&mut stream.listen(BASE, Some(BASE + 3 * kept - 1)));
        assert_eq!((again[0].1.as_str(), again.len()), ("6 changes are lost", KEPT + 1));
        assert_eq!(again[KEPT], (BASE + 4 * kept + 5, (kept + 5).to_string()));
    }

    #[test]
    fn who_has_heard_another_server_is_told_so() {
        let stream = Arc::new(EventStream::default());
        for after in [0, BASE - 1, BASE + 1, u64::MAX] {
            let mut listening = stream.listen(BASE, Some(after));
            let read = all(&mut listening);
            assert_eq!(read.len(), 1, "{after}: {read:?}");
            assert!(read[0].1.contains("another server"), "{after}: {read:?}");
        }
        let mut first = stream.listen(BASE, None);
        publish_line(&stream, 1);
        assert_eq!(all(&mut first).len(), 1);
        let read = all(&mut stream.listen(BASE, Some(5)));
        assert_eq!(read[1..], [(BASE + 1, "1".into())], "{read:?}");
    }

    #[tokio::test]
    async fn who_listens_is_woken() {
        let stream = Arc::new(EventStream::default());
        let mut listening = stream.listen(BASE, None);
        for line in 1..=1000 {
            let teller = {
                let stream = Arc::clone(&stream);
                std::thread::spawn(move || publish_line(&stream, line))
            };
            loop {
                let read = {
                    let stream = listening.stream();
                    let mut next = std::pin::pin!(stream.next());
                    next.as_mut().enable();
                    let read = listening.read(10);
                    if read.is_empty() {
                        next.await;
                    }
                    read
                };
                if let Some(event) = read.first() {
                    assert_eq!((read.len(), event.id), (1, BASE + line));
                    break;
                }
            }
            teller.join().unwrap();
        }
    }

    /// docs/events.md and the API list each kind.
    #[test]
    fn the_kinds_are_in_the_docs() {
        let docs = include_str!("../../../../docs/events.md");
        let api = include_str!("../api/events.rs");
        let rows = docs.lines().filter(|line| line.starts_with("| `"));
        let kinds = || EventKind::ALL.iter().map(|kind| kind.text()).chain(["lost"]);
        let listed: Vec<&str> = rows.filter_map(|row| row.split('`').nth(1)).collect();
        assert_eq!(listed, kinds().collect::<Vec<_>>());
        assert!(kinds().all(|kind| api.contains(&format!("\"{kind}\""))));
    }

    #[test]
    fn a_line_is_a_line() {
        let stream = Arc::new(EventStream::default());
        let mut listening = stream.listen(BASE, None);
        stream.publish(&|| DeviceEvent {
            device: "d".into(),
            uuid: None,
            number: DevNo { major: 254, minor: 0 },
            event_nr: 0,
            change: DeviceEventDetails::new(EventKind::PathFailed, "a\x1b[2J\nb"),
        });
        assert_eq!(all(&mut listening)[0].1, "a\\u{1b}[2J\\nb");
    }
}
