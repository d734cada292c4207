//! An object of a store as the source of a clone: udm's client of objects against
//! [`ObjectServer`].
//!
//! Checked are the promises of the client: a read ends by its deadline and not long before, unless
//! it is refused; it sends few requests; hedges are few; after a change of the object every read
//! fails until the object is opened again. That no wrong byte is read is seen by the model of the
//! clone.

use super::object_server::{ObjectServer, ServerAnswer};
use super::world::SOURCE;
use crate::environment::{Env, SharedEnv, lock_environment, lock_mutex};
use crate::path::SimPath;
use crate::rng::SimRng;
use crate::trace::{TraceEventKind, pack_op_and_flags, pack_sector_range};
use std::ops::Range;
use std::sync::{Arc, Mutex};
use udm_core::{
    Batch, Bio, Cx, Device, DeviceControlError, DeviceId, Lane, Limits, Nanos, Op, SECTOR_SIZE, Sectors,
    SharedDiskState, Status,
};
use udm_object::ReadFailure;
use udm_object::hedge::HedgePolicy;
use udm_object::range_read::{RangeBody, RangeRead, ReadStep, silence_max};
use udm_wire::uri::HedgeSetting;

/// How late a core may be.
const SLACK: Nanos = Nanos::from_millis(1000);

/// The shortest pause between two requests of a read, after the first [`EARLY_REQUESTS`].
const PAUSE_MIN: Nanos = Nanos::from_millis(1500);
const EARLY_REQUESTS: u64 = 9;

/// Hedges that may be sent at once, and requests that earn one.
const HEDGES_SAVED: u64 = 4;
const REQUESTS_PER_HEDGE: u64 = 20;

/// What all lanes of the object share.
pub(super) struct SharedObject {
    pub server: ObjectServer,
    deadline: Option<Nanos>,
    hedges: HedgePolicy,
    changed: Option<ReadFailure>,
    requests: u64,
    pub hedges_sent: u64,
}

/// The object as a device.
pub(super) struct SimObjectDevice {
    id: DeviceId,
    path: Arc<SimPath>,
    env: SharedEnv,
    pub object: Arc<Mutex<SharedObject>>,
}

impl SimObjectDevice {
    /// Draws an object with the content of the disk below `path`.
    pub(super) fn draw(path: &Arc<SimPath>, env: &SharedEnv, build: &mut SimRng, fails: bool) -> Self {
        let len = path.limits().size.bytes();
        let server = ObjectServer::draw(build, len, fails);
        let deadline = build.pick(&[Some(200), Some(1000), Some(3000), None]);
        let hedge = match build.below(3) {
            0 => HedgeSetting::Off,
            1 => HedgeSetting::Auto,
            _ => HedgeSetting::After(Nanos::from_millis(build.pick(&[1, 5, 20]))),
        };
        let object = SharedObject {
            server,
            deadline: deadline.map(Nanos::from_millis),
            hedges: HedgePolicy::new(hedge),
            changed: None,
            requests: 0,
            hedges_sent: 0,
        };
        let object = Arc::new(Mutex::new(object));
        SimObjectDevice { id: DeviceId::new(), path: Arc::clone(path), env: env.clone(), object }
    }
}

impl Device for SimObjectDevice {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn open(&self, _: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        let (env, object) = (self.env.clone(), Arc::clone(&self.object));
        Ok(Box::new(SimObjectLane { env, object, reads: Vec::new(), ended: Batch::new() }))
    }

    fn limits(&self) -> Limits {
        let limits = self.path.limits();
        Limits { max_discard: Sectors::ZERO, max_write_zeroes: Sectors::ZERO, read_only: true, ..limits }
    }

    fn shared_disk_state(&self) -> Option<&SharedDiskState> {
        self.path.shared_disk_state()
    }
}

/// A read of the lane.
struct PendingRead {
    bio: Box<Bio>,
    range: Range<u64>,
    read: RangeRead,
    /// The requests in flight: when each ends, and how.
    answers: Vec<(Nanos, ServerAnswer)>,
    sent: u64,
    /// An answer was bad or late, so the read may fail.
    is_excused: bool,
}

struct SimObjectLane {
    env: SharedEnv,
    object: Arc<Mutex<SharedObject>>,
    reads: Vec<PendingRead>,
    ended: Batch,
}

impl SimObjectLane {
    fn begin(&mut self, mut bio: Box<Bio>, env: &mut Env, object: &SharedObject) {
        let args = [
            SOURCE as u64,
            pack_op_and_flags(bio.op, bio.flags.bits()),
            pack_sector_range(bio.sector.0, bio.sectors.0),
            0,
        ];
        let (now, core) = (env.now, env.core);
        env.trace.add(now, core, TraceEventKind::PathIn, args);
        if bio.op != Op::Read {
            bio.end_with(if bio.op == Op::Flush { Status::Ok } else { Status::ReadOnly });
            return self.ended.push(bio);
        }
        if object.changed.is_some() && !env.calm && !env.dead {
            env.excuse(SOURCE, Status::Offline);
            bio.end_with(Status::Offline);
            return self.ended.push(bio);
        }
        let range = bio.sector.0 * SECTOR_SIZE..bio.end().0 * SECTOR_SIZE;
        let until = object.deadline.map(|deadline| now + deadline);
        let read = RangeRead::new(range.end - range.start, now, until, env.chance.below(16));
        self.reads.push(PendingRead { bio, range, read, answers: Vec::new(), sent: 0, is_excused: false });
    }

