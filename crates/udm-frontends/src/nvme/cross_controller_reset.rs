//! Cross-Controller Reset (base specification 2.3, 5.4.3): a host that has lost a controller asks
//! another controller of its own to end it, so that it may repeat its writes.
//!
//! The other association receives nothing more, its requests at the devices are awaited, and then
//! it is forgotten; only then the reset is done. If this takes longer than [`ANSWER_MAX`], the
//! command is answered before, an entry of the log page says that the reset is in progress, and an
//! event tells its end.
//!
//! A controller that is gone is answered with success at once if it was one of this server. Another
//! server of the same subsystem may have the disk open too. It is asked if it is known ([`peers`]);
//! otherwise the command is refused, and the host must wait for its keep-alive timeout and the
//! quiesce time.
//!
//! [`peers`]: super::peers

use super::admin::AdminReply;
use super::association::Association;
use super::peers::{NvmeResetOutcome, PendingPeerReset};
use super::queue::NvmeQueue;
use std::sync::Arc;
use udm_core::Nanos;
use udm_wire::nvme::{
    CROSS_CONTROLLER_RESET_LOG_MAX, ControllerInstance, ControllerKind, CrossControllerReset,
    CrossControllerResetEntry, CrossControllerResetStatus, NvmeCommand, NvmeStatus,
    encode_cross_controller_reset_log,
};

/// Limit of resets in progress of a controller (CCRL); TP8028 recommends 4.
pub(super) const RESETS_MAX: u8 = 4;

/// Time after which the command is answered, although the reset is in progress.
const ANSWER_MAX: Nanos = Nanos(1_000_000_000);

/// The resets that a controller was asked for.
#[derive(Default)]
pub(super) struct ControllerResets {
    in_progress: Vec<ResetInProgress>,
    /// Entries of the log page: those in progress whose command was answered, and completed ones.
    entries: Vec<CrossControllerResetEntry>,
}

struct ResetInProgress {
    impacted: ControllerInstance,
    target: ResetTarget,
    /// Identifier of the command; `None` once it was answered.
    command: Option<u16>,
    answer_until: Nanos,
}

/// Where the controller is.
enum ResetTarget {
    /// In this server.
    Own(Arc<Association>),
    /// In another server of the subsystem.
    Peer(Arc<PendingPeerReset>),
}

impl ResetTarget {
    /// The outcome; `None` while the reset is in progress.
    fn outcome(&self) -> Option<NvmeResetOutcome> {
        match self {
            ResetTarget::Own(association) => association.is_forgotten().then_some(NvmeResetOutcome::Done),
            ResetTarget::Peer(reset) => reset.outcome(),
        }
    }
}

impl ControllerResets {
    /// Returns whether a reset of `impacted` may begin.
    ///
    /// # Errors
    /// It is in progress, or there are too many.
    fn may_begin(&self, impacted: ControllerInstance) -> Result<(), NvmeStatus> {
        if self.in_progress.iter().any(|reset| reset.impacted.id == impacted.id) {
            return Err(NvmeStatus::CROSS_CONTROLLER_RESET_IN_PROGRESS);
        }
        if self.in_progress.len() >= RESETS_MAX.into() {
            return Err(NvmeStatus::CROSS_CONTROLLER_RESET_LIMIT_EXCEEDED);
        }
        if self.entries.len() + self.in_progress.len() >= CROSS_CONTROLLER_RESET_LOG_MAX {
            return Err(NvmeStatus::CROSS_CONTROLLER_RESET_LOG_FULL);
        }
        Ok(())
    }

    /// The log page. With `removes_completed`, entries of completed resets are removed after it.
    pub(super) fn log(&mut self, removes_completed: bool) -> Vec<u8> {
        let page = encode_cross_controller_reset_log(&self.entries);
        if removes_completed {
            self.entries.retain(|entry| entry.status == CrossControllerResetStatus::InProgress);
        }
        page
    }

    /// Forgets all: the controller was reset.
    pub(super) fn clear(&mut self) {
        self.in_progress.clear();
        self.entries.clear();
    }
}

