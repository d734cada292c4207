//! From request to bio and back: the transmission phase of a [`Connection`].
//!
//! Most requests are one bio. `CACHE`, zeroes that the device can't write by itself, and what is
//! longer than the device takes at once go piece by piece, one bio at a time; blocks that are
//! covered in part come behind the whole ones ([`super::unaligned`]); a FUA that the bio can't
//! carry is a flush behind it. The answer is queued when the last bio is back.

mod status;

use super::connection::{Connection, Phase};
use super::exports::FailLetter;
use super::reply::{Answer, Form, recycle};
use super::request::{Blocks, Plan, check};
use super::unaligned::{Edges, Side};
use std::any::Any;
use std::ops::Range;
use udm_core::bugs::{self, Bug};
use udm_core::errno;
use udm_core::{Bio, BioFlags, Nanos, Op, Sector, Sectors, Segments, Status};
use udm_runtime::FrontCx;
use udm_wire::nbd::{Command, CommandFlags, ESHUTDOWN, PAYLOAD_SKIP_MAX, Request};

/// What `CACHE` and written-out zeroes move at a time, in bytes.
pub(super) const PIECE: u32 = 256 << 10;

/// A request between its arrival and the end of its last bio.
pub(super) struct Pending {
    request: Request,
    op: Op,
    flags: BioFlags,
    pub(super) stage: Stage,
    pub(super) blocks: Blocks,
    /// The whole blocks that it is about, in bytes.
    start: u64,
    len: u64,
    /// Bytes that one bio of it covers at the most.
    piece: u32,
    charge: usize,
    /// When it was here whole.
    since: Nanos,
    /// Data that is done: of a read that goes piece by piece, for its answer.
    front: Segments,
    /// Data whose turn has not come.
    rest: Segments,
    /// The blocks that it changes in part.
    pub(super) edges: Option<Box<Edges>>,
    /// Its client was told that it has failed; a bio of it is still under way.
    pub(super) answered: bool,
}

/// Where a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// It waits for a hold, and has no bio.
    Parked,
    /// The device is asked what it holds; there is no bio.
    Survey,
    /// So many bytes are behind us; a bio for the next piece, which mostly is all, is on its way.
    Range { done: u64 },
    /// The device writes no zeroes; from so many bytes on they are written as data.
    Zeroes { done: u64 },
    /// A block that it changes in part is read.
    ReadEdge(Side),
    /// And written back.
    WriteEdge(Side),
    /// The work is done; a flush makes it durable.
    Flush,
}

impl Connection {
    /// Takes one request, if it is there. False when there is none to take yet.
    pub(super) fn take_request(&mut self, cx: &mut FrontCx<'_, '_>) -> bool {
        if let Some((request, flags)) = self.arriving {
            let Some(data) = self.rx.payload(request.len as usize) else { return false };
            self.arriving = None;
            let charge = data.len();
            self.start(request, Op::Write, flags, data, charge, cx);
            return true;
        }
        let Some(header) = self.rx.header::<{ Request::SIZE }>() else { return false };
        let request = match Request::decode(&header) {
            Ok(request) if request.payload_len() <= PAYLOAD_SKIP_MAX => request,
            other => {
                tracing::debug!(?other, "nbd: not a request, or one that nobody has reason to send");
                self.phase = Phase::Dead;
                return false;
            }
        };
        if request.command == Command::Disconnect {
            self.phase = Phase::Draining;
            return false;
        }
        let Some((_, geometry)) = &self.export else { return false };
        self.open += 1;
        self.tally.begun += 1;
        match check(&request, geometry, self.structured, !self.contexts.is_empty()) {
            Err(error) => {
                self.rx.skip(request.payload_len().into());
                self.answer(&request, error, Segments::new(), 0, None);
            }
            Ok(Plan::Survey) => self.survey(request, cx),
            Ok(Plan::Bio(Op::Flush, _)) if bugs::on(Bug::FlushWhenIdle) && self.pending.is_empty() => {
                self.answer(&request, 0, Segments::new(), 0, None);
            }
            Ok(Plan::Nothing) => self.answer(&request, 0, Segments::new(), 0, None),
            Ok(Plan::Cache) => {
                let whole = around(geometry.block, &request);
                let charge = whole.min(u64::from(PIECE)) as usize;
                let data = self.reads.get(charge);
                self.start(request, Op::Read, BioFlags::empty(), data.into(), charge, cx);
            }
            Ok(Plan::Bio(Op::Write, flags)) => {
                // From here on, because its payload takes memory as it arrives.
                self.open_bytes += request.len as usize;
                self.tally.bytes_in += u64::from(request.len);
                self.arriving = Some((request, flags));
            }
            Ok(Plan::Bio(Op::Read, flags)) => {
                let charge = around(geometry.block, &request) as usize;
                let data = self.reads.get_pieces(charge);
                self.start(request, Op::Read, flags, data, charge, cx);
            }
            Ok(Plan::Bio(op, flags)) => {
                // Zeroes may have to be written out; and 28 bytes must not ask for work without
                // end.
                let charge = PIECE.min(request.len) as usize;
                self.start(request, op, flags, Segments::new(), charge, cx);
            }
        }
        true
    }

