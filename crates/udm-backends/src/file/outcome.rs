//! What follows an operation that ended: the next one, or the request's end.
//!
//! Errors say whom they blame. What the errno leaves open is found out by reading: EIO from a block
//! ([`FileLane::probe`]), "no space" of a block device that has lost its end
//! ([`FileLane::find_end`]), and which half of a write with FUA failed, the write or the sync.

use super::lane::FileLane;
use super::request::{NonFuaOutcome, RequestStep, RetryBlame};
use super::sync::SyncTicket;
use rand::RngExt;
use udm_core::errno::{self, EAGAIN, EINTR, EINVAL, EIO, ENOSPC, EOPNOTSUPP};
use udm_core::{Cx, Op, Segments, Status};

/// How often an operation is repeated because of EINTR or EAGAIN.
pub(super) const RETRIES: u32 = 100;

/// How many blocks are tried until one is not in the page cache.
const PROBES: u32 = 16;

/// What comes after an operation.
#[derive(Debug)]
pub(super) enum NextAction {
    /// Another operation, with the memory of the last where it goes on.
    Again(Segments),
    /// The work proper, now that the flush before it is done.
    Synced,
    /// The request is over.
    End(Status),
}

impl FileLane {
    pub(super) fn succeeded(
        &mut self,
        key: usize,
        bytes: u64,
        data: Segments,
        cx: &mut Cx<'_>,
    ) -> NextAction {
        match self.advanced(key, bytes, data, cx) {
            NextAction::End(status) if self.slots[key].retried_without_fua => {
                self.sync_witness(key, NonFuaOutcome::Ended(status))
            }
            next => next,
        }
    }

