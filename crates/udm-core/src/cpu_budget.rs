//! Requests that a core serves by its own CPU: memory that is copied, filled or cleared.
//!
//! The cost of a request is the number of bytes of memory touched. A turn of a core has a budget of
//! bytes; requests beyond it stay queued and continue in the next turn. So CPU work never delays
//! the other users of the core by much more than a turn. A short request does not wait for the end
//! of long ones: long requests take turns, one piece at a time.
//!
//! A request may thus be served in pieces over several turns. Requests that are in flight together
//! have no order, so this is not visible.

use crate::{Batch, Bio, Cx, Lane, SECTOR_SIZE, Status, move_batch};
use std::collections::VecDeque;

/// Bytes that all lanes of a core may touch together in a turn: about 100 µs of copying. Each lane
/// may exceed it by [`LANE_MIN`], so that no lane starves.
pub const TURN_BUDGET: u64 = 1 << 20;

/// The longest piece of a request, in bytes. A request that costs no more is a short request.
pub const SLICE_MAX: u64 = 128 << 10;

/// Bytes that a lane may touch in a call even if the budget is used up: one short request and one
/// piece of a long one.
const LANE_MIN: u64 = 2 * SLICE_MAX;

/// Serves the bios of a device by CPU.
pub trait CpuBioHandler {
    /// Upper bound of the cost of `bio` in bytes; 0 if the cost is negligible.
    fn cost(&self, bio: &Bio) -> u64;

    /// Length of the request, in the unit of [`BioProgress::done`]: by default the bytes of its
    /// range.
    #[inline]
    fn length(&self, bio: &Bio) -> u64 {
        // Saturates: the handler refuses a range beyond the end.
        bio.sectors.0.saturating_mul(SECTOR_SIZE)
    }

    /// Serves `bio` from `part.done` on, until it is done or `part.left` is used up. Each call
    /// advances by at least one byte; a request that touches no memory is
    /// [finished](BioProgress::finish). An error status ends the bio at once; `Ok` matters only if
    /// `part` [is done](BioProgress::is_done).
    fn serve(&mut self, bio: &mut Bio, part: &mut BioProgress) -> Status;
}

/// Progress of a request, and the bytes that may be touched now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BioProgress {
    /// Completed bytes of the range.
    pub done: u64,
    /// Bytes that may still be touched.
    pub left: u64,
    /// State of the handler between parts; 0 at the first part.
    pub mark: u64,
    len: u64,
}

impl BioProgress {
    /// Progress of a new request of `len` bytes, of which `left` may be touched.
    #[must_use]
    pub fn first(len: u64, left: u64) -> BioProgress {
        BioProgress { done: 0, left, mark: 0, len }
    }

    /// Bytes of the range to serve now.
    #[must_use]
    pub fn now(&self) -> u64 {
        self.left.min(self.rest())
    }

    /// Bytes of the range that are not done.
    #[must_use]
    pub fn rest(&self) -> u64 {
        self.len - self.done
    }

    /// Completes `bytes` of the range at a cost of `bytes`.
    pub fn advance(&mut self, bytes: u64) {
        self.advance_for(bytes, bytes);
    }

    /// Completes `bytes` of the range at a cost of `cost` bytes.
    pub fn advance_for(&mut self, bytes: u64, cost: u64) {
        self.done += bytes;
        self.left = self.left.saturating_sub(cost);
        debug_assert!(self.done <= self.len, "more bytes done than the request has");
    }

    /// Completes the rest of the range at no cost.
    pub fn finish(&mut self) {
        self.done = self.len;
    }

    /// True if the whole range is done.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.done == self.len
    }
}

/// The requests of one lane that wait for CPU budget, and the handler that serves them.
pub struct CpuBudgetedQueue<S> {
    serve: S,
    /// Short requests that found the budget used up, oldest first.
    short: VecDeque<Box<Bio>>,
    /// Long requests with their progress; the first one is next.
    long: VecDeque<(Box<Bio>, BioProgress)>,
}

impl<S: CpuBioHandler> CpuBudgetedQueue<S> {
    /// Creates an empty queue.
    pub const fn new(serve: S) -> CpuBudgetedQueue<S> {
        CpuBudgetedQueue { serve, short: VecDeque::new(), long: VecDeque::new() }
    }

