//! The admin queue of a host: it connects a controller, reads what it is, and then keeps it alive
//! and hears its events. No I/O and no clock: the owner passes bytes and calls at times.
//!
//! One command is in flight while the controller is set up. Later there are at most three: an
//! asynchronous event request, a Keep Alive, and a read of a log or of Identify.

use super::command::{HostCommand, HostData};
use super::facts::{ControllerFacts, NamespaceFacts, find_ana_state};
use super::queue::{HostDigests, HostEvent, HostProtocolError, HostQueue, append_data_digest};
use crate::nvme::{
    AnaState, AsyncEventMask, ConnectCommand, ConnectData, ControllerStatus, IDENTIFY_SIZE, NvmeStatus,
    QueueCounts, property,
};

/// Entries of the admin queue.
const ADMIN_ENTRIES: u16 = 32;
/// Identifiers of commands.
const COMMAND: u16 = 0;
const KEEP_ALIVE: u16 = 1;
const EVENT: u16 = 2;

const LOG_CHANGED_NAMESPACES: u8 = 0x04;
const LOG_ANA: u8 = 0x0c;
/// ANA log without lists of namespaces (RGO).
const ANA_GROUPS_ONLY: u8 = 1;

/// The names and wishes of a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostOptions {
    /// Name of the host.
    pub host: String,
    /// Identifier of the host.
    pub host_id: [u8; 16],
    /// Name of the subsystem.
    pub subsystem: String,
    /// Number of the namespace.
    pub nsid: u32,
    /// Digests to ask for.
    pub digests: HostDigests,
    /// Keep-alive timeout in milliseconds, above 0.
    pub kato_ms: u32,
    /// Number of I/O queues to ask for, at least 1.
    pub queues: u16,
}

/// The reason why a controller cannot be used; prints as one line.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HostError {
    /// The controller violates the protocol.
    #[error(transparent)]
    Protocol(#[from] HostProtocolError),
    /// The controller refuses a command.
    #[error("the controller refuses {what}: status {status}{}", describe_status(*.status))]
    Refused {
        /// What it refuses.
        what: &'static str,
        /// The status of the command.
        status: NvmeStatus,
    },
    /// The controller or the namespace cannot be used.
    #[error("{0}")]
    Unusable(String),
}

fn describe_status(status: NvmeStatus) -> &'static str {
    match NvmeStatus(status.0 & 0x7ff) {
        NvmeStatus::CONNECT_INVALID_HOST => " (this host is not allowed: see hostnqn=)",
        NvmeStatus::CONNECT_INVALID_PARAMETERS => " (a parameter is wrong: is the subsystem's name right?)",
        NvmeStatus::CONNECT_CONTROLLER_BUSY => " (it is busy)",
        NvmeStatus::INVALID_NAMESPACE => " (there is no such namespace)",
        _ => "",
    }
}

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
}

/// The command in flight with identifier [`COMMAND`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AdminStep {
    Connect,
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
    /// No command is in flight.
    Idle,
}

impl AdminStep {
    const fn name(self) -> &'static str {
        match self {
            AdminStep::Connect => "the connection",
            AdminStep::Capabilities | AdminStep::Status => "a property",
            AdminStep::Enable => "to be enabled",
            AdminStep::IdentifyController => "Identify Controller",
            AdminStep::Queues => "I/O queues",
            AdminStep::EventMask => "events",
            AdminStep::IdentifyNamespace => "Identify Namespace",
            AdminStep::Descriptors => "the identifiers of the namespace",
            AdminStep::AnaLog => "the ANA log",
            AdminStep::ChangedLog => "the log of changed namespaces",
            AdminStep::Idle => "nothing",
        }
    }
}

/// The admin queue of a host.
pub struct HostAdmin {
    options: HostOptions,
    queue: HostQueue,
    out: Vec<u8>,
    step: AdminStep,
    data: Vec<u8>,
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
}

impl HostAdmin {
    /// An admin queue on a new connection. Its first bytes are in [`HostAdmin::take_out`].
    #[must_use]
    pub fn new(options: HostOptions) -> HostAdmin {
        let queue = HostQueue::new(options.digests, 3);
        HostAdmin {
            out: queue.initialize().to_vec(),
            options,
            queue,
            step: AdminStep::Connect,
            data: Vec::new(),
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
        while let Some(event) = self.queue.take(input)? {
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
                    check(status, "a Keep Alive")?;
                    Some(AdminEvent::Alive)
                }
                HostEvent::Completed { id: EVENT, status, result } => {
                    check(status, "an event request")?;
                    self.handle_async_event(result as u32);
                    None
                }
                HostEvent::Completed { status, result, .. } => self.handle_completion(status, result)?,
            };
            if event.is_some() {
                return Ok(event);
            }
        }
        Ok(None)
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

    fn handle_completion(
        &mut self,
        status: NvmeStatus,
        result: u64,
    ) -> Result<Option<AdminEvent>, HostError> {
        let step = self.step;
        match step {
            // A controller may lack these.
            AdminStep::Descriptors if !status.is_ok() => self.data.fill(0),
            AdminStep::EventMask | AdminStep::ChangedLog => {}
            _ => check(status, step.name())?,
        }
        match step {
            AdminStep::Connect => {
                self.controller_id = result as u16;
                if result >> 16 & 0b11 != 0 {
                    return Err(HostError::Unusable(
                        "the controller asks for authentication, which udm does not support".into(),
                    ));
                }
                let get = HostCommand::property_get(property::CAPABILITIES, true);
                self.send_step(AdminStep::Capabilities, &get);
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
                let mask = AsyncEventMask::NAMESPACE_CHANGED | AsyncEventMask::ANA_CHANGED;
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
            AdminStep::Idle => {}
        }
        Ok(None)
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
            match result >> 16 & 0xff {
                0x04 => self.must_read_changes = true,
                0x0c => self.must_read_ana = true,
                _ => {}
            }
        }
        self.read_next();
    }

    /// Begins the next read that an event asked for, if nothing else is in flight.
    fn read_next(&mut self) {
        if self.step != AdminStep::Idle {
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

fn check(status: NvmeStatus, what: &'static str) -> Result<(), HostError> {
    if status.is_ok() { Ok(()) } else { Err(HostError::Refused { what, status }) }
}

/// The Connect command of queue `queue`.
#[must_use]
pub(super) fn connect_command(queue: u16, entries: u16, keep_alive_ms: u32) -> HostCommand {
    HostCommand::connect(ConnectCommand {
        format: 0,
        queue,
        queue_size: entries - 1,
        // Without flow control of the submission queue a controller may omit completions of reads.
        no_flow_control: true,
        keep_alive_ms: if queue == 0 { keep_alive_ms } else { 0 },
    })
}

/// The data of a Connect command to `controller`.
#[must_use]
pub(super) fn connect_data(options: &HostOptions, controller: u16) -> ConnectData {
    ConnectData {
        host_id: options.host_id,
        controller,
        subsystem: options.subsystem.clone(),
        host: options.host.clone(),
    }
}
