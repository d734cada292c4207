//! The flushes of a lane: one `fdatasync` at a time, which serves all that asked before it began.
//!
//! Those that come while one is under way wait for the next, together: it covers all of them, and
//! so many fewer are under way at a time, which a sync that is to be believed would have to wait
//! for ([`super::sync`]).

use super::lane::FileLane;
use super::outcome::{NextAction, RETRIES};
use super::request::RequestStep;
use super::sync::SyncTicket;
use udm_core::errno::{self, EAGAIN, EINTR};
use udm_core::{Op, Status};
use udm_runtime::RingOp;

/// The ring's tag of the flush under way; requests have the keys of their slots.
pub(super) const FLUSH: u64 = u64::MAX;

/// See the module's documentation.
#[derive(Default)]
pub(super) struct FlushQueue {
    /// Requests that the flush under way serves; empty when there is none.
    members: Vec<usize>,
    /// Those that came since.
    waiting: Vec<usize>,
    ticket: Option<SyncTicket>,
    retries: u32,
}

impl FileLane {
    /// Has a request wait for a flush that begins from now on.
    pub(super) fn flush(&mut self, key: usize) {
        self.flushes.waiting.push(key);
        if self.flushes.members.is_empty() {
            self.begin_flush();
        }
    }

    fn begin_flush(&mut self) {
        let flushes = &mut self.flushes;
        std::mem::swap(&mut flushes.members, &mut flushes.waiting);
        if flushes.members.is_empty() {
            return;
        }
        flushes.retries = 0;
        if self.shared.disk.direct.is_none() {
            flushes.ticket = Some(self.shared.syncs.begin());
        }
        self.push_flush();
    }

    fn push_flush(&mut self) {
        self.push(FLUSH, RingOp::Fsync { fd: self.shared.fd.clone(), data_only: true });
    }

    /// The flush under way has ended: so have those that it served, or they go on to the work
    /// proper.
    pub(super) fn flushed(&mut self, result: Result<u32, i32>) {
        let (errno, retries) = (result.err(), self.flushes.retries);
        if errno.is_some_and(|e| e == EINTR || e == EAGAIN) && retries < RETRIES {
            self.flushes.retries += 1;
            return self.push_flush();
        }
        let ticket = self.flushes.ticket.take();
        let barrier = match (&ticket, errno) {
            (Some(ticket), None) => Some(self.shared.syncs.end(ticket)),
            (Some(ticket), Some(_)) => {
                self.sync_failed(ticket);
                None
            }
            (None, _) => None,
        };
        let error = errno.map(|e| if ticket.is_some() { Status::Medium } else { errno::status(e) });
        let mut members = std::mem::take(&mut self.flushes.members);
        for key in members.drain(..) {
            let slot = &mut self.slots[key];
            slot.barrier = barrier;
            let next = match error {
                Some(status) => NextAction::End(status),
                None if slot.step == RequestStep::Flush && slot.bio.op != Op::Flush => NextAction::Synced,
                None => NextAction::End(Status::Ok),
            };
            self.follow(key, next);
        }
        // Those that came meanwhile, also because of what has just ended.
        if self.flushes.members.is_empty() {
            self.flushes.members = members;
            self.begin_flush();
        } else if self.flushes.waiting.is_empty() {
            // Begun already by one of them. The list is kept for its room.
            self.flushes.waiting = members;
        }
    }

    /// Ends what a lane that is let go has under way: nobody will learn how it ended, and it counts
    /// as failed.
    pub(super) fn abandon_syncs(&mut self) {
        let tickets = self.slots.iter_mut().filter_map(|(_, slot)| slot.ticket.take());
        for ticket in tickets.chain(self.flushes.ticket.take()) {
            self.shared.syncs.fail(&ticket);
        }
    }
}
