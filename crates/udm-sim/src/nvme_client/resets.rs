//! Cross-Controller Reset at a model target: it ends the other controller, and reports success when
//! no command of it is at a disk. It answers late, by an event, or only in the log page; it
//! refuses, and it fails.

use super::conn::{ConnContext, ControllerConn};
use crate::model::Violation;
use udm_core::Nanos;
use udm_wire::nvme::{
    CrossControllerReset, CrossControllerResetEntry, CrossControllerResetStatus, NvmeCommand, NvmeStatus,
    encode_cross_controller_reset_log,
};

/// Progress of a reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ResetPhase {
    Asked,
    /// The other controller has ended.
    Begun,
    /// The command is answered, and the log page reports the end.
    Answered,
    Over,
}

/// A reset of another controller.
#[derive(Clone, Copy, Debug)]
pub(super) struct SimReset {
    pub(super) victim: usize,
    pub(super) phase: ResetPhase,
    /// Identifier of the command.
    command: u16,
    /// Earliest time of the next progress.
    pub(super) due: Nanos,
    pub(super) fails: bool,
    /// The command is answered before the reset is over.
    is_answered_early: bool,
}

impl ControllerConn {
    /// Takes the command.
    pub(super) fn reset_command(
        &mut self,
        controller: usize,
        command: &NvmeCommand,
        a: &mut ConnContext<'_>,
    ) -> Result<(), Violation> {
        let wrong = |why: &str| Err(format!("connection {}: {command:?}: {why}", self.link));
        let impacted = CrossControllerReset::decode(command).impacted;
        let (own, max) = (&a.controllers[controller], usize::from(a.target.description.resets_max));
        if max == 0 || impacted.id == own.id {
            return wrong("a reset that the controller does not do");
        }
        if own.resets.len() >= max {
            return wrong("more resets than the controller does at a time");
        }
        let victim = a.controllers.iter().position(|one| one.instance == Some(impacted));
        let is_refused = !a.calm && a.chance.one_in(4);
        let Some(victim) = victim.filter(|_| !is_refused) else {
            // Also for a controller of another target.
            let status = a.chance.pick(&[
                NvmeStatus::INVALID_FIELD.permanent(),
                NvmeStatus::CROSS_CONTROLLER_RESET_IN_PROGRESS,
                NvmeStatus::CROSS_CONTROLLER_RESET_LOG_FULL,
                NvmeStatus::CROSS_CONTROLLER_RESET_LIMIT_EXCEEDED,
            ]);
            self.complete(command.id(), 0, status);
            return Ok(());
        };
        let fails = !a.calm && a.chance.one_in(4);
        let reset = SimReset {
            victim,
            phase: ResetPhase::Asked,
            command: command.id(),
            due: a.now + Nanos(a.chance.span(20_000_000)),
            fails,
            is_answered_early: a.chance.one_in(2),
        };
        a.shared.say(format!("connection {}: a reset of controller {victim}, fails: {fails}", self.link));
        a.controllers[controller].resets.push(reset);
        Ok(())
    }

    /// Continues reset `i` of controller `source`. `is_quiet` if it may end now.
    pub(super) fn advance_reset(&mut self, source: usize, i: usize, is_quiet: bool, a: &mut ConnContext<'_>) {
        let SimReset { victim, phase, command, fails, is_answered_early, .. } =
            a.controllers[source].resets[i];
        let outcome = match fails {
            true => CrossControllerResetStatus::Failed,
            false => CrossControllerResetStatus::Succeeded,
        };
        match phase {
            ResetPhase::Begun if is_answered_early => {
                let (own, impacted) = (a.controllers[source].id, a.controllers[victim].instance);
                let Some(impacted) = impacted else { return };
                let status = CrossControllerResetStatus::InProgress;
                let entry = CrossControllerResetEntry {
                    impacted: impacted.id,
                    uniquifier: impacted.uniquifier,
                    source: own,
                    status,
                };
                let one = &mut a.controllers[source];
                one.reset_log.push((victim, entry));
                one.resets[i].phase = ResetPhase::Answered;
                one.resets[i].due = a.now + Nanos(a.chance.span(500_000_000));
                self.complete(command, 0, NvmeStatus::SUCCESS);
            }
            ResetPhase::Begun if is_quiet => {
                a.controllers[source].resets[i].phase = ResetPhase::Over;
                if fails {
                    return self.complete(command, 0, NvmeStatus::INTERNAL_ERROR);
                }
                a.counts.model_resets += 1;
                a.controllers[source].fenced.push(victim);
                self.complete(command, CrossControllerReset::DONE, NvmeStatus::SUCCESS);
            }
            ResetPhase::Answered if is_quiet => {
                let one = &mut a.controllers[source];
                one.resets[i].phase = ResetPhase::Over;
                for (other, entry) in &mut one.reset_log {
                    if *other == victim && entry.status == CrossControllerResetStatus::InProgress {
                        entry.status = outcome;
                    }
                }
                one.reset_ended = true;
                self.report_events(source, a);
            }
            _ => {}
        }
    }

    /// The log page of the resets of a controller.
    pub(super) fn reset_log(
        &mut self,
        controller: usize,
        removes_completed: bool,
        a: &mut ConnContext<'_>,
    ) -> Vec<u8> {
        let one = &mut a.controllers[controller];
        one.is_reset_armed = true;
        let entries: Vec<CrossControllerResetEntry> = one.reset_log.iter().map(|(_, entry)| *entry).collect();
        for (victim, entry) in &one.reset_log {
            if entry.status == CrossControllerResetStatus::Succeeded {
                a.counts.model_resets += 1;
                one.fenced.push(*victim);
            }
        }
        if removes_completed {
            one.reset_log.retain(|(_, entry)| entry.status == CrossControllerResetStatus::InProgress);
        }
        encode_cross_controller_reset_log(&entries)
    }
}