    /// Does what is due of all reads. Returns the time of the next step.
    fn drive(&mut self, env: &mut Env, object: &mut SharedObject) -> Nanos {
        let (mut wake, mut at) = (Nanos::NEVER, 0);
        if env.calm {
            // The object was opened again, with its first version.
            object.changed = None;
        }
        while at < self.reads.len() {
            match self.reads[at].advance(env, object) {
                ReadProgress::Waits(until) => {
                    wake = wake.min(until);
                    at += 1;
                }
                ReadProgress::Ended(status) => {
                    let mut read = self.reads.swap_remove(at);
                    read.check_end(status, env, object);
                    read.bio.end_with(status);
                    self.ended.push(read.bio);
                }
            }
        }
        wake
    }

    fn turn(&mut self, batch: Option<&mut Batch>, cx: &mut Cx<'_>) {
        let (env, object) = (self.env.clone(), Arc::clone(&self.object));
        let (mut env, mut object) = (lock_environment(&env), lock_mutex(&object));
        for bio in batch.into_iter().flat_map(|batch| batch.drain(..)) {
            self.begin(bio, &mut env, &object);
        }
        let wake = self.drive(&mut env, &mut object);
        if wake < Nanos::NEVER {
            cx.wake_at(wake);
        }
    }
}

impl Lane for SimObjectLane {
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        self.turn(Some(batch), cx);
        if !self.ended.is_empty() {
            cx.wake_now();
        }
    }

    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        self.turn(None, cx);
        done.append(&mut self.ended);
    }
}

enum ReadProgress {
    Waits(Nanos),
    Ended(Status),
}

impl PendingRead {
    fn advance(&mut self, env: &mut Env, object: &mut SharedObject) -> ReadProgress {
        if env.dead {
            return ReadProgress::Ended(Status::Ok);
        }
        let now = env.now;
        if env.calm {
            // A server that is well again closes the connections that hung.
            for (at, answer) in &mut self.answers {
                if *at == Nanos::NEVER || matches!(answer, ServerAnswer::Silence) {
                    *at = now;
                }
            }
        }
        while let Some(at) = self.answers.iter().position(|(at, _)| *at <= now) {
            let (_, answer) = self.answers.swap_remove(at);
            let result = self.take_answer(answer, object);
            self.is_excused |= result.is_err();
            self.read.answer(now, result.as_ref().map(|_| ()), &mut object.hedges);
            match result {
                Ok(()) => return ReadProgress::Ended(Status::Ok),
                Err(failure @ ReadFailure::Changed(_)) => object.changed = Some(failure),
                Err(_) => {}
            }
        }
        loop {
            match self.read.step(now, &mut object.hedges) {
                ReadStep::Send => self.send(env, object),
                ReadStep::Wait(until) => {
                    let next = self.answers.iter().map(|(at, _)| *at).min().unwrap_or(Nanos::NEVER);
                    return self.check_waits(until.min(next), env, object);
                }
                ReadStep::Fail(failure) => return ReadProgress::Ended(failure.status()),
            }
        }
    }

    fn send(&mut self, env: &mut Env, object: &mut SharedObject) {
        let is_hedge = !self.answers.is_empty();
        object.hedges_sent += u64::from(is_hedge);
        object.requests += u64::from(!is_hedge);
        self.sent += 1;
        let (hedges, most) =
            (object.hedges_sent, HEDGES_SAVED + object.requests.div_ceil(REQUESTS_PER_HEDGE));
        if hedges > most {
            env.violate(|| format!("{hedges} hedges were sent, and {most} are allowed"));
        }
        let (at, answer) = object.server.answer(&self.range, env);
        let is_silent = matches!(answer, ServerAnswer::Silence);
        let at = if is_silent { env.now + silence_max(object.deadline) } else { at };
        self.is_excused |= is_silent;
        self.answers.push((at, answer));
    }

    /// Checks an answer, and copies its data.
    fn take_answer(&mut self, answer: ServerAnswer, object: &SharedObject) -> Result<(), ReadFailure> {
        match answer {
            ServerAnswer::Silence => Err(ReadFailure::Unavailable("no answer".into())),
            ServerAnswer::Failure(failure) => Err(failure),
            ServerAnswer::Data { head, body } => {
                object.server.version().check(&head)?;
                let mut checked = RangeBody::begin(&self.range, &head)?;
                // In two pieces, as a stream arrives.
                let (first, rest) = body.split_at(body.len() / 2);
                checked.add(first)?;
                checked.add(rest)?;
                self.bio.data.copy_from_at(0, &checked.end()?);
                Ok(())
            }
        }
    }

    /// Checks that the read waits no longer than it may.
    fn check_waits(&self, until: Nanos, env: &mut Env, object: &SharedObject) -> ReadProgress {
        let waited = env.now.since(self.read.began());
        if object.deadline.is_some_and(|deadline| waited > deadline + SLACK) {
            env.violate(|| format!("a read of the object waits for {} ms", waited.0 / 1_000_000));
        }
        let most = EARLY_REQUESTS + waited.0 / PAUSE_MIN.0;
        let sent = self.sent;
        if sent > most {
            env.violate(|| format!("{sent} requests of one read of the object, and {most} are allowed"));
        }
        ReadProgress::Waits(until)
    }

    /// Checks the end of the read, and that it may fail so.
    fn check_end(&self, status: Status, env: &mut Env, object: &SharedObject) {
        let (now, core) = (env.now, env.core);
        let range = pack_sector_range(self.bio.sector.0, self.bio.sectors.0);
        env.trace.add(now, core, TraceEventKind::PathOut, [SOURCE as u64, 0, range, status as u64]);
        if status.is_ok() {
            return;
        }
        let waited = now.since(self.read.began());
        if status == Status::Timeout && object.deadline.is_none_or(|deadline| waited < deadline) {
            env.violate(|| format!("a read of the object gave up after {} ms", waited.0 / 1_000_000));
        }
        if self.is_excused {
            env.faults += 1;
            env.excuse(SOURCE, status);
        }
    }
}