    /// The handler.
    pub const fn server(&self) -> &S {
        &self.serve
    }

    /// True if no request waits.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.short.is_empty() && self.long.is_empty()
    }

    /// Serves the waiting requests and `batch` as far as the budget allows. On return, `batch`
    /// holds the completed bios; the others are queued.
    pub fn take(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        let mut left = cx.cpu_budget();
        let mut served = 0;
        if self.is_idle() {
            for bio in batch.iter_mut() {
                let cost = self.serve.cost(bio);
                if cost > left.min(SLICE_MAX) {
                    break;
                }
                left -= cost;
                serve_whole_bio(&mut self.serve, bio);
                served += 1;
            }
            cx.set_cpu_budget(left);
        }
        if served < batch.len() {
            self.queue_rest(batch, served, cx);
        }
    }

    #[cold]
    fn queue_rest(&mut self, batch: &mut Batch, served: usize, cx: &mut Cx<'_>) {
        for bio in batch.drain(served..) {
            if self.serve.cost(&bio) > SLICE_MAX {
                let part = BioProgress::first(self.serve.length(&bio), 0);
                self.long.push_back((bio, part));
            } else {
                self.short.push_back(bio);
            }
        }
        self.run_pending(batch, cx);
    }

    /// Serves waiting requests and appends the completed ones to `done`. Asks for another turn if
    /// the budget is not sufficient.
    pub fn run_pending(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        if self.is_idle() {
            return;
        }
        let budget = cx.cpu_budget().max(LANE_MIN);
        let mut left = budget;
        // Reserves one piece for long requests, so that a stream of short requests does not starve
        // them.
        let kept = if self.long.is_empty() { 0 } else { SLICE_MAX };
        while let Some(bio) = self.short.front() {
            let cost = self.serve.cost(bio);
            if cost + kept > left {
                break;
            }
            left -= cost;
            done.extend(self.short.pop_front().map(|mut bio| {
                serve_whole_bio(&mut self.serve, &mut bio);
                bio
            }));
        }
        while left > 0
            && let Some((mut bio, mut part)) = self.long.pop_front()
        {
            let (at, may) = (part.done, left.min(SLICE_MAX));
            part.left = may;
            let status = self.serve.serve(&mut bio, &mut part);
            debug_assert!(part.done > at || !status.is_ok(), "a call without progress");
            left -= (may - part.left).clamp(1, left);
            if part.is_done() || !status.is_ok() {
                bio.end_with(status);
                done.push(bio);
            } else {
                self.long.push_back((bio, part));
            }
        }
        cx.set_cpu_budget(cx.cpu_budget().saturating_sub(budget - left));
        if !self.is_idle() {
            cx.wake_now();
        }
    }
}

fn serve_whole_bio<S: CpuBioHandler>(serve: &mut S, bio: &mut Bio) {
    let mut part = BioProgress::first(serve.length(bio), u64::MAX);
    let status = serve.serve(bio, &mut part);
    debug_assert!(
        part.is_done() || !status.is_ok(),
        "serve returned Ok for a part of a request within the budget; advance or finish it"
    );
    bio.end_with(status);
}

/// The lane of a device that only needs CPU: each bio is served at once, or when the budget allows.
pub struct CpuBudgetedLane<S> {
    work: CpuBudgetedQueue<S>,
    ready: Batch,
}

impl<S: CpuBioHandler> CpuBudgetedLane<S> {
    /// Creates a lane over a handler.
    pub const fn new(serve: S) -> CpuBudgetedLane<S> {
        CpuBudgetedLane { work: CpuBudgetedQueue::new(serve), ready: Batch::new() }
    }
}

