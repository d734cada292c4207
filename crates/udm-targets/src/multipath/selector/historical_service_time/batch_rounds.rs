//! The choices for a batch, in rounds.
//!
//! If no threshold is set and the idle paths are at the front of the list, the kernel's comparisons
//! form an order:
//!
//! * among idle paths: the one that becomes stale first, ties to the one not chosen for longest;
//! * among *busy* paths: the one with the least cost, ties to the one chosen last;
//! * between these two: the busy path, unless it costs more.
//!
//! This holds if no path is stale. If all paths are stale, the number of bios in flight replaces
//! the cost, ties go to the path not chosen for longest, and an idle path precedes every busy one.
//!
//! A choice changes only its own path: the path becomes busy, its cost grows by its average, and it
//! is the one chosen last. So several busy paths can be chosen one after the other without sorting,
//! as long as each costs less than every path already chosen now costs. This is a *round*; the
//! order is sorted again only after it. The same holds for idle paths, from the first one on. If
//! all paths are alike, a round contains all of them.

use super::PathHistory;
use super::lane::LanePathHistoryAndLoad;

/// A path in the order of a batch.
#[derive(Clone, Copy, Debug)]
pub(super) struct CostRankedPath {
    /// The cost of one more bio: the average times (bios in flight + 1).
    pub(super) cost: u64,
    /// The increase of the cost per choice.
    pub(super) step: u64,
    stale_after: u64,
    /// Sequence number of the last choice.
    pub(super) used: u64,
    pub(super) path: u32,
    /// Number of times the path was chosen in this batch.
    pub(super) times: u32,
    pub(super) is_idle: bool,
}

impl CostRankedPath {
    /// The rank of `path` with the state `slot`. `stale` is true if all paths are stale, and false
    /// if none is.
    #[inline(always)]
    pub(super) fn new(path: u32, slot: &LanePathHistoryAndLoad, stale: bool) -> CostRankedPath {
        let LanePathHistoryAndLoad { history: PathHistory { average, stale_after, .. }, load, used, .. } =
            *slot;
        let (cost, step) =
            if stale { (load, 1) } else { (average.wrapping_mul(load.wrapping_add(1)), average) };
        CostRankedPath { cost, step, stale_after, used, path, times: 0, is_idle: load == 0 }
    }

    /// The sort key of busy paths, which are stored before the idle ones.
    #[inline(always)]
    fn rank(&self, stale: bool) -> (u64, u64) {
        (self.cost, if stale { self.used } else { !self.used })
    }

    #[inline(always)]
    pub(super) fn rank_of_all(&self, stale: bool) -> (bool, (u64, u64)) {
        (self.is_idle, if self.is_idle { (self.stale_after, self.used) } else { self.rank(stale) })
    }
}

/// The state of the rounds of one batch.
pub(super) struct BatchPathChoiceRounds<'a> {
    /// The busy paths in their order, then the idle paths in theirs.
    ranking: &'a mut [CostRankedPath],
    /// True if all paths are stale, false if none is.
    stale: bool,
    /// Number of busy paths.
    busy: usize,
    /// The round: the paths of `from..next` have been chosen, those of `next..to` follow.
    from: usize,
    next: usize,
    to: usize,
    /// If the round is a single path: how often it will be chosen again.
    again: u64,
    /// The value of `again` at the start of the round.
    most: u64,
    clock: u64,
}

impl BatchPathChoiceRounds<'_> {
    /// The rounds for `ranking`, in any order and not empty. `clock` is the last sequence number.
    #[inline(always)]
    pub(super) fn new(ranking: &mut [CostRankedPath], stale: bool, clock: u64) -> BatchPathChoiceRounds<'_> {
        let rank = |turn: &CostRankedPath| turn.rank_of_all(stale);
        if !ranking.is_sorted_by(|a, b| rank(a) < rank(b)) {
            ranking.sort_unstable_by_key(rank);
        }
        let busy = ranking.iter().take_while(|turn| !turn.is_idle).count();
        BatchPathChoiceRounds { ranking, stale, busy, from: 0, next: 0, to: 0, again: 0, most: 0, clock }
    }

    /// Returns the path for the next bio.
    #[inline(always)]
    pub(super) fn choose(&mut self) -> usize {
        if self.next < self.to {
            self.next += 1;
        } else if self.again > 0 {
            self.again -= 1;
        } else {
            self.turn();
            self.next += 1;
        }
        self.ranking[self.next - 1].path as usize
    }

    /// Ends the batch and returns the last sequence number.
    pub(super) fn end(mut self) -> u64 {
        self.account();
        self.clock
    }

    /// Ends a round and begins the next.
    #[inline(never)]
    fn turn(&mut self) {
        self.account();
        self.sort();
        let least = match self.ranking[..self.busy].first() {
            Some(least) if !self.stale => least.cost,
            _ => u64::MAX,
        };
        let (from, until, mut limit) = match self.ranking.get(self.busy) {
            // An idle path is chosen if it costs less than the cheapest busy path.
            Some(idle) if idle.cost < least => (self.busy, self.ranking.len(), least),
            Some(idle) => (0, self.busy, idle.cost + 1),
            None => (0, self.busy, u64::MAX),
        };
        // If a path of this round and another path cost the same, the path used last is next. If
        // all paths are stale, the path that was unused for longest is next.
        let tie = u64::from(self.stale);
        let round = self.ranking[from..until].iter().take_while(|turn| {
            let is_next = turn.cost < limit;
            limit = limit.min(turn.cost + turn.step + tie);
            is_next
        });
        (self.from, self.next, self.to) = (from, from, from + round.count());
        self.most = if from < self.busy && self.to == 1 { self.repeats() } else { 0 };
        self.again = self.most;
    }

    /// Number of times the first busy path is chosen again before any other path.
    fn repeats(&self) -> u64 {
        let (first, rest) = (&self.ranking[0], &self.ranking[1..]);
        // Indexes in `rest`: the next busy path, and the first idle one.
        let limit = |place: usize| rest.get(place).map_or(u64::MAX, |turn| turn.cost);
        let limit = limit(0).min(limit(self.busy - 1));
        // If two paths cost the same, the path used last is next. If all paths are stale, the path
        // that was unused for longest is next.
        (limit - first.cost - u64::from(self.stale)) / first.step
    }

    /// Accounts for the choices of this round.
    #[inline(always)]
    fn account(&mut self) {
        let times = 1 + self.most - self.again;
        for turn in &mut self.ranking[self.from..self.next] {
            self.clock += times;
            (turn.used, turn.times) = (self.clock, turn.times + times as u32);
            (turn.cost, turn.is_idle) = (turn.cost + times * turn.step, false);
        }
        self.busy = self.busy.max(self.next);
    }

    /// Sorts the busy paths after a round.
    #[inline(always)]
    fn sort(&mut self) {
        let stale = self.stale;
        let chosen = &mut self.ranking[self.from..self.next];
        if !stale && !chosen.is_sorted_by(|a, b| a.cost < b.cost) {
            reverse_equal_cost_paths(chosen);
        }
        let busy = &mut self.ranking[..self.busy];
        if !busy.is_sorted_by(|a, b| a.rank(stale) < b.rank(stale)) {
            busy.sort_unstable_by_key(|turn| turn.rank(stale));
        }
    }
}

/// Reverses each run of paths with equal cost: the last chosen comes first.
fn reverse_equal_cost_paths(ranking: &mut [CostRankedPath]) {
    ranking.chunk_by_mut(|a, b| a.cost == b.cost).for_each(<[CostRankedPath]>::reverse);
}
