//! Requests of a queue: from the buffers of a chain to bios, and back to a status byte.

use super::chain::{buffers_len, consume_front_16, take_last_byte};
use super::queue::VirtQueue;
use super::virt_ring::VirtRing;
use udm_buf::SharedRange;
use udm_core::interleave;
use udm_core::{BioFlags, BioTaskLaneId, Nanos, Op, SECTOR_SIZE, Sector, Sectors, Segments, Status};
use udm_runtime::FrontCx;
use udm_wire::virtio::blk::{
    BLK_ID_SIZE, BLK_RANGE_SIZE, BLK_S_IOERR, BLK_S_OK, BLK_S_UNSUPP, VirtioBlkRange, VirtioBlkRequestHeader,
    VirtioBlkRequestType,
};

/// Ranges per DISCARD or WRITE ZEROES.
pub(super) const RANGES_MAX: usize = 16;

/// The state of one request, by its slot in the ring.
#[derive(Debug, Default)]
pub(super) struct VirtQueueSlot {
    is_busy: bool,
    /// The operation for the counters; `None` for a request that moves no data.
    op: Option<Op>,
    /// Bios in flight.
    pub(super) left: u32,
    /// The last error of a bio.
    pub(super) status: Status,
    /// A flush follows the writes.
    pub(super) flushes_after: bool,
    /// The room of the list of ranges, and the regions of the ranges.
    room: Segments,
    regions: Vec<u8>,
    /// The request was one bio, so its ranges come back in their order.
    is_whole: bool,
    /// Guest address of the status byte.
    status_at: u64,
    /// Bytes of the request.
    bytes: u32,
    /// Bytes that the device has written to the guest's buffers.
    written: u32,
    since: Nanos,
    /// Number of the memory that the request uses.
    pub(super) generation: u32,
}

impl VirtQueueSlot {
    /// Begins a request that uses the memory of number `generation`.
    pub(super) fn begin(&mut self, generation: u32, now: Nanos) {
        (self.is_busy, self.op, self.left, self.status) = (true, None, 0, Status::Ok);
        (self.flushes_after, self.written, self.bytes) = (false, 0, 0);
        (self.generation, self.since) = (generation, now);
    }

    /// True while the request is in flight.
    pub(super) fn is_busy(&self) -> bool {
        self.is_busy
    }

    /// Ends the request and returns the length for its used entry.
    pub(super) fn finish(&mut self) -> u32 {
        self.is_busy = false;
        std::mem::take(&mut self.written)
    }
}

impl<R: VirtRing> VirtQueue<R> {
    /// Starts the request in `self.chain`.
    pub(super) fn start_request(&mut self, head: u16, lane: BioTaskLaneId, cx: &mut FrontCx<'_, '_>) {
        let slot = &mut self.slots[usize::from(head)];
        interleave::mark_interleave_point();
        let header = consume_front_16(&self.memory, &mut self.chain.readable);
        let (Some(bytes), Some(status_at)) = (header, take_last_byte(&mut self.chain.writable)) else {
            // Without a status byte there is no way to report an error.
            return self.complete_slot(head);
        };
        slot.status_at = status_at;
        let header = VirtioBlkRequestHeader::decode(&bytes);
        let started = match header.kind {
            _ if self.is_failing => Err(Status::IoErr),
            VirtioBlkRequestType::Read => self.start_data(head, Op::Read, header.sector, lane, cx),
            VirtioBlkRequestType::Write => self.start_data(head, Op::Write, header.sector, lane, cx),
            VirtioBlkRequestType::Flush => {
                self.slots[usize::from(head)].op = Some(Op::Flush);
                self.count_begin(Op::Flush);
                self.submit_flush(head, lane, cx);
                Ok(())
            }
            VirtioBlkRequestType::Discard => self.start_ranges(head, Op::Discard, lane, cx),
            VirtioBlkRequestType::WriteZeroes => self.start_ranges(head, Op::WriteZeroes, lane, cx),
            VirtioBlkRequestType::GetId => self.write_id(head),
            VirtioBlkRequestType::Unknown(_) => Err(Status::NotSupp),
        };
        if let Err(status) = started {
            self.slots[usize::from(head)].status = status;
        }
        if self.slots[usize::from(head)].left == 0 {
            self.answer(head, cx.now());
        }
    }

