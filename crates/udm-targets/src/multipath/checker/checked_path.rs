//! A path of the checker, and the check of it that is under way.

use super::check_schedule::CheckSchedule;
use super::marginal::Quarantine;
use udm_core::{DeviceSlot, Nanos, TaskCx};
use udm_dm::target::DeviceRef;

/// A path.
pub(super) struct CheckedPath {
    /// Gone when the task was stopped, so that nothing is held that nobody needs.
    pub(super) device: Option<DeviceRef>,
    pub(super) lane: Option<DeviceSlot>,
    pub(super) pace: CheckSchedule,
    /// How often it had failed when it was last looked at, and whether it was failed.
    pub(super) seen: (u64, bool),
    /// How often it had failed when the task began: that was counted then, or is long ago, and no
    /// failure of now.
    pub(super) fails_at_start: u64,
    /// The check under way.
    pub(super) pending: Option<PendingCheck>,
    /// Reads of a sample in flight.
    pub(super) samples: usize,
    pub(super) quarantine: Quarantine,
    /// It has been said that another disk answers in its place, or a part of it.
    pub(super) refused: bool,
}

/// A check under way.
pub(super) struct PendingCheck {
    pub(super) at: Nanos,
    /// How often the path had failed.
    pub(super) fails: u64,
    /// It took too long: what it says is not listened to.
    pub(super) late: bool,
    /// It is of the last block.
    pub(super) end: bool,
}

impl CheckedPath {
    pub(super) fn is_idle(&self) -> bool {
        self.pending.is_none() && self.samples == 0
    }

    /// Lets go of its lane, where nothing is in flight on it.
    pub(super) fn close(&mut self, cx: &mut dyn TaskCx) {
        if self.is_idle()
            && let Some(lane) = self.lane.take()
        {
            cx.close(lane);
        }
    }
}
