//! One client: a front end on one core.
//!
//! The life of a connection: *handshake* → *serving* → *draining* (nothing more is taken in; what is in flight is finished and answered) →
//! *dead* (nothing more is sent either; what is in flight is awaited) → closed. A client that vanishes, a stream out of step and a failed
//! send lead straight to *dead*; `DISC`, the end of the stream and a stop of the server to *draining*. Memory is freed
//! when the last bio and the last ring operation are back, not before.

use super::ServerOptions;
use super::exports::{ExportUse, Exports, Geometry};
use super::handshake::{Handshake, Session, Step};
use super::receive::Receiver;
use super::reply::{Answer, Sender, recycle};
use super::request::{Plan, check};
use super::stats::{Place, Tally};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use udm_core::{Batch, Bio, BioFlags, BioPool, BufPool, Nanos, Op, Sector, Sectors, Segments, Status};
use udm_runtime::{DeviceSlot, Done, FrontCx, FrontEnd, RingOp};
use udm_wire::nbd::{Command, CommandFlags, Request, error_from_errno};

const RECV: u64 = 0;
const SEND: u64 = 1;

/// What `CACHE` and written-out zeroes move at a time, in bytes.
const PIECE: u32 = 256 << 10;
/// Handshake output that may wait for a send, in bytes; more input is not looked at until it is gone.
const HANDSHAKE_OUT_MAX: usize = 64 << 10;

enum Phase {
    Handshake(Handshake),
    Serving,
    Draining,
    Dead,
}

/// A request between its arrival and the end of its last bio.
struct Pending {
    request: Request,
    stage: Stage,
    charge: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// One bio for all of it.
    Whole,
    /// Piece by piece; so many bytes are behind us.
    Pieces { done: u32 },
    /// The work is done; a flush makes it durable.
    Flush,
}

/// A client's connection. See the module's documentation.
pub(super) struct Connection {
    fd: Arc<OwnedFd>,
    exports: Arc<Exports>,
    options: ServerOptions,
    place: Place,
    phase: Phase,
    begun: bool,
    deadline: Nanos,
    device: Option<DeviceSlot>,
    export: Option<(ExportUse, Geometry)>,
    structured: bool,
    rx: Receiver,
    tx: Sender,
    receiving: bool,
    sending: bool,
    /// A write whose payload is still arriving.
    arriving: Option<(Request, BioFlags)>,
    pending: slab::Slab<Pending>,
    bios: BioPool,
    /// Buffers of reads. Nobody but devices writes into them, so a read that a device leaves alone shows zeroes or what this
    /// client has read before.
    reads: BufPool,
    /// Buffers of long writes and of zeroes.
    writes: BufPool,
    /// Requests not answered, and what they count for in bytes.
    open: usize,
    open_bytes: usize,
    tally: Tally,
    ops: Vec<Done>,
}

impl Connection {
    pub(super) fn new(
        fd: OwnedFd,
        exports: Arc<Exports>,
        options: ServerOptions,
        place: Place,
    ) -> Connection {
        Connection {
            fd: Arc::new(fd),
            exports,
            place,
            phase: Phase::Handshake(Handshake::default()),
            begun: false,
            deadline: Nanos::NEVER,
            device: None,
            export: None,
            structured: false,
            rx: Receiver::new(options.bytes_max),
            tx: Sender::new(),
            receiving: false,
            sending: false,
            arriving: None,
            pending: slab::Slab::new(),
            bios: BioPool::new(options.requests_max.max(1)),
            reads: BufPool::new(options.bytes_max),
            writes: BufPool::new(options.bytes_max),
            open: 0,
            open_bytes: 0,
            tally: Tally::default(),
            ops: Vec::new(),
            options,
        }
    }

    // ---- in ----

    fn received(&mut self, done: Done) {
        self.receiving = false;
        match done.result {
            Ok(n) if n > 0 => self.rx.arrived(n as usize, done.data),
            Ok(_) => {
                self.rx.arrived(0, done.data);
                // The client will say no more; it may still listen for its answers.
                match self.phase {
                    Phase::Serving => self.phase = Phase::Draining,
                    Phase::Handshake(_) => self.phase = Phase::Dead,
                    Phase::Draining | Phase::Dead => {}
                }
            }
            Err(errno) => {
                self.rx.arrived(0, done.data);
                tracing::debug!(errno, "nbd: receive failed");
                self.phase = Phase::Dead;
            }
        }
    }

    fn sent(&mut self, done: Done, cx: &mut FrontCx<'_, '_>) {
        self.sending = false;
        let dead = matches!(self.phase, Phase::Dead);
        let n = match done.result {
            Ok(n) if n > 0 && !dead => n as usize,
            other => {
                tracing::debug!(?other, "nbd: send failed");
                self.phase = Phase::Dead;
                recycle(done.data, &mut self.reads);
                return;
            }
        };
        match self.tx.sent(n, done.data, &mut self.reads) {
            Ok(sent) => {
                self.open -= sent.answers;
                self.open_bytes -= sent.charge;
                self.tally.ended += sent.answers as u64;
            }
            Err(rest) => self.send(rest, cx),
        }
    }

