//! What a connection holds of its core's memory, and when it lets go of it.

use super::{Connection, ConnectionPhase, IDLE};
use crate::nbd::memory::{HeldMemory, MemoryLease};
use crate::nbd::serve::{PIECE, around};
use udm_core::{BioPool, Nanos};
use udm_runtime::FrontCx;
use udm_wire::nbd::{Command, PAYLOAD_MAX, Request};

/// What a client may take to move however many wait: long enough for one send over a slow line.
const PATIENCE_MIN: Nanos = Nanos(1_000_000_000);

impl Connection {
    /// How long a client may stand in the way now: the more wait, the shorter.
    fn patience(&self) -> Nanos {
        let line = self.memory.as_ref().map_or(1, MemoryLease::line).max(1);
        let alone = self.options.stall_max.as_nanos() as u64;
        Nanos((alone / line as u64).max(PATIENCE_MIN.0.min(alone)))
    }

    fn held(&self) -> HeldMemory {
        let pools = self.reads.held() + self.writes.held();
        HeldMemory {
            bytes: self.rx.held() + self.tx.held() + pools + self.zeroing,
            midway: self.rx.is_midway(),
            under_way: !self.pending.is_empty(),
        }
    }

    pub(super) fn allowance(&self) -> usize {
        self.memory.as_ref().map_or(0, |memory| memory.allowance(self.held()))
    }

    /// The new memory that the next request needs, when it is here: what it reads, or may have to
    /// write. The payload of a write takes its own as it arrives.
    pub(super) fn next_need(&self) -> usize {
        let Some(Ok(request)) = self.rx.unread().first_chunk().map(Request::decode) else { return 0 };
        let Some((_, geometry)) = &self.export else { return 0 };
        let whole = around(geometry.block, &request);
        match request.command {
            Command::Read => self.reads.growth(whole.min(u64::from(PAYLOAD_MAX)) as usize),
            // A part of a block is read before it is changed.
            Command::Write if whole != u64::from(request.len) => {
                self.writes.growth(geometry.block.size as usize)
            }
            Command::Cache => self.reads.growth(request.len.min(PIECE) as usize),
            Command::WriteZeroes => request.len.min(PIECE) as usize,
            _ => 0,
        }
    }

    /// True when `need` bytes more may be had; otherwise the connection waits in line for them.
    pub(super) fn try_reserve(&mut self, need: usize, cx: &mut FrontCx<'_, '_>) -> bool {
        if need == 0 || need <= self.allowance() {
            self.leave_line(cx);
            return true;
        }
        // What is only kept helps nobody.
        self.trim();
        if need <= self.allowance() {
            self.leave_line(cx);
            return true;
        }
        if self.memory.as_mut().is_some_and(|memory| memory.wait(cx)) {
            self.patience_at = Nanos::NEVER;
            return true;
        }
        // The first in line looks after those in its way.
        if !self.memory.as_ref().is_some_and(MemoryLease::is_first) {
            self.patience_at = Nanos::NEVER;
        } else if self.patience_at == Nanos::NEVER {
            self.patience_at = cx.now() + self.patience();
        }
        false
    }

    pub(super) fn leave_line(&mut self, cx: &mut FrontCx<'_, '_>) {
        if let Some(memory) = self.memory.as_mut().filter(|memory| memory.waits()) {
            memory.leave_line(cx);
            self.patience_at = Nanos::NEVER;
        }
    }

    /// Says at the end of each call what is held, and when to be called.
    pub(super) fn publish_memory(&mut self, cx: &mut FrontCx<'_, '_>) {
        if !matches!(self.phase, ConnectionPhase::Serving) {
            self.leave_line(cx);
        }
        if self.memory.as_ref().is_some_and(MemoryLease::is_wanted) {
            self.trim();
        }
        let held = self.held();
        if let Some(memory) = &mut self.memory {
            memory.set(held, cx);
        }
        if self.has_reusable_memory && self.trim_at == Nanos::NEVER {
            // On the same beat for all: one wake-up of the core.
            self.trim_at = Nanos((cx.now().0 / IDLE.0 + 2) * IDLE.0);
        }
        let pending_move = self.pending_move.map_or(Nanos::NEVER, |pending_move| pending_move.until);
        cx.wake_at(self.deadline.min(self.trim_at).min(self.patience_at).min(pending_move));
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
        if self.patience_at <= now {
            // Somebody is in the way, perhaps.
            self.patience_at = now + self.patience();
            cx.schedule_all();
        }
        if self.is_stalled(now)
            && self.memory.as_ref().is_some_and(|memory| memory.blocks_waiters(self.patience(), now))
        {
            tracing::debug!(
                "nbd: a client that does not move holds memory that others wait for; it was closed"
            );
            self.phase = ConnectionPhase::Dead;
        }
    }

    /// Its client has something to do and does not do it.
    fn is_stalled(&self, now: Nanos) -> bool {
        let its_turn = self.sending || (self.receiving && self.rx.is_midway());
        its_turn && self.client_at + self.patience() <= now
    }

    fn is_idle(&self) -> bool {
        self.pending.is_empty() && self.tx.is_idle() && self.arriving.is_none()
    }

    /// Frees what is kept for reuse only.
    pub(super) fn trim(&mut self) {
        self.reads.trim();
        self.writes.trim();
        self.rx.trim();
        if self.pending.is_empty() {
            self.bios = BioPool::new(self.options.requests_max);
            self.pending = slab::Slab::new();
            self.tx.trim();
        }
    }
}
