//! Requests that a core serves by its own work: memory that is copied, filled or cleared.
//!
//! What the work costs is counted in bytes of memory touched. A turn of a core has a budget of
//! them, so that no request, and no number of requests, keeps the other users of the core waiting
//! for longer than a turn: what is over stays queued and goes on in the next. A short request does
//! not wait for the end of long ones: those take turns among themselves, a piece at a time.
//!
//! A request may so be served in pieces, over several turns. Requests that are in flight together
//! have no order, so nobody can tell.

use crate::{Batch, Bio, Cx, Lane, SECTOR_SIZE, Status, move_batch};
use std::collections::VecDeque;

/// The bytes that the lanes of a core may touch in a turn, all together: about 100 µs of copying.
/// Each lane may pass it by [`LANE_MIN`], so that one does not starve the other.
pub const TURN_BUDGET: u64 = 1 << 20;

/// The most that is done for a request before it is another's turn, in bytes; one that costs no
/// more is a short one.
pub const SLICE_MAX: u64 = 128 << 10;

/// What a lane may do in a call whatever the others did: one short request, and a piece of a long
/// one.
const LANE_MIN: u64 = 2 * SLICE_MAX;

/// What a device does with its requests.
pub trait BioHandler {
    /// What serving `bio` costs at the most, in bytes; 0 for what costs next to nothing.
    fn cost(&self, bio: &Bio) -> u64;

    /// How many bytes its parts count to: those of its range, where nothing else is said.
    #[inline]
    fn length(&self, bio: &Bio) -> u64 {
        // A range that ends beyond everything is refused by whoever serves it.
        bio.sectors.0.saturating_mul(SECTOR_SIZE)
    }

    /// Serves `bio` from where `part` says, until it is done or `part` is used up. Each call gets
    /// on by at least one byte of its range. Says how the bio ended; an error ends it at once, and
    /// `Ok` only matters when the part is [done](Part::is_done).
    fn serve(&mut self, bio: &mut Bio, part: &mut BioProgress) -> Status;
}

/// How far a request is served, and what may be done for it now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BioProgress {
    /// Bytes of the range that are done.
    pub done: u64,
    /// Bytes that may still be touched.
    pub left: u64,
    /// Whatever the server has to know at the next part; 0 at the first.
    pub mark: u64,
    len: u64,
}

impl BioProgress {
    /// The first part of a request of `len` bytes, of which `left` may be touched.
    #[must_use]
    pub fn first(len: u64, left: u64) -> BioProgress {
        BioProgress { done: 0, left, mark: 0, len }
    }

    /// Bytes of the range that are to be done now.
    #[must_use]
    pub fn now(&self) -> u64 {
        self.left.min(self.rest())
    }

    /// Bytes of the range that are not done.
    #[must_use]
    pub fn rest(&self) -> u64 {
        self.len - self.done
    }

    /// `bytes` of the range are done, and cost as many.
    pub fn advance(&mut self, bytes: u64) {
        self.advance_for(bytes, bytes);
    }

    /// `bytes` of the range are done, and cost `cost`.
    pub fn advance_for(&mut self, bytes: u64, cost: u64) {
        self.done += bytes;
        self.left = self.left.saturating_sub(cost);
        debug_assert!(self.done <= self.len, "more done than there is");
    }

    /// The rest of the range is done, and cost nothing.
    pub fn finish(&mut self) {
        self.done = self.len;
    }

    /// The whole range is done.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.done == self.len
    }
}

/// The requests of one lane that are being worked on. See the module's documentation.
pub struct BudgetedQueue<S> {
    serve: S,
    /// Short ones that found the budget used up, oldest first.
    short: VecDeque<Box<Bio>>,
    /// Long ones, with how far they are; the first is next.
    long: VecDeque<(Box<Bio>, BioProgress)>,
}

impl<S: BioHandler> BudgetedQueue<S> {
    /// Nothing to do yet.
    pub const fn new(serve: S) -> BudgetedQueue<S> {
        BudgetedQueue { serve, short: VecDeque::new(), long: VecDeque::new() }
    }

    /// What serves.
    pub const fn server(&self) -> &S {
        &self.serve
    }

