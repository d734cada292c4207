//! From request to bio and back: the transmission phase of a [`Connection`].
//!
//! Most requests are one bio. `CACHE`, zeroes that the device can't write by itself, and what is longer than the device takes at once go piece
//! by piece, one bio at a time; a FUA that the bio can't carry is a flush behind it. The answer is queued when the last bio is back.

use super::connection::{Connection, Phase};
use super::reply::{Answer, recycle};
use super::request::{Plan, check};
use udm_core::{Bio, BioFlags, Op, Sector, Sectors, Segments, Status};
use udm_runtime::FrontCx;
use udm_wire::nbd::{Command, CommandFlags, PAYLOAD_SKIP_MAX, Request, error_from_errno};

/// What `CACHE` and written-out zeroes move at a time, in bytes.
pub(super) const PIECE: u32 = 256 << 10;

/// A request between its arrival and the end of its last bio.
pub(super) struct Pending {
    request: Request,
    stage: Stage,
    /// Bytes that one bio of it covers at the most.
    piece: u32,
    charge: usize,
    /// Data that is done: of a read that goes piece by piece, for its answer.
    front: Segments,
    /// Data whose turn has not come.
    rest: Segments,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// So many bytes are behind us; a bio for the next piece, which mostly is all, is on its way.
    Range { done: u32 },
    /// The device writes no zeroes; from so many bytes on they are written as data.
    Zeroes { done: u32 },
    /// The work is done; a flush makes it durable.
    Flush,
}

impl Connection {
    /// Takes one request, if it is there. False when there is nothing more to take for now.
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
        match check(&request, geometry, self.structured) {
            Err(error) => {
                self.rx.skip(request.payload_len().into());
                self.answer(&request, error, Segments::new(), 0);
            }
            Ok(Plan::Nothing) => self.answer(&request, 0, Segments::new(), 0),
            Ok(Plan::Cache) => {
                let charge = PIECE.min(request.len) as usize;
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
                let charge = request.len as usize;
                let data = self.reads.get_pieces(charge);
                self.start(request, Op::Read, flags, data, charge, cx);
            }
            Ok(Plan::Bio(op, flags)) => {
                // Zeroes may have to be written out; and 28 bytes must not ask for work without end.
                let charge = PIECE.min(request.len) as usize;
                self.start(request, op, flags, Segments::new(), charge, cx);
            }
        }
        true
    }

    /// Sends the first bio of a request down.
    fn start(
        &mut self,
        request: Request,
        op: Op,
        flags: BioFlags,
        data: Segments,
        charge: usize,
        cx: &mut FrontCx<'_, '_>,
    ) {
        if op != Op::Write {
            self.open_bytes += charge;
        }
        if op == Op::WriteZeroes {
            self.zeroing += charge;
        }
        let piece = self.piece(&request);
        let (mut data, stage) = (data, Stage::Range { done: 0 });
        let first = data.split_to(data.len().min(piece as usize));
        let (front, rest) = (Segments::new(), data);
        let key = self.pending.insert(Pending { request, stage, piece, charge, front, rest });
        // There is one for each request that may be open, and this one is.
        let mut bio = self.bios.get().unwrap_or_default();
        bio.op = op;
        bio.flags = flags;
        bio.sector = Sector(request.offset / udm_core::SECTOR_SIZE);
        bio.sectors = Sectors::from_bytes(piece.min(request.len).into());
        bio.cookie = key as u64;
        bio.data = first;
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
        let dead = matches!(self.phase, Phase::Dead);
        let next = if dead { None } else { self.pending[key].after(&bio) };
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
        let Request { command, offset, len, .. } = pending.request;
        let (done, piece) = match pending.stage {
            Stage::Range { done } => (done, pending.piece),
            Stage::Zeroes { done } => (done, PIECE),
            Stage::Flush => {
                bio.op = Op::Flush;
                bio.flags = BioFlags::empty();
                (bio.sector, bio.sectors) = (Sector(0), Sectors::ZERO);
                recycle(std::mem::take(&mut bio.data), &mut self.writes);
                return;
            }
        };
        let len = piece.min(len - done);
        if matches!(pending.stage, Stage::Zeroes { .. }) && bio.op == Op::WriteZeroes {
            bio.op = Op::Write;
            bio.flags = BioFlags::empty();
            let mut zeroes = self.writes.get(len as usize);
            zeroes.fill(0);
            bio.data = zeroes.into();
        }
        bio.sector = Sector((offset + u64::from(done)) / udm_core::SECTOR_SIZE);
        bio.sectors = Sectors::from_bytes(len.into());
        let data = std::mem::take(&mut bio.data);
        match command {
            Command::Read => pending.front.append(data),
            Command::Write => recycle(data, &mut self.writes),
            // One buffer serves all pieces.
            _ => {
                bio.data = data;
                if bio.op.has_data() {
                    bio.data = std::mem::take(&mut bio.data).split_to(len as usize);
                }
                return;
            }
        }
        bio.data = pending.rest.split_to(len as usize);
    }

    fn end(&mut self, key: usize, mut bio: Box<Bio>) {
        let Pending { request, charge, front: mut data, rest, .. } = self.pending.remove(key);
        let error = error_from_errno(bio.status.errno());
        if request.command == Command::WriteZeroes {
            self.zeroing -= charge;
        }
        data.append(std::mem::take(&mut bio.data));
        data.append(rest);
        let data = match request.command {
            // What a failed read left behind is nobody's business.
            Command::Read if bio.status.is_ok() => data,
            Command::Read | Command::Cache => {
                recycle(data, &mut self.reads);
                Segments::new()
            }
            _ => {
                recycle(data, &mut self.writes);
                Segments::new()
            }
        };
        self.bios.put(bio);
        self.answer(&request, error, data, charge);
    }

    fn answer(&mut self, request: &Request, error: u32, data: Segments, charge: usize) {
        let read = request.command == Command::Read;
        self.tx.push(Answer { cookie: request.cookie, error, read, offset: request.offset, data, charge });
    }
}

impl Pending {
    /// The stage behind the one that `bio` ended; `None` when it is time to answer.
    fn after(&self, bio: &Bio) -> Option<Stage> {
        let Request { command, flags, len, .. } = self.request;
        let next = match self.stage {
            // Without FAST_ZERO the client relies on zeroes, however long they take.
            Stage::Range { done } if bio.status == Status::NotSupp && bio.op == Op::WriteZeroes => {
                return (!flags.contains(CommandFlags::FAST_ZERO)).then_some(Stage::Zeroes { done });
            }
            _ if !bio.status.is_ok() => return None,
            Stage::Flush => return None,
            Stage::Range { done } => Stage::Range { done: done + bio.sectors.bytes() as u32 },
            Stage::Zeroes { done } => Stage::Zeroes { done: done + bio.sectors.bytes() as u32 },
        };
        if let Stage::Range { done } | Stage::Zeroes { done } = next
            && done < len
        {
            return Some(next);
        }
        // A write carries its FUA itself; discards and zeroes know none, so a flush comes behind them.
        let separate = matches!(command, Command::Trim | Command::WriteZeroes);
        (separate && flags.contains(CommandFlags::FUA)).then_some(Stage::Flush)
    }
}
