//! One client: a front end on one core.
//!
//! The life of a connection: *handshake* → *serving* → *draining* (nothing more is taken in; what
//! is in flight is finished and answered) → *dead* (nothing more is sent either; what is in flight
//! is awaited) → closed. A client that vanishes, a stream out of step and a failed send lead
//! straight to *dead*; `DISC`, the end of the stream and a stop of the server to *draining*. Memory
//! is freed when the last bio and the last ring operation are back, not before. A connection that
//! is *moved* goes on on another core (`migration`).

mod memory_use;
mod migration;
mod run_handshake;

pub(super) use migration::MoveMessage;

use super::ServerOptions;
use super::admission::AdmissionSlot;
use super::balance::BalancedClient;
use super::block_status::BlockStatusWorker;
use super::contexts::MetaContext;
use super::exports::{ExportGeometry, ExportRef, Exports};
use super::handshake::Handshake;
use super::io_counters::CoreIoCounters;
use super::memory::MemoryLease;
use super::range_locks::LockMember;
use super::receive::{ReceiveBlocked, ReceiveBuffer};
use super::reply::{ReplySender, recycle};
use super::serve::PendingRequest;
use super::stats::CounterDelta;
use crossbeam_utils::CachePadded;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::any::Any;
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use udm_core::bugs::{self, Bug};
use udm_core::errno::ECANCELED;
use udm_core::{Batch, BioFlags, BioPool, BufPool, CoreId, Nanos, Segments};
use udm_runtime::{CoreSet, DeviceSlot, Done, FrontCx, FrontEnd, RingOp};
use udm_wire::nbd::Request;

const RECV: u64 = 0;
const SEND: u64 = 1;

/// Requests that a connection takes in a turn, so that a flood of them leaves the core to its other
/// clients in between.
const REQUESTS_A_TURN: usize = 256;

/// A connection that was idle for so long gives back what it kept for reuse.
const IDLE: Nanos = Nanos(1_000_000_000);

pub(super) enum ConnectionPhase {
    Handshake(Handshake),
    Serving,
    Draining,
    Dead,
    /// It goes on on another core.
    Moved,
}

/// A client's connection. See the module's documentation.
pub(super) struct Connection {
    /// `None` when nothing more is received or sent: a connection whose client is gone keeps no
    /// descriptor.
    fd: Option<Arc<OwnedFd>>,
    pub(super) cluster: Arc<CoreSet>,
    exports: Arc<Exports>,
    options: ServerOptions,
    pub(super) phase: ConnectionPhase,
    begun: bool,
    deadline: Nanos,
    pub(super) device: Option<DeviceSlot>,
    pub(super) export: Option<(ExportRef, ExportGeometry)>,
    pub(super) structured: bool,
    pub(super) contexts: Arc<[MetaContext]>,
    /// Its name in letters, unlike any other's.
    pub(super) id: u64,
    pub(super) block_status_worker: BlockStatusWorker,
    pub(super) rx: ReceiveBuffer,
    pub(super) tx: ReplySender,
    receiving: bool,
    sending: bool,
    /// A write whose payload is still arriving.
    pub(super) arriving: Option<(Request, BioFlags)>,
    pub(super) pending: slab::Slab<PendingRequest>,
    /// What orders requests that change a part of a block; `None` when this connection can't write.
    pub(super) lock_member: Option<LockMember>,
    /// Requests that wait for a hold to end, or for one of their own, in order.
    pub(super) parked: VecDeque<usize>,
    pub(super) bios: BioPool,
    /// Buffers of reads. Nobody but devices writes into them, so a read that a device leaves alone
    /// shows zeroes or what this client has read before.
    pub(super) reads: BufPool,
    /// Buffers of long writes and of zeroes.
    pub(super) writes: BufPool,
    /// Requests not answered, and what they count for in bytes.
    pub(super) open: usize,
    pub(super) open_bytes: usize,
    pub(super) delta: CounterDelta,
    /// What its core counts for its device; `None` before it has chosen one.
    pub(super) io_counters: Option<Arc<CachePadded<CoreIoCounters>>>,
    /// The time of this call.
    pub(super) now: Nanos,
    /// `None` before the first call on its core.
    memory: Option<MemoryLease>,
    /// `None` before that, and where there is no other core.
    balanced: Option<BalancedClient>,
    /// Bytes that write-zeroes in flight may need as data.
    pub(super) zeroing: usize,
    /// When its client last moved a byte, or was last given reason to; when anything of it last
    /// moved.
    client_at: Nanos,
    active_at: Nanos,
    /// When to look whether it is idle, and whether it waited for memory for too long.
    trim_at: Nanos,
    patience_at: Nanos,
    /// It keeps something for reuse.
    has_reusable_memory: bool,
    /// The client will send no more.
    read_eof: bool,
    /// It is about to go on on another core.
    pending_move: Option<migration::PendingMove>,
    /// The core that it came from, until it has settled on this one.
    from: Option<CoreId>,
    /// How long it stays here at the least.
    stay: Nanos,
    /// The server ends: what fails now may have waited for something that does not come any more.
    pub(super) ending: bool,
    /// Requests of its export fail.
    pub(super) failing: bool,
    ops: Vec<Done>,
    /// The turn, by its time, and the requests taken in it.
    turn: Nanos,
    taken: usize,
    /// Given back behind all the rest: who sees no connection sees no user of an export either.
    admission_slot: AdmissionSlot,
}

