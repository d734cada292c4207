//! What a null device does wrong on purpose, and how slow it is: null_blk's `badblocks`, `mbps`,
//! `timeout`, `requeue` and `init_hctx`.
//!
//! [`Faults::open`] puts a lane in front of another. A device without any of this has no such lane,
//! and pays nothing for it. Time and chance come from the core that polls.
//!
//! A request has a tag from when it is started until it comes back. Then, in null_blk's order: it
//! may be lost, and times out 5 s later; it may find no resources, and goes again, in turn after 3
//! ms and at the next poll; the bandwidth of this tick of 20 ms may be used up, which stops all
//! until the next; and one that touches a bad block fails without moving data.

use rand::RngExt as _;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use udm_core::bugs::{self, Bug};
use udm_core::errno::ENOMEM;
use udm_core::{Batch, Bio, Cx, Drain, Lane, Nanos, Op, OpenError, OwnWork, Status};
use udm_wire::uri::{FaultInjection, NullFaults};

/// How long a request is lost before it has timed out.
const TIMEOUT_DELAY: Nanos = Nanos::from_millis(5_000);

/// How long one that found no resources waits (kernel `BLK_MQ_RESOURCE_DELAY`).
const RESOURCE_DELAY: Nanos = Nanos::from_millis(3);

/// The time that a budget of bytes is for.
const TICK: Nanos = Nanos::from_millis(20);

/// Bytes a tick for each MiB a second.
const TICK_BYTES: u64 = (1 << 20) / 50;

/// The faults of one device, which its lanes share.
#[derive(Clone)]
pub struct Faults(Arc<FaultState>);

struct FaultState {
    badblocks: Vec<(u64, u64)>,
    budget: Option<BandwidthBudget>,
    timeout: FaultInjector,
    requeue: FaultInjector,
    init_hctx: FaultInjector,
}

impl Faults {
    /// Those of `params`; `None` where there are none.
    #[must_use]
    pub fn new(params: &NullFaults) -> Option<Faults> {
        (!params.is_none()).then(|| {
            Faults(Arc::new(FaultState {
                badblocks: params.badblocks.clone(),
                budget: (params.mbps > 0).then(|| BandwidthBudget::new(params.mbps)),
                timeout: FaultInjector::new(params.timeout),
                requeue: FaultInjector::new(params.requeue),
                init_hctx: FaultInjector::new(params.init_hctx),
            }))
        })
    }

    /// A lane in front of what `below` opens, with `depth` tags. A request that fails here does so
    /// after `delay`.
    ///
    /// # Errors
    /// ENOMEM when `init_hctx` says so, and those of `below`.
    pub fn open(
        &self,
        depth: usize,
        delay: Nanos,
        cx: &mut Cx<'_>,
        below: impl FnOnce(&mut Cx<'_>) -> Result<Box<dyn Lane>, OpenError>,
    ) -> Result<Box<dyn Lane>, OpenError> {
        if self.0.init_hctx.should_fail(cx) {
            return Err(OpenError::new(ENOMEM, "init_hctx: a hardware queue that can't be set up"));
        }
        let (requests, requeued, down) = Default::default();
        Ok(Box::new(FaultyLane {
            below: below(cx)?,
            all: Arc::clone(&self.0),
            depth,
            used: 0,
            requests,
            requeued,
            stopped: Nanos(0),
            failed: DelayQueue::new(delay),
            lost: DelayQueue::new(TIMEOUT_DELAY),
            short: DelayQueue::new(RESOURCE_DELAY),
            is_odd: false,
            ends: false,
            down,
        }))
    }
}

impl FaultState {
    /// Does `bio` touch a bad block?
    fn is_bad(&self, bio: &Bio) -> bool {
        let (first, end) = (bio.sector.0, bio.sector.0.saturating_add(bio.sectors.0));
        let at = self.badblocks.partition_point(|(_, last)| *last < first);
        let end = end.saturating_sub(u64::from(bugs::on(Bug::BadEndServed)));
        bio.op != Op::Flush && self.badblocks.get(at).is_some_and(|(bad, _)| *bad < end)
    }
}

/// A fault's chances so far, on all cores.
struct FaultInjector {
    of: FaultInjection,
    count: AtomicU64,
    space: AtomicI64,
    times: AtomicI64,
}

impl FaultInjector {
    fn new(of: FaultInjection) -> FaultInjector {
        let (space, times) = (i64::from(of.space).into(), i64::from(of.times).into());
        FaultInjector { of, count: AtomicU64::new(0), space, times }
    }

