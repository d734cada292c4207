//! Cross-Controller Reset (base specification 2.3, 5.4.3): a host that has lost a controller asks
//! another controller of its own to end it, so that it may repeat its writes.
//!
//! The other association receives nothing more, its requests at the devices are awaited, and then
//! it is forgotten; only then the reset is done. If this takes longer than [`ANSWER_MAX`], the
//! command is answered before, an entry of the log page says that the reset is in progress, and an
//! event tells its end.
//!
//! A controller that is gone is answered with success at once if it was one of this server. Another
//! server of the same subsystem may have the disk open too, so an instance that this server does
//! not know is refused: the host must then wait for its keep-alive timeout and the quiesce time.

use super::admin::AdminReply;
use super::association::Association;
use super::queue::NvmeQueue;
use std::sync::Arc;
use udm_core::Nanos;
use udm_wire::nvme::{
    CROSS_CONTROLLER_RESET_LOG_MAX, CommandCapsule, ControllerKind, CrossControllerReset,
    CrossControllerResetEntry, CrossControllerResetStatus, NvmeStatus, encode_cross_controller_reset_log,
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
    association: Arc<Association>,
    uniquifier: u8,
    /// Identifier of the command; `None` once it was answered.
    command: Option<u16>,
    answer_until: Nanos,
}

impl ControllerResets {
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
    pub(super) fn cross_controller_reset(
        &mut self,
        command: &CommandCapsule,
    ) -> Result<AdminReply, NvmeStatus> {
        let invalid = Err(NvmeStatus::INVALID_FIELD.permanent());
        let impacted = CrossControllerReset::decode(command).impacted;
        let (own, subsystem) = (&self.link.association, &self.server.subsystem);
        if impacted.id == own.id || !subsystem.is_own_instance(&impacted) {
            return invalid;
        }
        let association = subsystem.association(impacted.id);
        let Some(association) = association.filter(|one| one.instance() == Some(impacted)) else {
            return Ok(AdminReply::Done(CrossControllerReset::DONE));
        };
        let is_own_host = association.host == own.host && association.host_id == own.host_id;
        if !is_own_host || association.kind != ControllerKind::Io {
            return invalid;
        }
        let resets = &mut self.admin.as_mut().expect("it is an admin queue").resets;
        if resets.in_progress.iter().any(|reset| reset.association.id == impacted.id) {
            return Err(NvmeStatus::CROSS_CONTROLLER_RESET_IN_PROGRESS);
        }
        if resets.in_progress.len() >= RESETS_MAX.into() {
            return Err(NvmeStatus::CROSS_CONTROLLER_RESET_LIMIT_EXCEEDED);
        }
        if resets.entries.len() + resets.in_progress.len() >= CROSS_CONTROLLER_RESET_LOG_MAX {
            return Err(NvmeStatus::CROSS_CONTROLLER_RESET_LOG_FULL);
        }
        association.end("its host has reset it through another controller");
        resets.in_progress.push(ResetInProgress {
            association,
            uniquifier: impacted.uniquifier,
            command: Some(command.id()),
            answer_until: self.now + ANSWER_MAX,
        });
        self.look_at_resets();
        Ok(AdminReply::Later)
    }

    /// Looks for resets that are done: their controllers are forgotten.
    pub(super) fn look_at_resets(&mut self) {
        let Some(admin) = &mut self.admin else { return };
        let resets = &mut admin.resets;
        let mut answers = Vec::new();
        resets.in_progress.retain(|reset| {
            if !reset.association.is_forgotten() {
                return true;
            }
            if let Some(id) = reset.command {
                answers.push(id);
                return false;
            }
            let (id, uniquifier) = (reset.association.id, reset.uniquifier);
            let is_this = |entry: &&mut CrossControllerResetEntry| {
                entry.status == CrossControllerResetStatus::InProgress
                    && (entry.impacted, entry.uniquifier) == (id, uniquifier)
            };
            if let Some(entry) = resets.entries.iter_mut().find(is_this) {
                entry.status = CrossControllerResetStatus::Succeeded;
            }
            admin.events.reset_completed();
            false
        });
        for id in answers {
            self.respond(id, NvmeStatus::SUCCESS, CrossControllerReset::DONE);
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
                    impacted: reset.association.id,
                    uniquifier: reset.uniquifier,
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
