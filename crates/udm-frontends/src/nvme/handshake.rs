//! A connection before it is a queue: `ICReq`, then the Connect command.
//!
//! The connection belongs to any core. Once it is connected, it continues as a [`NvmeQueue`] on the
//! core of its queue. If the Connect command fails, the host gets the status, and the connection is
//! closed.

use super::association::AssociationOrigin;
use super::listener::NvmeShared;
use super::queue::{NvmeQueue, NvmeQueueStart, QueueLink};
use super::{CAPSULE_DATA_MAX, QUEUE_ENTRIES_MAX, TRANSFER_MAX};
use crate::nbd::{AdmittedConnectionSlot, Peer};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use udm_core::{Batch, Buf, Nanos, Segments};
use udm_runtime::{FrontCx, FrontEnd, RingCompletion, RingOp};
use udm_wire::nvme::{
    CONNECT_DATA_SIZE, Completion, ConnectCommand, ConnectData, ConnectError, DataPointer, FabricsCommand,
    FatalError, InitializeRequest, InitializeResponse, NvmeCommand, NvmeStatus, OPCODE_FABRICS, PduHeader,
    PduHeaderError, PduLimits, PduType, SQE_SIZE, TermRequest, data_digest, encode_capsule_response,
    verify_header_digest,
};

const RECV: u64 = 0;
const SEND: u64 = 1;

/// Bytes of one receive: more than a host sends before it waits for an answer.
const RECEIVE_LEN: usize = 2048;

/// A connection that is not a queue yet.
pub(super) struct NvmeHandshake {
    server: Arc<NvmeShared>,
    fd: Option<Arc<OwnedFd>>,
    /// Index of the port.
    port: usize,
    slot: Option<AdmittedConnectionSlot>,
    /// Received bytes that were not handled.
    received: Vec<u8>,
    /// Set once `ICReq` was answered.
    agreed: Option<AgreedParameters>,
    deadline: Nanos,
    is_begun: bool,
    is_waiting: bool,
    /// Bytes that the last send has left over.
    unsent: Vec<u8>,
    /// The connection closes when all is sent.
    closes: bool,
    is_closed: bool,
    ops: Vec<RingCompletion>,
}

/// Parameters of a connection that its first two PDUs have set.
#[derive(Clone, Copy)]
pub(super) struct AgreedParameters {
    pub(super) limits: PduLimits,
    pub(super) host_alignment: u8,
}

/// Why a connection ends before it is a queue.
enum HandshakeError {
    Pdu(PduHeaderError),
    /// The Connect command with this identifier fails.
    Connect(u16, ConnectError),
}

impl From<PduHeaderError> for HandshakeError {
    fn from(error: PduHeaderError) -> HandshakeError {
        HandshakeError::Pdu(error)
    }
}

impl NvmeHandshake {
    pub(super) fn new(
        server: Arc<NvmeShared>,
        fd: Arc<OwnedFd>,
        port: usize,
        slot: AdmittedConnectionSlot,
    ) -> NvmeHandshake {
        NvmeHandshake {
            server,
            fd: Some(fd),
            port,
            slot: Some(slot),
            received: Vec::new(),
            agreed: None,
            deadline: Nanos::NEVER,
            is_begun: false,
            is_waiting: false,
            unsent: Vec::new(),
            closes: false,
            is_closed: false,
            ops: Vec::new(),
        }
    }

    fn close(&mut self) {
        self.is_closed = true;
        (self.fd, self.slot) = (None, None);
        self.received = Vec::new();
    }

    fn received(&mut self, done: &RingCompletion) {
        match done.result {
            Ok(n) if n > 0 => {
                self.slot.iter().for_each(AdmittedConnectionSlot::mark_active);
                for buf in &done.data {
                    let n = (n as usize).min(buf.len());
                    self.received.extend_from_slice(&buf[..n]);
                }
            }
            _ => self.close(),
        }
    }

    /// A send may end early, also one that asks for all bytes to be sent.
    fn sent(&mut self, done: &RingCompletion) {
        let Ok(n) = done.result else { return self.close() };
        self.unsent = vec![0; done.data.len().saturating_sub(n as usize)];
        done.data.copy_to_at(n as usize, &mut self.unsent);
        if self.unsent.is_empty() && self.closes {
            self.close();
        }
    }