    /// Sends a request on its way, as soon as it may go.
    fn start(
        &mut self,
        request: Request,
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
        let (blocks, range) = (geometry.block, request.offset..request.offset + u64::from(request.len));
        let edges = match op {
            Op::Write | Op::WriteZeroes => Edges::new(&range, &blocks, &mut data),
            _ => None,
        };
        let whole = if op.is_write() { blocks.inside(&range) } else { blocks.around(&range) };
        let piece = self.piece(&request);
        let key = self.pending.insert(Pending {
            request,
            op,
            flags,
            stage: Stage::Parked,
            blocks,
            start: whole.start,
            len: whole.end - whole.start,
            piece,
            charge,
            since: self.now,
            front: Segments::new(),
            rest: data,
            edges,
            answered: false,
        });
        if let Some(served) = &self.served {
            served.begin(request.command);
        }
        match self.failing {
            true => self.fail(key),
            false => self.admit_or_park(key, cx),
        }
    }

    /// Looks whether requests are to fail; if so those under way do at once. True for a letter
    /// about that.
    pub(super) fn fail_letter(&mut self, letter: &(dyn Any + Send)) -> bool {
        let Some((export, _)) = self.export.as_ref().filter(|_| letter.is::<FailLetter>()) else {
            return false;
        };
        self.failing = export.is_failing();
        if !self.failing {
            return true;
        }
        self.parked.clear();
        let keys: Vec<usize> = self.pending.iter().map(|(key, _)| key).collect();
        for key in keys {
            let pending = &mut self.pending[key];
            match pending.stage {
                Stage::Parked => self.fail(key),
                _ if pending.answered => {}
                // Whoever asks the device has its own time.
                Stage::Survey => {}
                _ => {
                    pending.answered = true;
                    let (request, charge) = (pending.request, pending.charge);
                    self.answer(&request, errno::to_nbd(errno::EIO), Segments::new(), charge, None);
                }
            }
        }
        true
    }

    /// Ends a request that was not begun.
    pub(super) fn fail(&mut self, key: usize) {
        let mut bio = self.bios.get().unwrap_or_default();
        bio.end_with(Status::IoErr);
        self.end(key, bio);
    }

    /// True when no client waits for any request.
    pub(super) fn are_all_answered(&self) -> bool {
        self.pending.iter().all(|(_, pending)| pending.answered)
    }