/// A number for each connection.
fn next_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl Connection {
    pub(super) fn new(
        fd: Arc<OwnedFd>,
        cluster: Arc<CoreSet>,
        block_status_worker: BlockStatusWorker,
        exports: Arc<Exports>,
        mut options: ServerOptions,
        admission_slot: AdmissionSlot,
    ) -> Connection {
        // With bounds of nothing, nothing would ever be let in.
        options.requests_max = options.requests_max.max(1);
        options.bytes_max = options.bytes_max.max(1);
        Connection {
            fd: Some(fd),
            cluster,
            exports,
            admission_slot,
            phase: ConnectionPhase::Handshake(Handshake::default()),
            begun: false,
            deadline: Nanos::NEVER,
            device: None,
            export: None,
            structured: false,
            contexts: Arc::default(),
            id: next_id(),
            block_status_worker,
            rx: ReceiveBuffer::new(options.bytes_max),
            tx: ReplySender::new(),
            receiving: false,
            sending: false,
            arriving: None,
            pending: slab::Slab::new(),
            lock_member: None,
            parked: VecDeque::new(),
            bios: BioPool::new(options.requests_max),
            reads: BufPool::new(options.bytes_max),
            writes: BufPool::new(options.bytes_max),
            open: 0,
            open_bytes: 0,
            delta: CounterDelta::default(),
            io_counters: None,
            now: Nanos(0),
            memory: None,
            balanced: None,
            zeroing: 0,
            client_at: Nanos(0),
            active_at: Nanos(0),
            trim_at: Nanos::NEVER,
            patience_at: Nanos::NEVER,
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

    // ---- in ----

    fn received(&mut self, done: Done) {
        self.receiving = false;
        if matches!(self.phase, ConnectionPhase::Dead) {
            return recycle(done.data, &mut self.writes);
        }
        match done.result {
            Ok(n) if n > 0 => {
                self.admission_slot.talks();
                self.rx.arrived(n as usize, done.data);
            }
            Ok(_) => {
                self.rx.arrived(0, done.data);
                // The client will say no more; it may still listen for its answers.
                match self.phase {
                    ConnectionPhase::Serving if self.is_cut() => self.phase = ConnectionPhase::Dead,
                    ConnectionPhase::Serving => {
                        (self.phase, self.read_eof) = (ConnectionPhase::Draining, true)
                    }
                    ConnectionPhase::Handshake(_) => self.phase = ConnectionPhase::Dead,
                    ConnectionPhase::Draining | ConnectionPhase::Dead | ConnectionPhase::Moved => {}
                }
            }
            // For the sake of leaving, which may have been given up since.
            Err(ECANCELED) => self.rx.arrived(0, done.data),
            Err(errno) => {
                self.rx.arrived(0, done.data);
                tracing::debug!(errno, "nbd: receive failed");
                self.phase = ConnectionPhase::Dead;
            }
        }
    }

    /// True when the client takes no answers either. TCP does not say so before a send fails.
    fn is_cut(&self) -> bool {
        let Some(fd) = &self.fd else { return true };
        let mut fds = [PollFd::new(fd, PollFlags::empty())];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut fds, Some(&now)).is_ok() && fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)
    }

    fn sent(&mut self, done: Done, cx: &mut FrontCx<'_, '_>) {
        self.sending = false;
        let dead = matches!(self.phase, ConnectionPhase::Dead);
        let n = match done.result {
            Ok(n) if n > 0 && !dead => n as usize,
            other => {
                tracing::debug!(?other, "nbd: send failed");
                self.phase = ConnectionPhase::Dead;
                recycle(done.data, &mut self.reads);
                return;
            }
        };
        match self.tx.sent(n, done.data, &mut self.reads) {
            Ok(sent) => {
                self.open -= sent.answers;
                self.open_bytes -= sent.charge;
            }
            Err(rest) => self.send(rest, cx),
        }
    }

    fn send(&mut self, data: Segments, cx: &mut FrontCx<'_, '_>) {
        let Some(fd) = self.fd.clone() else { return };
        self.sending = true;
        self.client_at = cx.now();
        cx.push(SEND, RingOp::Send { fd, data, whole: true });
    }

    fn is_full(&self) -> bool {
        self.open >= self.options.requests_max || self.open_bytes >= self.options.bytes_max
    }

    /// Works off what has arrived, then asks for more and sends what waits. Called after every
    /// change.
    fn pump(&mut self, cx: &mut FrontCx<'_, '_>) {
        if matches!(self.phase, ConnectionPhase::Handshake(_)) {
            self.run_handshake(cx);
        }
        self.start_or_cancel_move(cx);
        let mut full = false;
        if self.turn != cx.now() {
            (self.turn, self.taken) = (cx.now(), 0);
        }
        while matches!(self.phase, ConnectionPhase::Serving)
            && self.taken < REQUESTS_A_TURN
            && !self.is_moving_away()
        {
            // A write that was let in gets its payload, whatever the bounds say of the next
            // request.
            full = self.arriving.is_none() && (self.is_full() || !self.try_reserve(self.next_need(), cx));
            if full || !self.take_request(cx) {
                break;
            }
            self.has_reusable_memory = true;
            self.taken += 1;
            if self.taken == REQUESTS_A_TURN {
                // What has arrived besides comes next turn.
                cx.schedule(cx.me());
            }
        }
        let listens = matches!(self.phase, ConnectionPhase::Serving | ConnectionPhase::Handshake(_))
            && !self.is_moving_away();
        if listens && !full && self.taken < REQUESTS_A_TURN && !self.receiving && !self.is_backpressured() {
            self.receive(cx);
        }
        if !matches!(self.phase, ConnectionPhase::Dead)
            && !self.sending
            && let Some(data) = self.tx.next(&mut self.delta)
        {
            self.send(data, cx);
        }
        self.advance_shutdown(cx);
        self.advance_move(cx);
        // While it listens for more, and has nothing else to say, it does not matter when it hears
        // that its answers have left.
        let goes_on = self.receiving && self.tx.is_all_out() && self.pending_move.is_none();
        cx.set_defer_sends(matches!(self.phase, ConnectionPhase::Serving) && goes_on);
        self.record_work(cx);
        self.admission_slot.publish(&mut self.delta);
        self.publish_memory(cx);
    }

    fn receive(&mut self, cx: &mut FrontCx<'_, '_>) {
        let may = self.allowance();
        let mut room = self.rx.room(&mut self.writes, may);
        if let Err(ReceiveBlocked::Memory(need)) = room
            && self.try_reserve(need, cx)
        {
            let may = self.allowance();
            room = self.rx.room(&mut self.writes, may);
        }
        if let (Ok(data), Some(fd)) = (room, self.fd.clone()) {
            self.leave_line(cx);
            self.receiving = true;
            self.client_at = cx.now();
            cx.push(RECV, RingOp::Recv { fd, data });
        }
    }

    /// True while a client that is still shaking hands does not read what it asked for.
    fn is_backpressured(&self) -> bool {
        matches!(self.phase, ConnectionPhase::Handshake(_)) && !self.tx.is_idle()
    }

    /// Ends what can be ended: the last steps of the connection's life.
    fn advance_shutdown(&mut self, cx: &mut FrontCx<'_, '_>) {
        if matches!(self.phase, ConnectionPhase::Draining) && self.are_all_answered() && self.tx.is_idle() {
            self.phase = ConnectionPhase::Dead;
        }
        let over = matches!(self.phase, ConnectionPhase::Dead);
        if over {
            self.abandon_parked();
        }
        if (over || self.read_eof) && !self.pending.is_empty() {
            self.admission_slot.orphan();
        }
        if !over {
            return;
        }
        // What is under way in the ring ends with an error or the end of the stream.
        if !self.receiving && !self.sending {
            self.fd = None;
        } else if let Some(fd) = &self.fd {
            let _ = rustix::net::shutdown(fd, rustix::net::Shutdown::Both);
        }
        self.rx.clear(&mut self.writes);
        if self.arriving.take().is_some() {
            self.delta.ended += 1;
        }
        self.delta.ended += self.tx.clear(&mut self.reads) as u64;
        if self.pending.is_empty()
            && let Some(slot) = self.device.take()
        {
            if !bugs::on(Bug::LaneKept) {
                cx.close(slot);
            }
            self.leave_range_locks(cx);
            self.export = None;
        }
        self.deadline = Nanos::NEVER;
        self.trim();
    }
}

impl FrontEnd for Connection {
    fn gather(&mut self, cx: &mut FrontCx<'_, '_>) {
        self.now = cx.now();
        if !self.begun {
            self.begun = true;
            self.memory = Some(MemoryLease::new(cx, self.options.core_bytes_max));
            self.balanced = self.join_balance(cx);
            if let Some(from) = self.from.take() {
                self.settle(from, cx);
            } else {
                self.deadline = cx.now() + Nanos(self.options.handshake_max.as_nanos() as u64);
                self.tx.push_raw(&Handshake::greeting());
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
        // Most are no affair of this client's, and there may be thousands of those.
        let is_mine = self.on_range_lock_message(message, cx)
            || self.on_block_status_answer(message)
            || self.on_move_message(message, cx);
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
            ConnectionPhase::Moved => return self.let_go(cx),
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
