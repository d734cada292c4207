//! The data-path half of a file: requests to operations of the ring, and back.
//!
//! A request is one operation in nearly all cases; a table of slots holds those under way, whose keys are the ring's tags. What the table has
//! no room for waits. See [`Step`] for the rarer ways.

use super::slot::{Shared, Slot, Step, copy_to_at};
use super::{Direct, MAX_SECTORS};
use rand::RngExt;
use slab::Slab;
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use udm_core::{Batch, Bio, BufPool, Cx, Lane, Limits, Op, Sectors, Segments, Status, hand_over};
use udm_runtime::{Client, Done};

/// Requests under way in one lane. More than any disk works on at a time.
const SLOTS: usize = 1024;

/// Bytes of aligned buffers that a lane keeps for the next time.
const KEEP: usize = 8 << 20;

/// How often an operation is repeated because of EINTR or EAGAIN.
const RETRIES: u32 = 100;

const EINTR: i32 = 4;
const EIO: i32 = 5;
const EAGAIN: i32 = 11;
const EOPNOTSUPP: i32 = 95;

pub(super) struct FileLane {
    client: Client,
    limits: Limits,
    shared: Shared,
    slots: Slab<Slot>,
    waiting: VecDeque<Box<Bio>>,
    ready: Batch,
    finished: Vec<Done>,
}

/// What comes after an operation.
enum Next {
    /// Another operation, with the memory of the last where it goes on.
    Again(Segments),
    /// The request is over.
    End(Status),
}

impl FileLane {
    pub(super) fn new(client: Client, fd: Arc<OwnedFd>, limits: Limits, direct: Option<Direct>) -> FileLane {
        let shared = Shared { fd, direct, pool: BufPool::new(KEEP), no_punch: false, no_zero_range: false };
        FileLane {
            client,
            limits,
            shared,
            slots: Slab::new(),
            waiting: VecDeque::new(),
            ready: Batch::new(),
            finished: Vec::new(),
        }
    }

    /// The status of a request that needs no file to be answered.
    fn answer_now(&self, bio: &Bio) -> Option<Status> {
        if bio.op == Op::Flush {
            return self.limits.read_only.then_some(Status::Ok);
        }
        if let Some(status) = crate::refusal(bio, self.limits.size) {
            return Some(status);
        }
        match bio.op {
            Op::Write | Op::WriteZeroes | Op::Discard if self.limits.read_only => Some(Status::ReadOnly),
            Op::Discard if self.limits.max_discard == Sectors::ZERO => Some(Status::NotSupp),
            _ => None,
        }
    }

    fn start(&mut self, mut bio: Box<Bio>) {
        if let Some(status) = self.answer_now(&bio) {
            bio.end_with(status);
            self.ready.push(bio);
            return;
        }
        debug_assert!(!bio.op.has_data() || bio.sectors <= MAX_SECTORS, "longer than announced: {bio:?}");
        let key = self.slots.insert(Slot::new(bio, &self.shared));
        self.go_on(key, Segments::new());
    }

    fn go_on(&mut self, key: usize, memory: Segments) {
        let op = self.slots[key].operation(memory, &mut self.shared);
        self.client.push(key as u64, op);
    }

    fn start_waiting(&mut self) {
        while self.slots.len() < SLOTS {
            let Some(bio) = self.waiting.pop_front() else { return };
            self.start(bio);
        }
    }

    fn operation_done(&mut self, done: Done, cx: &mut Cx<'_>) {
        let key = done.tag as usize;
        let next = match done.result {
            Ok(bytes) => self.succeeded(key, u64::from(bytes), done.data),
            Err(errno) => self.failed(key, errno, done.data, cx),
        };
        match next {
            Next::Again(memory) => self.go_on(key, memory),
            Next::End(status) => {
                let mut bio = self.slots.remove(key).bio;
                bio.end_with(status);
                self.ready.push(bio);
            }
        }
    }

