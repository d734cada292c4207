//! Requests of a queue: from a descriptor and a buffer to bios, and back to a result.
//!
//! A tag has one buffer. While a request is served, its data is a part of the buffer, in bios; the
//! rest stays with the tag. Afterwards both are joined and go to the kernel with the result.

use super::queue::UblkQueue;
use udm_core::{BioFlags, BioTaskLaneId, Buf, Nanos, Op, Sector, Sectors, Segments, Status};
use udm_runtime::FrontCx;
use udm_wire::ublk::{UblkIoDescriptor, UblkIoFlags, UblkIoOp};

/// The state of a tag.
#[derive(Debug, Default)]
pub(super) struct UblkTag {
    /// Operation and length of the request that is served; `None` for one that is refused.
    op: Option<Op>,
    bytes: u32,
    /// Bios in flight.
    left: u32,
    /// The last error of a bio.
    status: Status,
    since: Nanos,
    /// The buffer without the part that is in bios.
    rest: Option<Buf>,
    /// Data of completed bios, by their sectors.
    done: Vec<(Sector, Segments)>,
}

impl UblkQueue {
    /// Starts the request that was fetched with `tag` into `buffer`.
    pub(super) fn start_request(&mut self, tag: u16, buffer: Buf, cx: &mut FrontCx<'_, '_>) {
        let request = UblkIoDescriptor::decode(self.device.descriptor(tag));
        let state = &mut self.tags[usize::from(tag)];
        (state.op, state.bytes, state.left, state.status) = (None, 0, 0, Status::Ok);
        (state.since, state.rest) = (cx.now(), Some(buffer));
        self.in_flight += 1;
        let started = match self.lane {
            Some(lane) if !self.is_failing => self.submit_request(tag, &request, lane, cx),
            _ => Err(Status::IoErr),
        };
        if let Err(status) = started {
            self.tags[usize::from(tag)].status = status;
        }
        if self.tags[usize::from(tag)].left == 0 {
            self.answer(tag, cx);
        }
    }

    fn submit_request(
        &mut self,
        tag: u16,
        request: &UblkIoDescriptor,
        lane: BioTaskLaneId,
        cx: &mut FrontCx<'_, '_>,
    ) -> Result<(), Status> {
        let op = match request.op {
            UblkIoOp::Read => Op::Read,
            UblkIoOp::Write => Op::Write,
            UblkIoOp::Flush => Op::Flush,
            UblkIoOp::Discard => Op::Discard,
            UblkIoOp::WriteZeroes => Op::WriteZeroes,
            UblkIoOp::Unknown(_) => return Err(Status::NotSupp),
        };
        let (sector, sectors) = match op {
            Op::Flush => (Sector(0), Sectors::ZERO),
            _ => (Sector(request.sector), Sectors(request.sectors.into())),
        };
        self.geometry.limits.check(op, sector, sectors)?;
        let state = &mut self.tags[usize::from(tag)];
        let data = match (op.has_data(), &mut state.rest) {
            (true, Some(buffer)) if sectors.bytes() <= buffer.len() as u64 => {
                buffer.split_to(sectors.bytes() as usize).into()
            }
            (true, _) => return Err(Status::Inval),
            (false, _) => Segments::new(),
        };
        state.op = Some(op);
        state.bytes = u32::try_from(sectors.bytes()).unwrap_or(u32::MAX);
        self.io_counters.begin(op);
        let mut flags = BioFlags::empty();
        flags.set(BioFlags::FUA, op.is_write() && request.flags.contains(UblkIoFlags::FUA));
        flags.set(BioFlags::NOUNMAP, op == Op::WriteZeroes && request.flags.contains(UblkIoFlags::NOUNMAP));
        flags.set(BioFlags::META, request.flags.contains(UblkIoFlags::META));
        self.submit_range(tag, op, flags, (sector, sectors), data, lane, cx);
        Ok(())
    }

    /// Submits the bios of a range, each within the limits of the device; one bio for a flush.
    #[expect(clippy::too_many_arguments, reason = "the fields of a bio, and where it goes")]
    fn submit_range(
        &mut self,
        tag: u16,
        op: Op,
        flags: BioFlags,
        (mut sector, mut sectors): (Sector, Sectors),
        mut data: Segments,
        lane: BioTaskLaneId,
        cx: &mut FrontCx<'_, '_>,
    ) {
        let max = self.geometry.max_for(op);
        loop {
            let now = sectors.min(max);
            let mut bio = self.bios.pop().unwrap_or_default();
            (bio.op, bio.flags, bio.cookie) = (op, flags, u64::from(tag));
            (bio.sector, bio.sectors) = (sector, now);
            bio.data = match now == sectors {
                true => std::mem::take(&mut data),
                false if op.has_data() => data.split_to(now.bytes() as usize),
                false => Segments::new(),
            };
            (sector, sectors) = (sector + now, sectors - now);
            self.tags[usize::from(tag)].left += 1;
            cx.submit(lane, bio);
            if sectors == Sectors::ZERO {
                return;
            }
        }
    }

