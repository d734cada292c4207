//! The connection of one queue: a front end on one core.
//!
//! The phases of a queue: *serving* → *draining* (the server stops: nothing more is received;
//! commands in flight are completed and answered) → *dead* (nothing more is sent; commands in
//! flight are awaited) → closed. A lost connection and the end of the association lead straight to
//! *dead*. When the last queue of an association is closed, the controller is forgotten.

use super::admin::AdminQueue;
use super::association::{Association, AssociationEnded, AssociationOrigin, ControllerDisabled};
use super::authentication::QueueAuthentication;
use super::handshake::AgreedParameters;
use super::listener::NvmeShared;
use super::memory::DataMemory;
use super::namespaces::OpenNamespace;
use super::pending_command::PendingCommand;
use super::receive::Incoming;
use super::subsystem::{ControllerForgotten, Subsystem, SubsystemChanged};
use super::transmit::{PduSender, QueuedPdu};
use super::{QUEUE_BYTES_MAX, TRANSFER_MAX};
use crate::nbd::{AdmittedConnectionSlot, FailingExportMessage, ReceiveBuffer, return_buffers_to_pool};
use rustix::net::Shutdown;
use std::any::Any;
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use udm_core::{Batch, BioPool, BufPool, Nanos, Segments};
use udm_runtime::{FrontCx, FrontEnd, RingCompletion, RingOp};
use udm_wire::nvme::{
    CONNECT_AUTHENTICATION_REQUIRED, Completion, ConnectCommand, ConnectData, ConnectError, NvmeStatus,
};

const RECV: u64 = 0;
const SEND: u64 = 1;

/// Limit of PDUs that a queue takes in per turn, so that the core also serves others.
const PDUS_A_TURN: usize = 256;

/// Limit of answers of an admin queue that wait, each with up to 64 KiB: they count for no limit of
/// memory.
const ADMIN_ANSWERS_MAX: usize = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum QueuePhase {
    Serving,
    Draining,
    Dead,
}

/// A connected queue of an association. When dropped, it is disconnected.
pub(super) struct QueueLink {
    subsystem: Arc<Subsystem>,
    pub(super) association: Arc<Association>,
    queue: u16,
}

impl QueueLink {
    /// Connects a queue.
    ///
    /// # Errors
    /// The status for the host.
    pub(super) fn connect(
        subsystem: &Arc<Subsystem>,
        connect: &ConnectCommand,
        data: ConnectData,
        origin: AssociationOrigin,
    ) -> Result<QueueLink, ConnectError> {
        let association = match connect.queue {
            0 => subsystem.connect_admin(connect, data, origin)?,
            _ => subsystem.connect_io(connect, &data)?,
        };
        Ok(QueueLink { subsystem: Arc::clone(subsystem), association, queue: connect.queue })
    }
}

impl Drop for QueueLink {
    fn drop(&mut self) {
        if self.queue == 0 {
            self.association.end("its admin queue is disconnected");
        }
        if self.association.disconnect_queue(self.queue) {
            self.subsystem.forget_association(&self.association);
        }
    }
}

/// A connection that becomes a queue.
pub(super) struct NvmeQueueStart {
    pub(super) fd: Arc<OwnedFd>,
    pub(super) slot: AdmittedConnectionSlot,
    pub(super) server: Arc<NvmeShared>,
    pub(super) link: QueueLink,
    pub(super) connect: ConnectCommand,
    /// Identifier of the Connect command, which is not answered yet.
    pub(super) command: u16,
    pub(super) agreed: AgreedParameters,
    /// Bytes after the Connect command.
    pub(super) unread: Vec<u8>,
}