    fn succeeded(&mut self, key: usize, bytes: u64, mut data: Segments) -> Next {
        let slot = &mut self.slots[key];
        slot.retries = 0;
        match slot.step {
            Step::Flush if slot.bio.op == Op::Flush => Next::End(Status::Ok),
            Step::Flush => {
                slot.step = slot.main_step(&self.shared);
                Next::Again(Segments::new())
            }
            Step::Data => {
                if bytes == slot.left() && slot.done == 0 {
                    slot.bio.data = data;
                    return Next::End(Status::Ok);
                }
                // Short: the end of the file, more pieces than one operation takes, or a signal. With direct I/O the rest must start at a block.
                let bytes = bytes - bytes % self.shared.direct.map_or(1, |d| d.offset);
                slot.done += bytes;
                let moved = data.split_to(bytes as usize);
                slot.head.append(moved);
                if data.is_empty() {
                    slot.bio.data = std::mem::take(&mut slot.head);
                    return Next::End(Status::Ok);
                }
                if bytes == 0 {
                    return self.ended_early(key, data);
                }
                Next::Again(data)
            }
            Step::Bounce | Step::Zeroes => {
                let bytes = bytes - bytes % self.shared.direct.map_or(1, |d| d.offset);
                if slot.bio.op == Op::Read
                    && let Some(buf) = data.iter().next()
                {
                    copy_to_at(&mut slot.bio.data, slot.done as usize, &buf[..bytes as usize]);
                }
                slot.done += bytes;
                if bytes == 0 {
                    return self.ended_early(key, data);
                }
                if slot.left() > 0 {
                    return Next::Again(data);
                }
                let next = self.after_range(key);
                self.recycle(data);
                next
            }
            Step::Range => self.after_range(key),
            Step::FlushAfter => Next::End(Status::Ok),
            Step::Probe => {
                self.recycle(data);
                // The disk answers elsewhere: this block is bad, and no other path will read it.
                Next::End(if bytes > 0 { Status::Medium } else { Status::IoErr })
            }
        }
    }

    /// The work is done; a discard or write-zeroes with FUA must still be made durable. A bounced write is already.
    fn after_range(&mut self, key: usize) -> Next {
        let slot = &mut self.slots[key];
        if slot.is_fua() && !slot.bio.op.has_data() {
            slot.step = Step::FlushAfter;
            return Next::Again(Segments::new());
        }
        Next::End(Status::Ok)
    }

    fn failed(&mut self, key: usize, errno: i32, data: Segments, cx: &mut Cx<'_>) -> Next {
        let slot = &mut self.slots[key];
        if (errno == EINTR || errno == EAGAIN) && slot.retries < RETRIES {
            slot.retries += 1;
            return Next::Again(data);
        }
        match slot.step {
            Step::Range if errno == EOPNOTSUPP && slot.bio.op == Op::WriteZeroes => {
                if slot.keeps_blocks() {
                    self.shared.no_zero_range = true;
                } else {
                    self.shared.no_punch = true;
                }
                slot.step = Step::Zeroes;
                Next::Again(Segments::new())
            }
            Step::Data | Step::Bounce if errno == EIO => {
                self.give_back(key, data);
                self.probe(key, Some(cx))
            }
            Step::Data | Step::Bounce | Step::Zeroes => {
                self.give_back(key, data);
                Next::End(Status::from_errno(errno))
            }
            Step::Probe => {
                self.recycle(data);
                Next::End(Status::IoErr)
            }
            Step::Range | Step::Flush | Step::FlushAfter => Next::End(Status::from_errno(errno)),
        }
    }

    /// A read or write that moves nothing: the file was cut since it was opened.
    fn ended_early(&mut self, key: usize, data: Segments) -> Next {
        self.give_back(key, data);
        self.probe(key, None)
    }

    /// Puts the bio together again after its data, or a buffer of the lane, came back from an operation that failed.
    fn give_back(&mut self, key: usize, data: Segments) {
        let slot = &mut self.slots[key];
        if slot.step == Step::Data {
            let mut whole = std::mem::take(&mut slot.head);
            whole.append(data);
            slot.bio.data = whole;
        } else {
            self.recycle(data);
        }
    }

