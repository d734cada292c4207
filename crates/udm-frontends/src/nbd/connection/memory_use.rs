//! Memory that a connection holds of its core, and when it is freed.

use super::{AcceptedNbdConnection, ConnectionPhase, IDLE};
use crate::nbd::memory::{ConnectionHeldMemory, ConnectionMemoryLease};
use crate::nbd::serve::{PIECE, touched_blocks_len};
use udm_core::{BioPool, Nanos};
use udm_runtime::FrontCx;
use udm_wire::nbd::{NbdCommand, NbdHeaderStyle, NbdRequestHeader, PAYLOAD_MAX};

/// Minimum time that a client gets to move data, however many wait: enough for one send over a slow
/// line.
const WAIT_LIMIT_MIN: Nanos = Nanos(1_000_000_000);

impl AcceptedNbdConnection {
    /// Time for which a stalled client may block others now. The more wait, the shorter.
    fn wait_limit(&self) -> Nanos {
        let line = self.memory.as_ref().map_or(1, ConnectionMemoryLease::line).max(1);
        let alone = self.options.stall_max.as_nanos() as u64;
        Nanos((alone / line as u64).max(WAIT_LIMIT_MIN.0.min(alone)))
    }

    fn held(&self) -> ConnectionHeldMemory {
        let tls = self.tls.as_ref().map_or(0, |tls| tls.held());
        let pools = self.reads.total_bytes() + self.writes.total_bytes();
        ConnectionHeldMemory {
            bytes: self.rx.held() + self.tx.held() + tls + pools + self.zeroing,
            midway: self.rx.is_midway(),
            in_flight: !self.pending.is_empty(),
        }
    }

    pub(super) fn allowance(&self) -> usize {
        self.memory.as_ref().map_or(0, |memory| memory.allowance(self.held()))
    }

    /// New memory that the next request needs, if it has arrived: for the data of a read, or for a
    /// partial block. The payload of a write takes its memory as it arrives.
    pub(super) fn next_need(&self) -> usize {
        let unread = self.rx.unread();
        let request = match self.header_style {
            NbdHeaderStyle::Extended => unread.first_chunk().map(NbdRequestHeader::decode_extended),
            _ => unread.first_chunk().map(NbdRequestHeader::decode),
        };
        let Some(Ok(request)) = request else { return 0 };
        let Some((_, geometry)) = &self.export else { return 0 };
        let whole = touched_blocks_len(geometry.block, &request);
        match request.command {
            NbdCommand::Read => self.reads.growth(whole.min(u64::from(PAYLOAD_MAX)) as usize),
            // A partial block is read before it is changed.
            NbdCommand::Write if whole != request.len => self.writes.growth(geometry.block.size as usize),
            NbdCommand::Cache => self.reads.growth(request.len.min(PIECE.into()) as usize),
            NbdCommand::WriteZeroes => request.len.min(PIECE.into()) as usize,
            _ => 0,
        }
    }

    /// Returns true if `need` more bytes are available. Otherwise the connection is queued.
    pub(super) fn try_reserve(&mut self, need: usize, cx: &mut FrontCx<'_, '_>) -> bool {
        if need == 0 || need <= self.allowance() {
            self.leave_line(cx);
            return true;
        }
        // Free memory that is only kept for reuse.
        self.trim();
        if need <= self.allowance() {
            self.leave_line(cx);
            return true;
        }
        if self.memory.as_mut().is_some_and(|memory| memory.wait(cx)) {
            self.wait_limit_at = Nanos::NEVER;
            return true;
        }
        // The first in line checks for stalled clients.
        if !self.memory.as_ref().is_some_and(ConnectionMemoryLease::is_first) {
            self.wait_limit_at = Nanos::NEVER;
        } else if self.wait_limit_at == Nanos::NEVER {
            self.wait_limit_at = cx.now() + self.wait_limit();
        }
        false
    }