/// The controller's side of a queue.
pub(super) struct NvmeQueue {
    /// `None` when nothing more is received or sent.
    pub(super) fd: Option<Arc<OwnedFd>>,
    pub(super) server: Arc<NvmeShared>,
    pub(super) link: QueueLink,
    /// `None` if hosts need no secret.
    pub(super) authentication: Option<QueueAuthentication>,
    /// `None` for an I/O queue.
    pub(super) admin: Option<Box<AdminQueue>>,
    /// Number of entries.
    pub(super) entries: u16,
    /// Head of the submission queue; `None` without flow control.
    sq_head: Option<u16>,
    pub(super) agreed: AgreedParameters,
    pub(super) phase: QueuePhase,
    pub(super) rx: ReceiveBuffer,
    pub(super) incoming: Incoming,
    pub(super) tx: PduSender,
    pub(super) pending: slab::Slab<PendingCommand>,
    /// Commands that wait for memory, in order.
    pub(super) parked: VecDeque<usize>,
    /// Commands whose data the host was asked for.
    pub(super) transfers: usize,
    pub(super) bios: BioPool,
    /// Buffers of reads. Only devices and this controller write into them, so a host never gets
    /// data of another.
    pub(super) reads: BufPool,
    /// Buffers of long writes and of zeroes.
    pub(super) writes: BufPool,
    pub(super) namespaces: BTreeMap<u32, OpenNamespace>,
    /// `None` before the first call.
    pub(super) memory: Option<DataMemory>,
    /// Time of the current call.
    pub(super) now: Nanos,
    /// The server stops.
    pub(super) ending: bool,
    receiving: bool,
    pub(super) sending: bool,
    pub(super) deadline: Nanos,
    /// Time when the host last moved a byte or was last expected to.
    pub(super) host_at: Nanos,
    pub(super) trim_at: Nanos,
    /// Set when the queue dies: the host expects its requests to be at no device after this time.
    pub(super) quiesce_until: Nanos,
    /// The first answer: that of the Connect command.
    connected: Option<Completion>,
    ops: Vec<RingCompletion>,
    /// Dropped last.
    slot: AdmittedConnectionSlot,
}

impl NvmeQueue {
    pub(super) fn new(start: NvmeQueueStart) -> NvmeQueue {
        let NvmeQueueStart { fd, slot, server, link, connect, command, agreed, unread } = start;
        let entries = connect.queue_size + 1;
        let authentication = server.subsystem.authentication(&link.association);
        let required = if authentication.is_some() { CONNECT_AUTHENTICATION_REQUIRED } else { 0 };
        let connected = Completion {
            result: u64::from(link.association.id) | required,
            sq_head: 0,
            id: command,
            status: NvmeStatus::SUCCESS,
        };
        let admin = (connect.queue == 0)
            .then(|| Box::new(AdminQueue::new(link.association.kind, connect.keep_alive_ms)));
        let mut rx = ReceiveBuffer::new(QUEUE_BYTES_MAX);
        rx.put_back(&unread);
        NvmeQueue {
            fd: Some(fd),
            server,
            link,
            authentication,
            admin,
            entries,
            sq_head: (!connect.no_flow_control).then_some(0),
            agreed,
            phase: QueuePhase::Serving,
            rx,
            incoming: Incoming::Pdu,
            tx: PduSender::new(agreed.limits, agreed.host_alignment),
            pending: slab::Slab::new(),
            parked: VecDeque::new(),
            transfers: 0,
            bios: BioPool::new(usize::from(entries)),
            reads: BufPool::new(QUEUE_BYTES_MAX),
            writes: BufPool::new(QUEUE_BYTES_MAX),
            namespaces: BTreeMap::new(),
            memory: None,
            now: Nanos(0),
            ending: false,
            receiving: false,
            sending: false,
            deadline: Nanos::NEVER,
            host_at: Nanos(0),
            trim_at: Nanos::NEVER,
            quiesce_until: Nanos::NEVER,
            connected: Some(connected),
            ops: Vec::new(),
            slot,
        }
    }

    fn begin(&mut self, mut connected: Completion, cx: &mut FrontCx<'_, '_>) {
        let limit = self.server.limits.core_bytes_max;
        self.memory = Some(DataMemory::new(cx, limit, QUEUE_BYTES_MAX));
        cx.subscribe(self.link.association.topic);
        cx.subscribe(self.server.subsystem.topic);
        self.host_at = cx.now();
        self.begin_admin(cx.now());
        let until = cx.now() + Nanos(self.server.limits.handshake_max.as_nanos() as u64);
        self.authentication.iter_mut().for_each(|authentication| authentication.begin(until));
        self.look_at_subsystem(cx);
        self.advance_sq_head();
        connected.sq_head = self.sq_head();
        self.tx.push(QueuedPdu::Response(connected));
        // It may have ended or been disabled before this core subscribed.
        if self.link.association.is_ended() {
            self.die("its association has ended");
        } else if self.admin.is_none() && !self.link.association.is_enabled() {
            self.die("its controller is disabled");
        }
    }