    fn advanced(&mut self, key: usize, bytes: u64, mut data: Segments, cx: &mut Cx<'_>) -> NextAction {
        let block = self.direct().map_or(1, |d| d.offset);
        let slot = &mut self.slots[key];
        slot.retries = 0;
        if let Some(ticket) = slot.ticket.take_if(|_| !slot.retried_without_fua) {
            slot.barrier = Some(self.shared.syncs.end(&ticket));
        }
        match slot.step {
            RequestStep::Check => {
                self.recycle(data);
                if bytes < u64::from(self.limits.logical_block) {
                    let end = self.slots[key].probe_offset + bytes;
                    self.shared.disk.found_cut(end);
                    return NextAction::End(Status::IoErr);
                }
                self.checked(key)
            }
            RequestStep::Data => {
                if bytes == slot.left() && slot.done == 0 {
                    slot.bio.data = data;
                    return NextAction::End(Status::Ok);
                }
                // Short: the end of the file, more pieces than one operation takes, or a signal.
                // With direct I/O the rest must start at a block.
                let bytes = bytes - bytes % block;
                slot.done += bytes;
                let moved = data.split_to(bytes as usize);
                slot.head.append(moved);
                if data.is_empty() {
                    slot.bio.data = std::mem::take(&mut slot.head);
                    return NextAction::End(Status::Ok);
                }
                if bytes == 0 {
                    return self.ended_early(key, data);
                }
                NextAction::Again(data)
            }
            RequestStep::Bounce | RequestStep::Zeroes => {
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
                    return NextAction::Again(data);
                }
                let next = self.after_range(key);
                self.recycle(data);
                next
            }
            RequestStep::Range => self.after_range(key),
            RequestStep::Witness(alone) => self.cleared(key, alone, cx),
            RequestStep::Cached | RequestStep::Probe if bytes == 0 => {
                self.recycle(data);
                NextAction::End(Status::IoErr)
            }
            RequestStep::Cached => {
                self.recycle(data);
                self.probe(key, cx)
            }
            RequestStep::Probe => {
                self.recycle(data);
                // The disk answers elsewhere. If it does so here as well it was nothing; else this
                // block is bad on every path.
                self.try_again(key, RetryBlame::Medium)
            }
            RequestStep::End(status) => {
                self.recycle(data);
                if bytes == 0 {
                    let end = self.slots[key].probe_offset;
                    self.shared.disk.found_cut(end);
                    return NextAction::End(Status::IoErr);
                }
                NextAction::End(status)
            }
            RequestStep::Flush | RequestStep::FlushAfter => unreachable!("flushes are the lane's"),
        }
    }

    /// The end is where it should be: on to the work.
    fn checked(&mut self, key: usize) -> NextAction {
        let slot = &mut self.slots[key];
        slot.step = slot.first_step(&self.shared);
        NextAction::Again(Segments::new())
    }

    /// The work is done; a discard or write-zeroes with FUA must still be made durable. A bounced
    /// write is already.
    fn after_range(&mut self, key: usize) -> NextAction {
        let slot = &mut self.slots[key];
        if slot.is_fua() && !slot.bio.op.has_data() {
            slot.step = RequestStep::FlushAfter;
            return NextAction::Again(Segments::new());
        }
        NextAction::End(Status::Ok)
    }

    pub(super) fn failed(&mut self, key: usize, errno: i32, data: Segments, cx: &mut Cx<'_>) -> NextAction {
        let slot = &mut self.slots[key];
        if slot.step == RequestStep::Cached {
            if errno == EAGAIN {
                slot.step = RequestStep::Probe;
                return NextAction::Again(data);
            }
            self.recycle(data);
            return self.try_again(key, RetryBlame::Path);
        }
        if (errno == EINTR || errno == EAGAIN) && slot.retries < RETRIES {
            slot.retries += 1;
            return NextAction::Again(data);
        }
        if let Some(ticket) = slot.ticket.take() {
            if matches!(slot.step, RequestStep::Witness(_)) {
                self.sync_failed(&ticket);
                return NextAction::End(Status::Medium);
            }
            // Until it is known what failed other syncs are not believed.
            slot.ticket = Some(ticket);
            if !slot.retried_without_fua {
                slot.retried_without_fua = true;
                return NextAction::Again(data);
            }
            self.give_back(key, data);
            return self.sync_witness(key, NonFuaOutcome::Failed(errno));
        }
        match slot.step {
            RequestStep::Range if errno == EOPNOTSUPP => {
                if slot.bio.op == Op::Discard {
                    return NextAction::End(Status::NotSupp);
                }
                if slot.keeps_blocks() {
                    self.shared.no_zero_range = true;
                } else {
                    self.shared.no_punch = true;
                }
                slot.step = RequestStep::Zeroes;
                NextAction::Again(Segments::new())
            }
            RequestStep::Data | RequestStep::Bounce | RequestStep::Zeroes | RequestStep::Range => {
                self.give_back(key, data);
                self.blame(key, errno, cx)
            }
            // Nothing can be said about the end; the work itself will tell.
            RequestStep::Check => {
                self.recycle(data);
                self.checked(key)
            }
            RequestStep::Probe => {
                self.recycle(data);
                NextAction::End(Status::IoErr)
            }
            RequestStep::End(status) => {
                self.recycle(data);
                NextAction::End(status)
            }
            RequestStep::Flush | RequestStep::FlushAfter | RequestStep::Cached | RequestStep::Witness(_) => {
                unreachable!("dealt with elsewhere")
            }
        }
    }

    /// An operation on the request's own blocks failed.
    fn blame(&mut self, key: usize, errno: i32, cx: &mut Cx<'_>) -> NextAction {
        let slot = &mut self.slots[key];
        match (errno, slot.tried) {
            (EIO, None) => self.probe(key, cx),
            (EIO, Some(RetryBlame::Medium)) => NextAction::End(Status::Medium),
            (EIO, Some(RetryBlame::Path)) => NextAction::End(Status::IoErr),
            // What the kernel says of a write behind the end of a block device, also of one that is
            // gone.
            (ENOSPC | EINVAL, _) if self.shared.disk.is_block && slot.bio.op != Op::Read => {
                self.find_end(key, errno::status(errno))
            }
            _ => NextAction::End(errno::status(errno)),
        }
    }

    /// The write has been done without its FUA, and has ended or failed. What that says of the
    /// first try is nothing: a full file system may have room a moment later. So the kernel is
    /// asked once more whether it has lost data, through a descriptor that has not been told.
    fn sync_witness(&mut self, key: usize, alone: NonFuaOutcome) -> NextAction {
        self.slots[key].step = RequestStep::Witness(alone);
        NextAction::Again(Segments::new())
    }

    /// No data was lost, and all that was written is durable: what the write did alone is what it
    /// did.
    fn cleared(&mut self, key: usize, alone: NonFuaOutcome, cx: &mut Cx<'_>) -> NextAction {
        let slot = &mut self.slots[key];
        slot.retried_without_fua = false;
        slot.barrier = slot.ticket.take().map(|ticket| self.shared.syncs.end(&ticket));
        match alone {
            NonFuaOutcome::Ended(status) => NextAction::End(status),
            NonFuaOutcome::Failed(errno) => self.blame(key, errno, cx),
        }
    }

    /// A sync failed, for good.
    #[cold]
    pub(super) fn sync_failed(&self, ticket: &SyncTicket) {
        if self.shared.syncs.fail(ticket) {
            let path = self.shared.disk.path.display();
            tracing::error!(
                "{path}: data could not be written back and may be lost: flushes fail from now on"
            );
        }
    }

    /// A read or write that moves nothing: the file was cut since it was opened. The path has lost
    /// what others may still have.
    fn ended_early(&mut self, key: usize, data: Segments) -> NextAction {
        self.give_back(key, data);
        let slot = &self.slots[key];
        self.shared.disk.found_cut(slot.bio.sector.bytes() + slot.done);
        NextAction::End(Status::IoErr)
    }

    /// Puts the bio together again after its data, or a buffer of the lane, came back from an
    /// operation that failed.
    fn give_back(&mut self, key: usize, data: Segments) {
        let slot = &mut self.slots[key];
        if slot.step == RequestStep::Data {
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

    /// Reads a block that the request did not touch. Behind the page cache, one that is not in it:
    /// what was read a moment ago may come from there though the disk is gone.
    fn probe(&mut self, key: usize, cx: &mut Cx<'_>) -> NextAction {
        let block = u64::from(self.limits.logical_block);
        let blocks = self.limits.size.bytes() / block;
        let direct = self.direct().is_some();
        let slot = &mut self.slots[key];
        let (first, end) = (slot.bio.sector.bytes() / block, slot.bio.end().bytes().div_ceil(block));
        let others = blocks - (end - first);
        if others == 0 || slot.probes == PROBES {
            return self.try_again(key, RetryBlame::Path);
        }
        slot.probes += 1;
        let n = cx.rng().random_range(0..others);
        let at = if n < first { n } else { n + (end - first) };
        slot.step = if direct { RequestStep::Probe } else { RequestStep::Cached };
        slot.probe_offset = at * block;
        NextAction::Again(self.shared.pool.get(block as usize).into())
    }

    /// Has the request done once more; if it fails again, `blame` is to blame.
    fn try_again(&mut self, key: usize, blame: RetryBlame) -> NextAction {
        let slot = &mut self.slots[key];
        slot.tried = Some(blame);
        slot.done = 0;
        slot.barrier = None;
        slot.step = slot.main_step(&self.shared);
        NextAction::Again(Segments::new())
    }

    /// Looks whether the request's last block is there: it ends with `status` if so.
    fn find_end(&mut self, key: usize, status: Status) -> NextAction {
        let block = u64::from(self.limits.logical_block);
        let slot = &mut self.slots[key];
        slot.step = RequestStep::End(status);
        slot.probe_offset = slot.bio.end().bytes() - block;
        NextAction::Again(self.shared.pool.get(block as usize).into())
    }
}
