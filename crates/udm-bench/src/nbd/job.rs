//! One job over NBD: a thread with a connection, which keeps so many requests in flight.
//!
//! A round puts the requests that there is room for, sends them, and waits for replies; the clock
//! is read once a round. Once warm it allocates nothing.

use super::wire::{Asked, Wire};
use crate::job::{Clock, Failure, Outcome, Spec, nanos};
use crate::plan::Plan;
use crate::stats::{Stats, direction};
use anyhow::Result;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;
use udm_core::{Nanos, Op, errno};

struct Job<'a> {
    spec: &'a Spec<'a>,
    wire: Wire,
    plan: Plan,
    origin: Instant,
    clock: Clock,
    /// The ramp is not over.
    ramping: bool,
    /// By cookie: what is in flight, and since when.
    slots: Vec<Option<(Op, Nanos)>>,
    free: Vec<usize>,
    taken: u64,
    stopping: bool,
    stats: Stats,
    failure: Option<Failure>,
}

/// Runs a job to its end.
pub fn run(wire: Wire, spec: &Spec<'_>) -> Outcome {
    let depth = spec.load.iodepth as usize;
    let mut job = Job {
        spec,
        wire,
        plan: Plan::new(spec.load, spec.job, spec.region),
        origin: Instant::now(),
        clock: Clock::new(),
        ramping: true,
        slots: vec![None; depth],
        free: (0..depth).rev().collect(),
        taken: 0,
        stopping: false,
        stats: Stats::new(),
        failure: None,
    };
    if let Err(error) = job.rounds() {
        // Whatever it was, no more requests are answered.
        job.fail(errno::EIO, || format!("{error:#}"));
    }
    let now = job.now();
    job.clock.end(now, &mut job.stats, |_, ios| ios > 0);
    let thread = rustix::thread::gettid().as_raw_nonzero().get();
    Outcome { stats: job.stats, failure: job.failure, thread }
}

impl Job<'_> {
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
        self.clock.deadline = now + nanos(load.ramp_time);
        loop {
            if now >= self.clock.next {
                self.by_the_clock(now);
            }
            if !self.stopping {
                self.issue(now);
            }
            if self.in_flight() == 0 {
                return Ok(());
            }
            self.wire.flush()?;
            let (slots, len) = (&mut self.slots, load.bs as u32);
            let mut ended = 0;
            let (free, stats, failure) = (&mut self.free, &mut self.stats, &mut self.failure);
            let mut end = None;
            let origin = self.origin;
            let slots = std::cell::RefCell::new(slots);
            self.wire.replies(
                |cookie| slots.borrow().get(cookie as usize).copied().flatten().map(|(op, _)| (op, len)),
                |cookie, error| {
                    // All replies of a receive arrived together.
                    let end = *end.get_or_insert_with(|| Nanos(origin.elapsed().as_nanos() as u64));
                    let Some((op, begun)) = slots.borrow_mut()[cookie as usize].take() else { return };
                    free.push(cookie as usize);
                    ended += 1;
                    if error == 0 {
                        stats.directions[direction(op)].count((end.since(begun).0, 1), u64::from(len));
                    } else {
                        let number = errno::from_nbd(error);
                        failure.get_or_insert_with(|| Failure {
                            errno: number,
                            text: format!("{op:?}: errno {number}"),
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

    /// Puts what there is room for.
    fn issue(&mut self, now: Nanos) {
        let load = self.spec.load;
        let most = load.iodepth_batch.map_or(usize::MAX, |n| n as usize);
        let mut put = 0;
        while put < most && self.wire.has_room() {
            let Some(&slot) = self.free.last() else { break };
            let next = if self.taken < load.requests() { self.plan.next() } else { None };
            let Some((op, block)) = next else {
                self.stopping = true;
                break;
            };
            self.free.pop();
            self.slots[slot] = Some((op, now));
            self.taken += 1;
            put += 1;
            self.wire.put(Asked { op, cookie: slot as u64, offset: block * load.bs, len: load.bs as u32 });
        }
        if put > 0 {
            self.stats.submits.count(put);
            self.stats.depths[(self.in_flight().ilog2() as usize).min(6)] += put as u64;
        }
    }

    fn by_the_clock(&mut self, now: Nanos) {
        let load = self.spec.load;
        if self.ramping && now >= self.clock.deadline {
            self.ramping = false;
            self.stats.clear();
            self.clock.begin(now);
            self.clock.deadline = load.runtime.map_or(Nanos::NEVER, |t| now + nanos(t));
        } else if now >= self.clock.deadline {
            self.stopping = true;
            self.clock.deadline = Nanos::NEVER;
        }
        self.stopping |= self.spec.stop.load(Relaxed);
        self.clock.sample_if_due(now, &mut self.stats, load.bs);
    }

    #[cold]
    fn fail(&mut self, errno: i32, text: impl FnOnce() -> String) {
        self.failure.get_or_insert_with(|| Failure { errno, text: text() });
    }
}