    /// The queue receives and sends nothing more. With an admin queue, its association ends. With
    /// an I/O queue it does not: Linux closes those first, and then shuts the controller down.
    pub(super) fn die(&mut self, why: &str) {
        if self.phase != QueuePhase::Dead {
            self.phase = QueuePhase::Dead;
            let quiesce_ms = self.server.subsystem.quiesce_time_ms;
            self.quiesce_until = self.now + Nanos::from_millis(quiesce_ms.into());
            self.slot.mark_client_gone();
            if self.admin.is_some() {
                self.link.association.end(why);
            }
        }
    }

    /// Counts a command that was taken from the submission queue.
    pub(super) fn advance_sq_head(&mut self) {
        let entries = self.entries;
        if let Some(head) = &mut self.sq_head {
            *head = (*head + 1) % entries;
        }
    }

    fn sq_head(&self) -> u16 {
        self.sq_head.unwrap_or(u16::MAX)
    }

    /// True if a success may be reported with the data, without a response.
    pub(super) fn completes_with_data(&self) -> bool {
        self.sq_head.is_none()
    }

    /// Queues a response.
    pub(super) fn respond(&mut self, id: u16, status: NvmeStatus, result: u64) {
        let sq_head = self.sq_head();
        self.tx.push(QueuedPdu::Response(Completion { result, sq_head, id, status }));
    }

    /// Queues the data of a successful command, and its completion.
    pub(super) fn respond_with_data(&mut self, id: u16, data: Segments, charge: usize) {
        let is_completion = self.completes_with_data();
        self.tx.push(QueuedPdu::Data { command: id, data, is_completion, charge });
        if !is_completion {
            self.respond(id, NvmeStatus::SUCCESS, 0);
        }
    }

    /// Handles received PDUs, starts the next receive and sends waiting PDUs. Called after every
    /// change.
    fn pump(&mut self, cx: &mut FrontCx<'_, '_>) {
        self.start_parked(cx);
        let mut taken = 0;
        while taken < PDUS_A_TURN && self.may_take() && self.take_pdu(cx) {
            taken += 1;
        }
        if taken == PDUS_A_TURN {
            // The rest of the received data is handled in the next turn.
            cx.schedule(cx.me());
        } else if !self.receiving && self.may_take() {
            self.receive(cx);
        }
        if self.phase != QueuePhase::Dead
            && !self.sending
            && let Some(data) = self.tx.next()
        {
            self.send(data, cx);
        }
        self.advance_shutdown(cx);
        // If a receive is in flight and no PDU waits, the completion of the send may be deferred.
        let goes_on = self.receiving && self.tx.is_all_out();
        cx.set_defer_sends(self.phase == QueuePhase::Serving && goes_on);
        self.set_timers(cx);
    }

    /// True if the next PDU may be taken. Otherwise the host does not read its answers. The data
    /// that comes with commands needs no limit of its own: it is short, and there are few commands.
    fn may_take(&self) -> bool {
        let max = if self.admin.is_some() { ADMIN_ANSWERS_MAX } else { 2 * usize::from(self.entries) };
        let has_unread_answers = self.tx.waiting() > max;
        let is_between = matches!(self.incoming, Incoming::Pdu);
        self.phase == QueuePhase::Serving && !(is_between && has_unread_answers)
    }

    fn receive(&mut self, cx: &mut FrontCx<'_, '_>) {
        let room = self.rx.room(&mut self.writes, TRANSFER_MAX as usize);
        if let (Ok(data), Some(fd)) = (room, self.fd.clone()) {
            self.receiving = true;
            cx.push(RECV, RingOp::Recv { fd, data });
        }
    }

    fn received(&mut self, done: RingCompletion) {
        self.receiving = false;
        let n = done.result.unwrap_or_default() as usize;
        if self.phase == QueuePhase::Dead {
            return return_buffers_to_pool(done.data, &mut self.writes);
        }
        self.rx.arrived(n, done.data);
        if n == 0 {
            let why = match done.result {
                Ok(_) => "the host has disconnected",
                Err(_) => "the connection is lost",
            };
            self.die(why);
        }
    }

    fn send(&mut self, data: Segments, cx: &mut FrontCx<'_, '_>) {
        let Some(fd) = self.fd.clone() else { return };
        self.sending = true;
        self.host_at = cx.now();
        cx.push(SEND, RingOp::Send { fd, data, whole: true });
    }