    /// Does it happen this time? (Kernel `should_fail`, in its order.)
    fn should_fail(&self, cx: &mut Cx<'_>) -> bool {
        let less = |n: i64| (n > 0).then(|| n - 1);
        if self.of.probability == 0 || self.times.load(Ordering::Relaxed) == 0 {
            return false;
        }
        if self.space.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok() {
            return false;
        }
        let skipped = self.of.interval > 1
            && !(self.count.fetch_add(1, Ordering::Relaxed) + 1).is_multiple_of(self.of.interval);
        if skipped || self.of.probability <= u64::from(cx.rng().random_range(0..100u8)) {
            return false;
        }
        self.of.times < 0 || self.times.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok()
    }
}

/// The bytes that all cores may still move in this tick, or that ticks before owe.
struct BandwidthBudget {
    a_tick: i64,
    /// The last tick that brought its bytes.
    tick: AtomicU64,
    left: AtomicI64,
}

impl BandwidthBudget {
    fn new(mbps: u32) -> BandwidthBudget {
        let a_tick = (u64::from(mbps) * TICK_BYTES) as i64;
        BandwidthBudget { a_tick, tick: AtomicU64::new(0), left: AtomicI64::new(a_tick) }
    }

    /// Takes `bytes`, or stops all for the rest of this tick. What is longer than a whole tick
    /// takes what is left of one, and owes the rest to those after it. Who looks while another
    /// brings the bytes of a new tick waits for the next.
    fn take(&self, bytes: u64, now: Nanos) -> bool {
        let change = |cell: &AtomicI64, change: &dyn Fn(i64) -> i64| {
            let changed = cell.fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| Some(change(n)));
            changed.unwrap_or_else(|n| n)
        };
        let (now, was) = (now.0 / TICK.0, self.tick.load(Ordering::Acquire));
        let is_new = now > was;
        if is_new && self.tick.compare_exchange(was, now, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            let more = self.a_tick.saturating_mul((now - was).min(i64::MAX as u64) as i64);
            change(&self.left, &|left| left.saturating_add(more).min(self.a_tick));
        }
        let bytes = bytes.min(i64::MAX as u64) as i64;
        let goes = |left: i64| if bytes > self.a_tick { left > 0 } else { left >= bytes };
        let left =
            change(&self.left, &|left| if goes(left) { left.saturating_sub(bytes) } else { left.min(0) });
        goes(left) || bugs::on(Bug::BudgetPassed)
    }
}

/// Requests that come back, or go on, so long after they were put in: the first is the first.
struct DelayQueue {
    delay: Nanos,
    queue: VecDeque<(Nanos, Box<Bio>)>,
}

impl DelayQueue {
    fn new(delay: Nanos) -> DelayQueue {
        DelayQueue { delay, queue: VecDeque::new() }
    }

    fn push(&mut self, bio: Box<Bio>, now: Nanos) {
        self.queue.push_back((now + self.delay, bio));
    }

    fn pop(&mut self, now: Nanos) -> Option<Box<Bio>> {
        self.queue.front().filter(|(due, _)| *due <= now)?;
        self.queue.pop_front().map(|(_, bio)| bio)
    }

    fn ask(&self, cx: &mut Cx<'_>) {
        if let Some((due, _)) = self.queue.front() {
            cx.wake_at(*due);
        }
    }

    fn take_all(&mut self) -> impl Iterator<Item = Box<Bio>> {
        self.queue.drain(..).map(|(_, bio)| bio)
    }
}