    /// Starts a read or write of the data buffers.
    fn start_data(
        &mut self,
        head: u16,
        op: Op,
        sector: u64,
        lane: BioTaskLaneId,
        cx: &mut FrontCx<'_, '_>,
    ) -> Result<(), Status> {
        let buffers = if op == Op::Read { &self.chain.writable } else { &self.chain.readable };
        let len = buffers_len(buffers);
        let bytes = u32::try_from(len).map_err(|_| Status::IoErr)?;
        if !len.is_multiple_of(SECTOR_SIZE as usize) {
            return Err(Status::IoErr);
        }
        let (sector, sectors) = (Sector(sector), Sectors((len / SECTOR_SIZE as usize) as u64));
        self.settings.geometry.limits.check(op, sector, sectors)?;
        let data = self.data(head, op).ok_or(Status::IoErr)?;
        let slot = &mut self.slots[usize::from(head)];
        (slot.op, slot.bytes) = (Some(op), bytes);
        if op == Op::Read {
            slot.written = bytes;
        }
        self.count_begin(op);
        self.submit_range(head, op, BioFlags::empty(), (sector, sectors), data, lane, cx);
        Ok(())
    }

    /// The data buffers of the request as segments; `None` if some are in no memory of the guest.
    fn data(&mut self, head: u16, op: Op) -> Option<Segments> {
        let buffers = if op == Op::Read { &self.chain.writable } else { &self.chain.readable };
        let slot = &mut self.slots[usize::from(head)];
        let mut data = std::mem::take(&mut slot.room);
        slot.regions.clear();
        let (memory, spare) = (&self.memory, &mut self.spare);
        for (address, len) in buffers {
            let is_there = memory.parts(*address, *len, |part| {
                let reused = spare[part.region]
                    .pop()
                    .and_then(|mut range| range.retarget(part.at, part.len).is_ok().then_some(range));
                let range =
                    reused.or_else(|| SharedRange::new(memory.map(part.region), part.at, part.len).ok());
                if let Some(range) = range {
                    data.push_shared(range);
                    slot.regions.push(part.region as u8);
                }
            });
            if !is_there {
                return None;
            }
        }
        Some(data)
    }

    /// Keeps the ranges of a completed bio for reuse.
    pub(super) fn take_back(&mut self, head: u16, mut data: Segments) {
        let slot = &mut self.slots[usize::from(head)];
        if data.is_empty() || !slot.is_whole || slot.generation != self.generation {
            return;
        }
        data.take_shared(&mut self.taken_back);
        if self.taken_back.len() == slot.regions.len() {
            for (range, region) in self.taken_back.drain(..).zip(&slot.regions) {
                self.spare[usize::from(*region)].push(range);
            }
        }
        self.taken_back.clear();
        slot.room = data;
    }

    /// Starts DISCARD or WRITE ZEROES.
    fn start_ranges(
        &mut self,
        head: u16,
        op: Op,
        lane: BioTaskLaneId,
        cx: &mut FrontCx<'_, '_>,
    ) -> Result<(), Status> {
        let len = buffers_len(&self.chain.readable);
        if len == 0 || !len.is_multiple_of(BLK_RANGE_SIZE) || len / BLK_RANGE_SIZE > RANGES_MAX {
            return Err(Status::NotSupp);
        }
        // Copied once: the guest may change them.
        let mut ranges = [None; RANGES_MAX];
        let mut total = 0u64;
        for range in ranges.iter_mut().take(len / BLK_RANGE_SIZE) {
            let bytes = consume_front_16(&self.memory, &mut self.chain.readable).ok_or(Status::IoErr)?;
            let decoded = VirtioBlkRange::decode(&bytes);
            // VIRTIO 1.2, 5.2.6.2: a discard with `unmap` is unsupported too.
            if decoded.has_unknown_flags || (op == Op::Discard && decoded.unmap) {
                return Err(Status::NotSupp);
            }
            let (sector, sectors) = (Sector(decoded.sector), Sectors(decoded.sectors.into()));
            self.settings.geometry.limits.check(op, sector, sectors)?;
            total += sectors.bytes();
            *range = Some(decoded);
        }
        let slot = &mut self.slots[usize::from(head)];
        (slot.op, slot.bytes) = (Some(op), u32::try_from(total).unwrap_or(u32::MAX));
        self.count_begin(op);
        for range in ranges.into_iter().flatten() {
            let keeps_blocks = op == Op::WriteZeroes && !range.unmap;
            let flags = if keeps_blocks { BioFlags::NOUNMAP } else { BioFlags::empty() };
            let place = (Sector(range.sector), Sectors(range.sectors.into()));
            self.submit_range(head, op, flags, place, Segments::new(), lane, cx);
        }
        Ok(())
    }

