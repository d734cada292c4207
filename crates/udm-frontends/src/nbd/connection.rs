//! The connection of one client: a front end on one core.
//!
//! The phases of a connection: *handshake* → *serving* → *draining* (nothing more is received;
//! requests in flight are completed and answered) → *dead* (nothing more is sent; requests in
//! flight are awaited) → closed. A lost client, an invalid stream and a failed send lead straight
//! to *dead*. `DISC`, the end of the stream and a stop of the server lead to *draining*. Memory is
//! freed when the last bio and the last ring operation have completed. A connection that is *moved*
//! continues on another core (`migration`).

mod memory_use;
mod migration;
mod run_handshake;
mod tls;
mod transfer;

pub(super) use migration::{ConnectionMoveOrder, ConnectionServerRefs, attach_detached_client};

use super::NbdServerLimits;
use super::admission::{AdmittedConnectionSlot, Peer};
use super::allowed_clients::NbdClientIdentity;
use super::balance::ClientLoadBalanceHandle;
use super::block_status::BlockStatusWorkerHandle;
use super::contexts::MetaContext;
use super::export_geometry::ExportGeometry;
use super::exports::{AllowedClientsChanged, ExportRef, Exports};
use super::handshake::ServerHandshake;
use super::io_counters::CoreDeviceIoCounters;
use super::memory::ConnectionMemoryLease;
use super::range_locks::RangeLockMember;
use super::receive::ReceiveBuffer;
use super::reply::ReplySender;
use super::serve::PendingNbdRequest;
use super::stats::UnpublishedConnectionCounters;
use super::tls::NbdServerTlsHandle;
use crossbeam_utils::CachePadded;
use std::any::Any;
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tls::ConnectionTls;
use udm_core::{Batch, BioFlags, BioPool, BufPool, CoreId, DeviceId, Nanos};
use udm_runtime::{BioTaskLaneId, FrontCx, FrontEnd, ProcessCores, RingCompletion};
use udm_wire::nbd::{NbdHeaderStyle, NbdRequestHeader};

const RECV: u64 = 0;
const SEND: u64 = 1;

/// Limit of requests that a connection takes in per turn, so that the core also serves its other
/// clients.
const REQUESTS_A_TURN: usize = 256;

/// Idle time after which a connection frees the memory that it keeps for reuse.
const IDLE: Nanos = Nanos(1_000_000_000);

/// Time for a client of vsock to end its stream after `DISC`.
const END_OF_STREAM_MAX: Nanos = Nanos::from_millis(1000);

pub(super) enum ConnectionPhase {
    Handshake(ServerHandshake),
    Serving,
    Draining,
    Dead,
    /// The connection continues on another core.
    Moved,
}

