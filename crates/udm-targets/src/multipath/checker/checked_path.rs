//! A path of the checker and its pending check.

use super::check_schedule::PathCheckSchedule;
use super::marginal::PathQuarantineState;
use udm_core::{BioTaskCx, BioTaskLaneId, Nanos};
use udm_dm::target::ResolvedDevice;

/// A path.
pub(super) struct CheckedPath {
    /// `None` after the task was stopped, so that the device can be closed.
    pub(super) device: Option<ResolvedDevice>,
    pub(super) lane: Option<BioTaskLaneId>,
    pub(super) schedule: PathCheckSchedule,
    /// The failure count and the failed state at the last look.
    pub(super) seen: (u64, bool),
    /// The failure count when the task began. Such a failure is not new.
    pub(super) fails_at_start: u64,
    /// The pending check.
    pub(super) pending: Option<PendingPathCheck>,
    /// Sample reads in flight.
    pub(super) samples: usize,
    pub(super) quarantine: PathQuarantineState,
    /// The log line about another or truncated disk has been written.
    pub(super) refused: bool,
}

/// A pending check.
pub(super) struct PendingPathCheck {
    pub(super) at: Nanos,
    /// The failure count of the path when the check began.
    pub(super) fails: u64,
    /// The check timed out; its result is ignored.
    pub(super) late: bool,
    /// The check reads the last block.
    pub(super) end: bool,
}

impl CheckedPath {
    pub(super) fn is_idle(&self) -> bool {
        self.pending.is_none() && self.samples == 0
    }

    /// Closes the lane if nothing is in flight on it.
    pub(super) fn close(&mut self, cx: &mut dyn BioTaskCx) {
        if self.is_idle()
            && let Some(lane) = self.lane.take()
        {
            cx.close(lane);
        }
    }
}
