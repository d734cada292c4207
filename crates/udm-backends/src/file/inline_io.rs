//! I/O of files on memory file systems (tmpfs, ramfs): the core itself reads, writes and syncs
//! them.
//!
//! These files wait for no storage, except for swap, as all memory may. The kernel cannot know
//! that: the ring would pass each request to a worker and wait to be woken. A core counts its own
//! work in bytes. Work beyond the budget of the turn continues in the next turn, and short requests
//! go before pieces of long ones.
//!
//! A sync has nothing to wait for here, but it is still executed, so that its result is the
//! kernel's. Requests with foreign memory go to the ring.

use super::lane::FileLane;
use super::request::PIECE;
use rustix::fd::{AsFd, BorrowedFd};
use rustix::fs;
use rustix::io::{self, Errno, ReadWriteFlags};
use std::collections::VecDeque;
use std::io::IoSlice;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use udm_core::{Cx, Segments};
use udm_runtime::{RingCompletion, RingOp};

/// `f_type` of the memory file systems.
const TMPFS: u64 = 0x0102_1994;
const RAMFS: u64 = 0x8584_58f6;

/// Returns true if `fd` is on a memory file system.
pub(super) fn is_on_memory_filesystem(fd: BorrowedFd<'_>) -> bool {
    fs::fstatfs(fd).is_ok_and(|fs| matches!(fs.f_type as u64 & 0xffff_ffff, TMPFS | RAMFS))
}

/// A read or write, with the tag of its request.
struct InlineTransfer {
    tag: u64,
    fd: Arc<OwnedFd>,
    offset: u64,
    data: Segments,
    /// Bytes that are done.
    done: usize,
    kind: InlineTransferKind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum InlineTransferKind {
    Read,
    Write,
    /// A write that is durable when it completes.
    SyncedWrite,
}

/// Operations that a core executes itself for a lane.
#[derive(Default)]
pub(super) struct InlineIoQueue {
    /// Syncs: tag and descriptor.
    syncs: VecDeque<(u64, Arc<OwnedFd>)>,
    short: VecDeque<InlineTransfer>,
    long: VecDeque<InlineTransfer>,
}

impl InlineIoQueue {
    /// Queues an operation that the core can execute itself.
    ///
    /// # Errors
    /// Returns an operation that must go to the ring.
    pub(super) fn push(&mut self, tag: u64, op: RingOp) -> Result<(), RingOp> {
        // Only the kernel may copy foreign memory.
        if let RingOp::Read { data, .. } | RingOp::Write { data, .. } = &op
            && data.is_shared()
        {
            return Err(op);
        }
        let (fd, offset, data, kind) = match op {
            RingOp::Read { fd, offset, data, cached: false } => (fd, offset, data, InlineTransferKind::Read),
            RingOp::Write { fd, offset, data, dsync: false } => (fd, offset, data, InlineTransferKind::Write),
            RingOp::Write { fd, offset, data, dsync: true } => {
                (fd, offset, data, InlineTransferKind::SyncedWrite)
            }
            RingOp::Fsync { fd, data_only: true } => {
                self.syncs.push_back((tag, fd));
                return Ok(());
            }
            other => return Err(other),
        };
        let queue = if data.len() as u64 <= PIECE { &mut self.short } else { &mut self.long };
        queue.push_back(InlineTransfer { tag, fd, offset, data, done: 0, kind });
        Ok(())
    }

    /// Returns true if no operation waits.
    pub(super) fn is_idle(&self) -> bool {
        self.syncs.is_empty() && self.short.is_empty() && self.long.is_empty()
    }
}

impl FileLane {
    /// Executes queued operations within the CPU budget of the turn, and slightly beyond it.
    pub(super) fn serve_inline(&mut self, cx: &mut Cx<'_>) {
        while let Some((tag, fd)) = self.inline_io.syncs.pop_front() {
            let result = fs::fdatasync(&fd).map(|()| 0).map_err(Errno::raw_os_error);
            self.operation_done(RingCompletion { tag, result, data: Segments::new() }, cx);
        }
        let mut left = cx.cpu_budget();
        let mut first = true;
        while first || left > 0 {
            let Some(mut transfer) = self.inline_io.short.pop_front() else { break };
            first = false;
            left = left.saturating_sub(transfer.data.len() as u64);
            let ended = loop {
                if let Some(result) = transfer.advance() {
                    break result;
                }
            };
            self.operation_done(transfer.end(ended), cx);
        }
        first = true;
        while first || left > 0 {
            let Some(mut transfer) = self.inline_io.long.pop_front() else { break };
            first = false;
            left = left.saturating_sub(PIECE);
            match transfer.advance() {
                Some(ended) => self.operation_done(transfer.end(ended), cx),
                None => self.inline_io.long.push_back(transfer),
            }
        }
        cx.set_cpu_budget(left);
        if !self.inline_io.is_idle() {
            cx.wake_now();
        }
    }
}

impl InlineTransfer {
    /// Moves up to one piece. Returns the result if the transfer is complete, was short, or failed.
    fn advance(&mut self) -> Option<Result<(), Errno>> {
        let mut budget = PIECE as usize;
        let mut skip = self.done;
        for buf in self.data.iter_mut() {
            let from = skip.min(buf.len());
            skip -= from;
            let len = (buf.len() - from).min(budget);
            if len == 0 {
                continue;
            }
            let (part, at) = (&mut buf[from..from + len], self.offset + self.done as u64);
            let moved = match self.kind {
                InlineTransferKind::Read => io::pread(self.fd.as_fd(), part, at),
                InlineTransferKind::Write => io::pwrite(self.fd.as_fd(), part, at),
                InlineTransferKind::SyncedWrite => {
                    io::pwritev2(self.fd.as_fd(), &[IoSlice::new(part)], at, ReadWriteFlags::DSYNC)
                }
            };
            match moved {
                Ok(n) => self.done += n,
                Err(errno) => return Some(Err(errno)),
            }
            if moved != Ok(len) {
                return Some(Ok(()));
            }
            budget -= len;
            if budget == 0 {
                break;
            }
        }
        (self.done == self.data.len()).then_some(Ok(()))
    }

