//! One job: a thread that is a core, and drives a device's lane itself.
//!
//! The loop is what every number of the bench stands on, so it does little: a turn polls, counts
//! what finished, fills the same bios again and submits them as one batch. It reads the clock once
//! a turn ([`udm_runtime::LocalCore::turn`] does); requests that come back from one poll have the
//! same end. Once warm it allocates nothing. A job that must read back what it wrote replays its
//! plan afterwards.

use crate::load::{Load, Region};
use crate::pace::Pace;
use crate::plan::Plan;
use crate::stats::{DIRECTIONS, Stats, Usage, direction};
use crate::verify::{self, Stamp};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use udm_core::errno::EILSEQ;
use udm_core::{Batch, Bio, Buf, Cx, Lane, Nanos, Op, SECTOR_SIZE, Sector, Sectors, Status};
use udm_runtime::LocalCore;

/// How often bandwidth is read for its minimum, maximum and deviation.
const SAMPLE: Nanos = Nanos::from_millis(500);

/// What a job is to do.
pub struct Spec<'a> {
    pub load: &'a Load,
    pub job: usize,
    pub region: Region,
    /// Where the job says how many requests it has finished, for the progress line.
    pub progress: Option<&'a AtomicU64>,
    /// Whether the job is to stop early; it looks twice a second.
    pub stop: &'a AtomicBool,
}

/// What came of a job.
pub struct Outcome {
    pub stats: Stats,
    /// The first failure; the job ends with it.
    pub failure: Option<Failure>,
    /// The thread's number in the system.
    pub thread: i32,
}

/// A request that failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    pub errno: i32,
    pub text: String,
}

/// Runs a job to its end.
pub fn run(core: &mut LocalCore, lane: Box<dyn Lane>, spec: &Spec<'_>) -> Outcome {
    let mut job = Job::new(lane, spec);
    loop {
        let moved = core.turn(|cx| job.turn(cx));
        if job.is_over() {
            break;
        }
        if !moved {
            core.park();
        }
    }
    let thread = rustix::thread::gettid().as_raw_nonzero().get();
    Outcome { stats: job.stats, failure: job.failure, thread }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Before the first turn.
    Start,
    /// Not yet counted.
    Ramp,
    /// The load that was asked for.
    Load,
    /// What was written is read back.
    ReadBack,
    Over,
}

struct Job<'a> {
    spec: &'a Spec<'a>,
    lane: Box<dyn Lane>,
    phase: Phase,
    plan: Plan,
    /// A fresh copy of the plan, where it will be replayed.
    replay: Option<Plan>,
    /// Bios without work, and those that go down or came up in this turn.
    idle: Batch,
    batch: Batch,
    done: Batch,
    /// The flush of `--fsync`, when it is not under way.
    flush: Option<Box<Bio>>,
    /// Writes since the last flush.
    unflushed: u32,
    in_flight: usize,
    batch_max: usize,
    /// Requests taken from the plan, and how many may be.
    taken: u64,
    take_max: u64,
    /// Where it does not send as fast as it can: when it does, and a request that has to wait.
    pace: Option<Pace>,
    held: Option<(Op, u64)>,
    /// No new requests: the phase ends when those in flight are done.
    stopping: bool,
    /// Checks reads; with `written`, those of the job's own writes.
    checks: bool,
    tag: u64,
    once: bool,
    clock: Clock,
    stats: Stats,
    failure: Option<Failure>,
}

/// When things happen.
pub struct Clock {
    /// When the phase began.
    begin: Nanos,
    /// When the load ends.
    pub deadline: Nanos,
    /// When the last sample was taken, and what had been done by then.
    sampled: Nanos,
    ios: [u64; DIRECTIONS],
    /// The next time that something happens by the clock alone.
    pub next: Nanos,
    usage: Usage,
    /// Readings are taken for plots.
    plots: bool,
}

