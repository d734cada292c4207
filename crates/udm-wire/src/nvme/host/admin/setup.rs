//! The setup of a controller, one command after the other, and the reads that events ask for.

use super::{AdminEvent, COMMAND, HostAdmin};
use crate::nvme::host::authentication::{AuthenticationStep, HostAuthentication};
use crate::nvme::host::command::{HostCommand, HostData};
use crate::nvme::host::connect::needs_authentication;
use crate::nvme::host::error::{HostError, check_status};
use crate::nvme::host::facts::ControllerFacts;
use crate::nvme::{AsyncEventMask, ControllerStatus, NvmeStatus, QueueCounts, property};

/// The command in flight with identifier [`COMMAND`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AdminStep {
    Connect,
    Authentication,
    Capabilities,
    Enable,
    Status,
    IdentifyController,
    Queues,
    EventMask,
    IdentifyNamespace,
    Descriptors,
    AnaLog,
    /// Reading this log makes the controller report changes again.
    ChangedLog,
    ResetLog,
    /// No command is in flight.
    Idle,
}

impl AdminStep {
    const fn name(self) -> &'static str {
        match self {
            AdminStep::Connect => "the connection",
            AdminStep::Authentication => "the authentication",
            AdminStep::Capabilities | AdminStep::Status => "a property",
            AdminStep::Enable => "to be enabled",
            AdminStep::IdentifyController => "Identify Controller",
            AdminStep::Queues => "I/O queues",
            AdminStep::EventMask => "events",
            AdminStep::IdentifyNamespace => "Identify Namespace",
            AdminStep::Descriptors => "the identifiers of the namespace",
            AdminStep::AnaLog => "the ANA log",
            AdminStep::ChangedLog => "the log of changed namespaces",
            AdminStep::ResetLog => "the log of resets",
            AdminStep::Idle => "nothing",
        }
    }
}

impl HostAdmin {
    pub(super) fn handle_completion(
        &mut self,
        status: NvmeStatus,
        result: u64,
    ) -> Result<Option<AdminEvent>, HostError> {
        let step = self.step;
        match step {
            // A controller may lack these.
            AdminStep::Descriptors | AdminStep::ResetLog if !status.is_ok() => self.data.fill(0),
            AdminStep::EventMask | AdminStep::ChangedLog => {}
            _ => check_status(status, step.name())?,
        }
        match step {
            AdminStep::Connect => {
                self.controller_id = result as u16;
                let is_needed = needs_authentication(&self.options, result)?;
                match self.options.secrets.clone().filter(|_| is_needed) {
                    Some(secrets) => {
                        let (begun, step) = HostAuthentication::begin(&secrets);
                        self.authentication = Some(begun);
                        self.authentication_step(step);
                    }
                    None => self.read_capabilities(),
                }
            }
            AdminStep::Authentication => {
                let Some(authentication) = &mut self.authentication else { return Ok(None) };
                let step = authentication.next(&self.options, &self.data)?;
                self.authentication_step(step);
            }
            AdminStep::Capabilities => {
                self.capabilities = result;
                // Entries of 64 and 16 bytes, pages of 4 KiB, enabled.
                const CONFIGURATION: u32 = 4 << 20 | 6 << 16 | 1;
                let set = HostCommand::property_set(property::CONFIGURATION, CONFIGURATION);
                self.send_step(AdminStep::Enable, &set);
            }
            AdminStep::Enable => {
                self.send_step(AdminStep::Status, &HostCommand::property_get(property::STATUS, false));
            }
            AdminStep::Status => {
                let status = ControllerStatus::decode(result as u32);
                if status.is_failed {
                    return Err(HostError::Unusable("the controller has failed (CSTS.CFS)".into()));
                }
                if !status.is_ready {
                    return Ok(Some(AdminEvent::NotReady));
                }
                self.send_step(AdminStep::IdentifyController, &HostCommand::identify(1, 0));
            }
            AdminStep::IdentifyController => {
                let bytes = self.identify_data();
                let facts = ControllerFacts::decode(&bytes, self.controller_id, self.capabilities);
                self.controller = Some(facts.map_err(HostError::Unusable)?);
                let queues = QueueCounts::encode(self.options.queues.max(1));
                self.send_step(AdminStep::Queues, &HostCommand::set_features(0x07, queues));
            }
            AdminStep::Queues => {
                let QueueCounts { submission, completion } = QueueCounts::decode(result as u32);
                self.queues = submission.min(completion).min(self.options.queues.into()) as u16;
                let mut mask = AsyncEventMask::NAMESPACE_CHANGED | AsyncEventMask::ANA_CHANGED;
                // A controller refuses the whole mask because of an event that it does not know.
                if self.controller.as_ref().is_some_and(|controller| controller.reports_resets) {
                    mask |= AsyncEventMask::CROSS_CONTROLLER_RESET_COMPLETED;
                }
                self.send_step(AdminStep::EventMask, &HostCommand::set_features(0x0b, mask.bits()));
            }
            AdminStep::EventMask => {
                self.send_step(AdminStep::IdentifyNamespace, &HostCommand::identify(0, self.options.nsid));
            }
            AdminStep::IdentifyNamespace => {
                *self.namespace_bytes = *self.identify_data();
                self.send_step(AdminStep::Descriptors, &HostCommand::identify(3, self.options.nsid));
            }
            AdminStep::Descriptors => return self.handle_namespace(),
            AdminStep::AnaLog => return self.handle_ana_log(),
            AdminStep::ChangedLog => {
                self.step = AdminStep::Idle;
                self.must_read_namespace = true;
                self.read_next();
            }
            AdminStep::ResetLog => self.handle_reset_log(),
            AdminStep::Idle => {}
        }
        Ok(None)
    }

    fn read_capabilities(&mut self) {
        let get = HostCommand::property_get(property::CAPABILITIES, true);
        self.send_step(AdminStep::Capabilities, &get);
    }

    fn authentication_step(&mut self, step: AuthenticationStep) {
        match step {
            AuthenticationStep::Send(command, message) => {
                self.step = AdminStep::Authentication;
                debug_assert!(matches!(command.data, HostData::InCapsule(_)));
                self.send(COMMAND, &command, &message);
            }
            AuthenticationStep::Receive(command) => self.send_step(AdminStep::Authentication, &command),
            AuthenticationStep::Done => {
                self.authentication = None;
                self.read_capabilities();
            }
        }
    }
}
