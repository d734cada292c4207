//! A request to a file: its steps and the ring operation of each step.

use super::DirectAlignment;
use super::disk::OpenDisk;
use super::sync::{DescriptorSyncTracker, EarlierSyncsBarrier, InFlightSync};
use rustix::fs::FallocateFlags;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use udm_core::{Bio, BioFlags, BufPool, Op, Sectors, Segments, Status};
use udm_runtime::RingOp;

/// The longest buffer of the lane, in bytes. Unaligned data and zeroes move in pieces of this size.
/// It is a power of two, so each piece but the last is aligned for direct I/O.
pub(super) const PIECE: u64 = 128 << 10;

/// The current step of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FileRequestStep {
    /// Reads the last block of the range before a write, if the disk is truncated or the range ends
    /// at the end of a file. Without this check, a write could extend a truncated file.
    Check,
    /// The flush of a flush request, or the flush before a write (`PREFLUSH`).
    Flush,
    /// Data moves between the bio's memory and the file.
    Data,
    /// Data moves through an aligned buffer.
    Bounce,
    /// A hole is punched, or a range is zeroed.
    Range,
    /// Zeroes are written, because the file system cannot zero a range.
    Zeroes,
    /// The flush after a discard or write-zeroes with FUA. A write uses `RWF_DSYNC` instead.
    FlushAfter,
    /// The write with FUA failed, and its result without FUA is known. A sync through the witness
    /// descriptor shows whether data was lost.
    Witness(RetryWithoutFuaResult),
    /// The request failed with EIO. Searches for a block that is not in the page cache.
    Cached,
    /// The request failed with EIO. Reads another block to find out whether the path or the medium
    /// failed.
    Probe,
    /// The request failed, perhaps because the disk shrank. Reads its last block; if the block
    /// exists, the request ends with this status.
    End(Status),
}

/// Result of a write with FUA that was repeated without FUA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RetryWithoutFuaResult {
    /// The write completed with this status.
    Ended(Status),
    /// The write failed with this errno.
    Failed(i32),
}

/// Error class if the request fails again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RetryErrorClass {
    /// Another block could be read.
    Medium,
    /// No other block could be checked.
    Path,
}

/// A request in flight.
pub(super) struct FileRequest {
    pub(super) bio: Box<Bio>,
    pub(super) step: FileRequestStep,
    /// Bytes of the range that are done.
    pub(super) done: u64,
    /// Data of the bio that is done, while the ring has the rest.
    pub(super) head: Segments,
    /// Number of repeats because of EINTR or EAGAIN.
    pub(super) retries: u32,
    /// Byte offset of the block that is read as a check.
    pub(super) probe_offset: u64,
    /// Number of blocks tried for a probe.
    pub(super) probes: u32,
    /// Set if the request failed and is being retried.
    pub(super) tried: Option<RetryErrorClass>,
    /// The sync in flight.
    pub(super) ticket: Option<InFlightSync>,
    /// The write with FUA failed, and is repeated without FUA.
    pub(super) retried_without_fua: bool,
    /// Syncs that must end before the last sync of this request is confirmed.
    pub(super) barrier: Option<EarlierSyncsBarrier>,
}

/// State shared by the slots of a lane.
pub(super) struct FileLaneRequestState {
    /// Dropped before `disk`, which closes the descriptors.
    pub(super) fd: Arc<OwnedFd>,
    pub(super) witness: Option<Arc<OwnedFd>>,
    pub(super) disk: Arc<OpenDisk>,
    pub(super) syncs: Arc<DescriptorSyncTracker>,
    /// Reach of the disk as of this batch.
    pub(super) reach: Sectors,
    /// Whether the disk is truncated, as of this batch.
    pub(super) cut: bool,
    pub(super) pool: BufPool,
    /// The core itself reads and writes.
    pub(super) in_memory: bool,
    /// The file system reported that it does not support the operation.
    pub(super) no_punch: bool,
    pub(super) no_zero_range: bool,
}