/// The server side of a client's connection.
pub(super) struct AcceptedNbdConnection {
    /// `None` when nothing more is received or sent, so that a connection without a client keeps no
    /// descriptor.
    fd: Option<Arc<OwnedFd>>,
    pub(super) core_set: Arc<ProcessCores>,
    exports: Arc<Exports>,
    options: NbdServerLimits,
    pub(super) phase: ConnectionPhase,
    begun: bool,
    deadline: Nanos,
    pub(super) device: Option<BioTaskLaneId>,
    /// Who the client is, once it is served.
    client: NbdClientIdentity,
    pub(super) export: Option<(ExportRef, ExportGeometry)>,
    pub(super) header_style: NbdHeaderStyle,
    pub(super) contexts: Arc<[MetaContext]>,
    /// Topic of the answers to its queries of block status, once it has sent one.
    pub(super) status_topic: Option<DeviceId>,
    /// Unique number of the connection in messages.
    pub(super) id: u64,
    pub(super) block_status_worker: BlockStatusWorkerHandle,
    pub(super) rx: ReceiveBuffer,
    pub(super) tx: ReplySender,
    /// `None` if the server does not do TLS, or the connection has come from another core.
    server_tls: Option<NbdServerTlsHandle>,
    /// `None` if the connection uses no TLS, or not yet.
    tls: Option<Box<ConnectionTls>>,
    /// TLS that begins when the answer to STARTTLS has left.
    next_tls: Option<Box<ConnectionTls>>,
    receiving: bool,
    sending: bool,
    /// A request whose payload is still arriving: a write, or a block status.
    pub(super) arriving: Option<(NbdRequestHeader, BioFlags)>,
    pub(super) pending: slab::Slab<PendingNbdRequest>,
    /// Membership in the range locks of the device; `None` if this connection cannot write.
    pub(super) lock_member: Option<RangeLockMember>,
    /// Requests that wait for a range lock or for another request of this connection, in order.
    pub(super) blocked: VecDeque<usize>,
    pub(super) bios: BioPool,
    /// Buffers of reads. Only devices write into them. So if a device does not fill a read, the
    /// client gets zeroes or data that it has read before.
    pub(super) reads: BufPool,
    /// Buffers of long writes and of zeroes.
    pub(super) writes: BufPool,
    /// Number of unanswered requests, and the bytes that they count as.
    pub(super) open: usize,
    pub(super) open_bytes: usize,
    pub(super) delta: UnpublishedConnectionCounters,
    /// Counters of this core for the device; `None` before an export is chosen.
    pub(super) io_counters: Option<Arc<CachePadded<CoreDeviceIoCounters>>>,
    /// Time of the current call.
    pub(super) now: Nanos,
    /// `None` before the first call on this core.
    memory: Option<ConnectionMemoryLease>,
    /// `None` before the client is served, and if there is only one core.
    balanced: Option<ClientLoadBalanceHandle>,
    /// Bytes of buffers that write-zeroes in flight may need.
    pub(super) zeroing: usize,
    /// Time when the client last moved a byte or was last expected to, and time of the last
    /// activity.
    client_at: Nanos,
    active_at: Nanos,
    /// Times of the next check for idleness and of the next check of the wait for memory.
    trim_at: Nanos,
    wait_limit_at: Nanos,
    /// The connection keeps memory for reuse.
    has_reusable_memory: bool,
    /// The client has ended its stream.
    read_eof: bool,
    /// The move to another core that is in progress.
    pending_move: Option<migration::PendingConnectionMove>,
    /// The core that it came from, until it is ready on this one.
    from: Option<CoreId>,
    /// Minimum time on this core.
    stay: Nanos,
    /// The server stops: requests that fail now may have waited for an event that will not occur.
    pub(super) ending: bool,
    /// Requests of the export fail.
    pub(super) failing: bool,
    ops: Vec<RingCompletion>,
    /// Time of the current turn, and the requests taken in it.
    turn: Nanos,
    taken: usize,
    /// Dropped last: if no connection is counted, no export has a user.
    admission_slot: AdmittedConnectionSlot,
}