/// See the module.
struct FaultyLane {
    below: Box<dyn Lane>,
    all: Arc<FaultState>,
    depth: usize,
    /// Tags: requests that were started and have not come back.
    used: usize,
    /// Those without a tag.
    requests: VecDeque<Box<Bio>>,
    /// Those that go again, before any other.
    requeued: VecDeque<Box<Bio>>,
    /// Nothing starts before this.
    stopped: Nanos,
    failed: DelayQueue,
    lost: DelayQueue,
    short: DelayQueue,
    /// The last that found no resources waits for them.
    is_odd: bool,
    /// What is in the lane is to end: nothing more finds no resources.
    ends: bool,
    down: Batch,
}

impl Lane for FaultyLane {
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        self.ends = false;
        self.requests.extend(batch.drain(..));
        self.start(cx);
    }

    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        let (from, now) = (done.len(), cx.now());
        self.below.poll(done, cx);
        while let Some(mut bio) = self.failed.pop(now) {
            bio.end_with(Status::IoErr);
            done.push(bio);
        }
        let here = done.len();
        while let Some(mut bio) = self.lost.pop(now) {
            bio.end_with(Status::Timeout);
            done.push(bio);
        }
        self.used -= if bugs::on(Bug::LostTagKept) { here } else { done.len() } - from;
        while let Some(bio) = self.short.pop(now) {
            self.requeued.push_back(bio);
        }
        if self.start(cx) && !bugs::on(Bug::StartedUnpolled) {
            // It may have ended as it went down.
            cx.wake_now();
        }
    }

    fn drain(&mut self, how: Drain, back: &mut Batch, cx: &mut Cx<'_>) {
        self.ends = how.fails_held();
        if how == Drain::NoFlush {
            self.used -= self.requeued.len() + self.short.queue.len();
            back.extend(self.requeued.drain(..).chain(self.short.take_all()));
            back.extend(self.requests.drain(..));
        }
        if how == Drain::End {
            // Nobody waits for an answer any more.
            self.lost.queue.iter_mut().for_each(|(due, _)| *due = cx.now());
        }
        let from = back.len();
        self.below.drain(how, back, cx);
        self.used -= back.len() - from;
    }

    fn busy(&self) -> OwnWork {
        self.below.busy()
    }
}

impl FaultyLane {
    /// Starts what there are tags for, and asks for the next look; says whether anything went down.
    fn start(&mut self, cx: &mut Cx<'_>) -> bool {
        let now = cx.now();
        // What goes again at once does so at the next poll: one that always does must end the turn.
        let mut again = Batch::new();
        while self.stopped <= now {
            let Some(bio) = self.next() else { break };
            self.try_one(bio, &mut again, cx);
        }
        let any = !self.down.is_empty();
        if any {
            self.below.submit(&mut self.down, cx);
        }
        if !again.is_empty() && !bugs::on(Bug::RequeueSleeps) {
            cx.wake_now();
        }
        self.requeued.extend(again);
        let waits = !self.requeued.is_empty() || !self.requests.is_empty();
        if self.stopped > now && waits && !bugs::on(Bug::BudgetSleeps) {
            cx.wake_at(self.stopped);
        }
        [&self.failed, &self.lost, &self.short].into_iter().for_each(|later| later.ask(cx));
        any
    }

    fn next(&mut self) -> Option<Box<Bio>> {
        if let Some(bio) = self.requeued.pop_front() {
            return Some(bio);
        }
        let bio = if self.used < self.depth { self.requests.pop_front() } else { None };
        self.used += usize::from(bio.is_some());
        bio
    }

    fn try_one(&mut self, bio: Box<Bio>, again: &mut Batch, cx: &mut Cx<'_>) {
        let now = cx.now();
        let is_lost = self.all.timeout.should_fail(cx);
        if !self.ends && self.all.requeue.should_fail(cx) {
            self.is_odd = !self.is_odd;
            match self.is_odd {
                true => self.short.push(bio, now),
                false => again.push(bio),
            }
            return;
        }
        if self.all.budget.as_ref().is_some_and(|budget| !budget.take(bio.sectors.bytes(), now)) {
            self.stopped = Nanos((now.0 / TICK.0 + 1) * TICK.0);
            self.requeued.push_front(bio);
        } else if is_lost {
            self.lost.push(bio, now);
        } else if self.all.is_bad(&bio) {
            self.failed.push(bio, now);
        } else {
            self.down.push(bio);
        }
    }
}

#[cfg(test)]
mod tests;
