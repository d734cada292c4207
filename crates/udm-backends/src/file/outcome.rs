//! Handles completed operations: selects the next operation, or ends the request.
//!
//! Some errors do not show their cause, and reads find it. After EIO, another block is read
//! ([`FileLane::probe`]). After "no space" of a block device, its end is read
//! ([`FileLane::find_end`]). After a failed write with FUA, it is checked whether the write or the
//! sync failed.

use super::lane::FileLane;
use super::request::{FileRequestStep, RetryErrorClass, RetryWithoutFuaResult};
use super::sync::InFlightSync;
use rand::RngExt;
use udm_core::errno::{self, EAGAIN, EINTR, EINVAL, EIO, ENOSPC, EOPNOTSUPP};
use udm_core::{Cx, Op, Segments, Status};

/// Upper limit of repeats because of EINTR or EAGAIN.
pub(super) const RETRIES: u32 = 100;

/// Number of blocks that are tried to find one outside the page cache.
const PROBES: u32 = 16;

/// Next action after an operation.
#[derive(Debug)]
pub(super) enum FileRequestNextAction {
    /// Start another operation, which reuses this memory if it continues the last one.
    Again(Segments),
    /// Start the main step; the flush before it is done.
    Synced,
    /// Complete the request.
    End(Status),
}

impl FileLane {
    pub(super) fn succeeded(
        &mut self,
        key: usize,
        bytes: u64,
        data: Segments,
        cx: &mut Cx<'_>,
    ) -> FileRequestNextAction {
        match self.advanced(key, bytes, data, cx) {
            FileRequestNextAction::End(status) if self.slots[key].retried_without_fua => {
                self.sync_witness(key, RetryWithoutFuaResult::Ended(status))
            }
            next => next,
        }
    }

    fn advanced(
        &mut self,
        key: usize,
        bytes: u64,
        mut data: Segments,
        cx: &mut Cx<'_>,
    ) -> FileRequestNextAction {
        let block = self.direct().map_or(1, |d| d.offset);
        let slot = &mut self.slots[key];
        slot.retries = 0;
        if let Some(ticket) = slot.ticket.take_if(|_| !slot.retried_without_fua) {
            slot.barrier = Some(self.shared.syncs.end(&ticket));
        }
        match slot.step {
            FileRequestStep::Check => {
                self.recycle(data);
                if bytes < u64::from(self.limits.logical_block) {
                    let end = self.slots[key].probe_offset + bytes;
                    self.shared.disk.note_truncation(end);
                    return FileRequestNextAction::End(Status::IoErr);
                }
                self.checked(key)
            }
            FileRequestStep::Data => {
                if bytes == slot.left() && slot.done == 0 {
                    slot.bio.data = data;
                    return FileRequestNextAction::End(Status::Ok);
                }
                // Short transfer: the end of the file, more buffers than one operation takes, or a
                // signal. With direct I/O the rest must start at a block.
                let bytes = bytes - bytes % block;
                slot.done += bytes;
                let moved = data.split_to(bytes as usize);
                slot.head.append(moved);
                if data.is_empty() {
                    slot.bio.data = std::mem::take(&mut slot.head);
                    return FileRequestNextAction::End(Status::Ok);
                }
                if bytes == 0 {
                    return self.ended_early(key, data);
                }
                FileRequestNextAction::Again(data)
            }
            FileRequestStep::Bounce | FileRequestStep::Zeroes => {
                let bytes = bytes - bytes % block;
                if slot.bio.op == Op::Read
                    && let Some(buf) = data.iter().next()
                {
                    slot.bio.data.copy_from_at(slot.done as usize, &buf[..bytes as usize]);
                }
                slot.done += bytes;
                if bytes == 0 {
                    return self.ended_early(key, data);
                }
                if slot.left() > 0 {
                    return FileRequestNextAction::Again(data);
                }
                let next = self.after_range(key);
                self.recycle(data);
                next
            }
            FileRequestStep::Range => self.after_range(key),
            FileRequestStep::Witness(alone) => self.cleared(key, alone, cx),
            FileRequestStep::Cached | FileRequestStep::Probe if bytes == 0 => {
                self.recycle(data);
                FileRequestNextAction::End(Status::IoErr)
            }
            FileRequestStep::Cached => {
                self.recycle(data);
                self.probe(key, cx)
            }
            FileRequestStep::Probe => {
                self.recycle(data);
                // The disk can be read elsewhere. If the retry succeeds, the error was transient;
                // otherwise this block is bad on every path.
                self.try_again(key, RetryErrorClass::Medium)
            }
            FileRequestStep::End(status) => {
                self.recycle(data);
                if bytes == 0 {
                    let end = self.slots[key].probe_offset;
                    self.shared.disk.note_truncation(end);
                    return FileRequestNextAction::End(Status::IoErr);
                }
                FileRequestNextAction::End(status)
            }
            FileRequestStep::Flush | FileRequestStep::FlushAfter => unreachable!("the lane handles flushes"),
        }
    }

