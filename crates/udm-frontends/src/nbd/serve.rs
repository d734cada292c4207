//! The transmission phase of a [`AcceptedNbdConnection`]: turns requests into bios, and completed
//! bios into answers.
//!
//! Most requests are one bio. These are executed in pieces, one bio at a time: `CACHE`, zeroes that
//! the device does not support, and requests longer than the device's limit. Blocks that are
//! covered in part follow the whole ones ([`super::partial_blocks`]). If a bio cannot have FUA, a
//! flush follows it. The answer is queued when the last bio has completed.

mod status;

use super::connection::{AcceptedNbdConnection, ConnectionPhase};
use super::exports::FailingExportMessage;
use super::io_counters::nbd_command_to_op;
use super::partial_blocks::{PartialBlocks, UnalignedEdge};
use super::reply::{QueuedReply, ReplyForm, return_buffers_to_pool};
use super::request::{DeviceBlockSize, RequestPlan, check_request};
use std::any::Any;
use std::ops::Range;
use std::sync::Arc;
use udm_core::errno;
use udm_core::{Bio, BioFlags, Nanos, Op, Sector, Sectors, Segments, Status};
use udm_runtime::FrontCx;
use udm_wire::nbd::{
    CommandFlags, ESHUTDOWN, NbdCommand, NbdHeaderStyle, NbdRequestHeader, PAYLOAD_MAX, PAYLOAD_SKIP_MAX,
};

/// Bytes per piece of `CACHE` and of zeroes written as data.
pub(super) const PIECE: u32 = 256 << 10;

/// A request between its arrival and the completion of its last bio.
pub(super) struct PendingNbdRequest {
    request: NbdRequestHeader,
    op: Op,
    flags: BioFlags,
    pub(super) stage: RequestStage,
    pub(super) blocks: DeviceBlockSize,
    /// The whole blocks of the request, in bytes.
    start: u64,
    len: u64,
    /// Limit of bytes per bio.
    piece: u32,
    charge: usize,
    /// Time at which the request had arrived completely.
    since: Nanos,
    /// Data of completed pieces of a read, for the answer.
    front: Segments,
    /// Data of later pieces.
    rest: Segments,
    /// Blocks that the request changes in part.
    pub(super) partial_blocks: Option<Box<PartialBlocks>>,
    /// The client was told that the request has failed, but a bio is still in flight.
    pub(super) answered: bool,
}

/// Stage of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RequestStage {
    /// The request waits for a range lock and has no bio.
    Parked,
    /// A block-status query is in progress; there is no bio.
    BlockStatusQuery,
    /// `done` bytes have completed. One bio for the next piece, usually all the rest, is in flight.
    Range { done: u64 },
    /// The device does not support write-zeroes; zeroes are written as data after `done` bytes.
    Zeroes { done: u64 },
    /// A block that is covered in part is being read.
    ReadEdge(UnalignedEdge),
    /// The changed block is being written back.
    WriteEdge(UnalignedEdge),
    /// The data is written; a flush makes it durable.
    Flush,
}

impl AcceptedNbdConnection {
    /// Takes one request. Returns false if none has arrived completely.
    pub(super) fn take_request(&mut self, cx: &mut FrontCx<'_, '_>) -> bool {
        if let Some((request, flags)) = self.arriving {
            let Some(data) = self.rx.payload(request.len as usize) else { return false };
            self.arriving = None;
            if request.command == NbdCommand::BlockStatus {
                self.query_named_contexts(request, &data, cx);
                return true;
            }
            let charge = data.len();
            self.start(request, Op::Write, flags, data, charge, cx);
            return true;
        }
        let style = self.header_style;
        let (decoded, payload_max) = match style {
            NbdHeaderStyle::Extended => {
                (self.rx.header().map(|bytes| NbdRequestHeader::decode_extended(&bytes)), PAYLOAD_MAX)
            }
            _ => (self.rx.header().map(|bytes| NbdRequestHeader::decode(&bytes)), PAYLOAD_SKIP_MAX),
        };
        let request = match decoded {
            None => return false,
            Some(Ok(request)) if request.payload_len(style) <= payload_max.into() => request,
            other => {
                tracing::debug!(?other, "nbd: invalid request, or absurd payload length");
                self.phase = ConnectionPhase::Dead;
                return false;
            }
        };
        if request.command == NbdCommand::Disconnect {
            self.phase = ConnectionPhase::Draining;
            return false;
        }
        let Some((_, geometry)) = &self.export else { return false };
        self.open += 1;
        self.delta.begun += 1;
        match check_request(&request, geometry, style, self.contexts.len()) {
            Err(error) => {
                self.rx.skip(request.payload_len(style));
                self.answer(&request, error, Segments::new(), 0, None);
            }
            Ok(RequestPlan::BlockStatusQuery) => {
                self.query_block_status(request, Arc::clone(&self.contexts), cx);
            }
            Ok(RequestPlan::BlockStatusPayload) => self.arriving = Some((request, BioFlags::empty())),
            Ok(RequestPlan::Nothing) => self.answer(&request, 0, Segments::new(), 0, None),
            Ok(RequestPlan::Cache) => {
                let whole = touched_blocks_len(geometry.block, &request);
                let charge = whole.min(u64::from(PIECE)) as usize;
                let data = self.reads.get(charge);
                self.start(request, Op::Read, BioFlags::empty(), data.into(), charge, cx);
            }
            Ok(RequestPlan::Bio(Op::Write, flags)) => {
                // Counted from here, because the payload takes memory as it arrives.
                self.open_bytes += request.len as usize;
                self.delta.bytes_in += request.len;
                self.arriving = Some((request, flags));
            }
            Ok(RequestPlan::Bio(Op::Read, flags)) => {
                let charge = touched_blocks_len(geometry.block, &request) as usize;
                let data = self.reads.get_pieces(charge);
                self.start(request, Op::Read, flags, data, charge, cx);
            }
            Ok(RequestPlan::Bio(op, flags)) => {
                // Zeroes may have to be written as data. The charge also bounds the work that short
                // requests can cause.
                let charge = request.len.min(PIECE.into()) as usize;
                self.start(request, op, flags, Segments::new(), charge, cx);
            }
        }
        true
    }

