//! One job: a thread that runs as a core and drives the lane of a device itself.
//!
//! The loop does little, because its cost is part of every result. A turn polls, counts completed
//! requests, fills the same bios again and submits them as one batch. The clock is read once per
//! turn, in [`udm_runtime::LocalCore::turn`]. So all requests of one poll have the same end time.
//!
//! Once warm, the loop allocates no memory. A job that verifies its writes replays its plan
//! afterwards.

use crate::clock::{JobTimers, duration_to_nanos};
use crate::drain_deadline::DrainDeadline;
use crate::load::FioLoadOptions;
use crate::payload::new_bio_with_job_payload;
use crate::plan::AccessPlan;
use crate::region::JobRegion;
use crate::request_source::{NextRequest, RequestSource};
use crate::stats::{DIRECTIONS, JobStats, direction_index_of_op};
use crate::verify::{self, BlockHeader};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use udm_core::errno::{EILSEQ, ETIMEDOUT};
use udm_core::{Batch, Bio, Cx, Lane, Nanos, Op, Sector, Sectors, Status};
use udm_runtime::LocalCore;

/// The parameters of one job.
pub struct JobSpec<'a> {
    pub load: &'a FioLoadOptions,
    pub job: usize,
    pub region: JobRegion,
    /// Counter of completed requests, for the progress line.
    pub progress: Option<&'a AtomicU64>,
    /// If set, the job stops early. The job checks it twice per second.
    pub stop: &'a AtomicBool,
}

/// The result of one job.
pub struct JobOutcome {
    pub stats: JobStats,
    /// The first failure. The job ends with it.
    pub failure: Option<JobFailure>,
    /// The thread ID of the job in the system.
    pub thread: i32,
}

/// A request that failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobFailure {
    pub errno: i32,
    pub text: String,
}

/// Runs a job to its end.
pub fn run_job_on_core(core: &mut LocalCore, lane: Box<dyn Lane>, spec: &JobSpec<'_>) -> JobOutcome {
    let mut job = JobRunner::new(lane, spec);
    loop {
        let moved = core.turn(|cx| job.turn(cx));
        if job.is_over() {
            break;
        }
        if !moved {
            core.park();
        }
    }
    if job.in_flight > 0 {
        // The device may still use the memory of requests in flight.
        Box::leak(job.lane);
    }
    let thread = rustix::thread::gettid().as_raw_nonzero().get();
    JobOutcome { stats: job.stats, failure: job.failure, thread }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum JobPhase {
    /// Before the first turn.
    Start,
    /// The ramp, whose requests are not counted.
    Ramp,
    /// The load.
    Load,
    /// Written data is read back.
    ReadBack,
    Over,
}

struct JobRunner<'a> {
    spec: &'a JobSpec<'a>,
    lane: Box<dyn Lane>,
    phase: JobPhase,
    source: RequestSource,
    /// A fresh copy of the plan, if the job will replay it.
    replay: Option<AccessPlan>,
    /// If set, each written block gets a header and a checksum.
    stamps: bool,
    /// Idle bios. `batch` has the bios to submit in this turn, `done` the completed ones.
    idle: Batch,
    batch: Batch,
    done: Batch,
    /// The flush of `--fsync`, while it is not in flight.
    flush: Option<Box<Bio>>,
    /// Writes since the last flush.
    unflushed: u32,
    in_flight: usize,
    batch_max: usize,
    /// The length of each request.
    bs: u64,
    /// No new requests: the phase ends once the requests in flight complete.
    stopping: bool,
    /// The deadline for requests in flight after the clock, a signal or an error ended the load.
    end: DrainDeadline,
    /// The job no longer waits for requests in flight.
    gave_up: bool,
    /// If set, reads are checked.
    checks: bool,
    tag: u64,
    once: bool,
    clock: JobTimers,
    stats: JobStats,
    failure: Option<JobFailure>,
}