    /// True when nothing waits.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.short.is_empty() && self.long.is_empty()
    }

    /// Serves what the budget allows of `batch`, and of what waits, and leaves what is done in it;
    /// the rest is kept.
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
                serve_whole(&mut self.serve, bio);
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

    /// Goes on with what waits and appends what is done. Asks for another turn when the budget does
    /// not suffice.
    pub fn run_pending(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        if self.is_idle() {
            return;
        }
        let budget = cx.cpu_budget().max(LANE_MIN);
        let mut left = budget;
        // A piece of it is for the long ones, which a stream of short ones must not stop.
        let kept = if self.long.is_empty() { 0 } else { SLICE_MAX };
        while let Some(bio) = self.short.front() {
            let cost = self.serve.cost(bio);
            if cost + kept > left {
                break;
            }
            left -= cost;
            done.extend(self.short.pop_front().map(|mut bio| {
                serve_whole(&mut self.serve, &mut bio);
                bio
            }));
        }
        while left > 0
            && let Some((mut bio, mut part)) = self.long.pop_front()
        {
            let (at, may) = (part.done, left.min(SLICE_MAX));
            part.left = may;
            let status = self.serve.serve(&mut bio, &mut part);
            debug_assert!(part.done > at || !status.is_ok(), "a request that does not get on");
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

fn serve_whole<S: BioHandler>(serve: &mut S, bio: &mut Bio) {
    let mut part = BioProgress::first(serve.length(bio), u64::MAX);
    let status = serve.serve(bio, &mut part);
    debug_assert!(part.is_done() || !status.is_ok(), "a whole request is served whole");
    bio.end_with(status);
}

/// The lane of a device that has nothing to wait for: each bio is served at once, or as soon as its
/// turn comes.
pub struct BudgetedLane<S> {
    work: BudgetedQueue<S>,
    ready: Batch,
}

impl<S: BioHandler> BudgetedLane<S> {
    /// A lane on which `serve` serves.
    pub const fn new(serve: S) -> BudgetedLane<S> {
        BudgetedLane { work: BudgetedQueue::new(serve), ready: Batch::new() }
    }
}

impl<S: BioHandler> Lane for BudgetedLane<S> {
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        self.work.take(batch, cx);
        move_batch(batch, &mut self.ready);
        // What is ready needs a poll, and no event of the outside will bring one.
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
    use crate::{CoreId, CoreState, Nanos, Op, Sector, Sectors};

    /// Each byte costs one; notes which range was served when.
    struct RecordingHandler(Vec<(u64, u64, u64)>);

    impl BioHandler for RecordingHandler {
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

    /// Runs turns until all is done: the cookies that ended in each, and the bytes that it took.
    fn turns(mut batches: Vec<Batch>) -> Vec<(Vec<u64>, u64)> {
        let mut core = CoreState::new(CoreId(0), 1, 1, None);
        let mut work = BudgetedQueue::new(RecordingHandler(Vec::new()));
        let mut turns = Vec::new();
        batches.reverse();
        while !batches.is_empty() || !work.is_idle() {
            let mut batch = batches.pop().unwrap_or_default();
            let mut cx = core.cx(Nanos(1));
            work.take(&mut batch, &mut cx);
            work.run_pending(&mut batch, &mut cx);
            assert_eq!(cx.wake() == Nanos(1), !work.is_idle(), "it asks for a turn when it needs one");
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
        assert_eq!(turns.iter().map(|t| t.1).sum::<u64>(), 120 * 64 * MIB, "all of it is done, once");
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
        let mut core = CoreState::new(CoreId(0), 1, 1, None);
        let mut lanes: Vec<_> = (0..10).map(|_| BudgetedQueue::new(RecordingHandler(Vec::new()))).collect();
        let mut cx = core.cx(Nanos(1));
        for lane in &mut lanes {
            lane.take(&mut vec![bio(0, 64 * MIB)], &mut cx);
        }
        let bytes: Vec<u64> = lanes.iter().map(|l| l.serve.0.iter().map(|s| s.2).sum()).collect();
        assert!(bytes.iter().all(|&n| n > 0), "none goes without: {bytes:?}");
        assert!(bytes.iter().sum::<u64>() <= TURN_BUDGET + 10 * LANE_MIN, "{bytes:?}");
    }
}