    /// Returns the completion. An error after some bytes is dropped: it occurs again when the rest
    /// is requested.
    fn end(self, ended: Result<(), Errno>) -> RingCompletion {
        let result = match ended {
            Err(errno) if self.done == 0 => Err(errno.raw_os_error()),
            _ => Ok(self.done as u32),
        };
        RingCompletion { tag: self.tag, result, data: self.data }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{DiskUnderTest, core, file_in_memory, file_of, open, skipped};
    use super::*;
    use crate::testing::make_zeroed_segments;
    use udm_core::{Batch, Bio, BioFlags, Op, Sector, Sectors, Status, TURN_BUDGET};

    #[test]
    fn a_file_on_a_disk_is_the_rings() {
        let file = file_of(1 << 20, 0);
        if is_on_memory_filesystem(file.as_fd()) {
            return skipped("temporary files are in memory");
        }
        assert!(!open(file.path(), false, false).unwrap().disk.in_memory);
    }

    /// Long writes of eight budgets, and a short read after them. The read completes in the first
    /// turn, no turn does much more than its budget, and all requests complete.
    #[test]
    fn a_turn_has_its_budget_and_the_short_go_first() {
        let Some(file) = file_in_memory(16 << 20, 5) else { return };
        let file = open(file.path(), false, false).unwrap();
        assert!(file.disk.in_memory);
        let mut core = core();
        let mut lane = core.open(&file).unwrap();
        let mut batch: Batch = (0..8)
            .map(|i| {
                let mut data = make_zeroed_segments(TURN_BUDGET as usize, &[4096, 200_000]);
                data.fill(i as u8);
                Bio::write(Sector(i * TURN_BUDGET / 512), Sectors::from_bytes(TURN_BUDGET), data)
            })
            .collect();
        batch.push(Bio::read(Sector(20_000), Sectors(8), make_zeroed_segments(4096, &[512])));
        batch.iter_mut().for_each(|bio| bio.start());
        let mut done = Batch::new();
        core.turn(|cx| {
            lane.submit(&mut batch, cx);
            lane.poll(&mut done, cx);
            assert!(cx.wake() <= cx.now(), "it asks for the next turn");
        });
        assert_eq!(done.len(), 1, "the read, and no write: none of them is longer than a turn");
        let mut turns = 1;
        while done.len() < 9 {
            core.turn(|cx| lane.poll(&mut done, cx));
            turns += 1;
            assert!(turns < 100, "it gets on");
        }
        assert!(turns >= 8, "{turns} turns for eight budgets");
        done.iter_mut().for_each(|bio| bio.finish());
        assert!(done.iter().all(|bio| bio.status == Status::Ok));
        drop(lane);
        let mut disk = DiskUnderTest::over(&file);
        for i in 0..8 {
            assert!(disk.read(i * 2048, 2048).iter().all(|&byte| byte == i as u8));
        }
    }

    /// A write with PREFLUSH and FUA completes in the turn in which it is submitted, and so does a
    /// flush.
    #[test]
    fn syncs_wait_for_nothing() {
        let Some(file) = file_in_memory(1 << 20, 5) else { return };
        let file = open(file.path(), false, false).unwrap();
        let mut core = core();
        let mut lane = core.open(&file).unwrap();
        let mut data = make_zeroed_segments(8192, &[512]);
        data.fill(7);
        let mut write = Bio::write(Sector(8), Sectors(16), data);
        write.flags = BioFlags::PREFLUSH | BioFlags::FUA;
        let mut flush = Bio::new();
        flush.op = Op::Flush;
        let mut batch = vec![write, flush];
        batch.iter_mut().for_each(|bio| bio.start());
        let mut done = Batch::new();
        core.turn(|cx| {
            lane.submit(&mut batch, cx);
            lane.poll(&mut done, cx);
            lane.poll(&mut done, cx);
        });
        assert_eq!(done.len(), 2);
        done.iter_mut().for_each(|bio| bio.finish());
        assert!(done.iter().all(|bio| bio.status == Status::Ok));
        drop(lane);
        assert!(DiskUnderTest::over(&file).read(8, 16).iter().all(|&byte| byte == 7));
    }

    /// A read of the missing part of a truncated file is a path error, as on a disk.
    #[test]
    fn a_file_that_was_cut_ends_early() {
        let Some(temp) = file_in_memory(1 << 20, 5) else { return };
        let mut disk = DiskUnderTest::open(temp.path(), false, false);
        temp.as_file().set_len(512 << 10).unwrap();
        let bio = disk.run(Bio::read(Sector(1000), Sectors(48), make_zeroed_segments(48 * 512, &[512])));
        assert_eq!(bio.status, Status::IoErr);
        assert_eq!(bio.data.len(), 48 * 512, "a bio comes back with its data");
        assert!(disk.read(0, 1024).iter().all(|&byte| byte == 5));
    }
}
