//! A session: one connected front end, and the rings that it has set up.
//!
//! The session runs on the thread of the server, because mapping memory and waiting for queues may
//! block. The queues run on the cores. A message that changes a queue is answered when the queue
//! has acknowledged it.
//!
//! A ring is started once it has a size, addresses and a kick descriptor, and is enabled. When the
//! session ends, the queues complete what is in flight, and only then another session begins. So no
//! request of an old session can land after one that a new session submits again.

use super::channel::{
    ReceiveInterruption, ReceivedVhostUserMessage, VhostUserChannel, nonblocking_event_fd, send_message,
};
use super::geometry::DiskGeometry;
use super::handover::VhostUserSetupMessage;
use super::inflight_memory::InflightMemory;
use super::memory::GuestMemory;
use super::queue::{VirtQueueMessage, VirtQueueSettings};
use super::queue_wait::QueueWait;
use super::vring_setup::VringSetup;
use crate::nbd::ExportRef;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use udm_core::AckOnLastDrop;
use udm_runtime::ProcessCores;
use udm_wire::vhost_user::{
    BACKEND_CONFIG_CHANGE, ConfigSpaceRange, REGIONS_MAX, VhostUserProtocolFeatures, VhostUserRequest,
    VringFd, VringState, encode_message, encode_reply,
};
use udm_wire::virtio::VirtioFeatures;
use udm_wire::virtio::blk::{BLK_CONFIG_SIZE, BLK_CONFIG_WRITEBACK};

/// Queues per machine.
pub(super) const QUEUES_MAX: u16 = 64;

/// The largest ring: the virtio crates and QEMU allow no larger one.
const RING_SIZE_MAX: u16 = 1024;

/// Protocol features that are offered.
const PROTOCOL_FEATURES: VhostUserProtocolFeatures = VhostUserProtocolFeatures::MQ
    .union(VhostUserProtocolFeatures::REPLY_ACK)
    .union(VhostUserProtocolFeatures::BACKEND_REQ)
    .union(VhostUserProtocolFeatures::CONFIG)
    .union(VhostUserProtocolFeatures::INFLIGHT_SHMFD)
    .union(VhostUserProtocolFeatures::RESET_DEVICE)
    .union(VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS)
    .union(VhostUserProtocolFeatures::STATUS);

/// A session of one front end.
pub(super) struct VhostUserSession {
    pub(super) channel: VhostUserChannel,
    pub(super) core_set: Arc<ProcessCores>,
    pub(super) export: ExportRef,
    pub(super) features: VirtioFeatures,
    pub(super) protocol: VhostUserProtocolFeatures,
    pub(super) memory: Arc<GuestMemory>,
    pub(super) rings: Vec<VringSetup>,
    pub(super) inflight: Option<InflightMemory>,
    pub(super) back_channel: Option<OwnedFd>,
    /// False if the guest has switched the write cache off.
    pub(super) writeback: bool,
    pub(super) status: u8,
    geometry: DiskGeometry,
    wait: QueueWait,
}

/// Result of a step of a session.
pub(super) enum SessionStep {
    /// A message or an event was handled.
    Handled,
    /// The front end has disconnected.
    Closed,
    /// The server stops.
    Stopped,
}

/// What a request leads to besides its effect.
pub(super) enum RequestReply {
    /// The request has no reply of its own.
    None,
    /// A number.
    Number(u64),
    /// Bytes, and a descriptor.
    Payload(Vec<u8>, Option<OwnedFd>),
}

impl VhostUserSession {
    pub(super) fn new(
        channel: VhostUserChannel,
        core_set: Arc<ProcessCores>,
        export: ExportRef,
        wait: QueueWait,
    ) -> VhostUserSession {
        let geometry = DiskGeometry::new(export.device().limits(), export.is_read_only());
        VhostUserSession {
            channel,
            core_set,
            export,
            features: VirtioFeatures::empty(),
            protocol: VhostUserProtocolFeatures::empty(),
            memory: Arc::default(),
            rings: (0..QUEUES_MAX).map(|_| VringSetup::default()).collect(),
            inflight: None,
            back_channel: None,
            writeback: true,
            status: 0,
            geometry,
            wait,
        }
    }

