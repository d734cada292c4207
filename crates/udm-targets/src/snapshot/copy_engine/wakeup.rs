//! A bell that a lane listens to, and when it looked at it last.

use std::sync::Arc;
use udm_core::{Cx, WaitHandle, WaitQueue, WakeEpoch};

/// See the module's documentation.
pub(super) struct WakeupCursor(WaitHandle, WakeEpoch);

impl WakeupCursor {
    /// It has not been rung.
    pub(super) fn new(bell: &Arc<WaitQueue>, cx: &mut Cx<'_>) -> WakeupCursor {
        let listener = bell.subscribe(cx);
        let seen = listener.epoch();
        WakeupCursor(listener, seen)
    }

    /// True when it was rung since the last look.
    pub(super) fn has_news(&mut self) -> bool {
        let now = self.0.epoch();
        std::mem::replace(&mut self.1, now) != now
    }

    /// Asks to be woken when it is rung.
    pub(super) fn wait(&self, cx: &mut Cx<'_>) {
        self.0.wait(self.1, cx);
    }
}