impl<S: CpuBioHandler> Lane for CpuBudgetedLane<S> {
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        self.work.take(batch, cx);
        move_batch(batch, &mut self.ready);
        // Completed bios need a poll, and no external event causes one.
        cx.wake_now();
    }

    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        self.work.run_pending(&mut self.ready, cx);
        move_batch(&mut self.ready, done);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CoreId, CoreLaneState, Nanos, Op, Sector, Sectors};

    /// Each byte costs one. Records the cookie, offset and length of each part.
    struct RecordingHandler(Vec<(u64, u64, u64)>);

    impl CpuBioHandler for RecordingHandler {
        fn cost(&self, bio: &Bio) -> u64 {
            bio.sectors.bytes()
        }
        fn serve(&mut self, bio: &mut Bio, part: &mut BioProgress) -> Status {
            let n = part.now();
            self.0.push((bio.cookie, part.done, n));
            part.advance(n);
            Status::Ok
        }
    }

    fn bio(cookie: u64, bytes: u64) -> Box<Bio> {
        let mut bio = Bio::new();
        (bio.op, bio.sector, bio.sectors, bio.cookie) =
            (Op::Discard, Sector(0), Sectors::from_bytes(bytes), cookie);
        bio
    }

    /// Runs turns until all is done. Returns, per turn, the completed cookies and the bytes served.
    fn turns(mut batches: Vec<Batch>) -> Vec<(Vec<u64>, u64)> {
        let mut core = CoreLaneState::new(CoreId(0), 1, 1, None);
        let mut work = CpuBudgetedQueue::new(RecordingHandler(Vec::new()));
        let mut turns = Vec::new();
        batches.reverse();
        while !batches.is_empty() || !work.is_idle() {
            let mut batch = batches.pop().unwrap_or_default();
            let mut cx = core.cx(Nanos(1));
            work.take(&mut batch, &mut cx);
            work.run_pending(&mut batch, &mut cx);
            assert_eq!(cx.wake() == Nanos(1), !work.is_idle(), "it asks for a turn exactly if requests wait");
            let bytes = work.serve.0.drain(..).map(|(.., n)| n).sum();
            turns.push((batch.iter().map(|b| b.cookie).collect(), bytes));
        }
        turns
    }

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_turn_takes_a_bounded_amount_whatever_is_asked_for() {
        let long = || (0..120).map(|i| bio(i, 64 * MIB)).collect::<Batch>();
        let turns = turns(vec![long()]);
        assert!(turns.iter().all(|(_, bytes)| *bytes <= TURN_BUDGET + 2 * LANE_MIN), "{:?}", &turns[..3]);
        assert_eq!(
            turns.iter().map(|t| t.1).sum::<u64>(),
            120 * 64 * MIB,
            "each byte is served exactly once"
        );
        assert_eq!(turns.iter().map(|t| t.0.len()).sum::<usize>(), 120);
    }

    #[test]
    fn a_short_request_overtakes_long_ones() {
        let long = (0..120).map(|i| bio(i, 64 * MIB)).collect();
        let turns = turns(vec![long, vec![bio(1000, 4096)], Vec::new(), vec![bio(1001, SLICE_MAX)]]);
        assert!(turns[1].0.contains(&1000) && turns[3].0.contains(&1001));
    }

    #[test]
    fn short_requests_do_not_stop_a_long_one() {
        let flood = |n: u64| (0..1000).map(|i| bio(n * 1000 + i, 4096)).collect::<Batch>();
        let mut batches = vec![vec![bio(1, MIB)]];
        batches.extend((1..100).map(flood));
        let turns = turns(batches);
        assert!(turns[..40].iter().any(|t| t.0.contains(&1)));
    }

    #[test]
    fn long_requests_share() {
        let turns = turns(vec![vec![bio(0, 400 * MIB), bio(1, MIB)]]);
        assert!(turns[..4].iter().any(|t| t.0.contains(&1)));
    }

    #[test]
    fn what_fits_a_turn_is_done_in_it_and_in_order() {
        let turns = turns(vec![(0..64).map(|i| bio(i, 4096)).collect()]);
        assert_eq!(turns, [((0..64).collect(), 64 * 4096)]);
    }

    #[test]
    fn lanes_of_one_core_share_its_budget() {
        let mut core = CoreLaneState::new(CoreId(0), 1, 1, None);
        let mut lanes: Vec<_> =
            (0..10).map(|_| CpuBudgetedQueue::new(RecordingHandler(Vec::new()))).collect();
        let mut cx = core.cx(Nanos(1));
        for lane in &mut lanes {
            lane.take(&mut vec![bio(0, 64 * MIB)], &mut cx);
        }
        let bytes: Vec<u64> = lanes.iter().map(|l| l.serve.0.iter().map(|s| s.2).sum()).collect();
        assert!(bytes.iter().all(|&n| n > 0), "no lane starves: {bytes:?}");
        assert!(bytes.iter().sum::<u64>() <= TURN_BUDGET + 10 * LANE_MIN, "{bytes:?}");
    }
}