    pub(super) fn leave_line(&mut self, cx: &mut FrontCx<'_, '_>) {
        if let Some(memory) = self.memory.as_mut().filter(|memory| memory.waits()) {
            memory.leave_line(cx);
            self.wait_limit_at = Nanos::NEVER;
        }
    }

    /// Publishes the held memory at the end of each call, and sets the next wake-up.
    pub(super) fn publish_memory(&mut self, cx: &mut FrontCx<'_, '_>) {
        if !matches!(self.phase, ConnectionPhase::Serving) {
            self.leave_line(cx);
        }
        if self.memory.as_ref().is_some_and(ConnectionMemoryLease::is_wanted) {
            self.trim();
        }
        let held = self.held();
        if let Some(memory) = &mut self.memory {
            memory.set(held, cx);
        }
        if self.has_reusable_memory && self.trim_at == Nanos::NEVER {
            // All connections use the same times, so the core wakes up once for all.
            self.trim_at = Nanos((cx.now().0 / IDLE.0 + 2) * IDLE.0);
        }
        let pending_move = self.pending_move.as_ref().map_or(Nanos::NEVER, |pending_move| pending_move.until);
        let timers = self.deadline.min(self.trim_at).min(self.wait_limit_at).min(pending_move);
        cx.wake_at(timers.min(self.idle_until()));
    }

    /// The time at which the client is disconnected if it sends nothing; never while it has
    /// requests, or without a limit. A request of which a part is missing is none, unless the
    /// server itself waits for memory for the rest.
    fn idle_until(&self) -> Nanos {
        let Some(max) = self.options.idle_max else { return Nanos::NEVER };
        let is_serving = matches!(self.phase, ConnectionPhase::Serving);
        let has_request = self.has_requests() || (self.arriving.is_some() && !self.receiving);
        if !is_serving || has_request {
            return Nanos::NEVER;
        }
        self.active_at + Nanos(max.as_nanos() as u64)
    }

    pub(super) fn timers_due(&mut self, cx: &mut FrontCx<'_, '_>) {
        let now = cx.now();
        if self.trim_at <= now {
            self.trim_at = Nanos::NEVER;
            if self.active_at + IDLE <= now && self.is_idle() {
                self.trim();
                self.has_reusable_memory = false;
            }
        }
        if self.idle_until() <= now {
            tracing::debug!("nbd: a client without requests was disconnected");
            self.phase = ConnectionPhase::Dead;
        }
        if self.wait_limit_at <= now {
            // A stalled client may hold the memory.
            self.wait_limit_at = now + self.wait_limit();
            cx.schedule_all();
        }
        if self.is_stalled(now)
            && self.memory.as_ref().is_some_and(|memory| memory.blocks_waiters(self.wait_limit(), now))
        {
            tracing::debug!("nbd: closed a stalled client that holds memory that others wait for");
            self.phase = ConnectionPhase::Dead;
        }
    }

    /// Returns true if the server waits for the client to send or receive data, and the client has
    /// moved none within the time limit.
    fn is_stalled(&self, now: Nanos) -> bool {
        let its_turn = self.sending || (self.receiving && self.rx.is_midway());
        its_turn && self.client_at + self.wait_limit() <= now
    }

    fn is_idle(&self) -> bool {
        !self.has_requests() && self.arriving.is_none()
    }

    /// True if a request is in the device, or its reply is not sent.
    fn has_requests(&self) -> bool {
        !self.pending.is_empty() || !self.tx.is_idle()
    }

    /// Frees memory that is only kept for reuse.
    pub(super) fn trim(&mut self) {
        self.reads.trim();
        self.writes.trim();
        self.rx.trim();
        self.tls.iter_mut().for_each(|tls| tls.trim());
        if self.pending.is_empty() {
            self.bios = BioPool::new(self.options.requests_max);
            self.pending = slab::Slab::new();
            self.tx.trim();
        }
    }
}