    /// The end of the disk is where it should be: starts the first step.
    fn checked(&mut self, key: usize) -> FileRequestNextAction {
        let slot = &mut self.slots[key];
        slot.step = slot.first_step(&self.shared);
        FileRequestNextAction::Again(Segments::new())
    }

    /// The range is done. A discard or write-zeroes with FUA must still be made durable. A bounced
    /// write is durable already.
    fn after_range(&mut self, key: usize) -> FileRequestNextAction {
        let slot = &mut self.slots[key];
        if slot.is_fua() && !slot.bio.op.has_data() {
            slot.step = FileRequestStep::FlushAfter;
            return FileRequestNextAction::Again(Segments::new());
        }
        FileRequestNextAction::End(Status::Ok)
    }

    pub(super) fn failed(
        &mut self,
        key: usize,
        errno: i32,
        data: Segments,
        cx: &mut Cx<'_>,
    ) -> FileRequestNextAction {
        let slot = &mut self.slots[key];
        if slot.step == FileRequestStep::Cached {
            if errno == EAGAIN {
                slot.step = FileRequestStep::Probe;
                return FileRequestNextAction::Again(data);
            }
            self.recycle(data);
            return self.try_again(key, RetryErrorClass::Path);
        }
        if (errno == EINTR || errno == EAGAIN) && slot.retries < RETRIES {
            slot.retries += 1;
            return FileRequestNextAction::Again(data);
        }
        if let Some(ticket) = slot.ticket.take() {
            if matches!(slot.step, FileRequestStep::Witness(_)) {
                self.sync_failed(&ticket);
                return FileRequestNextAction::End(Status::Medium);
            }
            // Other syncs are not confirmed until the cause is known.
            slot.ticket = Some(ticket);
            if !slot.retried_without_fua {
                slot.retried_without_fua = true;
                return FileRequestNextAction::Again(data);
            }
            self.give_back(key, data);
            return self.sync_witness(key, RetryWithoutFuaResult::Failed(errno));
        }
        match slot.step {
            FileRequestStep::Range if errno == EOPNOTSUPP => {
                if slot.bio.op == Op::Discard {
                    return FileRequestNextAction::End(Status::NotSupp);
                }
                if slot.keeps_blocks() {
                    self.shared.no_zero_range = true;
                } else {
                    self.shared.no_punch = true;
                }
                slot.step = FileRequestStep::Zeroes;
                FileRequestNextAction::Again(Segments::new())
            }
            FileRequestStep::Data
            | FileRequestStep::Bounce
            | FileRequestStep::Zeroes
            | FileRequestStep::Range => {
                self.give_back(key, data);
                self.blame(key, errno, cx)
            }
            // The end of the disk is unknown; the request itself will fail if it is missing.
            FileRequestStep::Check => {
                self.recycle(data);
                self.checked(key)
            }
            FileRequestStep::Probe => {
                self.recycle(data);
                FileRequestNextAction::End(Status::IoErr)
            }
            FileRequestStep::End(status) => {
                self.recycle(data);
                FileRequestNextAction::End(status)
            }
            FileRequestStep::Flush
            | FileRequestStep::FlushAfter
            | FileRequestStep::Cached
            | FileRequestStep::Witness(_) => {
                unreachable!("dealt with elsewhere")
            }
        }
    }

    /// Handles a failed operation on the request's own blocks.
    fn blame(&mut self, key: usize, errno: i32, cx: &mut Cx<'_>) -> FileRequestNextAction {
        let slot = &mut self.slots[key];
        match (errno, slot.tried) {
            (EIO, None) => self.probe(key, cx),
            (EIO, Some(RetryErrorClass::Medium)) => FileRequestNextAction::End(Status::Medium),
            (EIO, Some(RetryErrorClass::Path)) => FileRequestNextAction::End(Status::IoErr),
            // The kernel's errors for a write after the end of a block device, even of a removed
            // one.
            (ENOSPC | EINVAL, _) if self.shared.disk.is_block && slot.bio.op != Op::Read => {
                self.find_end(key, errno::status(errno))
            }
            _ => FileRequestNextAction::End(errno::status(errno)),
        }
    }

