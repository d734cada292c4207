//! Requests that begin or end inside a block, for devices that see only whole blocks.
//!
//! * A read (and `CACHE`) reads the blocks around its range, and the answer is a part of them.
//! * A trim ignores the blocks that it covers in part.
//! * A write or write-zeroes first handles its whole blocks, then its *edges*. An edge is a block
//!   at either end that the request covers in part. It is read, changed and written back. Meanwhile
//!   the request holds a range lock on its blocks ([`super::range_locks`]), so that no other write
//!   to them through this server is lost. Reads are not delayed, and see a block before or after,
//!   as for any two requests in flight together. FUA makes the request durable as any other: each
//!   of its writes has FUA, or a flush follows.
//!
//! A request that waits for a range lock, its own or another, is *blocked* and has no bio yet.
//! Parked requests of a connection continue in their order. While a suspended device delays a
//! request, the request keeps its range lock. A connection that ends drops its blocked requests,
//! and releases its range locks when its requests in flight have completed.

use super::connection::AcceptedNbdConnection;
use super::range_locks::{RangeLockEvent, RangeLockMember, RangeLockMessage};
use super::reply::return_buffers_to_pool;
use super::request::DeviceBlockSize;
use super::serve::{PendingNbdRequest, RequestStage};
use std::any::Any;
use std::ops::Range;
use udm_core::{Bio, BioFlags, BufPool, Op, Sector, Sectors, Segments};
use udm_runtime::FrontCx;
use udm_wire::nbd::ExportFlags;

/// End of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UnalignedEdge {
    Head,
    Tail,
}

/// The edges of a request that covers blocks in part.
pub(super) struct PartialBlocks {
    block: u32,
    head: Option<PartialBlock>,
    tail: Option<PartialBlock>,
}

/// A block that is covered in part.
struct PartialBlock {
    /// Start of the block in bytes.
    at: u64,
    /// The covered part, in bytes from the start of the block.
    part: Range<u32>,
    /// Data to write; empty for zeroes.
    data: Segments,
}

impl PartialBlocks {
    /// Returns the edges of a request to `range`, in bytes; `None` if there are none. For a write,
    /// takes the data of the edges out of `data` and leaves the data of whole blocks.
    pub(super) fn new(
        range: &Range<u64>,
        blocks: &DeviceBlockSize,
        data: &mut Segments,
    ) -> Option<Box<PartialBlocks>> {
        let block = blocks.size;
        let (outer, inner) = (blocks.around(range), blocks.inside(range));
        if outer == *range {
            return None;
        }
        let within = |at: u64| (at % u64::from(block)) as u32;
        let one = outer.end - outer.start == u64::from(block);
        let mut take = |n: u32| if data.is_empty() { Segments::new() } else { data.split_to(n as usize) };
        let mut partial_blocks = PartialBlocks { block, head: None, tail: None };
        if one {
            let part = within(range.start)..(range.end - outer.start) as u32;
            partial_blocks.head = Some(PartialBlock { at: outer.start, data: take(part.len() as u32), part });
            return Some(Box::new(partial_blocks));
        }
        if outer.start < range.start {
            let part = within(range.start)..block;
            partial_blocks.head = Some(PartialBlock { at: outer.start, data: take(part.len() as u32), part });
        }
        if range.end < outer.end {
            let mut whole = take((inner.end - inner.start) as u32);
            let part = 0..within(range.end);
            partial_blocks.tail =
                Some(PartialBlock { at: outer.end - u64::from(block), data: take(part.len() as u32), part });
            whole.append(std::mem::take(data));
            *data = whole;
        }
        Some(Box::new(partial_blocks))
    }

    /// Returns the first edge after `side`, or after the whole blocks.
    pub(super) fn next(&self, side: Option<UnalignedEdge>) -> Option<UnalignedEdge> {
        match side {
            None if self.head.is_some() => Some(UnalignedEdge::Head),
            None | Some(UnalignedEdge::Head) if self.tail.is_some() => Some(UnalignedEdge::Tail),
            _ => None,
        }
    }

    fn edge(&mut self, side: UnalignedEdge) -> &mut PartialBlock {
        let edge = match side {
            UnalignedEdge::Head => &mut self.head,
            UnalignedEdge::Tail => &mut self.tail,
        };
        edge.as_mut().expect("a stage has its edge")
    }

