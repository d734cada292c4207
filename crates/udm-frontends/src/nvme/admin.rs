//! The commands of the admin queue.

use super::controller_state::ControllerState;
use super::cross_controller_reset::{ControllerResets, RESETS_MAX};
use super::events::ControllerEvents;
use super::namespaces::NamespaceGeometry;
use super::queue::NvmeQueue;
use super::subsystem::NAMESPACES_MAX;
use super::{
    CAPSULE_DATA_MAX, EVENT_REQUESTS_MAX, FIRMWARE, MODEL, QUEUE_ENTRIES_MAX, TRANSFER_MAX_LOG2, VERSION,
};
use std::net::SocketAddr;
use udm_core::Nanos;
use udm_core::Segments;
use udm_wire::nvme::{
    AdminOpcode, AsyncEventMask, ControllerKind, DISCOVERY_NQN, DataPointer, FeatureId, FenceCapabilities,
    IDENTIFY_SIZE, IdentifyController, IdentifyNamespace, IdentifyTarget, LOG_PAGE_MAX, LogPage,
    LogPageRequest, NvmeCommand, NvmeStatus, QueueCounts, encode_active_namespaces, encode_ana_log,
    encode_changed_namespaces, encode_discovery_log, encode_firmware_log, encode_health_log,
    encode_namespace_descriptors,
};

/// Steps of the keep-alive timer in milliseconds.
const KEEP_ALIVE_STEP_MS: u32 = 1000;

/// Keep-alive timeout of a discovery controller whose host has set none.
const DISCOVERY_KEEP_ALIVE_MS: u32 = 120_000;

/// State of a controller, which belongs to its admin queue.
pub(super) struct AdminQueue {
    kind: ControllerKind,
    pub(super) state: ControllerState,
    /// Keep-alive timeout; `None` for none.
    keep_alive: Option<Nanos>,
    keep_alive_ms: u32,
    /// When the host is given up.
    until: Nanos,
    pub(super) events: ControllerEvents,
    pub(super) resets: ControllerResets,
}

/// The answer to an admin command.
pub(super) enum AdminReply {
    /// Success, with the result.
    Done(u64),
    /// Success, with data of at least this length.
    Data(Vec<u8>),
    /// The command waits for an event.
    Later,
}

use AdminReply::{Data, Done, Later};

impl AdminQueue {
    pub(super) fn new(kind: ControllerKind, keep_alive_ms: u32) -> AdminQueue {
        let mut queue = AdminQueue {
            kind,
            state: ControllerState::default(),
            keep_alive: None,
            keep_alive_ms: 0,
            until: Nanos::NEVER,
            events: ControllerEvents::default(),
            resets: ControllerResets::default(),
        };
        queue.set_keep_alive(keep_alive_ms);
        queue
    }

    /// Sets the timeout, rounded up to whole steps.
    fn set_keep_alive(&mut self, ms: u32) {
        let ms = if ms == 0 && self.kind == ControllerKind::Discovery { DISCOVERY_KEEP_ALIVE_MS } else { ms };
        self.keep_alive_ms = ms.div_ceil(KEEP_ALIVE_STEP_MS).saturating_mul(KEEP_ALIVE_STEP_MS);
        self.keep_alive = (ms > 0).then(|| Nanos::from_millis(self.keep_alive_ms.into()));
    }

    pub(super) fn restart_timer(&mut self, now: Nanos) {
        self.until = self.keep_alive.map_or(Nanos::NEVER, |time| now + time);
    }
}

impl NvmeQueue {
    /// Begins as an admin queue, if it is one.
    pub(super) fn begin_admin(&mut self, now: Nanos) {
        let changes = self.ana_changes();
        let subsystem = &self.server.subsystem;
        if let Some(admin) = &mut self.admin {
            admin.restart_timer(now);
            admin.events.begin(subsystem.namespaces(), changes);
        }
    }

    /// Number of changes of ANA states on the port of this queue.
    fn ana_changes(&self) -> u64 {
        self.server.subsystem.ana_changes(self.link.association.origin.port)
    }