    /// Takes the result and the data of a bio.
    pub(super) fn finish_bio(&mut self, mut bio: Box<udm_core::Bio>, cx: &mut FrontCx<'_, '_>) {
        let tag = bio.cookie as u16;
        let state = &mut self.tags[usize::from(tag)];
        if bio.status != Status::Ok {
            state.status = bio.status;
        }
        if bio.op.has_data() {
            state.done.push((bio.sector, std::mem::take(&mut bio.data)));
        }
        state.left -= 1;
        let is_last = state.left == 0;
        if self.bios.len() < self.tags.len() {
            self.bios.push(bio);
        }
        if is_last {
            self.answer(tag, cx);
        }
    }

    /// Sends the result of a request to the kernel: all of its bytes, or an error.
    fn answer(&mut self, tag: u16, cx: &mut FrontCx<'_, '_>) {
        let io_bytes_max = self.device.io_bytes_max();
        let state = &mut self.tags[usize::from(tag)];
        let result = match state.status {
            Status::Ok if state.op.is_some_and(Op::has_data) => state.bytes as i32,
            status => -status.errno(),
        };
        let buffer = state.join_buffer(io_bytes_max);
        if let Some(op) = state.op {
            self.io_counters.end(op);
            self.io_counters.answer(op, state.bytes.into(), result >= 0, Some(cx.now().since(state.since)));
        }
        self.in_flight -= 1;
        if self.is_detached && result < 0 {
            // It may have failed because this server ends: the next one tries it again.
            return self.unanswered.push(buffer);
        }
        self.send(tag, Some(result), buffer, cx);
    }
}

impl UblkTag {
    /// Joins the buffer of the tag. If a layer below replaced the data of a read or still holds
    /// some of the buffer, the tag gets a new buffer with the data.
    fn join_buffer(&mut self, io_bytes_max: usize) -> Buf {
        if self.done.len() > 1 {
            self.done.sort_unstable_by_key(|(sector, _)| *sector);
        }
        let rest = self.rest.take();
        let mut data = Segments::new();
        self.done.drain(..).for_each(|(_, part)| data.append(part));
        if data.is_empty()
            && let Some(buffer) = rest
        {
            return buffer;
        }
        if data.iter().len() == 1
            && let (Some(mut front), Some(rest)) = (data.pop(), rest)
        {
            if front.try_join(rest).is_ok() && front.len() >= io_bytes_max {
                return front;
            }
            data.push(front);
        }
        let mut buffer = Buf::zeroed(io_bytes_max);
        if self.op == Some(Op::Read) {
            let len = (self.bytes as usize).min(data.len()).min(io_bytes_max);
            data.copy_to(&mut buffer[..len]);
        }
        buffer
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use udm_core::SECTOR_SIZE;

    const MAX: usize = 8192;

    fn tag(op: Op, bytes: u32) -> (UblkTag, Segments) {
        let mut buffer = Buf::zeroed(MAX);
        let data = buffer.split_to(bytes as usize).into();
        (UblkTag { op: Some(op), bytes, rest: Some(buffer), ..UblkTag::default() }, data)
    }

    #[test]
    fn the_buffer_comes_back_whole() {
        for bytes in [512, 4096, MAX as u32] {
            let (mut tag, data) = tag(Op::Read, bytes);
            let start = data.ranges().next().unwrap().0;
            tag.done.push((Sector(10), data));
            let buffer = tag.join_buffer(MAX);
            assert_eq!((buffer.addr(), buffer.len()), (start.addr(), MAX));
        }
        let (mut tag, _) = tag(Op::Flush, 0);
        assert_eq!(tag.join_buffer(MAX).len(), MAX);
    }

    #[test]
    fn parts_come_back_in_any_order() {
        let (mut tag, mut data) = tag(Op::Read, 4096);
        let start = data.ranges().next().unwrap().0;
        let first = data.split_to(1024);
        let second = data.split_to(SECTOR_SIZE as usize);
        tag.done.extend([(Sector(13), data), (Sector(10), first), (Sector(12), second)]);
        let buffer = tag.join_buffer(MAX);
        assert_eq!((buffer.addr(), buffer.len()), (start.addr(), MAX));
    }

    #[test]
    fn data_in_other_memory_is_copied() {
        let (mut tag, data) = tag(Op::Read, 1024);
        let mut other = Buf::zeroed(1024);
        other.fill(7);
        tag.done.push((Sector(10), other.into()));
        let buffer = tag.join_buffer(MAX);
        assert!(buffer.len() == MAX && buffer[..1024].iter().all(|byte| *byte == 7));
        assert_ne!(buffer.addr(), data.ranges().next().unwrap().0.addr(), "somebody holds the old one");
    }
}
