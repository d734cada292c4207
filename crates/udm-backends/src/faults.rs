//! Injected faults and limited bandwidth of a null device: null_blk's `badblocks`, `mbps`,
//! `timeout`, `requeue` and `init_hctx`.
//!
//! [`InjectedFaults::open`] puts a lane in front of another lane. A device without these parameters
//! has no such lane and pays nothing. Time and random numbers come from the core that polls.
//!
//! A request has a tag from its start until it completes. In null_blk's order, each start may have
//! these effects:
//!
//! 1. The request is lost, and times out 5 s later.
//! 2. The request finds no resources and is retried: alternately after 3 ms and at the next poll.
//! 3. The bandwidth of this tick of 20 ms is used up. No request starts until the next tick.
//! 4. The request touches a bad block, and fails without moving data.

use rand::RngExt as _;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use udm_core::errno::ENOMEM;
use udm_core::{Batch, Bio, Cx, DeviceControlError, DrainMode, Lane, Nanos, Op, OwnWork, Status};
use udm_wire::uri::{FaultAttr, NullFaults};

/// Time from the loss of a request to its timeout.
const TIMEOUT_DELAY: Nanos = Nanos::from_millis(5_000);

/// Wait of a request that found no resources (kernel `BLK_MQ_RESOURCE_DELAY`).
const RESOURCE_DELAY: Nanos = Nanos::from_millis(3);

/// Length of a tick of the bandwidth budget.
const TICK: Nanos = Nanos::from_millis(20);

/// Bytes per tick for each MiB/s.
const TICK_BYTES: u64 = (1 << 20) / 50;

/// The faults of one device, shared by its lanes.
#[derive(Clone)]
pub struct InjectedFaults(Arc<InjectedFaultState>);

struct InjectedFaultState {
    badblocks: Vec<(u64, u64)>,
    budget: Option<BandwidthBudget>,
    timeout: FaultAttrState,
    requeue: FaultAttrState,
    init_hctx: FaultAttrState,
}

impl InjectedFaults {
    /// Creates the faults of `params`; `None` if `params` has none.
    #[must_use]
    pub fn new(params: &NullFaults) -> Option<InjectedFaults> {
        (!params.is_none()).then(|| {
            InjectedFaults(Arc::new(InjectedFaultState {
                badblocks: params.badblocks.clone(),
                budget: (params.mbps > 0).then(|| BandwidthBudget::new(params.mbps)),
                timeout: FaultAttrState::new(params.timeout),
                requeue: FaultAttrState::new(params.requeue),
                init_hctx: FaultAttrState::new(params.init_hctx),
            }))
        })
    }