    /// Turns `bio` into the read of an edge's block.
    pub(super) fn read(&mut self, side: UnalignedEdge, bio: &mut Bio, pool: &mut BufPool) {
        return_buffers_to_pool(std::mem::take(&mut bio.data), pool);
        (bio.op, bio.flags) = (Op::Read, BioFlags::empty());
        bio.sector = Sector(self.edge(side).at / udm_core::SECTOR_SIZE);
        bio.sectors = Sectors::from_bytes(self.block.into());
        bio.data = pool.get(self.block as usize).into();
    }

    /// Turns `bio`, which has read an edge's block, into the write of the changed block.
    pub(super) fn write(&mut self, side: UnalignedEdge, bio: &mut Bio, flags: BioFlags, pool: &mut BufPool) {
        (bio.op, bio.flags) = (Op::Write, flags);
        let PartialBlock { part, data, .. } = self.edge(side);
        let part = part.start as usize..part.end as usize;
        // The block is one buffer, from the pool in `read`.
        if let Some(block) = bio.data.iter_mut().next() {
            if data.is_empty() {
                block[part].fill(0);
            } else {
                data.copy_to(&mut block[part]);
                return_buffers_to_pool(std::mem::take(data), pool);
            }
        }
    }

    /// Returns the unused data to the pool.
    pub(super) fn recycle(self, pool: &mut BufPool) {
        for edge in [self.head, self.tail].into_iter().flatten() {
            return_buffers_to_pool(edge.data, pool);
        }
    }
}

impl AcceptedNbdConnection {
    /// Starts a blocked request, or requests its range lock. Returns false if it must stay blocked.
    fn admit(&mut self, key: usize, cx: &mut FrontCx<'_, '_>) -> bool {
        if self.pending[key].writes() {
            self.join_range_locks(cx);
        }
        let pending = &self.pending[key];
        let Some(lock_member) = self.lock_member.as_mut().filter(|_| pending.writes()) else {
            self.launch(key, cx);
            return true;
        };
        lock_member.note_write();
        let blocks = pending.blocks.around(&pending.range());
        if pending.partial_blocks.is_none() {
            let free = !lock_member.is_locked(&blocks);
            if free {
                self.launch(key, cx);
            }
            return free;
        }
        let may = lock_member.may_acquire();
        if may {
            lock_member.acquire(key, blocks);
        }
        may
    }

    /// Starts a new request or parks it.
    pub(super) fn admit_or_park(&mut self, key: usize, cx: &mut FrontCx<'_, '_>) {
        if !self.admit(key, cx) {
            self.blocked.push_back(key);
        }
    }

    /// Joins the range locks of the device, unless the connection is a member already.
    fn join_range_locks(&mut self, cx: &mut FrontCx<'_, '_>) {
        if self.lock_member.is_none()
            && let Some((export, geometry)) = &self.export
            && !geometry.flags.contains(ExportFlags::READ_ONLY)
        {
            cx.subscribe(export.range_locks().topic());
            // Joined after the subscription: later changes arrive as messages.
            self.lock_member =
                Some(RangeLockMember::join(export.range_locks(), self.core_set.clone(), cx.core()));
        }
    }

    /// Leaves the range locks. No write of the connection is in flight or waits.
    pub(super) fn leave_range_locks(&mut self, cx: &mut FrontCx<'_, '_>) {
        if let Some(lock_member) = self.lock_member.take() {
            cx.unsubscribe(lock_member.topic());
        }
    }

    /// Handles a message about range locks. Returns true if a request was started.
    pub(super) fn on_range_lock_message(
        &mut self,
        message: &(dyn Any + Send),
        cx: &mut FrontCx<'_, '_>,
    ) -> bool {
        let (Some(message), Some(lock_member)) =
            (message.downcast_ref::<RangeLockMessage>(), &mut self.lock_member)
        else {
            return false;
        };
        let pending = &self.pending;
        let event = lock_member.message(message, |range| overlaps_write_in_flight(pending, range));
        if pending.is_empty() && lock_member.is_idle() {
            // The connection gets no messages until it writes again.
            self.leave_range_locks(cx);
            return false;
        }
        match event {
            RangeLockEvent::None => false,
            RangeLockEvent::Granted(key) => {
                self.launch(key, cx);
                true
            }
            RangeLockEvent::Released => {
                let blocked = self.blocked.len();
                while let Some(&key) = self.blocked.front()
                    && self.admit(key, cx)
                {
                    self.blocked.pop_front();
                }
                self.blocked.len() < blocked
            }
        }
    }