    /// Sends the first bio of a request down.
    pub(super) fn launch(&mut self, key: usize, cx: &mut FrontCx<'_, '_>) {
        let pending = &mut self.pending[key];
        let edge = pending.edges.as_ref().and_then(|edges| edges.next(None));
        pending.stage = match edge {
            Some(side) if pending.len == 0 => Stage::ReadEdge(side),
            _ if pending.op == Op::Flush => Stage::Flush,
            _ => Stage::Range { done: 0 },
        };
        // There is one for each request that may be open, and this one is.
        let mut bio = self.bios.get().unwrap_or_default();
        (bio.op, bio.flags, bio.cookie) = (pending.op, pending.flags, key as u64);
        self.prepare(&mut bio, key);
        self.submit(bio, cx);
    }

    /// How much of `request` one bio covers at the most, in bytes.
    fn piece(&self, request: &Request) -> u32 {
        match (request.command, &self.export) {
            (Command::Cache, _) => PIECE,
            (Command::Trim, Some((_, geometry))) => geometry.discard_max,
            (Command::WriteZeroes, Some((_, geometry))) => geometry.zeroes_max,
            (_, Some((_, geometry))) => geometry.data_max,
            (_, None) => request.len,
        }
    }

    fn submit(&mut self, bio: Box<Bio>, cx: &mut FrontCx<'_, '_>) {
        match self.device {
            Some(slot) => cx.submit(slot, bio),
            None => unreachable!("requests are taken while the device is open"),
        }
    }