    /// Opens a lane with `depth` tags in front of the lane that `below` opens. A request that fails
    /// on a bad block completes after `delay`.
    ///
    /// # Errors
    /// ENOMEM if `init_hctx` injects it, and the errors of `below`.
    pub fn open(
        &self,
        depth: usize,
        delay: Nanos,
        cx: &mut Cx<'_>,
        below: impl FnOnce(&mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError>,
    ) -> Result<Box<dyn Lane>, DeviceControlError> {
        if self.0.init_hctx.should_fail(cx) {
            return Err(DeviceControlError::new(ENOMEM, "init_hctx: a hardware queue that can't be set up"));
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

impl InjectedFaultState {
    /// Returns whether `bio` touches a bad block.
    fn is_bad(&self, bio: &Bio) -> bool {
        let (first, end) = (bio.sector.0, bio.sector.0.saturating_add(bio.sectors.0));
        let at = self.badblocks.partition_point(|(_, last)| *last < first);
        bio.op != Op::Flush && self.badblocks.get(at).is_some_and(|(bad, _)| *bad < end)
    }
}

/// State of one fault attribute, shared by all cores.
struct FaultAttrState {
    of: FaultAttr,
    count: AtomicU64,
    space: AtomicI64,
    times: AtomicI64,
}

impl FaultAttrState {
    fn new(of: FaultAttr) -> FaultAttrState {
        let (space, times) = (i64::from(of.space).into(), i64::from(of.times).into());
        FaultAttrState { of, count: AtomicU64::new(0), space, times }
    }

    /// Returns whether the fault happens this time (kernel `should_fail`, in its order).
    fn should_fail(&self, cx: &mut Cx<'_>) -> bool {
        let above = |least: i64| move |n: i64| (n > least).then(|| n - 1);
        if self.of.probability == 0 || self.times.load(Ordering::Relaxed) == 0 {
            return false;
        }
        // The kernel skips while `space` is above the size of the chance, and null_blk's size is 1.
        if self.space.fetch_update(Ordering::Relaxed, Ordering::Relaxed, above(1)).is_ok() {
            return false;
        }
        let skipped = self.of.interval > 1
            && !(self.count.fetch_add(1, Ordering::Relaxed) + 1).is_multiple_of(self.of.interval);
        if skipped || self.of.probability <= u64::from(cx.rng().random_range(0..100u8)) {
            return false;
        }
        self.of.times < 0 || self.times.fetch_update(Ordering::Relaxed, Ordering::Relaxed, above(0)).is_ok()
    }
}

/// Bytes that all cores may still move in this tick. Negative if earlier requests used more than
/// their ticks had.
struct BandwidthBudget {
    a_tick: i64,
    /// Number of the last tick whose bytes were added.
    tick: AtomicU64,
    left: AtomicI64,
}

impl BandwidthBudget {
    fn new(mbps: u32) -> BandwidthBudget {
        let a_tick = (u64::from(mbps) * TICK_BYTES) as i64;
        BandwidthBudget { a_tick, tick: AtomicU64::new(0), left: AtomicI64::new(a_tick) }
    }

    /// Takes `bytes` from the budget, or returns false and takes all of this tick. A request longer
    /// than a whole tick may start if any bytes are left, and later ticks pay for it. A caller that
    /// looks while another core adds the bytes of a new tick may have to wait for the next tick.
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
        goes(left)
    }
}

/// Requests that complete or are retried `delay` after they were queued, in queue order.
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

/// A lane that injects faults in front of the lane `below`.
struct FaultyLane {
    below: Box<dyn Lane>,
    all: Arc<InjectedFaultState>,
    depth: usize,
    /// Tags in use: requests that were started and have not completed.
    used: usize,
    /// Requests without a tag.
    requests: VecDeque<Box<Bio>>,
    /// Requests with a tag that are retried before others start.
    requeued: VecDeque<Box<Bio>>,
    /// No request starts before this time.
    stopped: Nanos,
    failed: DelayQueue,
    lost: DelayQueue,
    short: DelayQueue,
    /// Whether the last request that found no resources was delayed by 3 ms.
    is_odd: bool,
    /// The lane is drained and its requests must complete, so `requeue` injects no more faults.
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
        while let Some(mut bio) = self.lost.pop(now) {
            bio.end_with(Status::Timeout);
            done.push(bio);
        }
        self.used -= done.len() - from;
        while let Some(bio) = self.short.pop(now) {
            self.requeued.push_back(bio);
        }
        if self.start(cx) {
            // The bios may have completed during `submit`, after the poll of the lane below.
            cx.wake_now();
        }
    }

    fn drain(&mut self, how: DrainMode, back: &mut Batch, cx: &mut Cx<'_>) {
        self.ends = how.fails_held();
        if how == DrainMode::NoFlush {
            self.used -= self.requeued.len() + self.short.queue.len();
            back.extend(self.requeued.drain(..).chain(self.short.take_all()));
            back.extend(self.requests.drain(..));
        }
        if how == DrainMode::End {
            // The program ends, so lost requests time out at once.
            self.lost.queue.iter_mut().for_each(|(due, _)| *due = cx.now());
        }
        let from = back.len();
        self.below.drain(how, back, cx);
        self.used -= back.len() - from;
    }

    fn own_work(&self) -> OwnWork {
        self.below.own_work()
    }
}

impl FaultyLane {
    /// Starts requests as long as tags are free, and requests the next poll. Returns whether a bio
    /// was submitted to the lane below.
    fn start(&mut self, cx: &mut Cx<'_>) -> bool {
        let now = cx.now();
        // A request that is retried at once waits for the next poll. Otherwise a request that never
        // finds resources would keep this loop running.
        let mut again = Batch::new();
        while self.stopped <= now {
            let Some(bio) = self.next() else { break };
            self.try_one(bio, &mut again, cx);
        }
        let any = !self.down.is_empty();
        if any {
            self.below.submit(&mut self.down, cx);
        }
        if !again.is_empty() {
            cx.wake_now();
        }
        self.requeued.extend(again);
        let waits = !self.requeued.is_empty() || !self.requests.is_empty();
        if self.stopped > now && waits {
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
