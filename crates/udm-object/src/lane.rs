//! The data path of an object on one core: sends reads to the task of the object, and copies from
//! its replies within the budget of the turn.

use crate::block_cache::{JobSender, ReadJob, ReadReply};
use bytes::Bytes;
use std::collections::VecDeque;
use udm_backends::{advance_copies, immediate_status_of_read_only};
use udm_core::{Batch, Bio, Cx, Lane, ReplyInbox, SECTOR_SIZE, SLICE_MAX, Sectors, Status, move_batch};

/// Maximum number of reads of a lane that the task has at a time: at most 64 MiB of replies.
pub(crate) const READS_MAX: usize = 64;

pub(crate) struct ObjectLane {
    size: Sectors,
    jobs: JobSender,
    inbox: ReplyInbox<ReadReply>,
    replies: Vec<ReadReply>,
    /// Reads that the task has, by slot.
    slots: Vec<Option<Box<Bio>>>,
    free: Vec<usize>,
    waiting: VecDeque<Box<Bio>>,
    copies: VecDeque<ReplyCopy>,
    ready: Batch,
}

/// A reply that is being copied into its bio.
struct ReplyCopy {
    bio: Box<Bio>,
    pieces: Vec<Bytes>,
    /// The current piece, the bytes of it that are done, and all bytes that are done.
    piece: usize,
    piece_done: usize,
    done: usize,
}

impl ObjectLane {
    pub(crate) fn new(size: Sectors, jobs: JobSender, cx: &mut Cx<'_>) -> ObjectLane {
        ObjectLane {
            size,
            jobs,
            inbox: ReplyInbox::open(cx),
            replies: Vec::new(),
            slots: (0..READS_MAX).map(|_| None).collect(),
            free: (0..READS_MAX).collect(),
            waiting: VecDeque::new(),
            copies: VecDeque::new(),
            ready: Batch::new(),
        }
    }

    /// Sends waiting reads in one message, as far as there are free slots. Returns true if it sent
    /// any.
    fn send_waiting(&mut self) -> bool {
        let count = self.waiting.len().min(self.free.len());
        if count == 0 {
            return false;
        }
        let mut batch = Vec::with_capacity(count);
        for bio in self.waiting.drain(..count) {
            let slot = self.free.pop().expect("as many as counted");
            batch.push(ReadJob {
                offset: bio.sector.0 * SECTOR_SIZE,
                len: bio.sectors.bytes(),
                slot,
                to: self.inbox.sender(),
                result: Err(Status::IoErr),
            });
            self.slots[slot] = Some(bio);
        }
        self.jobs.send(batch);
        true
    }

    fn take_replies(&mut self, cx: &mut Cx<'_>) {
        self.inbox.take_and_wait(&mut self.replies, cx);
        let mut replies = std::mem::take(&mut self.replies);
        for ReadReply { slot, result } in replies.drain(..) {
            let mut bio = self.slots[slot].take().expect("a reply without a read");
            self.free.push(slot);
            match result {
                Ok(pieces) => {
                    self.copies.push_back(ReplyCopy { bio, pieces, piece: 0, piece_done: 0, done: 0 });
                }
                Err(status) => {
                    bio.end_with(status);
                    self.ready.push(bio);
                }
            }
        }
        self.replies = replies;
    }

    /// Copies replies within the budget of the turn, and at least one piece.
    fn run_copies(&mut self, cx: &mut Cx<'_>) {
        let ready = &mut self.ready;
        advance_copies(&mut self.copies, cx, |mut copy| {
            let bytes = copy.advance();
            if copy.piece < copy.pieces.len() {
                return (bytes, Some(copy));
            }
            let is_whole = copy.done == copy.bio.data.len();
            copy.bio.end_with(if is_whole { Status::Ok } else { Status::IoErr });
            ready.push(copy.bio);
            (bytes, None)
        });
    }
}

impl ReplyCopy {
    /// Copies up to [`SLICE_MAX`] bytes of the current piece. Returns their number.
    fn advance(&mut self) -> u64 {
        let Some(piece) = self.pieces.get(self.piece) else { return 0 };
        let end = piece.len().min(self.piece_done + SLICE_MAX as usize);
        let copied = self.bio.data.copy_from_at(self.done, &piece[self.piece_done..end]);
        self.done += copied;
        self.piece_done = end;
        if end == piece.len() {
            (self.piece, self.piece_done) = (self.piece + 1, 0);
        }
        copied as u64
    }
}

impl Lane for ObjectLane {
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        for mut bio in batch.drain(..) {
            match immediate_status_of_read_only(&bio, self.size) {
                Some(status) => {
                    bio.end_with(status);
                    self.ready.push(bio);
                }
                None => self.waiting.push_back(bio),
            }
        }
        self.send_waiting();
        if !self.ready.is_empty() {
            cx.wake_now();
        }
    }

    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        if self.free.len() < READS_MAX {
            self.take_replies(cx);
        }
        // These reads may be answered before the next look at the inbox.
        if self.send_waiting() {
            cx.wake_now();
        }
        self.run_copies(cx);
        move_batch(&mut self.ready, done);
    }
}
