//! One job over a connection: a thread that keeps a number of requests in flight.
//!
//! A round adds as many requests as possible, sends them, and waits for replies. The clock is read
//! once per round. Once warm, a round allocates no memory.

use super::{ConnectionRequest, RequestConnection};
use crate::clock::{JobTimers, duration_to_nanos};
use crate::drain_deadline::DrainDeadline;
use crate::job::{JobFailure, JobOutcome, JobSpec};
use crate::plan::AccessPlan;
use crate::request_source::{NextRequest, RequestSource};
use crate::stats::{JobStats, direction_index_of_op};
use anyhow::Result;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};
use udm_core::{Nanos, Op, SECTOR_SIZE, errno};

/// A request in flight.
#[derive(Clone, Copy)]
struct SentRequest {
    op: Op,
    len: u32,
    /// When the request was sent, or should have been sent.
    since: Nanos,
}

struct ConnectionJobRunner<'a, C> {
    spec: &'a JobSpec<'a>,
    connection: C,
    source: RequestSource,
    origin: Instant,
    clock: JobTimers,
    /// The ramp has not ended.
    ramping: bool,
    /// Requests in flight, by cookie.
    slots: Vec<Option<SentRequest>>,
    free: Vec<usize>,
    /// The time until which the next request has to wait.
    due: Nanos,
    stopping: bool,
    end: DrainDeadline,
    stats: JobStats,
    failure: Option<JobFailure>,
}

/// Runs a job to its end.
pub fn run_job_over_connection(connection: impl RequestConnection, spec: &JobSpec<'_>) -> JobOutcome {
    let depth = spec.load.iodepth as usize;
    let plan = AccessPlan::new(spec.load, spec.job, spec.region);
    let mut job = ConnectionJobRunner {
        spec,
        connection,
        source: RequestSource::new(spec.load, plan, spec.load.requests(spec.region)),
        origin: Instant::now(),
        clock: JobTimers::new(),
        ramping: true,
        slots: vec![None; depth],
        free: (0..depth).rev().collect(),
        due: Nanos::NEVER,
        stopping: false,
        end: DrainDeadline::default(),
        stats: JobStats::new(),
        failure: None,
    };
    if let Err(error) = job.rounds() {
        // After any error, no more requests are answered.
        job.fail(errno::EIO, || format!("{error:#}"));
    }
    let now = job.now();
    job.clock.end(now, &mut job.stats, |_, ios| ios > 0);
    let thread = rustix::thread::gettid().as_raw_nonzero().get();
    JobOutcome { stats: job.stats, failure: job.failure, thread }
}

impl<C: RequestConnection> ConnectionJobRunner<'_, C> {
    fn now(&self) -> Nanos {
        Nanos(self.origin.elapsed().as_nanos() as u64)
    }

    fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    fn rounds(&mut self) -> Result<()> {
        let load = self.spec.load;
        let mut now = self.now();
        self.clock.begin(now);
        self.clock.deadline = now + duration_to_nanos(load.ramp_time);
        loop {
            if now >= self.clock.next {
                self.check_timers(now);
                let out = self.in_flight();
                if self.end.is_due(now, out, &load.name) {
                    self.fail(errno::ETIMEDOUT, || DrainDeadline::text(out));
                    return Ok(());
                }
            }
            if !self.stopping {
                self.issue(now)?;
            }
            if self.in_flight() == 0 && (self.stopping || self.due == Nanos::NEVER) {
                return Ok(());
            }
            self.connection.flush()?;
            let mut ended = 0;
            let (free, stats, failure) = (&mut self.free, &mut self.stats, &mut self.failure);
            let mut end = None;
            let origin = self.origin;
            let slots = std::cell::RefCell::new(&mut self.slots);
            let until = (self.due != Nanos::NEVER).then(|| Duration::from_nanos(self.due.since(now).0));
            self.connection.replies(
                until,
                |cookie| {
                    slots.borrow().get(cookie as usize).copied().flatten().map(|sent| (sent.op, sent.len))
                },
                |cookie, error| {
                    // All replies of a receive arrived together.
                    let end = *end.get_or_insert_with(|| Nanos(origin.elapsed().as_nanos() as u64));
                    let Some(SentRequest { op, len, since }) = slots.borrow_mut()[cookie as usize].take()
                    else {
                        return;
                    };
                    free.push(cookie as usize);
                    ended += 1;
                    if error == 0 {
                        stats.directions[direction_index_of_op(op)]
                            .count((end.since(since).0, 1), u64::from(len));
                    } else {
                        failure.get_or_insert_with(|| JobFailure {
                            errno: error,
                            text: format!("{op:?}: errno {error}"),
                        });
                    }
                },
            )?;
            now = end.unwrap_or_else(|| self.now());
            self.stopping |= self.failure.is_some();
            if ended > 0 {
                self.stats.completes.count(ended);
                if let Some(progress) = self.spec.progress {
                    progress.fetch_add(ended as u64, Relaxed);
                }
            }
        }
    }

    /// Adds as many requests as possible.
    fn issue(&mut self, now: Nanos) -> Result<()> {
        let load = self.spec.load;
        let most = load.iodepth_batch.map_or(usize::MAX, |n| n as usize);
        let mut put = 0;
        self.due = Nanos::NEVER;
        while put < most && self.connection.has_room() {
            let Some(&slot) = self.free.last() else { break };
            let (op, span, since) = match self.source.next(now) {
                NextRequest::Request(op, span, since) => (op, span, since),
                NextRequest::Wait(until) => {
                    self.due = until;
                    break;
                }
                NextRequest::Over => {
                    self.stopping = true;
                    break;
                }
            };
            self.free.pop();
            let len = span.bytes() as u32;
            self.slots[slot] = Some(SentRequest { op, len, since });
            put += 1;
            let offset = span.sector * SECTOR_SIZE;
            self.connection.put(ConnectionRequest { op, cookie: slot as u64, offset, len })?;
        }
        if put > 0 {
            self.stats.submits.count(put);
            self.stats.depths[(self.in_flight().ilog2() as usize).min(6)] += put as u64;
        }
        Ok(())
    }

    fn check_timers(&mut self, now: Nanos) {
        let load = self.spec.load;
        if self.ramping && now >= self.clock.deadline {
            self.ramping = false;
            self.stats.clear();
            self.clock.begin(now);
            self.clock.deadline = load.runtime().map_or(Nanos::NEVER, |t| now + duration_to_nanos(t));
        } else if now >= self.clock.deadline {
            self.stopping = true;
            self.end.begin(now);
            self.clock.deadline = Nanos::NEVER;
        }
        if self.spec.stop.load(Relaxed) || self.failure.is_some() {
            self.stopping = true;
            self.end.begin(now);
        }
        self.clock.sample_if_due(now, &mut self.stats);
    }

    #[cold]
    fn fail(&mut self, errno: i32, text: impl FnOnce() -> String) {
        self.failure.get_or_insert_with(|| JobFailure { errno, text: text() });
    }
}
