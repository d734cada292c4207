//! Who waits for an event of a device.
//!
//! An event is raised by whoever meets it, cores included, and costs them a look at a counter
//! where nobody waits. Both mark first and look then: whoever waits counts himself and looks at the
//! number of events, and whoever raises one counts it and looks whether somebody waits.

use crate::http::api;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering, fence};
use tokio::sync::Notify;
use tokio::sync::futures::Notified;
use udm_core::bugs::{self, Bug};

/// Those who wait for an event of one device. Does not keep the device.
#[derive(Default)]
pub(crate) struct EventWaiters {
    count: AtomicUsize,
    raised: Notify,
    /// What the device was when it was removed.
    last: OnceLock<api::Device>,
}

impl EventWaiters {
    /// An event was raised.
    pub fn wake(&self) {
        fence(Ordering::SeqCst);
        if self.count.load(Ordering::SeqCst) > 0 {
            self.raised.notify_waiters();
        }
    }

    /// The device is gone, and was this.
    pub fn gone(&self, last: api::Device) {
        let _ = self.last.set(last);
        if !bugs::on(Bug::GoneUnheard) {
            self.wake();
        }
    }

    /// What the device was, if it is gone.
    pub fn last(&self) -> Option<&api::Device> {
        self.last.get()
    }

    /// Counts somebody who waits.
    pub fn enter(self: &Arc<EventWaiters>) -> EventWaiter {
        self.count.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        EventWaiter(Arc::clone(self))
    }
}

/// Somebody who waits, until it is dropped.
pub(crate) struct EventWaiter(Arc<EventWaiters>);

impl EventWaiter {
    /// Ends with the next event behind this call.
    pub fn next(&self) -> Notified<'_> {
        self.0.raised.notified()
    }
}

impl Drop for EventWaiter {
    fn drop(&mut self) {
        if bugs::on(Bug::WaitersForgotten) {
            self.0.count.store(1, Ordering::SeqCst);
        }
        self.0.count.fetch_sub(1, Ordering::SeqCst);
    }
}
