//! Waiting for the events of one device.
//!
//! Any thread raises events, cores included. Without a waiter an event costs one load of a counter.
//! Both sides first write and then read: a waiter counts itself and then reads the number of
//! events; a raiser counts the event and then reads the number of waiters.

use crate::api;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering, fence};
use tokio::sync::Notify;
use tokio::sync::futures::Notified;

/// The waiters for events of one device. Keeps no reference to the device.
#[derive(Default)]
pub(crate) struct EventWaiters {
    count: AtomicUsize,
    raised: Notify,
    /// Last state of the device, set when it is removed.
    last: OnceLock<api::DeviceDescription>,
}

impl EventWaiters {
    /// Wakes the waiters after an event.
    pub fn wake(&self) {
        fence(Ordering::SeqCst);
        if self.count.load(Ordering::SeqCst) > 0 {
            self.raised.notify_waiters();
        }
    }

    /// Stores the last state of the removed device and wakes the waiters.
    pub fn gone(&self, last: api::DeviceDescription) {
        let _ = self.last.set(last);
        self.wake();
    }

    /// The last state of the device, if it is removed.
    pub fn last(&self) -> Option<&api::DeviceDescription> {
        self.last.get()
    }

    /// Registers a waiter.
    pub fn enter(self: &Arc<EventWaiters>) -> EventWaiter {
        self.count.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        EventWaiter(Arc::clone(self))
    }
}

/// A registered waiter, until dropped.
pub(crate) struct EventWaiter(Arc<EventWaiters>);

impl EventWaiter {
    /// Completes at the next event after this call.
    pub fn next(&self) -> Notified<'_> {
        self.0.raised.notified()
    }
}

impl Drop for EventWaiter {
    fn drop(&mut self) {
        self.0.count.fetch_sub(1, Ordering::SeqCst);
    }
}