    /// Starts a request, or parks it until it may start.
    fn start(
        &mut self,
        request: NbdRequestHeader,
        op: Op,
        flags: BioFlags,
        mut data: Segments,
        charge: usize,
        cx: &mut FrontCx<'_, '_>,
    ) {
        if op != Op::Write {
            self.open_bytes += charge;
        }
        if op == Op::WriteZeroes {
            self.zeroing += charge;
        }
        let Some((_, geometry)) = &self.export else { unreachable!("requests are taken from an export") };
        let (blocks, range) = (geometry.block, request.offset..request.offset + request.len);
        let partial_blocks = match op {
            Op::Write | Op::WriteZeroes => PartialBlocks::new(&range, &blocks, &mut data),
            _ => None,
        };
        let whole = if op.is_write() { blocks.inside(&range) } else { blocks.around(&range) };
        let piece = self.piece(&request);
        let key = self.pending.insert(PendingNbdRequest {
            request,
            op,
            flags,
            stage: RequestStage::Parked,
            blocks,
            start: whole.start,
            len: whole.end - whole.start,
            piece,
            charge,
            since: self.now,
            front: Segments::new(),
            rest: data,
            partial_blocks,
            answered: false,
        });
        if let (Some(op), Some(io_counters)) = (nbd_command_to_op(request.command), &self.io_counters) {
            io_counters.begin(op);
        }
        match self.failing {
            true => self.fail(key),
            false => self.admit_or_park(key, cx),
        }
    }

    /// Handles a message about failing requests: if they must fail, those in flight fail at once.
    /// Returns true for such a message.
    pub(super) fn on_fail_message(&mut self, message: &(dyn Any + Send)) -> bool {
        let Some((export, _)) = self.export.as_ref().filter(|_| message.is::<FailingExportMessage>()) else {
            return false;
        };
        self.failing = export.is_failing();
        if !self.failing {
            return true;
        }
        self.blocked.clear();
        let keys: Vec<usize> = self.pending.iter().map(|(key, _)| key).collect();
        for key in keys {
            let pending = &mut self.pending[key];
            match pending.stage {
                RequestStage::Parked => self.fail(key),
                _ if pending.answered => {}
                // The block-status thread answers within its own time.
                RequestStage::BlockStatusQuery => {}
                _ => {
                    pending.answered = true;
                    let (request, charge) = (pending.request, pending.charge);
                    self.answer(&request, errno::to_nbd(errno::EIO), Segments::new(), charge, None);
                }
            }
        }
        true
    }

    /// Fails a request that was not started.
    pub(super) fn fail(&mut self, key: usize) {
        let mut bio = self.bios.get().unwrap_or_default();
        bio.end_with(Status::IoErr);
        self.end(key, bio);
    }

    /// Returns true if all requests were answered.
    pub(super) fn are_all_answered(&self) -> bool {
        self.pending.iter().all(|(_, pending)| pending.answered)
    }