    fn recycle(&mut self, data: Segments) {
        for buf in data {
            self.shared.pool.put(buf);
        }
    }

    /// Reads a block that the request did not touch. Any block, since one that was read a moment ago may come from the page
    /// cache of a disk that is gone; the first one, without `cx`, for a file of which the end is missing.
    fn probe(&mut self, key: usize, cx: Option<&mut Cx<'_>>) -> Next {
        let block = u64::from(self.limits.logical_block);
        let blocks = self.limits.size.bytes() / block;
        let slot = &mut self.slots[key];
        let (first, end) = (slot.bio.sector.bytes() / block, slot.bio.end().bytes().div_ceil(block));
        let others = blocks - (end - first);
        if others == 0 {
            return Next::End(Status::IoErr);
        }
        let n = cx.map_or(0, |cx| cx.rng().random_range(0..others));
        let at = if n < first { n } else { n + (end - first) };
        slot.step = Step::Probe;
        slot.done = at * block;
        let buf = self.shared.pool.get(block as usize);
        Next::Again(buf.into())
    }
}

impl Lane for FileLane {
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        self.waiting.extend(batch.drain(..));
        self.start_waiting();
        if !self.ready.is_empty() {
            cx.wake_at(cx.now);
        }
    }

    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        let mut finished = std::mem::take(&mut self.finished);
        self.client.take(&mut finished);
        for op in finished.drain(..) {
            self.operation_done(op, cx);
        }
        self.finished = finished;
        self.start_waiting();
        hand_over(&mut self.ready, done);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::tests::core;
    use udm_core::Sector;
    use udm_runtime::Ring;

    /// An EIO blames the medium when another block can be read, and the path when none can.
    #[test]
    fn eio_asks_another_block() {
        for (len, want) in [(65536, Status::Medium), (0, Status::IoErr)] {
            let file = tempfile::tempfile().unwrap();
            file.set_len(len).unwrap();
            let mut core = core();
            let client = core.turn(|cx| Ring::of(cx).unwrap().client());
            let limits = Limits::new(Sectors(128));
            let mut lane = FileLane::new(client, Arc::new(file.into()), limits, None);
            let data = Segments::from(udm_core::Buf::zeroed(1024));
            let mut bio = Bio::read(Sector(3), Sectors(2), data);
            bio.start();
            let mut slot = Slot::new(bio, &lane.shared);
            let memory = std::mem::take(&mut slot.bio.data);
            let key = lane.slots.insert(slot);
            core.turn(|cx| {
                lane.operation_done(Done { tag: key as u64, result: Err(EIO), data: memory }, cx);
            });
            let mut done = Batch::new();
            for _ in 0..1000 {
                core.turn(|cx| lane.poll(&mut done, cx));
                if !done.is_empty() {
                    break;
                }
                core.park();
            }
            let mut bio = done.pop().unwrap();
            bio.finish();
            assert_eq!((bio.status, bio.data.len()), (want, 1024));
        }
    }

    #[test]
    fn eagain_is_tried_again_and_not_for_ever() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(65536).unwrap();
        let mut core = core();
        let client = core.turn(|cx| Ring::of(cx).unwrap().client());
        let mut lane = FileLane::new(client, Arc::new(file.into()), Limits::new(Sectors(128)), None);
        let mut bio = Bio::read(Sector(3), Sectors(2), Segments::new());
        bio.start();
        let key = lane.slots.insert(Slot::new(bio, &lane.shared));
        core.turn(|cx| {
            let mut memory = Segments::from(udm_core::Buf::zeroed(1024));
            for _ in 0..RETRIES {
                match lane.failed(key, EAGAIN, memory, cx) {
                    Next::Again(again) => memory = again,
                    Next::End(status) => panic!("{status}"),
                }
            }
            assert!(matches!(lane.failed(key, EAGAIN, memory, cx), Next::End(Status::Again)));
        });
        let mut bio = lane.slots.remove(key).bio;
        bio.finish();
        assert_eq!(bio.data.len(), 1024);
    }
}