    /// Handles received bytes, and sends or receives next.
    fn advance(&mut self, cx: &mut FrontCx<'_, '_>) {
        if self.is_closed || self.is_waiting {
            return;
        }
        if !self.unsent.is_empty() {
            let rest = std::mem::take(&mut self.unsent);
            return self.send(&rest, cx);
        }
        let done = match self.agreed {
            None => self.initialize(),
            Some(agreed) => self.connect(agreed),
        };
        match done {
            Ok(None) => self.receive(cx),
            Ok(Some(reply)) => self.send(&reply, cx),
            Err(HandshakeError::Pdu(error)) => {
                let peer = self.peer();
                tracing::warn!("nvme: a connection of a host {peer} is closed: {error}");
                let request = TermRequest { error: error.error as u16, at: error.at };
                self.closes = true;
                self.send(&request.encode_c2h(&self.received), cx);
            }
            Err(HandshakeError::Connect(id, error)) => {
                let peer = self.peer();
                tracing::warn!("nvme: a host {peer} may not connect: {error} (status {})", error.status);
                let (result, status) = (error.result(), error.status);
                let completion = Completion { result, sq_head: 0, id, status };
                let mut out = [0; 128];
                let limits = self.agreed.expect("ICReq comes first").limits;
                let len = encode_capsule_response(&mut out, &completion, &limits);
                self.closes = true;
                self.send(&out[..len], cx);
            }
        }
    }

    fn peer(&self) -> Peer {
        self.slot.as_ref().map_or_else(Peer::default, AdmittedConnectionSlot::peer)
    }

    /// Takes a place for a queue.
    ///
    /// # Errors
    /// There are too many queues, in all or of this address.
    fn serve(&mut self) -> Result<(), ConnectError> {
        let (device, limits) = (self.server.subsystem.topic, &self.server.admission);
        let what = "there are too many queues, in all or of this address";
        let busy =
            ConnectError { status: NvmeStatus::CONNECT_CONTROLLER_BUSY, ..ConnectError::command(0, what) };
        self.slot.as_mut().map_or(Ok(()), |slot| slot.serve(device, limits).map_err(|_| busy))
    }

    fn receive(&mut self, cx: &mut FrontCx<'_, '_>) {
        if let Some(fd) = self.fd.clone().filter(|_| !self.is_closed) {
            self.is_waiting = true;
            cx.push(RECV, RingOp::Recv { fd, data: Segments::from(Buf::zeroed(RECEIVE_LEN)) });
        }
    }

    fn send(&mut self, bytes: &[u8], cx: &mut FrontCx<'_, '_>) {
        if let Some(fd) = self.fd.clone() {
            let mut buf = Buf::zeroed(bytes.len());
            buf.copy_from_slice(bytes);
            self.is_waiting = true;
            cx.push(SEND, RingOp::Send { fd, data: buf.into(), whole: true });
        }
    }

    /// Answers `ICReq`, once it has arrived.
    fn initialize(&mut self) -> Result<Option<Vec<u8>>, HandshakeError> {
        let Some(bytes) = self.received.first_chunk::<{ InitializeRequest::SIZE }>() else {
            // A connection that is not NVMe gets no more attention than its first byte.
            return match self.received.first() {
                Some(kind) if *kind != PduType::InitializeRequest as u8 => {
                    Err(PduHeaderError { error: FatalError::SequenceError, at: 0, what: "expected ICReq" }
                        .into())
                }
                _ => Ok(None),
            };
        };
        let request = InitializeRequest::decode(bytes)?;
        self.received.drain(..InitializeRequest::SIZE);
        let response = InitializeResponse {
            controller_alignment: 0,
            header_digest: request.header_digest,
            data_digest: request.data_digest,
            max_h2c_data: TRANSFER_MAX,
        };
        self.agreed = Some(AgreedParameters {
            limits: PduLimits {
                header_digest: request.header_digest,
                data_digest: request.data_digest,
                capsule_data_max: CAPSULE_DATA_MAX,
                data_max: TRANSFER_MAX,
            },
            host_alignment: request.host_alignment,
        });
        Ok(Some(response.encode().to_vec()))
    }