    /// The time at which the keep-alive timer expires; never for an I/O queue.
    pub(super) fn keep_alive_until(&self) -> Nanos {
        self.admin.as_ref().map_or(Nanos::NEVER, |admin| admin.until)
    }

    /// Looks for events after a change, and reports them.
    pub(super) fn look_for_events(&mut self) {
        let changes = self.ana_changes();
        let subsystem = &self.server.subsystem;
        let Some(admin) = &mut self.admin else { return };
        if admin.kind == ControllerKind::Io {
            admin.events.look(subsystem.namespaces(), changes);
        }
        self.report_events();
    }

    pub(super) fn report_events(&mut self) {
        while let Some((id, event)) = self.admin.as_mut().and_then(|admin| admin.events.next()) {
            self.respond(id, NvmeStatus::SUCCESS, event.result().into());
        }
    }

    /// Executes an admin command.
    pub(super) fn admin_command(&mut self, command: &NvmeCommand) {
        let now = self.now;
        let admin = self.admin.as_mut().expect("it is an admin queue");
        if !admin.state.is_ready() {
            // It has no I/O queues and refuses Keep Alive: any command shows that the host, which
            // may wait for the end of a shutdown, is alive.
            admin.restart_timer(now);
        }
        let done = self.execute_admin(command).and_then(|reply| match reply {
            Data(bytes) => match command.data_pointer() {
                DataPointer::Transport { len } if len > 0 => Ok(Data(pad_to_asked_length(bytes, len))),
                DataPointer::Transport { .. } => Err(NvmeStatus::DATA_SGL_LENGTH_INVALID.permanent()),
                _ => Err(NvmeStatus::SGL_DESCRIPTOR_TYPE_INVALID.permanent()),
            },
            other => Ok(other),
        });
        match done {
            Ok(Done(result)) => self.respond(command.id(), NvmeStatus::SUCCESS, result),
            Ok(Data(bytes)) => {
                let mut data = Segments::from(self.reads.get(bytes.len()));
                data.copy_from(&bytes);
                self.respond_with_data(command.id(), data, 0);
            }
            Ok(Later) => {}
            Err(status) => self.respond(command.id(), status, 0),
        }
        self.report_events();
    }

    fn execute_admin(&mut self, command: &NvmeCommand) -> Result<AdminReply, NvmeStatus> {
        let opcode = AdminOpcode::from_number(command.opcode());
        if command.is_fused() {
            return Err(NvmeStatus::INVALID_FIELD.permanent());
        }
        if opcode == AdminOpcode::Fabrics {
            return self.fabrics_command(command);
        }
        let admin = self.admin.as_mut().expect("it is an admin queue");
        if !admin.state.is_ready() {
            return Err(NvmeStatus::COMMAND_SEQUENCE_ERROR.permanent());
        }
        let is_io = admin.kind == ControllerKind::Io;
        match opcode {
            AdminOpcode::Identify => self.identify(command),
            AdminOpcode::GetLogPage => self.log_page(command),
            AdminOpcode::KeepAlive => {
                // No other command restarts the timer of a controller that is ready (CTRATT.TBKAS
                // is 0): a host computes from this when the timer has expired at the latest.
                admin.restart_timer(self.now);
                Ok(Done(0))
            }
            AdminOpcode::AsyncEventRequest => admin.events.request(command.id()).map(|()| Later),
            AdminOpcode::SetFeatures => self.set_features(command),
            AdminOpcode::GetFeatures => self.get_features(command),
            // The command is not aborted; it completes by itself.
            AdminOpcode::Abort if is_io => Ok(Done(1)),
            AdminOpcode::CrossControllerReset if is_io => self.cross_controller_reset(command),
            AdminOpcode::CrossControllerReset
            | AdminOpcode::Abort
            | AdminOpcode::Fabrics
            | AdminOpcode::Other(_) => Err(NvmeStatus::INVALID_OPCODE.permanent()),
        }
    }