    fn send(&mut self, data: Segments, cx: &mut FrontCx<'_, '_>) {
        self.sending = true;
        cx.push(SEND, RingOp::Send { fd: self.fd.clone(), data });
    }

    fn is_full(&self) -> bool {
        self.open >= self.options.requests_max.max(1) || self.open_bytes >= self.options.bytes_max
    }

    /// Works off what has arrived, then asks for more and sends what waits. Called after every change.
    fn pump(&mut self, cx: &mut FrontCx<'_, '_>) {
        if matches!(self.phase, Phase::Handshake(_)) {
            self.shake(cx);
        }
        let mut full = false;
        while matches!(self.phase, Phase::Serving) {
            // A write that was let in gets its payload, whatever the bounds say of the next request.
            full = self.arriving.is_none() && self.is_full();
            if full || !self.take_request(cx) {
                break;
            }
        }
        let listens = matches!(self.phase, Phase::Serving | Phase::Handshake(_));
        if listens
            && !full
            && !self.receiving
            && !self.is_choked()
            && let Some(data) = self.rx.room()
        {
            self.receiving = true;
            cx.push(RECV, RingOp::Recv { fd: self.fd.clone(), data });
        }
        if !matches!(self.phase, Phase::Dead)
            && !self.sending
            && let Some(data) = self.tx.next(&mut self.tally)
        {
            self.send(data, cx);
        }
        self.wind_up(cx);
        self.place.publish(&mut self.tally);
    }

    /// True while a client that is still shaking hands does not read what it asked for.
    fn is_choked(&self) -> bool {
        matches!(self.phase, Phase::Handshake(_)) && !self.tx.is_idle()
    }

    /// Ends what can be ended: the last steps of the connection's life.
    fn wind_up(&mut self, cx: &mut FrontCx<'_, '_>) {
        if matches!(self.phase, Phase::Draining) && self.pending.is_empty() && self.tx.is_idle() {
            self.phase = Phase::Dead;
        }
        if !matches!(self.phase, Phase::Dead) {
            return;
        }
        // What is under way in the ring ends with an error or the end of the stream.
        if self.receiving || self.sending {
            let _ = rustix::net::shutdown(&*self.fd, rustix::net::Shutdown::Both);
        }
        self.rx.clear();
        if self.arriving.take().is_some() {
            self.tally.ended += 1;
        }
        self.tally.ended += self.tx.clear(&mut self.reads) as u64;
        if self.pending.is_empty()
            && let Some(slot) = self.device.take()
        {
            cx.close(slot);
            self.export = None;
        }
        if self.deadline != Nanos::NEVER {
            self.deadline = Nanos::NEVER;
            cx.wake_at(Nanos::NEVER);
        }
    }

    // ---- handshake ----

    fn shake(&mut self, cx: &mut FrontCx<'_, '_>) {
        if !self.tx.is_idle() {
            return;
        }
        let mut out = Vec::new();
        while let Phase::Handshake(handshake) = &mut self.phase
            && out.len() < HANDSHAKE_OUT_MAX
        {
            let mut input = self.rx.unread();
            let before = input.len();
            let device = &mut self.device;
            let step = handshake.step(&mut input, &mut out, &self.exports, &mut |export| {
                *device = Some(cx.open(export.device())?);
                Ok(())
            });
            let taken = before - input.len();
            self.rx.consume(taken);
            match step {
                Step::Answered => {}
                Step::More => break,
                Step::Close => self.phase = Phase::Draining,
                Step::Begin(session) => self.begin(&session, cx),
            }
        }
        self.tx.push_raw(&out);
    }

    fn begin(&mut self, session: &Session, cx: &mut FrontCx<'_, '_>) {
        self.export = Some((ExportUse::new(&session.export), session.geometry));
        self.structured = session.structured;
        if session.structured {
            self.tx.use_structured();
        }
        self.phase = Phase::Serving;
        self.deadline = Nanos::NEVER;
        cx.wake_at(Nanos::NEVER);
    }

    // ---- requests ----

