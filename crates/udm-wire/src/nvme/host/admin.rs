//! The admin queue of a host: it connects a controller, reads what it is, and then keeps it alive,
//! hears its events and asks it to reset other controllers. No I/O and no clock: the owner passes
//! bytes and calls at times.
//!
//! One command is in flight while the controller is set up. Later there are at most four: an
//! asynchronous event request, a Keep Alive, a Cross-Controller Reset, and a read of a log or of
//! Identify.

mod resets;
mod setup;

use super::authentication::HostAuthentication;
use super::command::{HostCommand, HostData};
use super::connect::{connect_command, connect_data};
use super::error::{HostError, check_status};
use super::facts::{ControllerFacts, NamespaceFacts, find_ana_state};
use super::options::HostOptions;
use super::queue::{HostEvent, HostQueue, append_data_digest};
use crate::nvme::{AnaState, ControllerInstance, IDENTIFY_SIZE, property};
use resets::HostRequestedResets;
pub use resets::ResetOutcome;
use setup::AdminStep;
use std::collections::VecDeque;

/// Entries of the admin queue.
const ADMIN_ENTRIES: u16 = 32;
/// Identifiers of commands.
const COMMAND: u16 = 0;
const KEEP_ALIVE: u16 = 1;
const EVENT: u16 = 2;
const RESET: u16 = 3;
const COMMANDS: u16 = 4;

const LOG_CHANGED_NAMESPACES: u8 = 0x04;
const LOG_ANA: u8 = 0x0c;
const LOG_RESETS: u8 = 0x1e;
/// ANA log without lists of namespaces (RGO).
const ANA_GROUPS_ONLY: u8 = 1;

/// What is known of a controller that is set up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AssociationFacts {
    /// The controller.
    pub controller: ControllerFacts,
    /// Number of I/O queues that may be connected, at least 1.
    pub queues: u16,
    /// The namespace.
    pub namespace: NamespaceFacts,
    /// ANA state of the namespace.
    pub ana: AnaState,
}

/// An event of an admin queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AdminEvent {
    /// The controller is set up.
    Ready(Box<AssociationFacts>),
    /// The namespace has been read again.
    Namespace(Box<NamespaceFacts>),
    /// The ANA state has been read again.
    Ana(AnaState),
    /// The controller answered a Keep Alive.
    Alive,
    /// The controller is not ready yet: [`HostAdmin::ask_status`] asks again.
    NotReady,
    /// A reset of another controller has ended.
    ResetEnded(ControllerInstance, ResetOutcome),
}

/// The admin queue of a host.
pub struct HostAdmin {
    options: HostOptions,
    queue: HostQueue,
    out: Vec<u8>,
    step: AdminStep,
    data: Vec<u8>,
    authentication: Option<HostAuthentication>,
    controller_id: u16,
    capabilities: u64,
    controller: Option<ControllerFacts>,
    queues: u16,
    namespace_bytes: Box<[u8; IDENTIFY_SIZE]>,
    namespace: Option<NamespaceFacts>,
    is_ready: bool,
    is_keep_alive_pending: bool,
    /// Reads that an event asked for while another was in flight. The log of changed namespaces is
    /// read after each event: until then, the controller reports no other one.
    must_read_changes: bool,
    must_read_namespace: bool,
    must_read_ana: bool,
    resets: HostRequestedResets,
    /// Events that the owner has not taken.
    events: VecDeque<AdminEvent>,
}

impl HostAdmin {
    /// An admin queue on a new connection. Its first bytes are in [`HostAdmin::take_out`].
    #[must_use]
    pub fn new(options: HostOptions) -> HostAdmin {
        let queue = HostQueue::new(options.digests, COMMANDS);
        HostAdmin {
            out: queue.initialize().to_vec(),
            options,
            queue,
            step: AdminStep::Connect,
            data: Vec::new(),
            authentication: None,
            controller_id: 0,
            capabilities: 0,
            controller: None,
            queues: 1,
            namespace_bytes: Box::new([0; IDENTIFY_SIZE]),
            namespace: None,
            is_ready: false,
            is_keep_alive_pending: false,
            must_read_changes: false,
            must_read_namespace: false,
            must_read_ana: false,
            resets: HostRequestedResets::default(),
            events: VecDeque::new(),
        }
    }

