//! A bell that a lane listens to, and when it looked at it last.

use std::sync::Arc;
use udm_core::{Bell, Cx, Epoch, Listener};

/// See the module's documentation.
pub(super) struct Heard(Listener, Epoch);

impl Heard {
    /// It has not been rung.
    pub(super) fn new(bell: &Arc<Bell>, cx: &mut Cx<'_>) -> Heard {
        let listener = bell.listen(cx);
        let seen = listener.epoch();
        Heard(listener, seen)
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