    /// Serves the front end, which has sent `messages` to another server, until it disconnects or
    /// the server stops; returns true if the server stops. Afterwards no request of it is in
    /// flight.
    ///
    /// # Errors
    /// The front end has broken the protocol.
    pub(super) fn run(&mut self, messages: Vec<VhostUserSetupMessage>) -> io::Result<bool> {
        let done = self.set_up(messages).and_then(|()| {
            loop {
                match self.step()? {
                    SessionStep::Handled => {}
                    SessionStep::Closed => return Ok(false),
                    SessionStep::Stopped => return Ok(true),
                }
            }
        });
        self.stop_all();
        done
    }

    /// Handles the next message or event.
    ///
    /// # Errors
    /// The front end has broken the protocol.
    pub(super) fn step(&mut self) -> io::Result<SessionStep> {
        match self.channel.receive()? {
            Ok(message) => self.handle(message)?,
            Err(ReceiveInterruption::Event) => self.look_at_device(),
            Err(ReceiveInterruption::Closed) => return Ok(SessionStep::Closed),
            Err(ReceiveInterruption::Stopped) => return Ok(SessionStep::Stopped),
        }
        Ok(SessionStep::Handled)
    }

    /// Stops all rings, and waits until their requests are completed.
    pub(super) fn stop_all(&mut self) {
        (0..self.rings.len()).for_each(|index| self.stop(index));
    }

    /// Stops all rings until the front end enables them again.
    fn disable_all(&mut self) {
        self.stop_all();
        self.rings.iter_mut().for_each(|ring| ring.is_enabled = false);
        self.clear_inflight();
    }

    fn handle(&mut self, message: ReceivedVhostUserMessage) -> io::Result<()> {
        let ReceivedVhostUserMessage { header, payload, fds } = message;
        let invalid = |error| io::Error::new(io::ErrorKind::InvalidData, error);
        let request = VhostUserRequest::decode(&header, &payload, fds.len()).map_err(invalid)?;
        tracing::debug!("vhost-user {}: {request:x?}", self.export.name());
        // A request with a reply of its own has no reply that reports a failure.
        let acks = header.needs_reply
            && self.protocol.contains(VhostUserProtocolFeatures::REPLY_ACK)
            && !request.has_own_reply();
        let (payload, fd) = match self.execute(request, fds) {
            Ok(RequestReply::None) if acks => (0u64.to_ne_bytes().to_vec(), None),
            Ok(RequestReply::None) => return Ok(()),
            Ok(RequestReply::Number(number)) => (number.to_ne_bytes().to_vec(), None),
            Ok(RequestReply::Payload(payload, fd)) => (payload, fd),
            Err(error) if acks => {
                tracing::warn!("vhost-user {}: {error}", self.export.name());
                (1u64.to_ne_bytes().to_vec(), None)
            }
            // The front end would not learn of it otherwise.
            Err(error) => return Err(error),
        };
        self.channel.send(&encode_reply(header.request, &payload), fd.as_ref().map(AsFd::as_fd))
    }