/// Returns a new number for a connection.
fn next_connection_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl AcceptedNbdConnection {
    pub(super) fn new(
        fd: Arc<OwnedFd>,
        core_set: Arc<ProcessCores>,
        block_status_worker: BlockStatusWorkerHandle,
        exports: Arc<Exports>,
        mut options: NbdServerLimits,
        server_tls: Option<NbdServerTlsHandle>,
        admission_slot: AdmittedConnectionSlot,
    ) -> AcceptedNbdConnection {
        // With a limit of 0, no request would be accepted.
        let tls = server_tls.as_ref().map(|server| server.tls.clone());
        options.requests_max = options.requests_max.max(1);
        options.bytes_max = options.bytes_max.max(1);
        let client = NbdClientIdentity::of_peer(admission_slot.peer());
        AcceptedNbdConnection {
            fd: Some(fd),
            core_set,
            exports,
            admission_slot,
            phase: ConnectionPhase::Handshake(ServerHandshake::new(tls, client)),
            begun: false,
            deadline: Nanos::NEVER,
            device: None,
            client: NbdClientIdentity::default(),
            export: None,
            header_style: NbdHeaderStyle::Simple,
            contexts: Arc::default(),
            status_topic: None,
            id: next_connection_id(),
            block_status_worker,
            rx: ReceiveBuffer::new(options.bytes_max),
            tx: ReplySender::new(),
            server_tls,
            tls: None,
            next_tls: None,
            receiving: false,
            sending: false,
            arriving: None,
            pending: slab::Slab::new(),
            lock_member: None,
            blocked: VecDeque::new(),
            bios: BioPool::new(options.requests_max),
            reads: BufPool::new(options.bytes_max),
            writes: BufPool::new(options.bytes_max),
            open: 0,
            open_bytes: 0,
            delta: UnpublishedConnectionCounters::default(),
            io_counters: None,
            now: Nanos(0),
            memory: None,
            balanced: None,
            zeroing: 0,
            client_at: Nanos(0),
            active_at: Nanos(0),
            trim_at: Nanos::NEVER,
            wait_limit_at: Nanos::NEVER,
            has_reusable_memory: false,
            read_eof: false,
            pending_move: None,
            from: None,
            stay: Nanos(0),
            ending: false,
            failing: false,
            ops: Vec::new(),
            turn: Nanos(0),
            taken: 0,
            options,
        }
    }

    fn is_full(&self) -> bool {
        self.open >= self.options.requests_max || self.open_bytes >= self.options.bytes_max
    }

    /// Handles received data, starts the next receive and sends waiting output. Called after every
    /// change.
    fn pump(&mut self, cx: &mut FrontCx<'_, '_>) {
        if matches!(self.phase, ConnectionPhase::Handshake(_)) {
            self.run_handshake(cx);
        }
        self.start_or_cancel_move(cx);
        if self.turn != cx.now() {
            (self.turn, self.taken) = (cx.now(), 0);
        }
        let mut full = self.take_requests(cx);
        while !full && self.decrypt(cx) {
            if matches!(self.phase, ConnectionPhase::Handshake(_)) {
                self.run_handshake(cx);
            }
            full = self.take_requests(cx);
        }
        let waits = self.receiving || self.taken >= REQUESTS_A_TURN || self.is_backpressured();
        if self.listens() && !full && !waits {
            self.receive(cx);
        }
        self.close_tls(cx);
        if !matches!(self.phase, ConnectionPhase::Dead)
            && !self.sending
            && let Some(data) = self.next_send()
        {
            self.send(data, cx);
        }
        self.advance_shutdown(cx);
        self.advance_move(cx);
        // If a receive is in flight and no output waits, the completion of the send may be
        // deferred.
        let is_all_out = self.tx.is_all_out() && self.tls.as_ref().is_none_or(|tls| tls.is_all_out());
        let goes_on = self.receiving && is_all_out && self.pending_move.is_none();
        cx.set_defer_sends(matches!(self.phase, ConnectionPhase::Serving) && goes_on);
        self.record_work(cx);
        self.admission_slot.publish(&mut self.delta);
        self.publish_memory(cx);
    }

    /// Takes in requests that have arrived. Returns true if the limits block the next one.
    fn take_requests(&mut self, cx: &mut FrontCx<'_, '_>) -> bool {
        let mut full = false;
        while matches!(self.phase, ConnectionPhase::Serving)
            && self.taken < REQUESTS_A_TURN
            && !self.is_moving_away()
        {
            // A write that was accepted gets its payload, even if the limits block the next
            // request.
            full = self.arriving.is_none() && (self.is_full() || !self.try_reserve(self.next_need(), cx));
            if full || !self.take_request(cx) {
                break;
            }
            self.has_reusable_memory = true;
            self.taken += 1;
            if self.taken == REQUESTS_A_TURN {
                // The rest of the received data is handled in the next turn.
                cx.schedule(cx.me());
            }
        }
        full
    }

    /// Handles a message that the allowed clients have changed. Returns true if it was one.
    fn on_allowed_clients_changed(&mut self, message: &(dyn Any + Send)) -> bool {
        let is_mine = message.is::<AllowedClientsChanged>();
        if is_mine {
            self.disconnect_if_not_allowed();
        }
        is_mine
    }

    /// Disconnects a client that may not use the device any more. Its requests in flight are
    /// answered.
    fn disconnect_if_not_allowed(&mut self) {
        let Some((export, _)) = &self.export else { return };
        if !matches!(self.phase, ConnectionPhase::Serving) || export.admits(&self.client) {
            return;
        }
        tracing::warn!(
            "nbd: the client {} is disconnected from export {:?}: it is not allowed any more",
            self.client,
            export.name()
        );
        self.phase = ConnectionPhase::Draining;
        // A client that does not read its answers is not waited for.
        self.deadline = self.now + Nanos(self.options.stop_max.as_nanos() as u64);
    }

    /// Returns true while more of the client is expected.
    fn listens(&self) -> bool {
        matches!(self.phase, ConnectionPhase::Serving | ConnectionPhase::Handshake(_))
            && !self.is_moving_away()
    }

    /// Returns true while a client in the handshake does not read its answers.
    fn is_backpressured(&self) -> bool {
        matches!(self.phase, ConnectionPhase::Handshake(_)) && !self.tx.is_idle()
    }

    /// Waits for the end of the stream of a client that disconnects over vsock. If the server
    /// closes first, and then the client ends its half, as libnbd does after `DISC`, Linux reports
    /// ENOTCONN to the client.
    fn waits_for_end_of_stream(&mut self, cx: &mut FrontCx<'_, '_>) -> bool {
        let is_vsock = matches!(self.admission_slot.peer(), Peer::Machine(_));
        if !is_vsock || self.read_eof || self.ending {
            return false;
        }
        self.deadline = self.deadline.min(cx.now() + END_OF_STREAM_MAX);
        if !self.receiving {
            self.receive(cx);
        }
        true
    }

    /// Performs the last steps of the connection's life as far as possible.
    fn advance_shutdown(&mut self, cx: &mut FrontCx<'_, '_>) {
        let is_sent = self.tx.is_idle() && self.tls.as_ref().is_none_or(|tls| tls.is_idle() && !self.sending);
        if matches!(self.phase, ConnectionPhase::Draining) && self.are_all_answered() && is_sent {
            if self.waits_for_end_of_stream(cx) {
                return;
            }
            self.phase = ConnectionPhase::Dead;
        }
        let over = matches!(self.phase, ConnectionPhase::Dead);
        if over {
            self.abandon_parked();
        }
        if (over || self.read_eof) && !self.pending.is_empty() {
            self.admission_slot.mark_client_gone();
        }
        if !over {
            return;
        }
        // After the shutdown, ring operations end with an error or the end of the stream.
        if !self.receiving && !self.sending {
            self.fd = None;
        } else if let Some(fd) = &self.fd {
            let _ = rustix::net::shutdown(fd, rustix::net::Shutdown::Both);
        }
        self.rx.clear(&mut self.writes);
        if let Some(mut tls) = self.tls.take() {
            tls.clear(&mut self.reads);
        }
        if self.arriving.take().is_some() {
            self.delta.ended += 1;
        }
        self.delta.ended += self.tx.clear(&mut self.reads) as u64;
        if self.pending.is_empty()
            && let Some(slot) = self.device.take()
        {
            cx.close(slot);
            self.leave_range_locks(cx);
            self.export = None;
        }
        self.deadline = Nanos::NEVER;
        self.trim();
    }
}