    /// Submits the first bio of a request.
    pub(super) fn launch(&mut self, key: usize, cx: &mut FrontCx<'_, '_>) {
        let pending = &mut self.pending[key];
        let edge = pending.partial_blocks.as_ref().and_then(|partial_blocks| partial_blocks.next(None));
        pending.stage = match edge {
            Some(side) if pending.len == 0 => RequestStage::ReadEdge(side),
            _ if pending.op == Op::Flush => RequestStage::Flush,
            _ => RequestStage::Range { done: 0 },
        };
        // The pool has a bio for each open request.
        let mut bio = self.bios.get().unwrap_or_default();
        (bio.op, bio.flags, bio.cookie) = (pending.op, pending.flags, key as u64);
        self.prepare(&mut bio, key);
        self.submit(bio, cx);
    }

    /// Limit of bytes per bio for `request`.
    fn piece(&self, request: &NbdRequestHeader) -> u32 {
        match (request.command, &self.export) {
            (NbdCommand::Cache, _) => PIECE,
            (NbdCommand::Trim, Some((_, geometry))) => geometry.discard_max,
            (NbdCommand::WriteZeroes, Some((_, geometry))) => geometry.zeroes_max,
            (_, Some((_, geometry))) => geometry.data_max,
            (_, None) => PIECE,
        }
    }

    fn submit(&mut self, bio: Box<Bio>, cx: &mut FrontCx<'_, '_>) {
        match self.device {
            Some(slot) => cx.submit(slot, bio),
            None => unreachable!("requests are taken while the device is open"),
        }
    }

    /// Handles a completed bio: submits the next one of its request, or queues the answer.
    pub(super) fn finished(&mut self, mut bio: Box<Bio>, cx: &mut FrontCx<'_, '_>) {
        let key = bio.cookie as usize;
        // proto.md: a trim is a hint. The table of the device may have changed since the client
        // connected, so that the device does not support discards any more.
        if bio.op == Op::Discard && bio.status == Status::NotSupp {
            bio.status = Status::Ok;
        }
        let over = matches!(self.phase, ConnectionPhase::Dead) || self.pending[key].answered;
        let next = if over { None } else { self.pending[key].after(&bio) };
        match next {
            Some(stage) => {
                self.pending[key].stage = stage;
                self.prepare(&mut bio, key);
                self.submit(bio, cx);
            }
            None => self.end(key, bio),
        }
    }

    /// Turns `bio` into the next one of request `key`, whose stage is set.
    fn prepare(&mut self, bio: &mut Bio, key: usize) {
        let pending = &mut self.pending[key];
        let (done, piece) = match pending.stage {
            RequestStage::Range { done } => (done, pending.piece),
            RequestStage::Zeroes { done } => (done, PIECE),
            RequestStage::ReadEdge(side) => {
                return pending.partial_blocks.as_mut().expect("it has edges").read(
                    side,
                    bio,
                    &mut self.writes,
                );
            }
            RequestStage::WriteEdge(side) => {
                let flags = if pending.op == Op::Write { pending.flags } else { BioFlags::empty() };
                let partial_blocks = pending.partial_blocks.as_mut().expect("it has edges");
                return partial_blocks.write(side, bio, flags, &mut self.writes);
            }
            RequestStage::Parked | RequestStage::BlockStatusQuery | RequestStage::Flush => {
                bio.op = Op::Flush;
                bio.flags = BioFlags::empty();
                (bio.sector, bio.sectors) = (Sector(0), Sectors::ZERO);
                return return_buffers_to_pool(std::mem::take(&mut bio.data), &mut self.writes);
            }
        };
        let len = u64::from(piece).min(pending.len - done);
        bio.sector = Sector((pending.start + done) / udm_core::SECTOR_SIZE);
        bio.sectors = Sectors::from_bytes(len);
        let data = std::mem::take(&mut bio.data);
        match pending.request.command {
            NbdCommand::Read => pending.front.append(data),
            NbdCommand::Write => return_buffers_to_pool(data, &mut self.writes),
            // All pieces use one buffer.
            NbdCommand::Cache => pending.rest.append(data),
            _ => {
                let zeroes = matches!(pending.stage, RequestStage::Zeroes { .. });
                bio.data = data;
                if zeroes && bio.op == Op::WriteZeroes {
                    (bio.op, bio.flags) = (Op::Write, BioFlags::empty());
                    let mut buf = self.writes.get(len as usize);
                    buf.fill(0);
                    bio.data = buf.into();
                } else if zeroes {
                    bio.data = std::mem::take(&mut bio.data).split_to(len as usize);
                }
                return;
            }
        }
        bio.data = pending.rest.split_to(len as usize);
    }

