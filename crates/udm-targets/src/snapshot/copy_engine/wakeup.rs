//! A wait queue of a lane, with the last epoch seen.

use std::sync::Arc;
use udm_core::{Cx, WaitQueue, WaitQueueSubscription, WakeEpoch};

/// A wait queue and the last epoch that the lane has seen.
pub(super) struct WaitQueueSeenEpoch(WaitQueueSubscription, WakeEpoch);

impl WaitQueueSeenEpoch {
    /// A cursor that has seen all wakeups so far.
    pub(super) fn new(wait_queue: &Arc<WaitQueue>, cx: &mut Cx<'_>) -> WaitQueueSeenEpoch {
        let wait_handle = wait_queue.subscribe(cx);
        let seen = wait_handle.epoch();
        WaitQueueSeenEpoch(wait_handle, seen)
    }

    /// True if there was a wakeup since the last call.
    pub(super) fn has_news(&mut self) -> bool {
        let now = self.0.epoch();
        std::mem::replace(&mut self.1, now) != now
    }

    /// Registers for the next wakeup.
    pub(super) fn wait(&self, cx: &mut Cx<'_>) {
        self.0.wait(self.1, cx);
    }
}