    /// Takes one request, if it is there. False when there is nothing more to take for now.
    fn take_request(&mut self, cx: &mut FrontCx<'_, '_>) -> bool {
        if let Some((request, flags)) = self.arriving {
            let Some(data) = self.rx.payload(request.len as usize, &mut self.writes) else { return false };
            self.arriving = None;
            let charge = data.len();
            self.start(request, Op::Write, flags, data, charge, cx);
            return true;
        }
        let Some(header) = self.rx.header::<{ Request::SIZE }>() else { return false };
        let request = match Request::decode(&header) {
            Ok(request) => request,
            Err(e) => {
                tracing::debug!("nbd: {e}");
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
                let data = self.reads.get(charge);
                self.start(request, Op::Read, flags, data.into(), charge, cx);
            }
            Ok(Plan::Bio(op, flags)) => {
                // Zeroes may have to be written out.
                let charge = if op == Op::WriteZeroes { PIECE.min(request.len) as usize } else { 0 };
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
        let cache = request.command == Command::Cache;
        let stage = if cache { Stage::Pieces { done: 0 } } else { Stage::Whole };
        let len = if cache { data.len() as u64 } else { request.len.into() };
        let key = self.pending.insert(Pending { request, stage, charge });
        // There is one for each request that may be open, and this one is.
        let mut bio = self.bios.get().unwrap_or_default();
        bio.op = op;
        bio.flags = flags;
        bio.sector = Sector(request.offset / udm_core::SECTOR_SIZE);
        bio.sectors = Sectors::from_bytes(len);
        bio.cookie = key as u64;
        bio.data = data;
        self.submit(bio, cx);
    }

    fn submit(&mut self, bio: Box<Bio>, cx: &mut FrontCx<'_, '_>) {
        match self.device {
            Some(slot) => cx.submit(slot, bio),
            None => unreachable!("requests are taken while the device is open"),
        }
    }

    /// A bio is back: the next one of its request, or the answer.
    fn finished(&mut self, mut bio: Box<Bio>, cx: &mut FrontCx<'_, '_>) {
        let key = bio.cookie as usize;
        let dead = matches!(self.phase, Phase::Dead);
        let next = if dead { None } else { self.pending[key].after(&bio) };
        match next {
            Some(stage) => {
                self.pending[key].stage = stage;
                let request = self.pending[key].request;
                self.prepare(&mut bio, &request, stage);
                self.submit(bio, cx);
            }
            None => self.end(key, bio),
        }
    }

    /// Makes `bio` the next one of `request`.
    fn prepare(&mut self, bio: &mut Bio, request: &Request, stage: Stage) {
        match stage {
            Stage::Whole => {}
            Stage::Flush => {
                bio.op = Op::Flush;
                bio.flags = BioFlags::empty();
                (bio.sector, bio.sectors) = (Sector(0), Sectors::ZERO);
                recycle(std::mem::take(&mut bio.data), &mut self.writes);
            }
            Stage::Pieces { done } => {
                let len = PIECE.min(request.len - done);
                if request.command == Command::WriteZeroes {
                    bio.op = Op::Write;
                    bio.flags = BioFlags::empty();
                    if bio.data.is_empty() {
                        let mut zeroes = self.writes.get(len as usize);
                        zeroes.fill(0);
                        bio.data = zeroes.into();
                    }
                }
                bio.sector = Sector((request.offset + u64::from(done)) / udm_core::SECTOR_SIZE);
                bio.sectors = Sectors::from_bytes(len.into());
                bio.data = std::mem::take(&mut bio.data).split_to(len as usize);
            }
        }
    }

    fn end(&mut self, key: usize, mut bio: Box<Bio>) {
        let Pending { request, charge, .. } = self.pending.remove(key);
        let error = error_from_errno(bio.status.errno());
        let data = std::mem::take(&mut bio.data);
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
        if bio.status == Status::NotSupp && bio.op == Op::WriteZeroes {
            // Without FAST_ZERO the client relies on zeroes, however long they take.
            return (!flags.contains(CommandFlags::FAST_ZERO)).then_some(Stage::Pieces { done: 0 });
        }
        if !bio.status.is_ok() || self.stage == Stage::Flush {
            return None;
        }
        if let Stage::Pieces { done } = self.stage {
            let done = done + bio.sectors.bytes() as u32;
            if done < len {
                return Some(Stage::Pieces { done });
            }
        }
        // A write carries its FUA itself; discards and zeroes know none, so a flush comes behind them.
        let separate = matches!(command, Command::Trim | Command::WriteZeroes);
        (separate && flags.contains(CommandFlags::FUA)).then_some(Stage::Flush)
    }
}

impl FrontEnd for Connection {
    fn gather(&mut self, cx: &mut FrontCx<'_, '_>) {
        if !self.begun {
            self.begun = true;
            self.deadline = cx.now() + Nanos(self.options.handshake_max.as_nanos() as u64);
            cx.wake_at(self.deadline);
            self.tx.push_raw(&Handshake::greeting());
        }
        let mut ops = std::mem::take(&mut self.ops);
        cx.take(&mut ops);
        for done in ops.drain(..) {
            match done.tag {
                RECV => self.received(done),
                _ => self.sent(done, cx),
            }
        }
        self.ops = ops;
        if self.deadline <= cx.now() {
            tracing::debug!("nbd: a connection ran out of time");
            self.phase = Phase::Dead;
        }
        self.pump(cx);
    }

    fn complete(&mut self, done: &mut Batch, cx: &mut FrontCx<'_, '_>) {
        for bio in done.drain(..) {
            self.finished(bio, cx);
        }
        self.pump(cx);
    }

    fn stop(&mut self, cx: &mut FrontCx<'_, '_>) {
        match self.phase {
            Phase::Serving | Phase::Draining => {
                self.phase = Phase::Draining;
                self.deadline = cx.now() + Nanos(self.options.stop_max.as_nanos() as u64);
                cx.wake_at(self.deadline);
            }
            Phase::Handshake(_) => self.phase = Phase::Dead,
            Phase::Dead => {}
        }
        self.pump(cx);
    }

    fn is_closed(&self) -> bool {
        matches!(self.phase, Phase::Dead) && self.pending.is_empty() && !self.receiving && !self.sending
    }
}