    /// Connects, once the Connect command has arrived.
    fn connect(&mut self, agreed: AgreedParameters) -> Result<Option<Vec<u8>>, HandshakeError> {
        let Some(common) = self.received.first_chunk() else { return Ok(None) };
        let pdu = PduHeader::decode(common, &agreed.limits)?;
        let sequence = |what| PduHeaderError { error: FatalError::SequenceError, at: 0, what };
        if pdu.kind != PduType::NvmeCommand {
            return Err(sequence("expected a Connect command").into());
        }
        let digest = if pdu.has_data_digest { 4 } else { 0 };
        let total = pdu.header_len + pdu.data_len as usize + digest;
        if pdu.data_len as usize > CONNECT_DATA_SIZE {
            let error = FatalError::DataLimitExceeded;
            return Err(PduHeaderError { error, at: 4, what: "expected a Connect command" }.into());
        }
        if self.received.len() < total {
            return Ok(None);
        }
        let header = &self.received[..pdu.header_len];
        let digested = PduHeader::SIZE + SQE_SIZE + 4;
        if agreed.limits.header_digest && !verify_header_digest(&header[..digested]) {
            let error = FatalError::HeaderDigestError;
            return Err(PduHeaderError { error, at: 0, what: "wrong header digest" }.into());
        }
        let mut command = [0; SQE_SIZE];
        command.copy_from_slice(&header[PduHeader::SIZE..PduHeader::SIZE + SQE_SIZE]);
        let command = NvmeCommand::from_bytes(command);
        let (data, rest) = self.received[pdu.header_len..total].split_at(pdu.data_len as usize);
        let fail = |status: NvmeStatus, what| {
            let error = ConnectError { status, ..ConnectError::command(0, what) };
            Err(HandshakeError::Connect(command.id(), error))
        };
        if pdu.has_data_digest && data_digest([data]) != *rest {
            return fail(NvmeStatus::TRANSIENT_TRANSPORT_ERROR, "wrong data digest");
        }
        if command.opcode() != OPCODE_FABRICS {
            return fail(NvmeStatus::COMMAND_SEQUENCE_ERROR.permanent(), "expected a Connect command");
        }
        let FabricsCommand::Connect(connect) = FabricsCommand::decode(&command) else {
            return fail(NvmeStatus::COMMAND_SEQUENCE_ERROR.permanent(), "expected a Connect command");
        };
        let pointer = DataPointer::InCapsule { offset: 0, len: CONNECT_DATA_SIZE as u32 };
        let Some(data) = data.first_chunk().filter(|_| command.data_pointer() == pointer) else {
            let status = NvmeStatus::DATA_SGL_LENGTH_INVALID.permanent();
            return fail(status, "expected 1024 bytes of data in the capsule");
        };
        let origin = AssociationOrigin { peer: self.peer(), port: self.port };
        let link = check_connect_parameters(&connect)
            .and_then(|()| ConnectData::decode(data))
            .and_then(|data| self.serve().map(|()| data))
            .and_then(|data| QueueLink::connect(&self.server.subsystem, &connect, data, origin));
        let link = link.map_err(|error| HandshakeError::Connect(command.id(), error))?;
        let unread = self.received.split_off(total);
        self.continue_as_queue(link, &connect, command.id(), agreed, unread);
        Ok(None)
    }

    /// The connection continues on the core of its queue.
    fn continue_as_queue(
        &mut self,
        link: QueueLink,
        connect: &ConnectCommand,
        command: u16,
        agreed: AgreedParameters,
        unread: Vec<u8>,
    ) {
        let (Some(fd), Some(mut slot)) = (self.fd.take(), self.slot.take()) else { return };
        let core = link.association.core_of(connect.queue);
        let slot = slot.hand_over(core);
        let server = Arc::clone(&self.server);
        let (connect, core_set) = (*connect, Arc::clone(&self.server.core_set));
        let start = NvmeQueueStart { fd, slot, server, link, connect, command, agreed, unread };
        core_set.attach(core, Box::new(move || Box::new(NvmeQueue::new(start))));
        self.close();
    }
}

/// Checks the parameters of a Connect command that do not depend on the subsystem.
fn check_connect_parameters(connect: &ConnectCommand) -> Result<(), ConnectError> {
    if connect.format != 0 {
        let status = NvmeStatus::CONNECT_INCOMPATIBLE_FORMAT.permanent();
        return Err(ConnectError { status, ..ConnectError::command(40, "unknown format of Connect") });
    }
    if !(1..QUEUE_ENTRIES_MAX).contains(&connect.queue_size) {
        return Err(ConnectError::command(44, "wrong size of the queue"));
    }
    Ok(())
}

impl FrontEnd for NvmeHandshake {
    fn gather(&mut self, cx: &mut FrontCx<'_, '_>) {
        if !self.is_begun {
            self.is_begun = true;
            self.deadline = cx.now() + Nanos(self.server.limits.handshake_max.as_nanos() as u64);
        }
        let mut ops = std::mem::take(&mut self.ops);
        cx.take(&mut ops);
        for done in ops.drain(..) {
            self.is_waiting = false;
            match done.tag {
                _ if self.is_closed => {}
                RECV => self.received(&done),
                _ => self.sent(&done),
            }
        }
        self.ops = ops;
        if self.deadline <= cx.now() && !self.is_closed {
            tracing::debug!("nvme: a connection ran out of time");
            self.abandon();
        }
        self.advance(cx);
        cx.wake_at(if self.is_closed { Nanos::NEVER } else { self.deadline });
    }

    fn complete(&mut self, done: &mut Batch, _: &mut FrontCx<'_, '_>) {
        debug_assert!(done.is_empty(), "it makes no bios");
    }

    fn stop(&mut self, _: &mut FrontCx<'_, '_>) {
        self.abandon();
    }

    fn is_closed(&self) -> bool {
        self.is_closed && !self.is_waiting
    }
}

impl NvmeHandshake {
    /// Closes the connection. An operation in flight ends with an error.
    fn abandon(&mut self) {
        if let Some(fd) = &self.fd {
            let _ = rustix::net::shutdown(fd, rustix::net::Shutdown::Both);
        }
        self.close();
    }
}
