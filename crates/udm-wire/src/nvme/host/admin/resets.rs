//! Resets of other controllers that this controller was asked for (Cross-Controller Reset).
//!
//! The command may be answered before the reset is done. Then an event tells its end, and the log
//! page says how it ended. The owner may also ask for the log at times
//! ([`HostAdmin::follow_resets`]), so that a controller that sends no event is enough.

use super::{AdminEvent, AdminStep, HostAdmin, LOG_RESETS, RESET};
use crate::nvme::host::command::HostCommand;
use crate::nvme::{
    ControllerInstance, CrossControllerReset, CrossControllerResetStatus, IDENTIFY_SIZE, NvmeStatus,
    decode_cross_controller_reset_log,
};
use std::collections::VecDeque;

/// Removes the entries of completed resets from the log after the read (RMC).
const REMOVE_COMPLETED: u8 = 1;

/// How a reset ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResetOutcome {
    /// No request of the controller will land.
    Succeeded,
    /// Requests of the controller may still land.
    Failed,
    /// The command was refused: requests of the controller may still land.
    Refused(NvmeStatus),
}

/// Resets that the owner has asked for.
#[derive(Default)]
pub(super) struct HostRequestedResets {
    waiting: VecDeque<ControllerInstance>,
    /// The reset of the command in flight.
    sent: Option<ControllerInstance>,
    /// Resets that were answered before their end.
    in_progress: Vec<ControllerInstance>,
    /// An event or the owner has asked for the log.
    pub(super) must_read_log: bool,
}

impl HostAdmin {
    /// Asks the controller to reset the controller `impacted` of the same subsystem. An event tells
    /// the end. Returns false if the controller does not support it, or is not set up.
    pub fn reset_controller(&mut self, impacted: ControllerInstance) -> bool {
        let can = self.controller.as_ref().is_some_and(|own| own.resets_max > 0 && own.id != impacted.id);
        if !self.is_ready || !can {
            return false;
        }
        self.resets.waiting.push_back(impacted);
        self.send_reset();
        true
    }

    /// Number of resets that the controller was asked for and whose end it has not told.
    #[must_use]
    pub fn unfinished_resets(&self) -> usize {
        let HostRequestedResets { waiting, sent, in_progress, .. } = &self.resets;
        waiting.len() + usize::from(sent.is_some()) + in_progress.len()
    }

    /// Reads the log page of resets if one is in progress.
    pub fn follow_resets(&mut self) {
        self.resets.must_read_log |= !self.resets.in_progress.is_empty();
        self.read_next();
    }

    /// Sends the next command, if the limit of the controller allows it.
    fn send_reset(&mut self) {
        let max = self.controller.as_ref().map_or(0, |controller| controller.resets_max);
        if self.resets.sent.is_some() || self.resets.in_progress.len() >= usize::from(max) {
            return;
        }
        if let Some(impacted) = self.resets.waiting.pop_front() {
            self.resets.sent = Some(impacted);
            self.send(RESET, &HostCommand::cross_controller_reset(&impacted), &[]);
        }
    }

    /// Handles the completion of the command in flight.
    pub(super) fn reset_answered(&mut self, status: NvmeStatus, result: u64) -> Option<AdminEvent> {
        let impacted = self.resets.sent.take()?;
        let outcome = if !status.is_ok() {
            Some(ResetOutcome::Refused(status))
        } else if result & CrossControllerReset::DONE != 0 {
            Some(ResetOutcome::Succeeded)
        } else {
            self.resets.in_progress.push(impacted);
            None
        };
        self.send_reset();
        outcome.map(|outcome| AdminEvent::ResetEnded(impacted, outcome))
    }

    /// Reads the log page of resets, if it is due. Returns true if it does.
    pub(super) fn read_reset_log(&mut self) -> bool {
        let is_due = std::mem::take(&mut self.resets.must_read_log);
        if is_due {
            // The longest page has the same size.
            let log = HostCommand::log_page(LOG_RESETS, REMOVE_COMPLETED, IDENTIFY_SIZE as u32);
            self.send_step(AdminStep::ResetLog, &log);
        }
        is_due
    }

    /// Compares the log page with the resets in progress. Entries of other controllers, of other
    /// instances and of other sources are ignored: a page is not trusted to name only what it was
    /// asked for. A reset without an entry goes on; the owner does not wait for it for ever.
    pub(super) fn handle_reset_log(&mut self) {
        self.step = AdminStep::Idle;
        let (source, entries) = (self.controller_id, decode_cross_controller_reset_log(&self.data));
        let HostRequestedResets { in_progress, .. } = &mut self.resets;
        let events = &mut self.events;
        in_progress.retain(|reset| {
            let own = entries.iter().filter(|entry| {
                (entry.impacted, entry.uniquifier, entry.source) == (reset.id, reset.uniquifier, source)
            });
            let outcome = own.fold(None, |outcome, entry| match entry.status {
                CrossControllerResetStatus::InProgress => outcome,
                // If entries contradict each other, the reset is not relied on.
                CrossControllerResetStatus::Succeeded => outcome.or(Some(ResetOutcome::Succeeded)),
                CrossControllerResetStatus::Failed => Some(ResetOutcome::Failed),
            });
            events.extend(outcome.map(|outcome| AdminEvent::ResetEnded(*reset, outcome)));
            outcome.is_none()
        });
        self.send_reset();
        self.read_next();
    }
}