    pub(super) fn execute(
        &mut self,
        request: VhostUserRequest,
        mut fds: Vec<OwnedFd>,
    ) -> io::Result<RequestReply> {
        use VhostUserRequest as R;
        match request {
            R::GetFeatures => return Ok(RequestReply::Number(self.geometry.features(QUEUES_MAX).bits())),
            R::SetFeatures(features) => {
                let unknown = features.difference(self.geometry.features(QUEUES_MAX));
                if !unknown.is_empty() {
                    return Err(refused(format!("features {:#x} are not offered", unknown.bits())));
                }
                let is_other_kind =
                    self.features.symmetric_difference(features).contains(VirtioFeatures::RING_PACKED);
                if is_other_kind && !self.features.is_empty() {
                    // The driver has reset the device.
                    self.clear_inflight();
                }
                self.features = features;
                // Without protocol features there is no message that enables a ring.
                if !features.contains(VirtioFeatures::VHOST_PROTOCOL_FEATURES) {
                    self.rings.iter_mut().for_each(|ring| ring.is_enabled = true);
                    (0..self.rings.len()).try_for_each(|index| self.start_if_ready(index))?;
                }
                self.update_settings();
            }
            R::SetOwner => {}
            R::ResetOwner | R::ResetDevice => {
                self.disable_all();
                (self.status, self.writeback) = (0, true);
            }
            R::SetMemTable(table) => self.set_memory(self.memory.replaced(&table, fds)?),
            R::AddMemReg(region) => {
                let file = fds.pop().ok_or(io::ErrorKind::InvalidData)?;
                self.set_memory(self.memory.with(region, file)?);
            }
            R::RemMemReg(region) => {
                let without = self.memory.without(&region);
                let missing = || refused(format!("there is no memory region at {:#x}", region.guest_address));
                self.set_memory(without.ok_or_else(missing)?);
            }
            R::GetMaxMemSlots => return Ok(RequestReply::Number(REGIONS_MAX as u64)),
            R::SetVringNum(VringState { index, value }) => {
                // VIRTIO 1.2, 2.8.10.1: a packed ring may have any size.
                let is_packed = self.features.contains(VirtioFeatures::RING_PACKED);
                let is_valid =
                    |size: &u16| (1..=RING_SIZE_MAX).contains(size) && (is_packed || size.is_power_of_two());
                let size = u16::try_from(value).ok().filter(is_valid);
                let bad =
                    || refused(format!("a ring of {value} entries: expected a power of two up to 1024"));
                self.stopped_ring(index)?.size = Some(size.ok_or_else(bad)?);
                self.start_if_ready(index as usize)?;
            }
            R::SetVringAddr(addresses) => {
                let ring = self.ring(addresses.index)?;
                // A running ring is named again when the front end changes what it logs.
                if ring.running.is_none() || ring.addresses != Some(addresses) {
                    self.stopped_ring(addresses.index)?.addresses = Some(addresses);
                    self.start_if_ready(addresses.index as usize)?;
                }
            }
            R::SetVringBase(VringState { index, value }) => {
                let ring = self.stopped_ring(index)?;
                (ring.base, ring.is_rebased) = (value, ring.has_run);
            }
            R::GetVringBase(index) => {
                self.ring(index)?;
                self.stop(index as usize);
                let ring = self.ring(index)?;
                (ring.kick, ring.has_kick, ring.call) = (None, false, None);
                let payload = [index.to_ne_bytes(), ring.base.to_ne_bytes()].concat();
                return Ok(RequestReply::Payload(payload, None));
            }
            R::SetVringKick(VringFd { index, .. }) => {
                self.ring(index)?;
                self.stop(index as usize);
                let ring = self.ring(index)?;
                (ring.kick, ring.has_kick) = (fds.pop().map(nonblocking_event_fd).transpose()?, true);
                if ring.kick.is_none() {
                    return Err(refused(format!(
                        "ring {index} has no kick descriptor: polling is not supported"
                    )));
                }
                self.start_if_ready(index as usize)?;
            }
            R::SetVringCall(VringFd { index, .. }) => {
                let call = fds.pop().map(nonblocking_event_fd).transpose()?;
                self.ring(index)?.call.clone_from(&call);
                self.tell(index as usize, VirtQueueMessage::Call(call));
            }
            R::SetVringErr(VringFd { index, .. }) => drop(self.ring(index)?),
            R::GetProtocolFeatures => return Ok(RequestReply::Number(PROTOCOL_FEATURES.bits())),
            R::SetProtocolFeatures(protocol) => {
                let unknown = protocol.difference(PROTOCOL_FEATURES);
                if !unknown.is_empty() {
                    return Err(refused(format!("protocol features {:#x} are not offered", unknown.bits())));
                }
                self.protocol = protocol;
            }
            R::GetQueueNum => return Ok(RequestReply::Number(QUEUES_MAX.into())),
            R::SetVringEnable(VringState { index, value }) => {
                self.ring(index)?.is_enabled = value != 0;
                self.start_if_ready(index as usize)?;
                self.update_settings();
            }
            R::SetBackendReqFd => self.back_channel = fds.pop(),
            R::GetConfig(range) => return Ok(RequestReply::Payload(self.read_config(range).encode(), None)),
            R::SetConfig(range) => self.write_config(&range)?,
            R::GetInflightFd(asked) => {
                let (memory, file) =
                    InflightMemory::create(asked, QUEUES_MAX, RING_SIZE_MAX, self.ring_kinds())?;
                let reply = memory.area.encode();
                self.inflight = Some(memory);
                return Ok(RequestReply::Payload(reply, Some(file)));
            }
            R::SetInflightFd(area) => {
                let file = fds.pop().ok_or(io::ErrorKind::InvalidData)?;
                self.inflight = Some(InflightMemory::new(file, area)?);
            }
            R::SetStatus(status) => {
                self.status = status;
                if status == 0 {
                    // The driver has reset the device. Its memory may hold anything from now on.
                    self.disable_all();
                }
            }
            R::GetStatus => return Ok(RequestReply::Number(self.status.into())),
            R::Unsupported(number) => return Err(refused(format!("message {number} is not supported"))),
        }
        Ok(RequestReply::None)
    }

