//! Limits of the requests and bytes per second of a mapped device.

use super::MappedDevice;
use crate::throttle::{Throttle, ThrottleCounters};
use std::sync::Arc;
use udm_core::{CoreCommandSender, Device, LaneCommand};

impl MappedDevice {
    /// Sets limits of the requests and bytes per second; `None` for none. Several devices may have
    /// the same `throttle`. Bios that wait go by the new limits.
    pub fn set_throttle(&self, throttle: Option<Arc<Throttle>>, cores: &dyn CoreCommandSender) {
        self.throttle.set(throttle);
        cores.broadcast(self.id(), LaneCommand::Kick);
    }

    /// The limits of the requests and bytes per second; `None` for none.
    #[must_use]
    pub fn throttle(&self) -> Option<Arc<Throttle>> {
        self.throttle.get()
    }

    /// Lifts the limits, or puts them back: with `is_lifted`, all that waits passes at once. For a
    /// device that must complete its requests before it goes away.
    pub fn lift_throttle(&self, is_lifted: bool, cores: &dyn CoreCommandSender) {
        self.throttle.lift(is_lifted);
        cores.broadcast(self.id(), LaneCommand::Kick);
    }

    /// Counts the bios that wait, or had to wait, because of limits.
    #[must_use]
    pub fn throttle_counters(&self) -> ThrottleCounters {
        self.throttle.counters()
    }
}