    fn identify(&mut self, command: &NvmeCommand) -> Result<AdminReply, NvmeStatus> {
        let admin = self.admin.as_ref().expect("it is an admin queue");
        let subsystem = &self.server.subsystem;
        let invalid = NvmeStatus::INVALID_NAMESPACE.permanent();
        let namespace = |nsid| subsystem.namespace(nsid).ok_or(invalid);
        let target = IdentifyTarget::decode(command);
        if admin.kind == ControllerKind::Discovery && target != IdentifyTarget::Controller {
            return Err(NvmeStatus::INVALID_FIELD.permanent());
        }
        let bytes = match target {
            IdentifyTarget::Controller => self.identify_controller(),
            IdentifyTarget::Namespace(nsid) if nsid == 0 || nsid == u32::MAX => return Err(invalid),
            // An inactive namespace is all zero (*Base* 5.17.2.1).
            IdentifyTarget::Namespace(nsid) => match subsystem.namespace(nsid) {
                None if nsid > NAMESPACES_MAX => return Err(invalid),
                None => [0; IDENTIFY_SIZE],
                Some(namespace) => {
                    let limits = namespace.export.device().limits();
                    let geometry = NamespaceGeometry::new(&limits, namespace.export.is_read_only());
                    let in_blocks = |bytes: u32| bytes >> geometry.block_log2;
                    IdentifyNamespace {
                        blocks: geometry.blocks,
                        block_log2: geometry.block_log2,
                        preferred_write: in_blocks(limits.physical_block.max(limits.io_min)),
                        optimal_write: in_blocks(limits.io_opt),
                        is_thin: geometry.can_discard,
                        is_read_only: geometry.is_read_only,
                        ana_group: nsid,
                        nguid: namespace.uuid,
                    }
                    .encode()
                }
            },
            IdentifyTarget::ActiveNamespaces(after) if after >= u32::MAX - 1 => return Err(invalid),
            IdentifyTarget::ActiveNamespaces(after) => {
                encode_active_namespaces(subsystem.namespaces().into_keys().filter(|nsid| *nsid > after))
            }
            IdentifyTarget::NamespaceDescriptors(nsid) => {
                let uuid = namespace(nsid)?.uuid;
                encode_namespace_descriptors(&uuid, &uuid)
            }
            // No limits besides that of all commands.
            IdentifyTarget::NvmController => [0; IDENTIFY_SIZE],
            IdentifyTarget::Other(_) => return Err(NvmeStatus::INVALID_FIELD.permanent()),
        };
        Ok(Data(bytes.to_vec()))
    }

    fn identify_controller(&self) -> [u8; IDENTIFY_SIZE] {
        let (subsystem, association) = (&self.server.subsystem, &self.link.association);
        let is_io = association.kind == ControllerKind::Io;
        IdentifyController {
            kind: association.kind,
            serial: &subsystem.serial,
            model: MODEL,
            firmware: FIRMWARE,
            subsystem: if is_io { &subsystem.nqn } else { DISCOVERY_NQN },
            id: association.id,
            version: VERSION,
            transfer_max_log2: TRANSFER_MAX_LOG2,
            capsule_data_max: CAPSULE_DATA_MAX,
            commands_max: QUEUE_ENTRIES_MAX,
            namespaces_max: NAMESPACES_MAX,
            event_requests_max: EVENT_REQUESTS_MAX,
            ana_transition_max: 10,
            ana_groups: NAMESPACES_MAX,
            keep_alive_granularity: (KEEP_ALIVE_STEP_MS / 100) as u16,
            fence: FenceCapabilities {
                instance: association.instance(),
                resets_max: RESETS_MAX,
                quiesce_time_ms: subsystem.quiesce_time_ms,
            },
        }
        .encode()
    }