    /// Asks the kernel once more whether it has lost data, after the write was repeated without
    /// FUA. The result of the repeat says nothing about the first try: a full file system may have
    /// room a moment later. The witness descriptor is used, because the kernel has not reported the
    /// loss to it yet.
    fn sync_witness(&mut self, key: usize, alone: RetryWithoutFuaResult) -> FileRequestNextAction {
        self.slots[key].step = FileRequestStep::Witness(alone);
        FileRequestNextAction::Again(Segments::new())
    }

    /// No data was lost, and all written data is durable. The request gets the result of its write
    /// without FUA.
    fn cleared(
        &mut self,
        key: usize,
        alone: RetryWithoutFuaResult,
        cx: &mut Cx<'_>,
    ) -> FileRequestNextAction {
        let slot = &mut self.slots[key];
        slot.retried_without_fua = false;
        slot.barrier = slot.ticket.take().map(|ticket| self.shared.syncs.end(&ticket));
        match alone {
            RetryWithoutFuaResult::Ended(status) => FileRequestNextAction::End(status),
            RetryWithoutFuaResult::Failed(errno) => self.blame(key, errno, cx),
        }
    }

    /// Records that a sync failed. The failure is permanent.
    #[cold]
    pub(super) fn sync_failed(&self, ticket: &InFlightSync) {
        if self.shared.syncs.fail(ticket) {
            let path = self.shared.disk.path.display();
            tracing::error!(
                "{path}: data could not be written back and may be lost: flushes fail from now on"
            );
        }
    }

    /// Handles a transfer of 0 bytes: the file was truncated. This is a path error, because other
    /// paths may still have the data.
    fn ended_early(&mut self, key: usize, data: Segments) -> FileRequestNextAction {
        self.give_back(key, data);
        let slot = &self.slots[key];
        self.shared.disk.note_truncation(slot.bio.sector.bytes() + slot.done);
        FileRequestNextAction::End(Status::IoErr)
    }

    /// Restores the bio's data, or recycles a buffer of the lane, after an operation failed.
    fn give_back(&mut self, key: usize, data: Segments) {
        let slot = &mut self.slots[key];
        if slot.step == FileRequestStep::Data {
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

    /// Reads a block outside the request. With the page cache, the block must not be cached: a
    /// cached block can be read even if the disk is gone.
    fn probe(&mut self, key: usize, cx: &mut Cx<'_>) -> FileRequestNextAction {
        let block = u64::from(self.limits.logical_block);
        let blocks = self.limits.size.bytes() / block;
        let direct = self.direct().is_some();
        let slot = &mut self.slots[key];
        let (first, end) = (slot.bio.sector.bytes() / block, slot.bio.end().bytes().div_ceil(block));
        let others = blocks - (end - first);
        if others == 0 || slot.probes == PROBES {
            return self.try_again(key, RetryErrorClass::Path);
        }
        slot.probes += 1;
        let n = cx.rng().random_range(0..others);
        let at = if n < first { n } else { n + (end - first) };
        slot.step = if direct { FileRequestStep::Probe } else { FileRequestStep::Cached };
        slot.probe_offset = at * block;
        FileRequestNextAction::Again(self.shared.pool.get(block as usize).into())
    }

    /// Retries the request. If it fails again, `blame` gives the error class.
    fn try_again(&mut self, key: usize, blame: RetryErrorClass) -> FileRequestNextAction {
        let slot = &mut self.slots[key];
        slot.tried = Some(blame);
        slot.done = 0;
        slot.barrier = None;
        slot.step = slot.main_step(&self.shared);
        FileRequestNextAction::Again(Segments::new())
    }

    /// Checks whether the request's last block exists. If it does, the request ends with `status`.
    fn find_end(&mut self, key: usize, status: Status) -> FileRequestNextAction {
        let block = u64::from(self.limits.logical_block);
        let slot = &mut self.slots[key];
        slot.step = FileRequestStep::End(status);
        slot.probe_offset = slot.bio.end().bytes() - block;
        FileRequestNextAction::Again(self.shared.pool.get(block as usize).into())
    }
}
