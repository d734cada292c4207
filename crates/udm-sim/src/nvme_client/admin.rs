//! Connect, and the commands of the admin queue.

use super::conn::{ConnContext, ConnStage, ControllerConn};
use super::pdus::{FREE_ID, PduSequence, data_answer, response};
use super::target::{AnaReport, SimController};
use crate::model::Violation;
use udm_wire::nvme::{
    AdminOpcode, ConnectCommand, ConnectData, ControllerConfiguration, FabricsCommand, IdentifyTarget,
    LogPage, LogPageRequest, NvmeCommand, NvmeStatus, OPCODE_FABRICS, QueueCounts, encode_changed_namespaces,
    property,
};

/// Results of an asynchronous event: a notice, its information, and the log page.
const NAMESPACE_EVENT: u64 = 2 | 0x04 << 16;
const ANA_EVENT: u64 = 2 | 3 << 8 | 0x0c << 16;
const RESET_EVENT: u64 = 2 | 0xf4 << 8 | 0x1e << 16;

impl ControllerConn {
    /// Takes a command with the data of its capsule.
    pub(super) fn command(
        &mut self,
        command: &NvmeCommand,
        data: &[u8],
        a: &mut ConnContext<'_>,
    ) -> Result<(), Violation> {
        let wrong = |why: &str| format!("connection {}: {command:?}: {why}", self.link);
        if self.in_flight.contains(&command.id()) {
            return Err(wrong("another command with this identifier is in flight"));
        }
        let entries = if self.stage == ConnStage::Connecting { 2 } else { usize::from(self.entries) };
        if self.in_flight.len() + 1 >= entries {
            return Err(wrong("more commands than the queue has entries"));
        }
        self.in_flight.push(command.id());
        match self.stage {
            ConnStage::Connecting => self.connect(command, data, a),
            ConnStage::Admin(controller) => {
                let is_keep_alive = AdminOpcode::from_number(command.opcode()) == AdminOpcode::KeepAlive;
                a.controllers[controller].note_command(is_keep_alive, a.now);
                self.admin_command(controller, command, a)
            }
            ConnStage::Io(controller) => {
                a.controllers[controller].note_command(false, a.now);
                self.io_command(controller, command, data, a)
            }
            ConnStage::Initializing | ConnStage::Over => Ok(()),
        }
    }

    /// Queues the PDUs that complete a command.
    pub(super) fn answer(&mut self, id: u16, pdus: PduSequence) {
        self.in_flight.retain(|other| *other != id);
        self.answers.push(pdus);
    }

    pub(super) fn complete(&mut self, id: u16, result: u64, status: NvmeStatus) {
        let pdu = response(id, result, status, &self.limits);
        self.answer(id, PduSequence::from([pdu]));
    }

    fn connect(
        &mut self,
        command: &NvmeCommand,
        data: &[u8],
        a: &mut ConnContext<'_>,
    ) -> Result<(), Violation> {
        let wrong = |why: &str| Err(format!("connection {}: {command:?}: {why}", self.link));
        let FabricsCommand::Connect(connect) = FabricsCommand::decode(command) else {
            return wrong("expected Connect");
        };
        let Ok(data) = <&[u8; 1024]>::try_from(data) else { return wrong("Connect without its data") };
        let Ok(data) = ConnectData::decode(data) else { return wrong("wrong data of Connect") };
        let own = (&a.options.host, a.options.host_id, &a.options.subsystem);
        if command.opcode() != OPCODE_FABRICS || (&data.host, data.host_id, &data.subsystem) != own {
            return wrong("wrong names in Connect");
        }
        if connect.queue == 0 {
            self.connect_admin(command, &connect, &data, a)
        } else {
            self.connect_io(command, &connect, &data, a)
        }
    }

    fn connect_admin(
        &mut self,
        command: &NvmeCommand,
        connect: &ConnectCommand,
        data: &ConnectData,
        a: &mut ConnContext<'_>,
    ) -> Result<(), Violation> {
        if data.controller != u16::MAX || connect.keep_alive_ms != a.options.kato_ms {
            return Err(format!("connection {}: a wrong Connect: {connect:?}", self.link));
        }
        if self.is_drawn(self.behavior.refusals, a) {
            a.trouble();
            self.complete(command.id(), 0, NvmeStatus::CONNECT_CONTROLLER_BUSY);
            return Ok(());
        }
        let (number, id) = (a.controllers.len(), a.controllers.len() as u16 + 1);
        let target = (self.target, &*a.target);
        let (link, random) = ((self.link, self.behavior.loses_close), a.chance.any());
        let controller = SimController::new(target, id, link, connect.keep_alive_ms, random, a.now);
        a.controllers.push(controller);
        a.shared.say(format!("connection {}: the admin queue of controller {number}", self.link));
        a.counts.associations += 1;
        (self.stage, self.entries) = (ConnStage::Admin(number), connect.queue_size + 1);
        self.limits.capsule_data_max = 8192;
        self.complete(command.id(), id.into(), NvmeStatus::SUCCESS);
        Ok(())
    }