    fn log_page(&mut self, command: &NvmeCommand) -> Result<AdminReply, NvmeStatus> {
        let request = LogPageRequest::decode(command);
        if request.len > LOG_PAGE_MAX as u64 {
            return Err(NvmeStatus::INVALID_FIELD.permanent());
        }
        let subsystem = &self.server.subsystem;
        let host = &self.link.association.host;
        let admin = self.admin.as_mut().expect("it is an admin queue");
        let is_discovery = admin.kind == ControllerKind::Discovery;
        let page = match request.page {
            LogPage::Discovery if is_discovery => {
                let unknown = SocketAddr::from(([0, 0, 0, 0], 0));
                let at = self.fd.as_ref().and_then(super::listener::local_address).unwrap_or(unknown);
                encode_discovery_log(0, &subsystem.discovery_entries(host, at))
            }
            _ if is_discovery => return Err(NvmeStatus::INVALID_LOG_PAGE.permanent()),
            LogPage::Error => vec![0; 64],
            LogPage::Health => encode_health_log(),
            LogPage::Firmware => encode_firmware_log(FIRMWARE),
            LogPage::ChangedNamespaces => {
                encode_changed_namespaces(&admin.events.changed_namespaces(!request.retains_event))
            }
            LogPage::Ana => {
                let port = self.link.association.origin.port;
                let changes = subsystem.ana_changes(port);
                encode_ana_log(changes, &subsystem.ana_groups(port), request.specific & 1 != 0)
            }
            LogPage::CrossControllerReset => admin.resets.log(request.specific & 1 != 0),
            LogPage::Discovery | LogPage::Other(_) => {
                return Err(NvmeStatus::INVALID_LOG_PAGE.permanent());
            }
        };
        if !request.retains_event {
            admin.events.page_read(command.dword(10) as u8);
        }
        // After the end of the page are zeroes: hosts read as much as there may be at most.
        let from = usize::try_from(request.offset).ok().filter(|from| *from <= LOG_PAGE_MAX);
        let from = from.ok_or(NvmeStatus::INVALID_FIELD.permanent())?;
        let mut part = page.get(from..).unwrap_or_default().to_vec();
        part.resize(request.len as usize, 0);
        Ok(Data(part))
    }

    fn set_features(&mut self, command: &NvmeCommand) -> Result<AdminReply, NvmeStatus> {
        let value = command.dword(11);
        let now = self.now;
        let admin = self.admin.as_mut().expect("it is an admin queue");
        match FeatureId::from_dword(command.dword(10)) {
            FeatureId::NumberOfQueues if admin.kind == ControllerKind::Io => {
                let asked = QueueCounts::decode(value);
                if asked.submission > 0xffff || asked.completion > 0xffff {
                    return Err(NvmeStatus::INVALID_FIELD.permanent());
                }
                let granted = self.link.association.grant_queues(asked.submission.min(asked.completion));
                Ok(Done(QueueCounts::encode(granted).into()))
            }
            FeatureId::AsyncEventConfiguration => {
                admin.events.set_mask(AsyncEventMask::from_bits_retain(value));
                Ok(Done(0))
            }
            FeatureId::KeepAliveTimer => {
                admin.set_keep_alive(value);
                admin.restart_timer(now);
                Ok(Done(0))
            }
            _ => Err(NvmeStatus::INVALID_FIELD.permanent()),
        }
    }

    fn get_features(&mut self, command: &NvmeCommand) -> Result<AdminReply, NvmeStatus> {
        let admin = self.admin.as_ref().expect("it is an admin queue");
        let is_io = admin.kind == ControllerKind::Io;
        match FeatureId::from_dword(command.dword(10)) {
            FeatureId::VolatileWriteCache if is_io => Ok(Done(1)),
            FeatureId::NumberOfQueues if is_io => {
                Ok(Done(QueueCounts::encode(self.link.association.granted_queues()).into()))
            }
            FeatureId::AsyncEventConfiguration => Ok(Done(admin.events.mask().bits().into())),
            FeatureId::KeepAliveTimer => Ok(Done(admin.keep_alive_ms.into())),
            FeatureId::HostIdentifier => Ok(Data(self.link.association.host_id.to_vec())),
            _ => Err(NvmeStatus::INVALID_FIELD.permanent()),
        }
    }
}

/// `bytes` with the length that the host has asked for, at most that of the longest log page.
fn pad_to_asked_length(mut bytes: Vec<u8>, len: u32) -> Vec<u8> {
    bytes.resize((len as usize).min(LOG_PAGE_MAX), 0);
    bytes
}