    /// Releases the range lock of a request that has ended, and notifies those that waited for the
    /// request.
    pub(super) fn release_range(&mut self, key: usize, held: bool) {
        let Some(lock_member) = &mut self.lock_member else { return };
        if held {
            lock_member.release(key);
        }
        if lock_member.is_waited_for() {
            lock_member.write_ended(|range| overlaps_write_in_flight(&self.pending, range));
        }
    }

    /// Drops the blocked requests of a dead connection, and its block-status queries.
    pub(super) fn abandon_parked(&mut self) {
        self.blocked.clear();
        let blocked = self
            .pending
            .iter()
            .filter(|(_, p)| matches!(p.stage, RequestStage::Parked | RequestStage::BlockStatusQuery));
        let keys: Vec<usize> = blocked.map(|(key, _)| key).collect();
        keys.into_iter().for_each(|key| self.fail(key));
    }
}

/// Returns true if a write that overlaps `range` is in flight.
fn overlaps_write_in_flight(pending: &slab::Slab<PendingNbdRequest>, range: &Range<u64>) -> bool {
    let overlaps = |r: Range<u64>| r.start < range.end && range.start < r.end;
    pending
        .iter()
        .any(|(_, p)| p.stage != RequestStage::Parked && p.writes() && overlaps(p.blocks.around(&p.range())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use udm_core::Buf;

    /// Position, part and first byte of an edge.
    fn seen(edge: Option<PartialBlock>) -> Option<(u64, Range<u32>, Option<u8>)> {
        edge.map(|e| {
            assert!(e.data.is_empty() || e.data.len() == e.part.len());
            (e.at, e.part.clone(), e.data.iter().next().map(|b| b[0]))
        })
    }

    #[test]
    fn edges_and_whole_blocks_make_up_the_range() {
        let blocks = DeviceBlockSize { size: 512 };
        type Seen = Option<(u64, Range<u32>, Option<u8>)>;
        let check = |range: Range<u64>, head: Seen, tail: Seen, whole: usize| {
            let mut buf = Buf::zeroed((range.end - range.start) as usize);
            // Each byte is the number of its block.
            buf.iter_mut().zip(range.clone()).for_each(|(b, at)| *b = (at / 512) as u8);
            let mut data = Segments::from(buf);
            let partial_blocks = *PartialBlocks::new(&range, &blocks, &mut data).unwrap();
            assert_eq!((seen(partial_blocks.head), seen(partial_blocks.tail)), (head, tail), "{range:?}");
            assert_eq!(data.len(), whole, "{range:?}");
            if let Some(first) = data.iter().next().filter(|_| whole > 0) {
                assert_eq!(u64::from(first[0]), blocks.inside(&range).start / 512);
            }
        };
        check(513..514, Some((512, 1..2, Some(1))), None, 0);
        check(512..600, Some((512, 0..88, Some(1))), None, 0);
        check(600..1024, Some((512, 88..512, Some(1))), None, 0);
        check(1000..1100, Some((512, 488..512, Some(1))), Some((1024, 0..76, Some(2))), 0);
        check(1..1600, Some((0, 1..512, Some(0))), Some((1536, 0..64, Some(3))), 1024);
        check(512..1600, None, Some((1536, 0..64, Some(3))), 1024);
        check(1..2048, Some((0, 1..512, Some(0))), None, 1536);
        assert!(PartialBlocks::new(&(512..2048), &blocks, &mut Segments::new()).is_none());
        let zeroes = PartialBlocks::new(&(1..1600), &blocks, &mut Segments::new()).unwrap();
        assert_eq!(
            (zeroes.next(None), zeroes.next(Some(UnalignedEdge::Head))),
            (Some(UnalignedEdge::Head), Some(UnalignedEdge::Tail))
        );
        assert_eq!(zeroes.next(Some(UnalignedEdge::Tail)), None);
    }
}
