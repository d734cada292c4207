//! One request to a file on its way: its steps, and the operation that each step asks of the ring.

use super::DirectAlignment;
use super::disk::OpenDisk;
use super::sync::{SyncBarrier, SyncTicket, SyncTracker};
use rustix::fs::FallocateFlags;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use udm_core::{Bio, BioFlags, BufPool, Op, Sectors, Segments, Status};
use udm_runtime::RingOp;

/// The most bytes in a buffer of the lane's own: data that is not aligned, and zeroes, move in
/// pieces of it. A power of two, so that each piece but the last is aligned for direct I/O.
pub(super) const PIECE: u64 = 128 << 10;

/// What a request waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RequestStep {
    /// Its last block is read, before anything is changed on a disk that was cut, and before the
    /// last block of a file is: a write would make a file longer again.
    Check,
    /// The flush before the write (`PREFLUSH`), or that a flush is.
    Flush,
    /// Its data moves between the bio's own memory and the file.
    Data,
    /// Its data moves through an aligned buffer.
    Bounce,
    /// A hole is punched, or a range zeroed.
    Range,
    /// The file system can't zero a range: zeroes are written.
    Zeroes,
    /// The flush behind a discard or write-zeroes with FUA. Writes have `RWF_DSYNC`.
    FlushAfter,
    /// Its write with FUA failed, and what the write does alone is known: a sync through the other
    /// descriptor says whether data was lost.
    Witness(NonFuaOutcome),
    /// It failed with EIO; a block is looked for that is not in the page cache.
    Cached,
    /// It failed with EIO; whether another block can be read says whom to blame.
    Probe,
    /// It failed in a way that a missing end explains; its last block is read, and when that is
    /// there it ends so.
    End(Status),
}

/// What became of a write with FUA when it was done without.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NonFuaOutcome {
    /// It ended so.
    Ended(Status),
    /// It failed, with this errno.
    Failed(i32),
}

/// Who is to blame if a request fails again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RetryBlame {
    /// Another block could be read.
    Medium,
    /// Nothing could be found out.
    Path,
}

/// A request on its way.
pub(super) struct FileRequest {
    pub(super) bio: Box<Bio>,
    pub(super) step: RequestStep,
    /// Bytes of the range that are done.
    pub(super) done: u64,
    /// The bio's data that is done, while the ring has the rest.
    pub(super) head: Segments,
    /// How often the operation was repeated because of EINTR or EAGAIN.
    pub(super) retries: u32,
    /// Where a block is that is read to find something out, in bytes.
    pub(super) probe_offset: u64,
    /// How many blocks were tried for a probe.
    pub(super) probes: u32,
    /// It failed and was tried once more.
    pub(super) tried: Option<RetryBlame>,
    /// The sync under way.
    pub(super) ticket: Option<SyncTicket>,
    /// Its write with FUA failed, and is done without.
    pub(super) retried_without_fua: bool,
    /// What must have ended before its last sync is believed.
    pub(super) barrier: Option<SyncBarrier>,
}

/// What the slots of a lane have in common.
pub(super) struct RequestContext {
    /// Before the disk, which is the last to let go of it.
    pub(super) fd: Arc<OwnedFd>,
    pub(super) witness: Option<Arc<OwnedFd>>,
    pub(super) disk: Arc<OpenDisk>,
    pub(super) syncs: Arc<SyncTracker>,
    /// How far the disk reached as of this batch.
    pub(super) reach: Sectors,
    /// The disk has lost some of its end, as of this batch.
    pub(super) cut: bool,
    pub(super) pool: BufPool,
    /// The core itself reads and writes.
    pub(super) in_memory: bool,
    /// The file system said that it can't.
    pub(super) no_punch: bool,
    pub(super) no_zero_range: bool,
}

impl FileRequest {
    pub(super) fn new(bio: Box<Bio>, shared: &RequestContext) -> FileRequest {
        let mut slot = FileRequest {
            bio,
            step: RequestStep::Flush,
            done: 0,
            head: Segments::new(),
            retries: 0,
            probe_offset: 0,
            probes: 0,
            tried: None,
            ticket: None,
            retried_without_fua: false,
            barrier: None,
        };
        let changes = !matches!(slot.bio.op, Op::Read | Op::Flush);
        // Whatever else is written, a file that was cut stays shorter than it was.
        let is_last = slot.bio.end().0 == shared.reach.0 && !shared.disk.is_block;
        slot.step = if changes && (shared.cut || is_last) {
            slot.probe_offset = slot.bio.end().bytes().saturating_sub(u64::from(shared.disk.block()));
            RequestStep::Check
        } else {
            slot.first_step(shared)
        };
        slot
    }