    /// Bytes to send.
    #[must_use]
    pub fn take_out(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.out)
    }

    /// Sends a Keep Alive. Returns false if the last one is not answered yet.
    pub fn keep_alive(&mut self) -> bool {
        if !self.is_keep_alive_pending {
            self.is_keep_alive_pending = true;
            self.send(KEEP_ALIVE, &HostCommand::keep_alive(), &[]);
            return true;
        }
        false
    }

    /// Asks for the status of a controller that was not ready.
    pub fn ask_status(&mut self) {
        if self.step == AdminStep::Status && self.queue.in_flight() == 0 {
            self.send_step(AdminStep::Status, &HostCommand::property_get(property::STATUS, false));
        }
    }

    /// Reads the ANA state again, because a command failed with an ANA status.
    pub fn refresh_ana(&mut self) {
        self.must_read_ana = true;
        self.read_next();
    }

    /// Takes bytes from the front of `input` up to the next event; `None` if all are taken.
    ///
    /// # Errors
    /// The controller cannot be used; the connection must be closed.
    pub fn take(&mut self, input: &mut &[u8]) -> Result<Option<AdminEvent>, HostError> {
        loop {
            if let Some(event) = self.events.pop_front() {
                return Ok(Some(event));
            }
            let Some(event) = self.queue.take(input)? else { return Ok(None) };
            let event = match event {
                HostEvent::Initialized => {
                    self.send_connect();
                    None
                }
                HostEvent::Data { at, bytes, .. } => {
                    let at = at as usize;
                    self.data[at..at + bytes.len()].copy_from_slice(bytes);
                    None
                }
                // No admin command of this host has data for the controller outside its capsule.
                HostEvent::ReadyToTransfer(_) => None,
                HostEvent::Completed { id: KEEP_ALIVE, status, .. } => {
                    self.is_keep_alive_pending = false;
                    check_status(status, "a Keep Alive")?;
                    Some(AdminEvent::Alive)
                }
                HostEvent::Completed { id: EVENT, status, result } => {
                    check_status(status, "an event request")?;
                    self.handle_async_event(result as u32);
                    None
                }
                HostEvent::Completed { id: RESET, status, result } => self.reset_answered(status, result),
                HostEvent::Completed { status, result, .. } => self.handle_completion(status, result)?,
            };
            self.events.extend(event);
        }
    }

    fn send(&mut self, id: u16, command: &HostCommand, data: &[u8]) {
        let mut header = [0; 128];
        let len = self.queue.put_command(&mut header, id, command);
        self.out.extend_from_slice(&header[..len]);
        self.out.extend_from_slice(data);
        if self.queue.has_data_digest() && !data.is_empty() {
            self.out.extend_from_slice(&append_data_digest(0, data).to_le_bytes());
        }
    }

    fn send_step(&mut self, step: AdminStep, command: &HostCommand) {
        self.step = step;
        if let HostData::Read(len) = command.data {
            self.data.clear();
            self.data.resize(len as usize, 0);
        }
        self.send(COMMAND, command, &[]);
    }

    fn send_connect(&mut self) {
        let command = connect_command(0, ADMIN_ENTRIES, self.options.kato_ms);
        let data = connect_data(&self.options, u16::MAX).encode();
        self.send(COMMAND, &command, &data);
    }

    fn identify_data(&self) -> Box<[u8; IDENTIFY_SIZE]> {
        let mut bytes = Box::new([0; IDENTIFY_SIZE]);
        bytes.copy_from_slice(&self.data);
        bytes
    }

    fn handle_namespace(&mut self) -> Result<Option<AdminEvent>, HostError> {
        let Some(controller) = &self.controller else { return Ok(None) };
        let (nsid, descriptors) = (self.options.nsid, self.identify_data());
        let namespace = NamespaceFacts::decode(nsid, &self.namespace_bytes, &descriptors, controller);
        let namespace = namespace.map_err(HostError::Unusable)?;
        let reads_ana = controller.has_ana && namespace.ana_group != 0;
        self.namespace = Some(namespace.clone());
        self.step = AdminStep::Idle;
        self.must_read_ana |= reads_ana;
        if !self.is_ready && !reads_ana {
            return Ok(self.ready(AnaState::Optimized));
        }
        self.read_next();
        Ok(self.is_ready.then(|| AdminEvent::Namespace(Box::new(namespace))))
    }

    fn handle_ana_log(&mut self) -> Result<Option<AdminEvent>, HostError> {
        let group = self.namespace.as_ref().map_or(0, |namespace| namespace.ana_group);
        let Some(state) = find_ana_state(&self.data, group) else {
            return Err(HostError::Unusable(format!("the ANA log has no group {group} of the namespace")));
        };
        self.step = AdminStep::Idle;
        if !self.is_ready {
            return Ok(self.ready(state));
        }
        self.read_next();
        Ok(Some(AdminEvent::Ana(state)))
    }

    fn ready(&mut self, ana: AnaState) -> Option<AdminEvent> {
        self.is_ready = true;
        self.send(EVENT, &HostCommand::async_event_request(), &[]);
        let facts = AssociationFacts {
            controller: self.controller.clone()?,
            queues: self.queues,
            namespace: self.namespace.clone()?,
            ana,
        };
        Some(AdminEvent::Ready(Box::new(facts)))
    }

    /// Handles an event of the controller, and waits for the next one.
    fn handle_async_event(&mut self, result: u32) {
        self.send(EVENT, &HostCommand::async_event_request(), &[]);
        const NOTICE: u32 = 2;
        if result & 7 == NOTICE {
            match (result >> 16) as u8 {
                LOG_CHANGED_NAMESPACES => self.must_read_changes = true,
                LOG_ANA => self.must_read_ana = true,
                LOG_RESETS => self.resets.must_read_log = true,
                _ => {}
            }
        }
        self.read_next();
    }

    /// Begins the next read that an event asked for, if nothing else is in flight.
    fn read_next(&mut self) {
        if self.step != AdminStep::Idle || self.read_reset_log() {
            return;
        }
        if std::mem::take(&mut self.must_read_changes) {
            let log = HostCommand::log_page(LOG_CHANGED_NAMESPACES, 0, IDENTIFY_SIZE as u32);
            return self.send_step(AdminStep::ChangedLog, &log);
        }
        if std::mem::take(&mut self.must_read_namespace) {
            self.send_step(AdminStep::IdentifyNamespace, &HostCommand::identify(0, self.options.nsid));
            return;
        }
        let Some(controller) = self.controller.as_ref().filter(|_| self.must_read_ana) else { return };
        let groups = if controller.has_ana { controller.ana_groups } else { return };
        self.must_read_ana = false;
        let log = HostCommand::log_page(LOG_ANA, ANA_GROUPS_ONLY, 16 + groups * 32);
        self.send_step(AdminStep::AnaLog, &log);
    }
}
