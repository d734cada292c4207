//! Devices that are removed when nobody has them open any more.
//!
//! Who closes a device looks whether any removal waits, and wakes who sees to it if so. Both mark
//! first and look then, in one order for all (`SeqCst`): either the one that defers a removal sees
//! that nobody has the device open, or the last one to close it sees that a removal waits.

use super::Registry;
use super::directory::Mapped;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use tokio::sync::Notify;

/// How many removals wait, and who sees to them.
#[derive(Default)]
pub(super) struct DeferredRemovals {
    waiting: AtomicUsize,
    wake: Notify,
}

impl DeferredRemovals {
    /// Somebody has closed a device.
    pub fn closed(&self) {
        if self.waiting.load(SeqCst) > 0 {
            self.wake.notify_one();
        }
    }
}

impl Mapped {
    /// True when it is removed as soon as nobody has it open.
    pub(crate) fn is_deferred(&self) -> bool {
        self.is_deferred.load(SeqCst)
    }

    /// Has it removed when nobody has it open any more, or not; what was so before. Who says so
    /// looks behind this whether somebody has it open.
    pub(crate) fn defer(&self, deferred: bool) -> bool {
        let before = self.is_deferred.swap(deferred, SeqCst);
        if deferred && !before {
            self.deferred.waiting.fetch_add(1, SeqCst);
        } else if before && !deferred {
            self.deferred.waiting.fetch_sub(1, SeqCst);
        }
        before
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        self.defer(false);
    }
}

impl Registry {
    /// Waits until a device has been closed while removals wait. For one at a time.
    pub(crate) async fn closed(&self) {
        self.deferred.wake.notified().await;
    }
}
