//! The properties of a controller: a host enables, resets and shuts it down.
//!
//! A controller that a host resets or shuts down ends its I/O queues. It is ready for the next
//! instance, or reports a complete shutdown, only when none of their requests is at a device: a
//! host that reads this may repeat its writes over another path.

use super::admin::AdminReply;
use super::queue::NvmeQueue;
use super::{QUEUE_ENTRIES_MAX, VERSION};
use udm_wire::nvme::{
    ControllerCapabilities, ControllerConfiguration, ControllerStatus, FabricsCommand, NvmeCommand,
    NvmeStatus, ShutdownStatus, property,
};

/// State of a controller.
#[derive(Default)]
pub(super) struct ControllerState {
    configuration: ControllerConfiguration,
    is_ready: bool,
    /// A shutdown was asked for since the controller was last enabled or disabled.
    is_shutting_down: bool,
}

impl ControllerState {
    /// True while the controller processes commands.
    pub(super) fn is_ready(&self) -> bool {
        self.is_ready
    }

    /// The property `CSTS`, if no I/O queue is connected (`is_quiet`) or some are.
    fn status(&self, is_quiet: bool) -> ControllerStatus {
        let shutdown = match self.is_shutting_down {
            false => ShutdownStatus::None,
            true if is_quiet => ShutdownStatus::Complete,
            true => ShutdownStatus::Occurring,
        };
        // A reset is complete when the controller is not ready any more.
        let is_resetting = !self.configuration.is_enabled() && !self.is_shutting_down && !is_quiet;
        ControllerStatus { is_ready: self.is_ready || is_resetting, is_failed: false, shutdown }
    }
}

impl NvmeQueue {
    pub(super) fn fabrics_command(&mut self, command: &NvmeCommand) -> Result<AdminReply, NvmeStatus> {
        let capabilities = ControllerCapabilities { queue_entries: QUEUE_ENTRIES_MAX - 1, timeout: 15 };
        self.become_ready();
        let is_quiet = self.link.association.connected_io_queues() == 0;
        let state = &self.admin.as_ref().expect("it is an admin queue").state;
        match FabricsCommand::decode(command) {
            FabricsCommand::PropertyGet(get) => {
                let value = match (get.offset, get.is_long) {
                    (property::CAPABILITIES, true) => capabilities.encode(),
                    (property::VERSION, false) => VERSION.into(),
                    (property::CONFIGURATION, false) => state.configuration.0.into(),
                    (property::STATUS, false) => state.status(is_quiet).encode().into(),
                    _ => return Err(NvmeStatus::INVALID_FIELD.permanent()),
                };
                Ok(AdminReply::Done(value))
            }
            FabricsCommand::PropertySet(set) => {
                if (set.offset, set.is_long) != (property::CONFIGURATION, false) {
                    return Err(NvmeStatus::INVALID_FIELD.permanent());
                }
                self.configure(ControllerConfiguration(set.value as u32))?;
                Ok(AdminReply::Done(0))
            }
            // A queue connects once.
            FabricsCommand::Connect(_) => Err(NvmeStatus::COMMAND_SEQUENCE_ERROR.permanent()),
            // Hosts need no secret here.
            FabricsCommand::AuthenticationSend(_)
            | FabricsCommand::AuthenticationReceive(_)
            | FabricsCommand::Other(_) => Err(NvmeStatus::INVALID_OPCODE.permanent()),
        }
    }

    /// Sets the property `CC`: enables, disables or shuts down the controller.
    fn configure(&mut self, configuration: ControllerConfiguration) -> Result<(), NvmeStatus> {
        if !configuration.is_supported() {
            return Err(NvmeStatus::INVALID_FIELD.permanent());
        }
        let admin = self.admin.as_mut().expect("it is an admin queue");
        let before = std::mem::replace(&mut admin.state.configuration, configuration);
        if configuration.is_enabled() != before.is_enabled() {
            admin.state.is_shutting_down = false;
        }
        admin.state.is_shutting_down |= configuration.is_shutdown();
        if !configuration.is_enabled() || admin.state.is_shutting_down {
            admin.state.is_ready = false;
            self.link.association.disable();
        }
        if !configuration.is_enabled() {
            admin.events.reset();
            admin.resets.clear();
        }
        self.become_ready();
        Ok(())
    }

    /// Makes an enabled controller ready, once no request of its last instance is at a device.
    fn become_ready(&mut self) {
        let association = &self.link.association;
        let admin = self.admin.as_mut().expect("it is an admin queue");
        let state = &mut admin.state;
        let is_wanted = state.configuration.is_enabled() && !state.is_shutting_down;
        if is_wanted && !state.is_ready && association.connected_io_queues() == 0 {
            state.is_ready = true;
            admin.restart_timer(self.now);
            association.enable(self.server.subsystem.next_instance_random());
        }
    }
}