    /// Submits the bios of a range, each within the limits of the device.
    #[expect(clippy::too_many_arguments, reason = "the fields of a bio, and where it goes")]
    fn submit_range(
        &mut self,
        head: u16,
        op: Op,
        mut flags: BioFlags,
        (mut sector, mut sectors): (Sector, Sectors),
        mut data: Segments,
        lane: BioTaskLaneId,
        cx: &mut FrontCx<'_, '_>,
    ) {
        let geometry = self.settings.geometry;
        if self.settings.writes_through && op.is_write() {
            if geometry.limits.fua && op != Op::Discard {
                flags |= BioFlags::FUA;
            } else {
                self.slots[usize::from(head)].flushes_after = true;
            }
        }
        let max = geometry.max_for(op);
        self.slots[usize::from(head)].is_whole = sectors <= max;
        while sectors > Sectors::ZERO {
            let now = sectors.min(max);
            let mut bio = self.bio();
            (bio.op, bio.flags, bio.cookie) = (op, flags, u64::from(head));
            (bio.sector, bio.sectors) = (sector, now);
            bio.data = match now == sectors {
                true => std::mem::take(&mut data),
                false if op.has_data() => data.split_to(now.bytes() as usize),
                false => Segments::new(),
            };
            (sector, sectors) = (sector + now, sectors - now);
            self.slots[usize::from(head)].left += 1;
            cx.submit(lane, bio);
        }
    }

    /// Submits a flush.
    pub(super) fn submit_flush(&mut self, head: u16, lane: BioTaskLaneId, cx: &mut FrontCx<'_, '_>) {
        let mut bio = self.bio();
        (bio.op, bio.flags, bio.cookie) = (Op::Flush, BioFlags::empty(), u64::from(head));
        (bio.sector, bio.sectors) = (Sector(0), Sectors::ZERO);
        self.slots[usize::from(head)].left += 1;
        cx.submit(lane, bio);
    }

    /// Writes the ID of the disk.
    fn write_id(&mut self, head: u16) -> Result<(), Status> {
        let mut done = 0;
        for (address, room) in &self.chain.writable {
            let part = (*room).min(BLK_ID_SIZE - done);
            if !self.memory.write(*address, &self.disk_id[done..done + part]) {
                return Err(Status::IoErr);
            }
            done += part;
        }
        self.slots[usize::from(head)].written = done as u32;
        Ok(())
    }

    fn count_begin(&self, op: Op) {
        if let Some(io_counters) = &self.io_counters {
            io_counters.begin(op);
        }
    }

    /// Writes the status byte and queues the used entry.
    pub(super) fn answer(&mut self, head: u16, now: Nanos) {
        let slot = &mut self.slots[usize::from(head)];
        let byte = match slot.status {
            Status::Ok => BLK_S_OK,
            Status::NotSupp => BLK_S_UNSUPP,
            _ => BLK_S_IOERR,
        };
        if let (Some(op), Some(io_counters)) = (slot.op, &self.io_counters) {
            io_counters.end(op);
            io_counters.answer(op, slot.bytes.into(), slot.status == Status::Ok, Some(now.since(slot.since)));
        }
        interleave::mark_interleave_point();
        if self.memory.write_byte(slot.status_at, byte) {
            slot.written += 1;
        }
        self.complete_slot(head);
    }
}
