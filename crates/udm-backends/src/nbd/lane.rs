//! The data-path half of an export of an NBD server: requests to bytes on a connection, and back.

use super::connection::{Brought, Connection, Stage};
use super::outgoing::Outgoing;
use super::server::Server;
use slab::Slab;
use std::collections::VecDeque;
use std::sync::Arc;
use udm_core::{
    Batch, Bio, BioFlags, BufPool, Busy, Cx, Drain, Lane, Limits, Nanos, Op, Status, errno, hand_over,
};
use udm_runtime::{Done, Ring};
use udm_wire::nbd::client::{Asked, Event, Replies};
use udm_wire::nbd::{Command, CommandFlags};

/// Requests under way in one lane: more than any server works on at a time.
const SLOTS: usize = 1024;

/// Bytes of buffers that a lane keeps for the next time.
const KEEP: usize = 1 << 20;

/// How soon after a failure to connect it is tried again, when somebody wants something: at first,
/// and at the most.
const BACK_OFF: Nanos = Nanos(100_000_000);
pub(super) const BACK_OFF_MAX: Nanos = Nanos(5_000_000_000);

/// A request on its way.
pub(super) struct Slot {
    pub(super) bio: Box<Bio>,
    /// The flush before the write (`PREFLUSH`) is under way.
    flushing: bool,
    /// How it has ended, though its data is not all sent: a server that says no early.
    pub(super) early: Option<Status>,
}

impl Slot {
    fn new(bio: Box<Bio>) -> Slot {
        let flushing = bio.op != Op::Flush && bio.flags.contains(BioFlags::PREFLUSH);
        Slot { bio, flushing, early: None }
    }

    /// What is asked of the server now.
    pub(super) fn asked(&self) -> Asked {
        let Bio { op, flags, sector, sectors, .. } = *self.bio;
        if self.flushing || op == Op::Flush {
            return Asked { command: Command::Flush, flags: CommandFlags::empty(), offset: 0, len: 0 };
        }
        let command = match op {
            Op::Read => Command::Read,
            Op::Write => Command::Write,
            Op::Discard => Command::Trim,
            Op::WriteZeroes | Op::Flush => Command::WriteZeroes,
        };
        let mut modifiers = CommandFlags::empty();
        modifiers.set(CommandFlags::FUA, op != Op::Read && flags.contains(BioFlags::FUA));
        let keeps = op == Op::WriteZeroes && flags.contains(BioFlags::NOUNMAP);
        modifiers.set(CommandFlags::NO_HOLE, keeps);
        Asked { command, flags: modifiers, offset: sector.bytes(), len: sectors.bytes() as u32 }
    }

    /// True when data follow what is asked now.
    pub(super) fn sends_data(&self) -> bool {
        self.bio.op == Op::Write && !self.flushing
    }
}

/// See the module's documentation.
pub(super) struct NbdLane {
    ring: Ring,
    server: Arc<Server>,
    limits: Limits,
    connection: Option<Connection>,
    slots: Slab<Slot>,
    /// For a connection, or a slot.
    waiting: VecDeque<Box<Bio>>,
    outgoing: Outgoing,
    ready: Batch,
    pool: BufPool,
    finished: Vec<Done>,
    over: Vec<usize>,
    /// How often it was tried to connect.
    tries: usize,
    /// When that may be tried again, and how long it takes from the next failure on.
    next_try: Nanos,
    back_off: Nanos,
}

impl NbdLane {
    pub(super) fn new(ring: Ring, server: &Arc<Server>, cx: &mut Cx<'_>) -> NbdLane {
        let mut lane = NbdLane {
            ring,
            limits: server.limits(),
            server: Arc::clone(server),
            connection: None,
            slots: Slab::new(),
            waiting: VecDeque::new(),
            outgoing: Outgoing::default(),
            ready: Batch::new(),
            pool: BufPool::new(KEEP),
            finished: Vec::new(),
            over: Vec::new(),
            tries: 0,
            next_try: Nanos(0),
            back_off: BACK_OFF,
        };
        lane.connect(cx);
        lane
    }