impl<'a> JobRunner<'a> {
    fn new(lane: Box<dyn Lane>, spec: &'a JobSpec<'a>) -> JobRunner<'a> {
        let load = spec.load;
        let depth = load.iodepth as usize;
        let plan = AccessPlan::new(load, spec.job, spec.region);
        let writes = load.rw.op() != Some(Op::Read);
        let bios = (0..depth).map(|i| new_bio_with_job_payload(load, i as u64)).collect();
        let room = || Batch::with_capacity(depth + 1);
        JobRunner {
            spec,
            lane,
            phase: JobPhase::Start,
            replay: (load.verify.is_some() && load.do_verify && writes).then(|| plan.clone()),
            stamps: load.verify.is_some() && writes,
            once: plan.covers_each_block_once(),
            source: RequestSource::new(load, plan, load.requests(spec.region)),
            idle: bios,
            batch: room(),
            done: room(),
            flush: Some(Bio::new()),
            unflushed: 0,
            in_flight: 0,
            batch_max: load.iodepth_batch.map_or(depth, |n| depth.min(n as usize)),
            bs: load.block_bytes(),
            stopping: false,
            end: DrainDeadline::default(),
            gave_up: false,
            checks: load.verify.is_some() && !writes,
            tag: rand::random(),
            clock: JobTimers::new(),
            stats: JobStats::new(),
            failure: None,
        }
    }

    fn is_over(&self) -> bool {
        self.phase == JobPhase::Over
    }

    /// Takes one turn and returns whether a request moved.
    fn turn(&mut self, cx: &mut Cx<'_>) -> bool {
        self.lane.poll(&mut self.done, cx);
        let finished = self.done.len();
        if finished > 0 {
            self.complete(cx.now());
        }
        if cx.now() >= self.clock.next {
            self.check_timers(cx.now());
        }
        if self.stopping && (self.in_flight == 0 || self.gave_up) {
            self.end_phase(cx.now());
        }
        self.issue(cx);
        let submitted = self.batch.len();
        if submitted > 0 {
            self.in_flight += submitted;
            self.stats.submits.count(submitted);
            // All requests of the batch count at the depth that the batch reaches.
            self.stats.depths[(self.in_flight.ilog2() as usize).min(6)] += submitted as u64;
            self.lane.submit(&mut self.batch, cx);
        }
        cx.wake_at(self.clock.next);
        finished + submitted > 0
    }

    /// Counts completed requests.
    fn complete(&mut self, now: Nanos) {
        let finished = self.done.len();
        self.in_flight -= finished;
        self.stats.completes.count(finished);
        // Most requests of one batch begin and end together. Equal latencies enter the histogram as
        // one.
        let mut runs = [(0u64, 0u64); DIRECTIONS];
        let mut done = std::mem::take(&mut self.done);
        for mut bio in done.drain(..) {
            bio.finish();
            let latency = now.since(bio.started).0;
            if bio.status != Status::Ok {
                self.fail(bio.status.errno(), || describe_failed_bio(&bio));
            } else if self.checks && bio.op == Op::Read {
                self.check(&bio);
            }
            if bio.op == Op::Flush {
                self.stats.sync.record(latency, 1);
                self.flush = Some(bio);
                continue;
            }
            let direction = direction_index_of_op(bio.op);
            let run = &mut runs[direction];
            if run.0 != latency {
                self.stats.directions[direction].count(*run, self.bs);
                *run = (latency, 0);
            }
            run.1 += 1;
            self.idle.push(bio);
        }
        self.done = done;
        for (direction, run) in self.stats.directions.iter_mut().zip(runs) {
            direction.count(run, self.bs);
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
        while self.batch.len() < self.batch_max {
            if fsync > 0 && self.unflushed >= fsync {
                return self.issue_flush(now);
            }
            let Some(mut bio) = self.idle.pop() else { return };
            let (op, span, started) = match self.source.next(now) {
                NextRequest::Request(op, span, since) => (op, span, since),
                NextRequest::Wait(until) => {
                    self.idle.push(bio);
                    return cx.wake_at(until);
                }
                NextRequest::Over => {
                    self.idle.push(bio);
                    self.stopping = true;
                    return;
                }
            };
            bio.op = op;
            bio.sector = Sector(span.sector);
            bio.sectors = Sectors(span.sectors);
            bio.cookie = self.source.taken() - 1;
            bio.started = started;
            if op == Op::Write {
                self.unflushed += 1;
                if self.stamps {
                    stamp_write_with_block_header(&mut bio, self.tag);
                }
            }
            bio.start();
            self.batch.push(bio);
        }
    }

    /// Issues a flush once nothing else is in flight, as fio does. The flush covers all writes
    /// before it.
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

    fn check_timers(&mut self, now: Nanos) {
        let load = self.spec.load;
        match self.phase {
            JobPhase::Start if !load.ramp_time.is_zero() => {
                self.phase = JobPhase::Ramp;
                self.clock.begin(now);
                self.clock.deadline = now + duration_to_nanos(load.ramp_time);
            }
            JobPhase::Ramp if now < self.clock.deadline => self.clock.sampled = now,
            JobPhase::Start | JobPhase::Ramp => {
                self.phase = JobPhase::Load;
                self.stats.clear();
                self.clock.deadline = load.runtime().map_or(Nanos::NEVER, |t| now + duration_to_nanos(t));
                self.clock.begin(now);
            }
            JobPhase::Load | JobPhase::ReadBack => {
                if now >= self.clock.deadline {
                    self.stopping = true;
                    self.end.begin(now);
                    self.clock.deadline = Nanos::NEVER;
                }
            }
            JobPhase::Over => {}
        }
        if self.spec.stop.load(Relaxed) {
            // Data is not read back after a stop, because that can take as long as the load.
            (self.stopping, self.replay, self.clock.deadline) = (true, None, Nanos::NEVER);
            self.end.begin(now);
        }
        if self.failure.is_some() {
            self.end.begin(now);
        }
        if self.end.is_due(now, self.in_flight, &self.spec.load.name) {
            let out = self.in_flight;
            self.fail(ETIMEDOUT, || DrainDeadline::text(out));
            (self.replay, self.gave_up) = (None, true);
        }
        self.clock.sample_if_due(now, &mut self.stats);
    }

    fn end_phase(&mut self, now: Nanos) {
        // If a load ends during its ramp, the ramp is reported, as in fio.
        let read_back = self.phase == JobPhase::ReadBack;
        self.clock.end(now, &mut self.stats, |i, ios| if read_back { i == 0 } else { ios > 0 });
        let again = if self.failure.is_none() { self.replay.take() } else { None };
        let Some(plan) = again else {
            self.phase = JobPhase::Over;
            return;
        };
        self.phase = JobPhase::ReadBack;
        self.source.read_back(plan);
        (self.checks, self.stopping, self.unflushed) = (true, false, 0);
        self.clock.begin(now);
        self.clock.deadline = Nanos::NEVER;
        self.clock.continue_phase(now, &self.stats);
    }

    fn check(&mut self, bio: &Bio) {
        let own = self.phase == JobPhase::ReadBack;
        let tag = own.then_some(self.tag);
        let index = (own && self.once).then_some(bio.cookie);
        let at = bio.sector.bytes();
        let wrong =
            bio.data.iter().find_map(|data| verify::check_block_header_and_crc(data, at, tag, index).err());
        if let Some(text) = wrong {
            // fio uses this error, too.
            self.fail(EILSEQ, || text);
        }
    }

    #[cold]
    fn fail(&mut self, errno: i32, text: impl FnOnce() -> String) {
        self.stopping = true;
        self.failure.get_or_insert_with(|| JobFailure { errno, text: text() });
    }
}

fn describe_failed_bio(bio: &Bio) -> String {
    format!("{:?} of {} bytes at {}: {}", bio.op, bio.sectors.bytes(), bio.sector.bytes(), bio.status)
}

/// Gives the data of a write a header and a checksum.
fn stamp_write_with_block_header(bio: &mut Bio, tag: u64) {
    let header = BlockHeader { offset: bio.sector.bytes(), tag, index: bio.cookie };
    bio.data.iter_mut().for_each(|data| verify::fill_block_with_header_and_crc(data, header));
}