    /// Ends a request. `bio` was its last one, or was never submitted.
    pub(super) fn end(&mut self, key: usize, mut bio: Box<Bio>) {
        let pending = self.pending.remove(key);
        let took = (pending.stage != RequestStage::Parked).then(|| Nanos(self.now.0 - pending.since.0));
        if let (Some(op), Some(io_counters)) = (nbd_command_to_op(pending.request.command), &self.io_counters)
        {
            io_counters.end(op);
        }
        self.release_range(key, pending.partial_blocks.is_some());
        let (
            start,
            PendingNbdRequest { request, charge, front: mut data, rest, partial_blocks, answered, .. },
        ) = (pending.start, pending);
        let error = match bio.status {
            Status::IoErr if self.ending => ESHUTDOWN,
            status => errno::to_nbd(status.errno()),
        };
        if request.command == NbdCommand::WriteZeroes {
            self.zeroing -= charge;
        }
        data.append(std::mem::take(&mut bio.data));
        data.append(rest);
        let data = match request.command {
            // Data of a failed read is dropped.
            NbdCommand::Read if bio.status.is_ok() && !answered => {
                // Takes the requested part of the blocks that were read.
                return_buffers_to_pool(data.split_to((request.offset - start) as usize), &mut self.reads);
                let wanted = data.split_to(request.len as usize);
                return_buffers_to_pool(data, &mut self.reads);
                wanted
            }
            NbdCommand::Read | NbdCommand::Cache => {
                return_buffers_to_pool(data, &mut self.reads);
                Segments::new()
            }
            _ => {
                return_buffers_to_pool(data, &mut self.writes);
                Segments::new()
            }
        };
        if let Some(partial_blocks) = partial_blocks {
            partial_blocks.recycle(&mut self.writes);
        }
        self.bios.put(bio);
        if !answered {
            self.answer(&request, error, data, charge, took);
        }
    }

    /// Queues the answer to a request. `took` is its time at the device, if it was submitted.
    fn answer(
        &mut self,
        request: &NbdRequestHeader,
        error: u32,
        data: Segments,
        charge: usize,
        took: Option<Nanos>,
    ) {
        if let (Some(op), Some(io_counters)) = (nbd_command_to_op(request.command), &self.io_counters) {
            io_counters.answer(op, request.len, error == 0, took);
        }
        let chunks = matches!(request.command, NbdCommand::Read | NbdCommand::BlockStatus);
        let form = if chunks { ReplyForm::Chunks } else { ReplyForm::Simple };
        self.tx.push(QueuedReply {
            cookie: request.cookie,
            error,
            form,
            offset: request.offset,
            data,
            charge,
        });
    }
}

/// Number of bytes in the blocks that `request` touches.
pub(super) fn touched_blocks_len(blocks: DeviceBlockSize, request: &NbdRequestHeader) -> u64 {
    let end = request.offset.saturating_add(request.len).min(u64::MAX / 2);
    let range = blocks.around(&(request.offset..end));
    range.end.saturating_sub(range.start)
}

impl PendingNbdRequest {
    /// Range in bytes, as in the client's request.
    pub(super) fn range(&self) -> Range<u64> {
        self.request.offset..self.request.offset + self.request.len
    }

    /// Returns true if the request changes data.
    pub(super) fn writes(&self) -> bool {
        self.op.is_write()
    }

    /// Returns the stage after the one that `bio` completed; `None` if the answer is due.
    fn after(&self, bio: &Bio) -> Option<RequestStage> {
        let NbdRequestHeader { command, flags, .. } = self.request;
        let next = match self.stage {
            // Without FAST_ZERO the client needs zeroes, however long they take.
            RequestStage::Range { done } if bio.status == Status::NotSupp && bio.op == Op::WriteZeroes => {
                return (!flags.contains(CommandFlags::FAST_ZERO)).then_some(RequestStage::Zeroes { done });
            }
            _ if !bio.status.is_ok() => return None,
            RequestStage::Flush | RequestStage::Parked | RequestStage::BlockStatusQuery => return None,
            RequestStage::ReadEdge(side) => return Some(RequestStage::WriteEdge(side)),
            RequestStage::Range { done } => RequestStage::Range { done: done + bio.sectors.bytes() },
            RequestStage::Zeroes { done } => RequestStage::Zeroes { done: done + bio.sectors.bytes() },
            RequestStage::WriteEdge(side) => RequestStage::WriteEdge(side),
        };
        let behind = match next {
            RequestStage::Range { done } | RequestStage::Zeroes { done } if done < self.len => {
                return Some(next);
            }
            RequestStage::WriteEdge(side) => Some(side),
            _ => None,
        };
        if let Some(side) =
            self.partial_blocks.as_ref().and_then(|partial_blocks| partial_blocks.next(behind))
        {
            return Some(RequestStage::ReadEdge(side));
        }
        // A write has FUA itself; a flush follows discards and zeroes, which have no FUA.
        let separate = matches!(command, NbdCommand::Trim | NbdCommand::WriteZeroes);
        (separate && flags.contains(CommandFlags::FUA)).then_some(RequestStage::Flush)
    }
}