impl NvmeQueue {
    pub(super) fn cross_controller_reset(&mut self, command: &NvmeCommand) -> Result<AdminReply, NvmeStatus> {
        let invalid = Err(NvmeStatus::INVALID_FIELD.permanent());
        let impacted = CrossControllerReset::decode(command).impacted;
        let (own, subsystem) = (&self.link.association, &self.server.subsystem);
        if impacted.id == own.id {
            return invalid;
        }
        let resets = &mut self.admin.as_mut().expect("it is an admin queue").resets;
        let target = if subsystem.is_own_instance(&impacted) {
            let association = subsystem.association(impacted.id);
            let Some(association) = association.filter(|one| one.instance() == Some(impacted)) else {
                return Ok(AdminReply::Done(CrossControllerReset::DONE));
            };
            let is_own_host = association.host == own.host && association.host_id == own.host_id;
            if !is_own_host || association.kind != ControllerKind::Io {
                return invalid;
            }
            resets.may_begin(impacted)?;
            association.end("its host has reset it through another controller");
            ResetTarget::Own(association)
        } else {
            let Some(peers) = &subsystem.peers else { return invalid };
            resets.may_begin(impacted)?;
            ResetTarget::Peer(PendingPeerReset::begin(&**peers, impacted, own, subsystem))
        };
        let answer_until = self.now + ANSWER_MAX;
        let command = Some(command.id());
        resets.in_progress.push(ResetInProgress { impacted, target, command, answer_until });
        self.look_at_resets();
        Ok(AdminReply::Later)
    }

    /// Looks for resets that have ended.
    pub(super) fn look_at_resets(&mut self) {
        let Some(admin) = &mut self.admin else { return };
        let resets = &mut admin.resets;
        let mut answers = Vec::new();
        resets.in_progress.retain(|reset| {
            let Some(outcome) = reset.target.outcome() else { return true };
            if let Some(id) = reset.command {
                answers.push((id, outcome));
                return false;
            }
            let ControllerInstance { id, uniquifier, .. } = reset.impacted;
            let is_this = |entry: &&mut CrossControllerResetEntry| {
                entry.status == CrossControllerResetStatus::InProgress
                    && (entry.impacted, entry.uniquifier) == (id, uniquifier)
            };
            if let Some(entry) = resets.entries.iter_mut().find(is_this) {
                entry.status = match outcome {
                    NvmeResetOutcome::Done => CrossControllerResetStatus::Succeeded,
                    NvmeResetOutcome::Refused | NvmeResetOutcome::Failed => {
                        CrossControllerResetStatus::Failed
                    }
                };
            }
            admin.events.reset_completed();
            false
        });
        for (id, outcome) in answers {
            match outcome {
                NvmeResetOutcome::Done => self.respond(id, NvmeStatus::SUCCESS, CrossControllerReset::DONE),
                NvmeResetOutcome::Refused => self.respond(id, NvmeStatus::INVALID_FIELD.permanent(), 0),
                // The host must not repeat the command: its time is shorter.
                NvmeResetOutcome::Failed => self.respond(id, NvmeStatus::INTERNAL_ERROR.permanent(), 0),
            }
        }
        self.report_events();
    }

    /// Answers commands whose resets take long.
    pub(super) fn answer_late_resets(&mut self) {
        let source = self.link.association.id;
        let Some(admin) = &mut self.admin else { return };
        let mut answers = Vec::new();
        for reset in &mut admin.resets.in_progress {
            if reset.answer_until <= self.now
                && let Some(id) = reset.command.take()
            {
                answers.push(id);
                admin.resets.entries.push(CrossControllerResetEntry {
                    impacted: reset.impacted.id,
                    uniquifier: reset.impacted.uniquifier,
                    source,
                    status: CrossControllerResetStatus::InProgress,
                });
            }
        }
        for id in answers {
            self.respond(id, NvmeStatus::SUCCESS, 0);
        }
    }

    /// The time at which the next command must be answered; never if none waits.
    pub(super) fn reset_answers_until(&self) -> Nanos {
        let waiting = self.admin.iter().flat_map(|admin| &admin.resets.in_progress);
        let waiting = waiting.filter(|reset| reset.command.is_some());
        waiting.map(|reset| reset.answer_until).min().unwrap_or(Nanos::NEVER)
    }
}
