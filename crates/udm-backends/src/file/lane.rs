//! The data path of a file: turns requests into ring operations, and completions into results.
//!
//! Nearly every request is one operation. A table of slots holds the requests in flight; the key of
//! a slot is the tag of its operation. If the table is full, requests wait. [`FileRequestStep`]
//! lists the rarer cases, and [`super::outcome`] handles completed operations.

use super::disk::{OpenDisk, SyncTrackedDescriptor};
use super::flush::{FLUSH, FlushQueue};
use super::inline_io::InlineIoQueue;
use super::outcome::FileRequestNextAction;
use super::request::{FileLaneRequestState, FileRequest, FileRequestStep};
use super::{DirectAlignment, MAX_SECTORS};
use slab::Slab;
use std::collections::VecDeque;
use std::sync::Arc;
use udm_core::{
    Batch, Bio, BioFlags, BufPool, Cx, Lane, Limits, Nanos, Op, Sectors, Segments, Status, move_batch,
};
use udm_runtime::{RingCompletion, RingOp, RingUser};

/// Upper limit of requests in flight per lane: more than any disk works on at a time.
const SLOTS: usize = 1024;

/// Bytes of aligned buffers that a lane keeps for reuse.
const KEEP: usize = 8 << 20;

/// Time until a sync that waits for syncs of other lanes is checked again. Those lanes do not wake
/// this one.
const SYNC_LOOK: Nanos = Nanos(50_000);

pub(super) struct FileLane {
    pub(super) user: RingUser,
    pub(super) limits: Limits,
    pub(super) shared: FileLaneRequestState,
    pub(super) slots: Slab<FileRequest>,
    waiting: VecDeque<Box<Bio>>,
    pub(super) flushes: FlushQueue,
    /// Requests whose sync succeeded but is not yet confirmed.
    pub(super) held: Vec<(usize, FileRequestNextAction)>,
    /// Spare vector for `held` while its requests are checked.
    looked: Vec<(usize, FileRequestNextAction)>,
    /// Operations that the core executes itself.
    pub(super) inline_io: InlineIoQueue,
    ready: Batch,
    finished: Vec<RingCompletion>,
}

impl FileLane {
    pub(super) fn new(
        user: RingUser,
        disk: &Arc<OpenDisk>,
        handle: &SyncTrackedDescriptor,
        limits: Limits,
    ) -> FileLane {
        let shared = FileLaneRequestState {
            disk: Arc::clone(disk),
            fd: Arc::clone(&handle.fd),
            witness: handle.witness.clone(),
            syncs: Arc::clone(&handle.syncs),
            reach: disk.reach(),
            cut: false,
            pool: BufPool::new(KEEP),
            in_memory: disk.in_memory,
            no_punch: false,
            no_zero_range: false,
        };
        FileLane {
            user,
            limits: Limits { size: disk.reach(), ..limits },
            shared,
            slots: Slab::new(),
            waiting: VecDeque::new(),
            flushes: FlushQueue::default(),
            held: Vec::new(),
            looked: Vec::new(),
            inline_io: InlineIoQueue::default(),
            ready: Batch::new(),
            finished: Vec::new(),
        }
    }

    pub(super) fn direct(&self) -> Option<DirectAlignment> {
        self.shared.disk.direct
    }

    /// Returns the status of a request that completes without an operation.
    fn immediate_status(&self, bio: &Bio) -> Option<Status> {
        let sync = bio.op == Op::Flush || bio.flags.intersects(BioFlags::PREFLUSH | BioFlags::FUA);
        if sync && !self.limits.read_only && self.direct().is_none() && self.shared.syncs.has_failed() {
            return Some(Status::Medium);
        }
        if bio.op == Op::Flush {
            return self.limits.read_only.then_some(Status::Ok);
        }
        if let Some(status) = crate::invalid_bio_status(bio, self.limits.size) {
            return Some(status);
        }
        match bio.op {
            Op::Write | Op::WriteZeroes | Op::Discard if self.limits.read_only => Some(Status::ReadOnly),
            Op::Discard if self.limits.max_discard == Sectors::ZERO => Some(Status::NotSupp),
            _ => None,
        }
    }

    fn start(&mut self, mut bio: Box<Bio>) {
        if let Some(status) = self.immediate_status(&bio) {
            bio.end_with(status);
            self.ready.push(bio);
            return;
        }
        debug_assert!(
            !bio.op.has_data() || bio.sectors <= MAX_SECTORS,
            "longer than the limits allow: {bio:?}"
        );
        let key = self.slots.insert(FileRequest::new(bio, &self.shared));
        self.issue(key, Segments::new());
    }

