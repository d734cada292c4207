//! Devices that are removed after their last close.
//!
//! Every close of a device checks for deferred removals and wakes the task that runs them. Both
//! sides first write and then read, in one total order (`SeqCst`): either the deferring verb sees
//! that the device is closed, or the last close sees that a removal is deferred.

use super::DeviceRegistry;
use super::directory::RegisteredDevice;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use tokio::sync::Notify;

/// Number of deferred removals, and the wake-up of the task that runs them.
#[derive(Default)]
pub(super) struct DeferredRemovalNotifier {
    waiting: AtomicUsize,
    wake: Notify,
}

impl DeferredRemovalNotifier {
    /// Notes that a device was closed.
    pub fn closed(&self) {
        if self.waiting.load(SeqCst) > 0 {
            self.wake.notify_one();
        }
    }
}

impl RegisteredDevice {
    /// True if the device is removed after its last close.
    pub(crate) fn is_deferred(&self) -> bool {
        self.is_deferred.load(SeqCst)
    }

    /// Sets or cancels the deferred removal; returns the previous state. The caller checks
    /// afterwards if the device is open.
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

impl Drop for RegisteredDevice {
    fn drop(&mut self) {
        self.defer(false);
    }
}

impl DeviceRegistry {
    /// Waits until a device is closed while removals are deferred. Only one task may wait.
    pub(crate) async fn closed(&self) {
        self.deferred.wake.notified().await;
    }
}