    fn connect_io(
        &mut self,
        command: &NvmeCommand,
        connect: &ConnectCommand,
        data: &ConnectData,
        a: &mut ConnContext<'_>,
    ) -> Result<(), Violation> {
        let description = &a.target.description;
        let found = a.controllers.iter().position(|one| one.id == data.controller);
        let found = found.filter(|one| a.controllers[*one].target == self.target);
        let Some(number) = found else {
            return Err(format!("connection {}: Connect to an unknown controller", self.link));
        };
        let controller = &mut a.controllers[number];
        if !controller.is_enabled
            || connect.queue > description.queues
            || connect.queue_size + 1 > description.entries
            || connect.queue_size == 0
        {
            return Err(format!("connection {}: a wrong Connect: {connect:?}", self.link));
        }
        if controller.is_other {
            return Err(format!("connection {}: a queue of a controller of another namespace", self.link));
        }
        if controller.is_over || controller.queues.contains(&connect.queue) {
            // The controller may still have the queue of a lane that was closed just now.
            self.complete(command.id(), 0, NvmeStatus::CONNECT_INVALID_PARAMETERS);
            return Ok(());
        }
        if self.is_drawn(self.behavior.refusals, a) {
            a.trouble();
            a.counts.refused_queues += 1;
            self.complete(command.id(), 0, NvmeStatus::CONNECT_CONTROLLER_BUSY);
            return Ok(());
        }
        let controller = &mut a.controllers[number];
        controller.queues.push(connect.queue);
        controller.note_command(false, a.now);
        self.stage = ConnStage::Io(number);
        (self.queue, self.entries) = (connect.queue, connect.queue_size + 1);
        self.limits.capsule_data_max = a.target.description.capsule_data_max();
        self.complete(command.id(), 0, NvmeStatus::SUCCESS);
        Ok(())
    }

    fn admin_command(
        &mut self,
        controller: usize,
        command: &NvmeCommand,
        a: &mut ConnContext<'_>,
    ) -> Result<(), Violation> {
        let wrong = |why: &str| Err(format!("connection {}: {command:?}: {why}", self.link));
        let id = command.id();
        if self.is_drawn(self.behavior.violations, a) {
            self.note_violation(a);
            if self.limits.header_digest && a.chance.one_in(2) {
                // A good completion, except for its digest.
                let mut bad = response(id, 0, NvmeStatus::SUCCESS, &self.limits);
                bad[9] ^= 1;
                self.answer(id, PduSequence::from([bad]));
                return Ok(());
            }
            // A completion of no command, and no other one.
            self.complete(id, 0, NvmeStatus::SUCCESS);
            let bad = response(FREE_ID, 0, NvmeStatus::SUCCESS, &self.limits);
            self.answers.insert(0, PduSequence::from([bad]));
            return Ok(());
        }
        match AdminOpcode::from_number(command.opcode()) {
            AdminOpcode::Fabrics => match FabricsCommand::decode(command) {
                FabricsCommand::PropertyGet(get) => {
                    let is_ready = a.controllers[controller].is_enabled && (a.calm || a.chance.below(4) > 0);
                    let value = match get.offset {
                        property::CAPABILITIES if get.is_long => a.target.description.capabilities(),
                        property::STATUS => u64::from(is_ready),
                        _ => return wrong("an unknown property"),
                    };
                    self.complete(id, value, NvmeStatus::SUCCESS);
                }
                FabricsCommand::PropertySet(set) if set.offset == property::CONFIGURATION => {
                    let configuration = ControllerConfiguration(set.value as u32);
                    a.controllers[controller].is_enabled = configuration.is_enabled();
                    self.complete(id, 0, NvmeStatus::SUCCESS);
                }
                _ => return wrong("an unknown command of fabrics"),
            },
            _ if !a.controllers[controller].is_enabled => {
                return wrong("a command before the controller is enabled");
            }
            AdminOpcode::Identify => {
                let namespace = a.target.other.as_ref().unwrap_or(a.namespace);
                let (bytes, list) = namespace.encode();
                let bytes = match IdentifyTarget::decode(command) {
                    IdentifyTarget::Controller => {
                        let one = &a.controllers[controller];
                        a.target.description.encode(one.id, one.instance, namespace)
                    }
                    IdentifyTarget::Namespace(1) => bytes,
                    IdentifyTarget::NamespaceDescriptors(1) => list,
                    other => return wrong(&format!("a wrong Identify: {other:?}")),
                };
                let pdus = data_answer(id, &bytes[..], true, &self.limits, a.chance);
                self.answer(id, pdus);
            }
            AdminOpcode::SetFeatures => {
                let result = match command.dword(10) {
                    0x07 => u64::from(QueueCounts::encode(a.target.description.queues)),
                    0x0b => {
                        a.controllers[controller].reports_events = true;
                        0
                    }
                    _ => return wrong("an unknown feature"),
                };
                self.complete(id, result, NvmeStatus::SUCCESS);
            }
            AdminOpcode::GetLogPage => return self.log_page(controller, command, a),
            AdminOpcode::AsyncEventRequest => {
                if a.controllers[controller].event_request.replace(id).is_some() {
                    return wrong("a second event request");
                }
                a.controllers[controller].is_ready = true;
                self.report_events(controller, a);
            }
            AdminOpcode::CrossControllerReset => return self.reset_command(controller, command, a),
            AdminOpcode::KeepAlive => {
                if self.is_drawn(self.behavior.hangs, a) {
                    // Without an answer, and without a restart of the timer of a host that must
                    // notice it.
                    a.trouble();
                    a.counts.hangs += 1;
                    return Ok(());
                }
                self.complete(id, 0, NvmeStatus::SUCCESS);
            }
            other => return wrong(&format!("{other:?}")),
        }
        Ok(())
    }