    /// Starts the operation of the request's current step.
    pub(super) fn issue(&mut self, key: usize, memory: Segments) {
        let slot = &mut self.slots[key];
        if matches!(slot.step, FileRequestStep::Flush | FileRequestStep::FlushAfter) {
            return self.flush(key);
        }
        let op = slot.operation(memory, &mut self.shared);
        let is_sync = matches!(op, RingOp::Write { dsync: true, .. });
        // A sync that is repeated after EINTR already has a ticket.
        if is_sync && self.shared.disk.direct.is_none() && slot.ticket.is_none() {
            slot.ticket = Some(self.shared.syncs.begin());
        }
        self.push(key as u64, op);
    }

    /// Passes the operation to the core itself or to the ring.
    pub(super) fn push(&mut self, tag: u64, op: RingOp) {
        let op = match self.shared.in_memory {
            true => self.inline_io.push(tag, op),
            false => Err(op),
        };
        op.unwrap_or_else(|op| self.user.push(tag, op));
    }

    fn start_waiting(&mut self) {
        while self.slots.len() < SLOTS {
            let Some(bio) = self.waiting.pop_front() else { return };
            self.start(bio);
        }
    }

    pub(super) fn operation_done(&mut self, done: RingCompletion, cx: &mut Cx<'_>) {
        if done.tag == FLUSH {
            return self.flushed(done.result);
        }
        let key = done.tag as usize;
        let next = match done.result {
            Ok(bytes) => self.succeeded(key, u64::from(bytes), done.data, cx),
            Err(errno) => self.failed(key, errno, done.data, cx),
        };
        self.apply(key, next);
    }

    /// Performs `next`, unless it depends on a sync that is not yet confirmed.
    pub(super) fn apply(&mut self, key: usize, next: FileRequestNextAction) {
        let slot = &mut self.slots[key];
        let next = match (slot.barrier, &next) {
            (Some(barrier), FileRequestNextAction::End(Status::Ok) | FileRequestNextAction::Synced) => {
                match self.shared.syncs.verdict(barrier) {
                    None => return self.held.push((key, next)),
                    Some(true) => next,
                    Some(false) => FileRequestNextAction::End(Status::Medium),
                }
            }
            _ => next,
        };
        match next {
            FileRequestNextAction::Again(memory) => self.issue(key, memory),
            FileRequestNextAction::Synced => {
                slot.barrier = None;
                slot.step = slot.main_step(&self.shared);
                self.issue(key, Segments::new());
            }
            FileRequestNextAction::End(status) => {
                let mut bio = self.slots.remove(key).bio;
                bio.end_with(status);
                self.ready.push(bio);
            }
        }
    }

    /// Checks the requests in `held` again.
    #[cold]
    fn recheck_held(&mut self, cx: &mut Cx<'_>) {
        let mut looked = std::mem::take(&mut self.looked);
        std::mem::swap(&mut looked, &mut self.held);
        for (key, next) in looked.drain(..) {
            self.apply(key, next);
        }
        self.looked = looked;
        if !self.held.is_empty() {
            cx.wake_at(cx.now() + SYNC_LOOK);
        }
    }

    /// Reads the reach of the disk and whether it is truncated. Two loads per batch, of values that
    /// rarely change.
    fn refresh_reach(&mut self) {
        self.limits.size = self.shared.disk.reach();
        self.shared.reach = self.limits.size;
        self.shared.cut = self.shared.disk.is_truncated();
    }
}

impl Lane for FileLane {
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        self.refresh_reach();
        self.waiting.extend(batch.drain(..));
        self.start_waiting();
        if !self.inline_io.is_idle() {
            self.serve_inline(cx);
        }
        if !self.ready.is_empty() {
            cx.wake_now();
        }
    }

    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        let mut finished = std::mem::take(&mut self.finished);
        self.user.take(&mut finished);
        for op in finished.drain(..) {
            self.operation_done(op, cx);
        }
        self.finished = finished;
        if !self.held.is_empty() {
            self.recheck_held(cx);
        }
        self.start_waiting();
        if !self.inline_io.is_idle() {
            self.serve_inline(cx);
        }
        move_batch(&mut self.ready, done);
    }
}

impl Drop for FileLane {
    /// A lane is dropped when no operation is in flight. If one still is, the disk must not report
    /// success for it.
    fn drop(&mut self) {
        self.abandon_syncs();
    }
}