    fn sent(&mut self, done: RingCompletion, cx: &mut FrontCx<'_, '_>) {
        self.sending = false;
        let n = match done.result {
            Ok(n) if n > 0 && self.phase != QueuePhase::Dead => n as usize,
            _ => {
                self.die("the connection is lost");
                return return_buffers_to_pool(done.data, &mut self.reads);
            }
        };
        match self.tx.sent(n, done.data, &mut self.reads) {
            Ok(charge) => self.give_back(charge, cx),
            Err(rest) => self.send(rest, cx),
        }
    }

    /// Returns memory of data.
    pub(super) fn give_back(&mut self, bytes: usize, cx: &mut FrontCx<'_, '_>) {
        if let Some(memory) = &mut self.memory {
            memory.give_back(bytes, cx);
        }
    }

    /// Performs the last steps of the queue's life as far as possible.
    fn advance_shutdown(&mut self, cx: &mut FrontCx<'_, '_>) {
        // When the server stops, the admin queue ends last: its end would be that of the others.
        let is_last = self.admin.is_none() || !self.ending || self.link.association.is_alone();
        if self.phase == QueuePhase::Draining && self.pending.is_empty() && self.tx.is_idle() && is_last {
            let why = match self.ending {
                true => "the server stops",
                false if self.lacks_authentication() => "its host is not authenticated",
                false => "the host has sent a wrong PDU",
            };
            self.die(why);
        }
        if self.phase != QueuePhase::Dead {
            return;
        }
        // After the shutdown, ring operations end with an error or the end of the stream.
        if !self.receiving && !self.sending {
            self.fd = None;
        } else if let Some(fd) = &self.fd {
            let _ = rustix::net::shutdown(fd, Shutdown::Both);
        }
        self.rx.clear(&mut self.writes);
        self.tx.clear(&mut self.reads);
        self.incoming = Incoming::Pdu;
        self.abandon_waiting(cx);
        if self.pending.is_empty() {
            self.close_namespaces(cx);
            if let Some(memory) = &mut self.memory {
                memory.give_back_all(cx);
            }
        }
        self.deadline = Nanos::NEVER;
        self.trim();
    }
}

impl FrontEnd for NvmeQueue {
    fn gather(&mut self, cx: &mut FrontCx<'_, '_>) {
        self.now = cx.now();
        if let Some(connected) = self.connected.take() {
            self.begin(connected, cx);
        }
        let mut ops = std::mem::take(&mut self.ops);
        cx.take(&mut ops);
        for done in ops.drain(..) {
            if done.result.is_ok_and(|n| n > 0) {
                self.host_at = cx.now();
            }
            match done.tag {
                RECV => self.received(done),
                _ => self.sent(done, cx),
            }
        }
        self.ops = ops;
        self.timers_due(cx);
        self.pump(cx);
    }

    fn complete(&mut self, done: &mut Batch, cx: &mut FrontCx<'_, '_>) {
        self.now = cx.now();
        for bio in done.drain(..) {
            self.finished(bio, cx);
        }
        self.look_at_keep_alive();
        self.pump(cx);
    }

    fn message(&mut self, message: &(dyn Any + Send), cx: &mut FrontCx<'_, '_>) {
        self.now = cx.now();
        if message.is::<AssociationEnded>() {
            self.die("its association has ended");
        } else if message.is::<ControllerDisabled>() {
            if self.admin.is_none() {
                self.die("its controller is disabled");
            }
        } else if message.is::<ControllerForgotten>() {
            self.look_at_resets();
        } else if message.is::<SubsystemChanged>() {
            self.look_at_subsystem(cx);
        } else if message.is::<FailingExportMessage>() {
            self.look_at_failing_exports(cx);
        } else {
            return;
        }
        self.pump(cx);
    }

    fn stop(&mut self, cx: &mut FrontCx<'_, '_>) {
        self.now = cx.now();
        self.ending = true;
        if self.phase == QueuePhase::Serving {
            self.phase = QueuePhase::Draining;
            self.deadline = cx.now() + Nanos(self.server.limits.stop_max.as_nanos() as u64);
            self.abandon_waiting(cx);
        }
        self.pump(cx);
    }

    fn is_closed(&self) -> bool {
        self.phase == QueuePhase::Dead && self.pending.is_empty() && !self.receiving && !self.sending
    }
}