    fn log_page(
        &mut self,
        controller: usize,
        command: &NvmeCommand,
        a: &mut ConnContext<'_>,
    ) -> Result<(), Violation> {
        let LogPageRequest { page, specific, len, offset, .. } = LogPageRequest::decode(command);
        let mut data = match page {
            LogPage::ChangedNamespaces => {
                a.controllers[controller].is_namespace_armed = true;
                encode_changed_namespaces(&[1])
            }
            LogPage::Ana if a.target.description.has_ana => {
                let one = &mut a.controllers[controller];
                one.is_ana_armed = true;
                let is_known = one.ana_report.is_some_and(|(state, _)| state == a.target.ana);
                if !is_known {
                    one.ana_report = Some((a.target.ana, AnaReport::Sent));
                }
                a.target.description.ana_log(a.target.ana_changes, a.target.ana)
            }
            LogPage::CrossControllerReset if a.target.description.resets_max > 0 => {
                self.reset_log(controller, specific & 1 != 0, a)
            }
            other => return Err(format!("connection {}: a read of log page {other:?}", self.link)),
        };
        if offset != 0 || len > 8192 {
            return Err(format!("connection {}: {len} bytes of a log page from {offset} on", self.link));
        }
        data.resize(len as usize, 0);
        let pdus = data_answer(command.id(), &data, true, &self.limits, a.chance);
        self.answer(command.id(), pdus);
        // A change while the report was on its way.
        self.report_events(controller, a);
        Ok(())
    }

    /// Reports a change to the host, if it waits for one.
    pub(super) fn report_events(&mut self, controller: usize, a: &mut ConnContext<'_>) {
        let one = &mut a.controllers[controller];
        if !one.reports_events || one.is_over {
            return;
        }
        let Some(id) = one.event_request else { return };
        let result = if one.namespace_changed && one.is_namespace_armed {
            (one.namespace_changed, one.is_namespace_armed) = (false, false);
            NAMESPACE_EVENT
        } else if one.ana_changed && one.is_ana_armed {
            (one.ana_changed, one.is_ana_armed) = (false, false);
            ANA_EVENT
        } else if one.reset_ended && one.is_reset_armed && a.target.description.reports_resets {
            (one.reset_ended, one.is_reset_armed) = (false, false);
            RESET_EVENT
        } else {
            return;
        };
        one.event_request = None;
        a.counts.events += 1;
        self.complete(id, result, NvmeStatus::SUCCESS);
    }
}