    /// The flush before the work proper, or that.
    pub(super) fn first_step(&self, shared: &RequestContext) -> RequestStep {
        if self.bio.flags.contains(BioFlags::PREFLUSH) || self.bio.op == Op::Flush {
            return RequestStep::Flush;
        }
        self.main_step(shared)
    }

    /// The step that does the work proper.
    pub(super) fn main_step(&self, shared: &RequestContext) -> RequestStep {
        match self.bio.op {
            Op::Flush => RequestStep::Flush,
            Op::Read | Op::Write => {
                let aligned = shared.disk.direct.is_none_or(|d| is_aligned(&self.bio.data, d));
                if aligned { RequestStep::Data } else { RequestStep::Bounce }
            }
            Op::Discard => RequestStep::Range,
            Op::WriteZeroes if self.is_known_unsupported(shared) => RequestStep::Zeroes,
            Op::WriteZeroes => RequestStep::Range,
        }
    }

    fn is_known_unsupported(&self, shared: &RequestContext) -> bool {
        if self.keeps_blocks() { shared.no_zero_range } else { shared.no_punch }
    }

    /// A write-zeroes that must leave its blocks allocated.
    pub(super) fn keeps_blocks(&self) -> bool {
        self.bio.op == Op::WriteZeroes && self.bio.flags.contains(BioFlags::NOUNMAP)
    }

    pub(super) fn is_fua(&self) -> bool {
        self.bio.flags.contains(BioFlags::FUA)
    }

    /// Bytes of the range that are left.
    pub(super) fn left(&self) -> u64 {
        self.bio.sectors.bytes() - self.done
    }

    /// The operation that the step asks for. `memory` is what the step's last operation gave back;
    /// empty at its begin.
    pub(super) fn operation(&mut self, memory: Segments, shared: &mut RequestContext) -> RingOp {
        let fd = Arc::clone(&shared.fd);
        let offset = self.bio.sector.bytes() + self.done;
        match self.step {
            RequestStep::Flush | RequestStep::FlushAfter => unreachable!("flushes are the lane's"),
            RequestStep::Data => {
                let data = if memory.is_empty() { std::mem::take(&mut self.bio.data) } else { memory };
                self.transfer(fd, offset, data)
            }
            RequestStep::Bounce => {
                let len = self.left().min(PIECE) as usize;
                let mut buf = piece(memory, len, &mut shared.pool);
                if self.bio.op == Op::Write {
                    self.bio.data.copy_to_at(self.done as usize, &mut buf);
                }
                self.transfer(fd, offset, buf.into())
            }
            RequestStep::Zeroes => {
                let fresh = memory.is_empty();
                let mut buf = piece(memory, self.left().min(PIECE) as usize, &mut shared.pool);
                if fresh {
                    buf.fill(0);
                }
                RingOp::Write { fd, offset, data: buf.into(), dsync: false }
            }
            RequestStep::Range => {
                let how =
                    if self.keeps_blocks() { FallocateFlags::ZERO_RANGE } else { FallocateFlags::PUNCH_HOLE };
                let mode = (how | FallocateFlags::KEEP_SIZE).bits() as i32;
                RingOp::Fallocate { fd, mode, offset, len: self.bio.sectors.bytes() }
            }
            RequestStep::Witness(_) => {
                let fd = shared.witness.clone().expect("who writes behind the page cache has one");
                RingOp::Fsync { fd, data_only: true }
            }
            RequestStep::Check | RequestStep::Cached | RequestStep::Probe | RequestStep::End(_) => {
                let buf = piece(memory, shared.disk.block() as usize, &mut shared.pool);
                RingOp::Read {
                    fd,
                    offset: self.probe_offset,
                    data: buf.into(),
                    cached: self.step == RequestStep::Cached,
                }
            }
        }
    }

    fn transfer(&self, fd: Arc<OwnedFd>, offset: u64, data: Segments) -> RingOp {
        if self.bio.op == Op::Write {
            RingOp::Write { fd, offset, data, dsync: self.is_fua() && !self.retried_without_fua }
        } else {
            RingOp::Read { fd, offset, data, cached: false }
        }
    }
}

/// The buffer of the last operation, or a new one, `len` bytes long. The last piece is the only
/// shorter one.
fn piece(memory: Segments, len: usize, pool: &mut BufPool) -> udm_core::Buf {
    let mut buf = memory.into_iter().next().unwrap_or_else(|| pool.get(len));
    if buf.len() > len {
        buf.truncate(len);
    }
    buf
}

fn is_aligned(data: &Segments, direct: DirectAlignment) -> bool {
    data.ranges().all(|(start, len)| {
        start.addr().is_multiple_of(direct.memory) && (len as u64).is_multiple_of(direct.offset)
    })
}
