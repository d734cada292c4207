//! The flushes of a lane: one `fdatasync` at a time serves all flushes that were requested before
//! it.
//!
//! Flushes that are requested during a sync are served together by the next one. This also keeps
//! the number of syncs in flight small: a sync is confirmed only when the others have ended
//! ([`super::sync`]).

use super::lane::FileLane;
use super::outcome::{FileRequestNextAction, RETRIES};
use super::request::FileRequestStep;
use super::sync::InFlightSync;
use udm_core::errno::{self, EAGAIN, EINTR};
use udm_core::{Op, Status};
use udm_runtime::RingOp;

/// Ring tag of the flush in flight. Requests use the keys of their slots.
pub(super) const FLUSH: u64 = u64::MAX;

/// The flush in flight and the requests that wait for a flush.
#[derive(Default)]
pub(super) struct FlushQueue {
    /// Requests that the flush in flight serves; empty if there is none.
    members: Vec<usize>,
    /// Requests that wait for the next flush.
    waiting: Vec<usize>,
    ticket: Option<InFlightSync>,
    retries: u32,
}

impl FileLane {
    /// Adds a request to the next flush, and starts that flush if none is in flight.
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

    /// Handles the end of the flush in flight: its requests complete or start their main step.
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
                Some(status) => FileRequestNextAction::End(status),
                None if slot.step == FileRequestStep::Flush && slot.bio.op != Op::Flush => {
                    FileRequestNextAction::Synced
                }
                None => FileRequestNextAction::End(Status::Ok),
            };
            self.apply(key, next);
        }
        // Start a flush for the requests that arrived meanwhile.
        if self.flushes.members.is_empty() {
            self.flushes.members = members;
            self.begin_flush();
        } else if self.flushes.waiting.is_empty() {
            // One of these requests has started the flush already. The vector is kept for reuse.
            self.flushes.waiting = members;
        }
    }

    /// Counts all syncs in flight as failed, because the lane is dropped and their results are
    /// lost.
    pub(super) fn abandon_syncs(&mut self) {
        let tickets = self.slots.iter_mut().filter_map(|(_, slot)| slot.ticket.take());
        for ticket in tickets.chain(self.flushes.ticket.take()) {
            self.shared.syncs.fail(&ticket);
        }
    }
}