    #[cold]
    fn connect(&mut self, cx: &mut Cx<'_>) {
        match Connection::begin(&self.ring, &self.server, self.tries, cx) {
            Ok(connection) => self.connection = Some(connection),
            Err(why) => self.lost(&why, cx),
        }
        self.tries += 1;
    }

    /// There is no connection any more: all that waits for one ends.
    #[cold]
    fn lost(&mut self, why: &str, cx: &mut Cx<'_>) {
        self.server.is_down(why);
        self.connection = None;
        self.outgoing = Outgoing::default();
        self.next_try = cx.now() + self.back_off;
        self.back_off = (self.back_off + self.back_off).min(BACK_OFF_MAX);
        let under_way = self.slots.drain().map(|slot| slot.bio);
        for mut bio in under_way.chain(self.waiting.drain(..)) {
            bio.end_with(Status::Transport);
            self.ready.push(bio);
        }
    }

    /// Sends what waits, if nothing is being sent.
    fn send(&mut self) {
        let Some(connection) = &mut self.connection else { return };
        if connection.is_ready() {
            while self.slots.len() < SLOTS {
                let Some(bio) = self.waiting.pop_front() else { break };
                start(bio, &self.limits, &mut self.slots, &mut self.outgoing, &mut self.ready);
            }
        }
        if !connection.may_send() {
            // It has to know when the send under way has left.
            return connection.set_patient(self.outgoing.is_empty());
        }
        let Stage::Ready(replies) = &mut connection.stage else { return connection.send_raw() };
        if self.outgoing.is_empty() {
            return;
        }
        let buf = self.outgoing.gather(&self.slots, replies, &mut self.pool, &mut self.over);
        connection.set_patient(self.outgoing.is_empty());
        connection.send(buf);
        for key in self.over.drain(..) {
            let mut slot = self.slots.remove(key);
            slot.bio.end_with(slot.early.unwrap_or_default());
            self.ready.push(slot.bio);
        }
    }

    /// Takes in what the ring has finished.
    fn collect(&mut self, cx: &mut Cx<'_>) {
        let Some(connection) = &self.connection else { return };
        let mut finished = std::mem::take(&mut self.finished);
        connection.take(&mut finished);
        for done in finished.drain(..) {
            // Behind the end of a connection nothing of it matters.
            if self.connection.is_some()
                && let Err(why) = self.operation_done(done, cx)
            {
                self.lost(&why, cx);
            }
        }
        self.finished = finished;
    }

    fn operation_done(&mut self, done: Done, cx: &mut Cx<'_>) -> Result<(), String> {
        let Some(connection) = &mut self.connection else { return Ok(()) };
        match connection.finished(done, &mut self.pool)? {
            Brought::Connected => connection.shake(&self.server.uri.export, &mut self.pool),
            Brought::Sent(buf) => self.pool.put(buf),
            Brought::Bytes(buf, n) => {
                cx.set_work_left(cx.work_left().saturating_sub(n as u64));
                self.take_in(&buf[..n])?;
                if let Some(connection) = &self.connection {
                    connection.receive(Some(buf), &mut self.pool);
                }
            }
            Brought::Nothing => {}
        }
        Ok(())
    }