impl<'a> Job<'a> {
    fn new(lane: Box<dyn Lane>, spec: &'a Spec<'a>) -> Job<'a> {
        let load = spec.load;
        let depth = load.iodepth as usize;
        let plan = Plan::new(load, spec.job, spec.region);
        let writes = load.rw.op() != Some(Op::Read);
        let bios = (0..depth).map(|i| new_bio(load, i as u64)).collect();
        let room = || Batch::with_capacity(depth + 1);
        Job {
            spec,
            lane,
            phase: Phase::Start,
            replay: (load.verify.is_some() && writes).then(|| plan.clone()),
            once: plan.is_once(),
            plan,
            idle: bios,
            batch: room(),
            done: room(),
            flush: Some(Bio::new()),
            unflushed: 0,
            in_flight: 0,
            batch_max: load.iodepth_batch.map_or(depth, |n| depth.min(n as usize)),
            taken: 0,
            take_max: load.requests(),
            pace: Pace::new(load, load.seed() ^ spec.job as u64),
            held: None,
            stopping: false,
            checks: load.verify.is_some() && !writes,
            tag: rand::random(),
            clock: Clock::new(),
            stats: Stats::new(),
            failure: None,
        }
    }

    fn is_over(&self) -> bool {
        self.phase == Phase::Over
    }

    /// One turn; says whether anything moved.
    fn turn(&mut self, cx: &mut Cx<'_>) -> bool {
        self.lane.poll(&mut self.done, cx);
        let finished = self.done.len();
        if finished > 0 {
            self.complete(cx.now());
        }
        if cx.now() >= self.clock.next {
            self.by_the_clock(cx.now());
        }
        if self.stopping && self.in_flight == 0 {
            self.end_phase(cx.now());
        }
        self.issue(cx);
        let submitted = self.batch.len();
        if submitted > 0 {
            self.in_flight += submitted;
            self.stats.submits.count(submitted);
            // At the depth that the batch makes.
            self.stats.depths[(self.in_flight.ilog2() as usize).min(6)] += submitted as u64;
            self.lane.submit(&mut self.batch, cx);
        }
        cx.wake_at(self.clock.next);
        finished + submitted > 0
    }

    /// Takes what came back.
    fn complete(&mut self, now: Nanos) {
        let finished = self.done.len();
        self.in_flight -= finished;
        self.stats.completes.count(finished);
        // Requests of one batch began and end together, so most latencies are equal and go into the
        // histogram as one.
        let mut runs = [(0u64, 0u64); DIRECTIONS];
        let mut done = std::mem::take(&mut self.done);
        for mut bio in done.drain(..) {
            bio.finish();
            let latency = now.since(bio.started).0;
            if bio.status != Status::Ok {
                self.fail(bio.status.errno(), || describe(&bio));
            } else if self.checks && bio.op == Op::Read {
                self.check(&bio);
            }
            if bio.op == Op::Flush {
                self.stats.sync.record(latency, 1);
                self.flush = Some(bio);
                continue;
            }
            let direction = direction(bio.op);
            let run = &mut runs[direction];
            if run.0 != latency {
                self.stats.directions[direction].count(*run, self.spec.load.bs);
                *run = (latency, 0);
            }
            run.1 += 1;
            self.idle.push(bio);
        }
        self.done = done;
        for (direction, run) in self.stats.directions.iter_mut().zip(runs) {
            direction.count(run, self.spec.load.bs);
        }
        if let Some(progress) = self.spec.progress {
            progress.fetch_add(finished as u64, Relaxed);
        }
    }

    /// Fills idle bios from the plan.
    fn issue(&mut self, cx: &mut Cx<'_>) {
        let now = cx.now();
        if self.stopping {
            return;
        }
        let fsync = self.spec.load.fsync;
        let per_block = self.spec.load.bs / SECTOR_SIZE;
        while self.batch.len() < self.batch_max {
            if fsync > 0 && self.unflushed >= fsync {
                return self.issue_flush(now);
            }
            if let Some(pace) = &mut self.pace {
                let all_back = self.in_flight == 0 && self.batch.is_empty();
                if let Some(until) = pace.thinks(all_back, now) {
                    return cx.wake_at(until);
                }
            }
            let Some(mut bio) = self.idle.pop() else { return };
            let more = self.held.is_none() && self.taken < self.take_max;
            let next = if more { self.next_request() } else { self.held.take() };
            let Some((op, block)) = next else {
                self.idle.push(bio);
                self.stopping = true;
                return;
            };
            let mut started = now;
            if let Some(pace) = &mut self.pace {
                match pace.send(direction(op), self.spec.load.bs, now) {
                    Ok(at) => started = at,
                    Err(due) => {
                        self.held = Some((op, block));
                        self.idle.push(bio);
                        return cx.wake_at(due);
                    }
                }
            }
            bio.op = op;
            bio.sector = Sector(block * per_block);
            bio.sectors = Sectors(per_block);
            bio.cookie = self.taken - 1;
            bio.started = started;
            if op == Op::Write {
                self.unflushed += 1;
                if self.replay.is_some() {
                    let stamp = Stamp { offset: bio.sector.bytes(), tag: self.tag, index: bio.cookie };
                    bio.data.iter_mut().for_each(|data| verify::fill(data, stamp));
                }
            }
            bio.start();
            self.batch.push(bio);
        }
    }

    fn next_request(&mut self) -> Option<(Op, u64)> {
        loop {
            let (op, block) = self.plan.next()?;
            self.taken += 1;
            if self.phase != Phase::ReadBack {
                return Some((op, block));
            }
            if op == Op::Write {
                return Some((Op::Read, block));
            }
            if self.taken == self.take_max {
                return None;
            }
        }
    }

    /// A flush waits until nothing else is in flight, as fio's does: it covers all writes before
    /// it.
    fn issue_flush(&mut self, now: Nanos) {
        if self.in_flight > 0 || !self.batch.is_empty() {
            return;
        }
        if let Some(mut bio) = self.flush.take() {
            self.unflushed = 0;
            bio.op = Op::Flush;
            bio.started = now;
            bio.start();
            self.batch.push(bio);
        }
    }

    fn by_the_clock(&mut self, now: Nanos) {
        let load = self.spec.load;
        match self.phase {
            Phase::Start if !load.ramp_time.is_zero() => {
                self.phase = Phase::Ramp;
                self.clock.begin(now);
                self.clock.deadline = now + nanos(load.ramp_time);
            }
            Phase::Ramp if now < self.clock.deadline => self.clock.sampled = now,
            Phase::Start | Phase::Ramp => {
                self.phase = Phase::Load;
                self.stats.clear();
                self.clock.deadline = load.runtime.map_or(Nanos::NEVER, |t| now + nanos(t));
                self.clock.begin(now);
            }
            Phase::Load | Phase::ReadBack => {
                if now >= self.clock.deadline {
                    self.stopping = true;
                    self.clock.deadline = Nanos::NEVER;
                }
            }
            Phase::Over => {}
        }
        if self.spec.stop.load(Relaxed) {
            // What was written so far is not read back: it could take as long again.
            (self.stopping, self.replay, self.clock.deadline) = (true, None, Nanos::NEVER);
        }
        self.clock.sample_if_due(now, &mut self.stats, self.spec.load.bs);
    }

    fn end_phase(&mut self, now: Nanos) {
        // A load that is through before the ramp is over was the ramp alone; it is reported, as fio
        // does.
        let read_back = self.phase == Phase::ReadBack;
        self.clock.end(now, &mut self.stats, |i, ios| if read_back { i == 0 } else { ios > 0 });
        // What was not sent is not read back.
        self.taken -= u64::from(self.held.take().is_some());
        self.pace = None;
        let again = if self.failure.is_none() { self.replay.take() } else { None };
        let Some(plan) = again else {
            self.phase = Phase::Over;
            return;
        };
        self.phase = Phase::ReadBack;
        self.plan = plan;
        (self.take_max, self.taken) = (self.taken, 0);
        (self.checks, self.stopping, self.unflushed) = (true, false, 0);
        self.clock.begin(now);
        self.clock.deadline = Nanos::NEVER;
        self.clock.ios = std::array::from_fn(|i| self.stats.directions[i].ios);
        (self.clock.next, self.clock.plots) = (now + SAMPLE, false);
    }

    fn check(&mut self, bio: &Bio) {
        let own = self.phase == Phase::ReadBack;
        let tag = own.then_some(self.tag);
        let index = (own && self.once).then_some(bio.cookie);
        let wrong =
            bio.data.iter().find_map(|data| verify::check(data, bio.sector.bytes(), tag, index).err());
        if let Some(text) = wrong {
            // As fio has it.
            self.fail(EILSEQ, || text);
        }
    }

    #[cold]
    fn fail(&mut self, errno: i32, text: impl FnOnce() -> String) {
        self.stopping = true;
        self.failure.get_or_insert_with(|| Failure { errno, text: text() });
    }
}