    fn ring(&mut self, index: u32) -> io::Result<&mut VringSetup> {
        let missing = || refused(format!("there is no ring {index}: a machine has at most {QUEUES_MAX}"));
        self.rings.get_mut(index as usize).ok_or_else(missing)
    }

    /// The ring, for a change that a running ring cannot take.
    fn stopped_ring(&mut self, index: u32) -> io::Result<&mut VringSetup> {
        let ring = self.ring(index)?;
        if ring.running.is_some() { Err(refused(format!("ring {index} is in use"))) } else { Ok(ring) }
    }

    pub(super) fn settings(&self, index: usize) -> VirtQueueSettings {
        let has_cache = self.features.contains(VirtioFeatures::BLK_FLUSH);
        VirtQueueSettings {
            geometry: self.geometry,
            writes_through: !(self.writeback && has_cache) && self.geometry.limits.write_cache,
            is_enabled: self.rings[index].is_enabled,
        }
    }

    /// Sends a message to a running queue.
    fn tell(&self, index: usize, message: VirtQueueMessage) {
        if let Some(running) = self.rings[index].running {
            self.core_set.send_message(running.core, running.topic, Box::new(message));
        }
    }

    /// Stops a ring and waits until its requests are completed.
    fn stop(&mut self, index: usize) {
        let Some(running) = self.rings[index].running.take() else { return };
        let (reply, stopped) = sync_channel(1);
        self.core_set.send_message(running.core, running.topic, Box::new(VirtQueueMessage::Stop(reply)));
        if let Some(base) = self.wait.receive(&stopped, &self.export.name()) {
            self.rings[index].base = base;
        }
    }

    /// Gives all queues a new memory, and waits until none uses the old one.
    fn set_memory(&mut self, memory: GuestMemory) {
        self.memory = Arc::new(memory);
        self.tell_all(|_, ack| VirtQueueMessage::Memory(Arc::clone(&self.memory), ack));
    }

    /// Gives all queues their settings, and waits until they use them: a write that the guest adds
    /// after the write cache was switched off must be durable.
    fn update_settings(&self) {
        self.tell_all(|index, ack| VirtQueueMessage::Settings { settings: self.settings(index), _ack: ack });
    }

    /// Sends a message to each running queue, and waits until all have dropped its acknowledgement.
    fn tell_all(&self, message: impl Fn(usize, AckOnLastDrop) -> VirtQueueMessage) {
        let (done, acknowledged) = sync_channel::<()>(1);
        let ack = AckOnLastDrop::new(move || {
            // The receiver waits, and there is one acknowledgement.
            let _ = done.try_send(());
        });
        for index in 0..self.rings.len() {
            self.tell(index, message(index, ack.clone()));
        }
        drop(ack);
        self.wait.receive(&acknowledged, &self.export.name());
    }

    fn read_config(&self, mut range: ConfigSpaceRange) -> ConfigSpaceRange {
        let config = self.geometry.config(QUEUES_MAX, self.writeback).encode();
        let start = range.offset as usize;
        for (at, byte) in range.bytes.iter_mut().enumerate() {
            *byte = config.get(start.saturating_add(at)).copied().unwrap_or(0);
        }
        range
    }

    /// The only field that a driver may change is the write cache.
    fn write_config(&mut self, range: &ConfigSpaceRange) -> io::Result<()> {
        let start = range.offset as usize;
        if start.saturating_add(range.bytes.len()) > BLK_CONFIG_SIZE {
            return Err(refused("the configuration space has 60 bytes".into()));
        }
        let writeback = BLK_CONFIG_WRITEBACK.checked_sub(start).and_then(|at| range.bytes.get(at));
        if let Some(byte) = writeback {
            self.writeback = *byte != 0;
            self.update_settings();
        }
        Ok(())
    }

    /// Looks if the device has changed, and tells the front end so.
    fn look_at_device(&mut self) {
        let before = self.geometry.config(QUEUES_MAX, self.writeback);
        self.geometry = DiskGeometry::new(self.export.device().limits(), self.export.is_read_only());
        self.update_settings();
        if self.geometry.config(QUEUES_MAX, self.writeback) == before {
            return;
        }
        let Some(back_channel) = &self.back_channel else { return };
        let message = encode_message(BACKEND_CONFIG_CHANGE, false, &[]);
        if let Err(error) = send_message(back_channel.as_fd(), &message, None) {
            tracing::warn!(
                "vhost-user {}: the machine is not told its new size: {error}",
                self.export.name()
            );
        }
    }
}

pub(super) fn refused(why: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, why)
}