    /// Bytes of the server.
    fn take_in(&mut self, mut input: &[u8]) -> Result<(), String> {
        let Some(connection) = &mut self.connection else { return Ok(()) };
        if let Stage::Shaking(shake) = &mut connection.stage {
            let Some(export) = shake.take(&mut input).map_err(|e| e.to_string())? else {
                let out = shake.take_out();
                connection.raw.extend(out);
                return Ok(());
            };
            self.server.accept(&export)?;
            self.server.is_up();
            // Where it answers it is looked for first the next time.
            self.tries -= 1;
            connection.stage = Stage::Ready(Box::new(Replies::new(&export)));
        }
        let Stage::Ready(replies) = &mut connection.stage else { return Ok(()) };
        while let Some(event) = replies.take(&mut input).map_err(|e| e.to_string())? {
            match event {
                Event::Data { tag, at, bytes } => {
                    self.slots[tag as usize].bio.data.copy_from_at(at as usize, bytes);
                }
                Event::Zeroes { tag, at, len } => {
                    let data = &mut self.slots[tag as usize].bio.data;
                    data.produce(at as usize, len as usize, |_, part| part.fill(0));
                }
                Event::Status { .. } => return Err("a block status that nobody asked for".into()),
                Event::Done { tag, error } => {
                    self.back_off = BACK_OFF;
                    let (key, status) = (tag as usize, errno::status(errno::from_nbd(error)));
                    let status = if error == 0 { Status::Ok } else { status };
                    answered(key, status, &mut self.slots, &mut self.outgoing, &mut self.ready);
                }
            }
        }
        Ok(())
    }
}

/// Gives a request a slot and queues it, or ends it when it needs no server.
fn start(
    mut bio: Box<Bio>,
    limits: &Limits,
    slots: &mut Slab<Slot>,
    outgoing: &mut Outgoing,
    ready: &mut Batch,
) {
    if let Some(status) = answer_now(&bio, limits) {
        bio.end_with(status);
        return ready.push(bio);
    }
    let mut slot = Slot::new(bio);
    // Without a cache there is nothing to flush.
    slot.flushing &= limits.write_cache;
    outgoing.push(slots.insert(slot));
}

/// The server has answered what a slot asked for.
fn answered(key: usize, status: Status, slots: &mut Slab<Slot>, outgoing: &mut Outgoing, ready: &mut Batch) {
    let slot = &mut slots[key];
    if slot.flushing && status.is_ok() {
        slot.flushing = false;
        return outgoing.push(key);
    }
    if outgoing.is_sending(key) {
        slot.early = Some(status);
        return;
    }
    let mut bio = slots.remove(key).bio;
    bio.end_with(status);
    ready.push(bio);
}

/// The status of a request that needs no server to be answered.
fn answer_now(bio: &Bio, limits: &Limits) -> Option<Status> {
    if bio.op == Op::Flush {
        return (!limits.write_cache).then_some(Status::Ok);
    }
    if let Some(status) = crate::refusal(bio, limits.size) {
        return Some(status);
    }
    let max = limits.max_for(bio.op);
    match bio.op {
        op if op.is_write() && limits.read_only => Some(Status::ReadOnly),
        Op::Discard | Op::WriteZeroes if max.0 == 0 => Some(Status::NotSupp),
        _ => (bio.sectors > max).then_some(Status::Inval),
    }
}

impl Lane for NbdLane {
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        self.limits.size = self.server.size();
        if self.connection.is_none() && self.next_try <= cx.now() {
            self.connect(cx);
        }
        if self.connection.is_some() {
            self.waiting.extend(batch.drain(..));
            self.send();
        } else {
            for mut bio in batch.drain(..) {
                bio.end_with(Status::Transport);
                self.ready.push(bio);
            }
        }
        if !self.ready.is_empty() {
            cx.wake_now();
        }
    }

    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        self.collect(cx);
        self.send();
        if let Some(deadline) = self.connection.as_ref().and_then(Connection::deadline) {
            if deadline <= cx.now() {
                self.lost("the server does not answer", cx);
            } else {
                cx.wake_at(deadline);
            }
        }
        hand_over(&mut self.ready, done);
    }

    fn drain(&mut self, how: Drain, back: &mut Batch, _cx: &mut Cx<'_>) {
        if how == Drain::NoFlush {
            back.extend(self.waiting.drain(..));
        }
    }

    /// Turns while it connects, so that it can be given up in time.
    fn busy(&self) -> Busy {
        match self.connection.as_ref().and_then(Connection::deadline) {
            Some(_) => Busy::Background,
            None => Busy::Idle,
        }
    }
}