impl Clock {
    /// Nothing has begun.
    pub fn new() -> Clock {
        Clock {
            begin: Nanos(0),
            deadline: Nanos::NEVER,
            sampled: Nanos(0),
            ios: [0; DIRECTIONS],
            next: Nanos(0),
            usage: Usage::default(),
            plots: true,
        }
    }

    /// A phase begins.
    pub fn begin(&mut self, now: Nanos) {
        (self.begin, self.sampled, self.ios) = (now, now, [0; DIRECTIONS]);
        self.usage = Usage::now();
    }

    /// Reads the bandwidth of requests of `bs` bytes, when it is time, and sets `next`.
    pub fn sample_if_due(&mut self, now: Nanos, stats: &mut Stats, bs: u64) {
        let since = now.since(self.sampled);
        if since >= SAMPLE {
            let seconds = since.0 as f64 / 1e9;
            for (direction, before) in stats.directions.iter_mut().zip(&mut self.ios) {
                let ios = (direction.ios - *before) as f64 / seconds;
                *before = direction.ios;
                if direction.ios > 0 {
                    direction.iops.push(ios);
                    direction.bandwidth.push(ios * bs as f64 / 1024.0);
                }
            }
            self.sampled = now;
        }
        let timeline = &mut stats.parts[0].timeline;
        let begun = now.since(self.begin);
        if self.plots && begun >= timeline.due() {
            timeline.read(begun, stats.directions.each_ref().map(|d| d.bytes));
        }
        let reading = if self.plots { self.begin + timeline.due() } else { Nanos::NEVER };
        self.next = self.deadline.min(self.sampled + SAMPLE).min(reading);
    }