impl FrontEnd for AcceptedNbdConnection {
    fn gather(&mut self, cx: &mut FrontCx<'_, '_>) {
        self.now = cx.now();
        if !self.begun {
            self.begun = true;
            self.memory = Some(ConnectionMemoryLease::new(cx, self.options.core_bytes_max));
            self.balanced = self.join_balance(cx);
            if matches!(self.phase, ConnectionPhase::Serving) {
                self.settle(cx);
            } else {
                self.deadline = cx.now() + Nanos(self.options.handshake_max.as_nanos() as u64);
                self.tx.push_raw(&ServerHandshake::greeting());
            }
        }
        if matches!(self.phase, ConnectionPhase::Moved) {
            return;
        }
        let mut ops = std::mem::take(&mut self.ops);
        cx.take(&mut ops);
        for done in ops.drain(..) {
            self.active_at = cx.now();
            if done.result.is_ok_and(|n| n > 0) {
                self.client_at = cx.now();
            }
            match done.tag {
                RECV => self.received(done),
                _ => self.sent(done, cx),
            }
        }
        self.ops = ops;
        if self.deadline <= cx.now() {
            tracing::debug!("nbd: a connection ran out of time");
            self.phase = ConnectionPhase::Dead;
        }
        self.timers_due(cx);
        self.pump(cx);
    }

    fn complete(&mut self, done: &mut Batch, cx: &mut FrontCx<'_, '_>) {
        self.now = cx.now();
        self.active_at = self.now;
        for bio in done.drain(..) {
            self.finished(bio, cx);
        }
        self.pump(cx);
    }

    fn message(&mut self, message: &(dyn Any + Send), cx: &mut FrontCx<'_, '_>) {
        self.now = cx.now();
        // Most messages are for other clients, and there may be thousands of them.
        let is_mine = self.on_range_lock_message(message, cx)
            || self.on_block_status_answer(message)
            || self.on_tls_message(message, cx)
            || self.on_move_message(message, cx)
            || self.on_allowed_clients_changed(message);
        if is_mine || self.on_fail_message(message) {
            self.pump(cx);
        }
    }

    fn stop(&mut self, cx: &mut FrontCx<'_, '_>) {
        self.ending = true;
        match self.phase {
            ConnectionPhase::Serving | ConnectionPhase::Draining => {
                self.phase = ConnectionPhase::Draining;
                self.deadline = cx.now() + Nanos(self.options.stop_max.as_nanos() as u64);
            }
            ConnectionPhase::Handshake(_) => self.phase = ConnectionPhase::Dead,
            ConnectionPhase::Dead => {}
            ConnectionPhase::Moved => return self.close_moved(cx),
        }
        self.pump(cx);
    }

    fn is_closed(&self) -> bool {
        let over = match self.phase {
            ConnectionPhase::Dead => true,
            ConnectionPhase::Moved => self.device.is_none(),
            _ => false,
        };
        over && self.pending.is_empty() && !self.receiving && !self.sending
    }
}