impl FileRequest {
    pub(super) fn new(bio: Box<Bio>, shared: &FileLaneRequestState) -> FileRequest {
        let mut slot = FileRequest {
            bio,
            step: FileRequestStep::Flush,
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
        // A truncated file must stay truncated, whatever else is written.
        let is_last = slot.bio.end().0 == shared.reach.0 && !shared.disk.is_block;
        slot.step = if changes && (shared.cut || is_last) {
            slot.probe_offset = slot.bio.end().bytes().saturating_sub(u64::from(shared.disk.block()));
            FileRequestStep::Check
        } else {
            slot.first_step(shared)
        };
        slot
    }

    /// Returns the first step: the flush before the request, or its main step.
    pub(super) fn first_step(&self, shared: &FileLaneRequestState) -> FileRequestStep {
        if self.bio.flags.contains(BioFlags::PREFLUSH) || self.bio.op == Op::Flush {
            return FileRequestStep::Flush;
        }
        self.main_step(shared)
    }

    /// Returns the step that reads, writes, zeroes, discards or flushes.
    pub(super) fn main_step(&self, shared: &FileLaneRequestState) -> FileRequestStep {
        match self.bio.op {
            Op::Flush => FileRequestStep::Flush,
            Op::Read | Op::Write => {
                let aligned = shared.disk.direct.is_none_or(|d| is_aligned_for_direct_io(&self.bio.data, d));
                if aligned { FileRequestStep::Data } else { FileRequestStep::Bounce }
            }
            Op::Discard => FileRequestStep::Range,
            Op::WriteZeroes if self.is_known_unsupported(shared) => FileRequestStep::Zeroes,
            Op::WriteZeroes => FileRequestStep::Range,
        }
    }

    fn is_known_unsupported(&self, shared: &FileLaneRequestState) -> bool {
        if self.keeps_blocks() { shared.no_zero_range } else { shared.no_punch }
    }

    /// Returns true for a write-zeroes that must keep its blocks allocated.
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

    /// Returns the ring operation of the current step. `memory` is the memory of the step's
    /// previous operation; it is empty for the first one.
    pub(super) fn operation(&mut self, memory: Segments, shared: &mut FileLaneRequestState) -> RingOp {
        let fd = Arc::clone(&shared.fd);
        let offset = self.bio.sector.bytes() + self.done;
        match self.step {
            FileRequestStep::Flush | FileRequestStep::FlushAfter => unreachable!("the lane handles flushes"),
            FileRequestStep::Data => {
                let data = if memory.is_empty() { std::mem::take(&mut self.bio.data) } else { memory };
                self.transfer(fd, offset, data)
            }
            FileRequestStep::Bounce => {
                let len = self.left().min(PIECE) as usize;
                let mut buf = reuse_or_allocate_buffer(memory, len, &mut shared.pool);
                if self.bio.op == Op::Write {
                    self.bio.data.copy_to_at(self.done as usize, &mut buf);
                }
                self.transfer(fd, offset, buf.into())
            }
            FileRequestStep::Zeroes => {
                let fresh = memory.is_empty();
                let mut buf =
                    reuse_or_allocate_buffer(memory, self.left().min(PIECE) as usize, &mut shared.pool);
                if fresh {
                    buf.fill(0);
                }
                RingOp::Write { fd, offset, data: buf.into(), dsync: false }
            }
            FileRequestStep::Range => {
                let how =
                    if self.keeps_blocks() { FallocateFlags::ZERO_RANGE } else { FallocateFlags::PUNCH_HOLE };
                let mode = (how | FallocateFlags::KEEP_SIZE).bits() as i32;
                RingOp::Fallocate { fd, mode, offset, len: self.bio.sectors.bytes() }
            }
            FileRequestStep::Witness(_) => {
                let fd = shared.witness.clone().expect("a buffered writer has a witness descriptor");
                RingOp::Fsync { fd, data_only: true }
            }
            FileRequestStep::Check
            | FileRequestStep::Cached
            | FileRequestStep::Probe
            | FileRequestStep::End(_) => {
                let buf = reuse_or_allocate_buffer(memory, shared.disk.block() as usize, &mut shared.pool);
                RingOp::Read {
                    fd,
                    offset: self.probe_offset,
                    data: buf.into(),
                    cached: self.step == FileRequestStep::Cached,
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

/// Returns the buffer of the previous operation, or a new one, cut to `len` bytes. Only the last
/// piece is shorter.
fn reuse_or_allocate_buffer(memory: Segments, len: usize, pool: &mut BufPool) -> udm_core::Buf {
    let mut buf = memory.into_iter().next().unwrap_or_else(|| pool.get(len));
    if buf.len() > len {
        buf.truncate(len);
    }
    buf
}

fn is_aligned_for_direct_io(data: &Segments, direct: DirectAlignment) -> bool {
    data.ranges().all(|(start, len)| {
        start.addr().is_multiple_of(direct.memory) && (len as u64).is_multiple_of(direct.offset)
    })
}