    /// A phase is over, which had requests of the directions that `ran` says.
    pub fn end(&self, now: Nanos, stats: &mut Stats, ran: impl Fn(usize, u64) -> bool) {
        let took = now.since(self.begin);
        for (i, direction) in stats.directions.iter_mut().enumerate() {
            if ran(i, direction.ios) {
                direction.runtime = direction.runtime + took;
            }
        }
        stats.runtime = stats.runtime + took;
        let part = &mut stats.parts[0];
        if self.plots {
            part.timeline.end(took, stats.directions.each_ref().map(|d| d.bytes));
        }
        (part.ios, part.runtime) = (stats.directions.each_ref().map(|d| d.ios), stats.runtime);
        let took = Duration::from_nanos(took.0);
        stats.usage.add(&Usage::now().since(&self.usage, took));
    }
}

pub fn nanos(t: Duration) -> Nanos {
    Nanos(u64::try_from(t.as_nanos()).unwrap_or(u64::MAX))
}

fn describe(bio: &Bio) -> String {
    format!("{:?} of {} bytes at {}: {}", bio.op, bio.sectors.bytes(), bio.sector.bytes(), bio.status)
}

/// A bio with data that compresses to nothing less, where it carries any.
fn new_bio(load: &Load, i: u64) -> Box<Bio> {
    let mut bio = Bio::new();
    if !load.bare && load.rw.op() != Some(Op::Discard) {
        let mut data = Buf::zeroed(load.bs as usize);
        verify::fill(&mut data, Stamp { offset: i, tag: load.seed(), index: i });
        bio.data = data.into();
    }
    bio
}