    /// A bio is back: the next one of its request, or the answer.
    pub(super) fn finished(&mut self, mut bio: Box<Bio>, cx: &mut FrontCx<'_, '_>) {
        let key = bio.cookie as usize;
        // proto.md: a trim is a hint. The device could discard when the client connected, and its
        // table has changed since.
        if bio.op == Op::Discard && bio.status == Status::NotSupp {
            bio.status = Status::Ok;
        }
        let over = matches!(self.phase, Phase::Dead) || self.pending[key].answered;
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

    /// Makes `bio` the next one of request `key`, whose stage is set.
    fn prepare(&mut self, bio: &mut Bio, key: usize) {
        let pending = &mut self.pending[key];
        let (done, piece) = match pending.stage {
            Stage::Range { done } => (done, pending.piece),
            Stage::Zeroes { done } => (done, PIECE),
            Stage::ReadEdge(side) => {
                return pending.edges.as_mut().expect("it has edges").read(side, bio, &mut self.writes);
            }
            Stage::WriteEdge(side) => {
                let flags = if pending.op == Op::Write { pending.flags } else { BioFlags::empty() };
                let edges = pending.edges.as_mut().expect("it has edges");
                return edges.write(side, bio, flags, &mut self.writes);
            }
            Stage::Parked | Stage::Survey | Stage::Flush => {
                bio.op = Op::Flush;
                bio.flags = BioFlags::empty();
                (bio.sector, bio.sectors) = (Sector(0), Sectors::ZERO);
                return recycle(std::mem::take(&mut bio.data), &mut self.writes);
            }
        };
        let len = u64::from(piece).min(pending.len - done);
        bio.sector = Sector((pending.start + done) / udm_core::SECTOR_SIZE);
        bio.sectors = Sectors::from_bytes(len);
        let data = std::mem::take(&mut bio.data);
        match pending.request.command {
            Command::Read => pending.front.append(data),
            Command::Write => recycle(data, &mut self.writes),
            // One buffer serves all pieces.
            Command::Cache => pending.rest.append(data),
            _ => {
                let zeroes = matches!(pending.stage, Stage::Zeroes { .. });
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

    /// A request is over; `bio` was its last, or never started.
    pub(super) fn end(&mut self, key: usize, mut bio: Box<Bio>) {
        let pending = self.pending.remove(key);
        let took = (pending.stage != Stage::Parked).then(|| Nanos(self.now.0 - pending.since.0));
        let gone = bugs::on(Bug::InFlightKept) && matches!(self.phase, Phase::Dead);
        if let Some(served) = self.served.as_ref().filter(|_| !gone) {
            served.end(pending.request.command);
        }
        self.set_free(key, pending.edges.is_some() && !bugs::on(Bug::HoldSkipped));
        let (start, Pending { request, charge, front: mut data, rest, edges, answered, .. }) =
            (pending.start, pending);
        let error = match bio.status {
            Status::IoErr if self.ending => ESHUTDOWN,
            status => errno::to_nbd(status.errno()),
        };
        if request.command == Command::WriteZeroes {
            self.zeroing -= charge;
        }
        data.append(std::mem::take(&mut bio.data));
        data.append(rest);
        let data = match request.command {
            // What a failed read left behind is nobody's business.
            Command::Read if bio.status.is_ok() && !answered => {
                // Of the blocks that were read, what was asked for.
                recycle(data.split_to((request.offset - start) as usize), &mut self.reads);
                let wanted = data.split_to(request.len as usize);
                recycle(data, &mut self.reads);
                wanted
            }
            Command::Read | Command::Cache => {
                recycle(data, &mut self.reads);
                Segments::new()
            }
            _ => {
                recycle(data, &mut self.writes);
                Segments::new()
            }
        };
        if let Some(edges) = edges {
            edges.recycle(&mut self.writes);
        }
        self.bios.put(bio);
        if !answered {
            self.answer(&request, error, data, charge, took);
        }
    }

    /// Answers a request; `took` is how long the device had it, when it did.
    fn answer(&mut self, request: &Request, error: u32, data: Segments, charge: usize, took: Option<Nanos>) {
        if let Some(served) = &self.served {
            served.answer(request.command, request.len, error == 0, took);
        }
        let chunks = matches!(request.command, Command::Read | Command::BlockStatus);
        let form = if chunks { Form::Chunks } else { Form::Simple };
        self.tx.push(Answer { cookie: request.cookie, error, form, offset: request.offset, data, charge });
    }
}

/// Bytes in the blocks that `request` touches.
pub(super) fn around(blocks: Blocks, request: &Request) -> u64 {
    let end = request.offset.saturating_add(request.len.into()).min(u64::MAX / 2);
    let range = blocks.around(&(request.offset..end));
    range.end.saturating_sub(range.start)
}

impl Pending {
    /// Its range in bytes, as the client gave it.
    pub(super) fn range(&self) -> Range<u64> {
        self.request.offset..self.request.offset + u64::from(self.request.len)
    }

    /// True when it changes what the device holds.
    pub(super) fn writes(&self) -> bool {
        self.op.is_write()
    }

    /// The stage behind the one that `bio` ended; `None` when it is time to answer.
    fn after(&self, bio: &Bio) -> Option<Stage> {
        let Request { command, flags, .. } = self.request;
        let next = match self.stage {
            // Without FAST_ZERO the client relies on zeroes, however long they take.
            Stage::Range { done } if bio.status == Status::NotSupp && bio.op == Op::WriteZeroes => {
                return (!flags.contains(CommandFlags::FAST_ZERO)).then_some(Stage::Zeroes { done });
            }
            _ if !bio.status.is_ok() => return None,
            Stage::Flush | Stage::Parked | Stage::Survey => return None,
            Stage::ReadEdge(side) => return Some(Stage::WriteEdge(side)),
            Stage::Range { done } => Stage::Range { done: done + bio.sectors.bytes() },
            Stage::Zeroes { done } => Stage::Zeroes { done: done + bio.sectors.bytes() },
            Stage::WriteEdge(side) => Stage::WriteEdge(side),
        };
        let behind = match next {
            Stage::Range { done } | Stage::Zeroes { done } if done < self.len => return Some(next),
            Stage::WriteEdge(side) => Some(side),
            _ => None,
        };
        if let Some(side) = self.edges.as_ref().and_then(|edges| edges.next(behind)) {
            return Some(Stage::ReadEdge(side));
        }
        // A write carries its FUA itself; discards and zeroes know none, so a flush comes behind
        // them.
        let separate = matches!(command, Command::Trim | Command::WriteZeroes);
        let separate = separate && !bugs::on(Bug::ZeroesFuaForgotten);
        (separate && flags.contains(CommandFlags::FUA)).then_some(Stage::Flush)
    }
}
