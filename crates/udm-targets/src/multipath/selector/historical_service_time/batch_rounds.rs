//! The choices for a batch, in rounds.
//!
//! While no threshold is asked for, and the idle paths are at the front of the list, what the
//! kernel's comparisons come to is an order:
//!
//! * of the idle paths the one that is stale first, ties to the one not chosen for longest;
//! * of the others, the *busy* ones, that of the least cost, ties to the one chosen last;
//! * of those two the busy one, unless it costs more.
//!
//! So while no path is stale. While all are, what is in flight stands for the cost, ties go to the
//! one not chosen for longest, and an idle one comes before any that is busy.
//!
//! All that a choice changes is that its path is busy from then on, costs its average more than
//! before, and is the one chosen last. So the busy paths that cost less than any of them will once
//! it was chosen are chosen one after the other, a *round*, and only behind it the order has to be
//! made anew. Likewise the idle ones, from the first. Where paths are alike, a round is all of
//! them.

use super::PathHistory;
use super::lane::PathEstimate;

/// A path in the order of a batch.
#[derive(Clone, Copy, Debug)]
pub(super) struct CostRank {
    /// What one more costs: the average times the bios in flight and one.
    pub(super) cost: u64,
    /// How much more it costs once it is chosen.
    pub(super) step: u64,
    stale_after: u64,
    /// When it was last chosen.
    pub(super) used: u64,
    pub(super) path: u32,
    /// How often it was chosen.
    pub(super) times: u32,
    pub(super) is_idle: bool,
}

impl CostRank {
    /// `path_load` of `path`, all paths of which are stale, or none.
    #[inline(always)]
    pub(super) fn new(path: u32, slot: &PathEstimate, stale: bool) -> CostRank {
        let PathEstimate { history: PathHistory { average, stale_after, .. }, load, used, .. } = *slot;
        let (cost, step) =
            if stale { (load, 1) } else { (average.wrapping_mul(load.wrapping_add(1)), average) };
        CostRank { cost, step, stale_after, used, path, times: 0, is_idle: load == 0 }
    }

    /// The order of the busy ones; they come before the idle ones.
    #[inline(always)]
    fn rank(&self, stale: bool) -> (u64, u64) {
        (self.cost, if stale { self.used } else { !self.used })
    }

    #[inline(always)]
    pub(super) fn rank_of_all(&self, stale: bool) -> (bool, (u64, u64)) {
        (self.is_idle, if self.is_idle { (self.stale_after, self.used) } else { self.rank(stale) })
    }
}

/// See the module.
pub(super) struct BatchRounds<'a> {
    /// The busy ones in their order, behind them the idle ones in theirs.
    ranking: &'a mut [CostRank],
    /// All are stale.
    stale: bool,
    /// How many are busy.
    busy: usize,
    /// The round: those of `from..next` have been chosen, those of `next..to` will be.
    from: usize,
    next: usize,
    to: usize,
    /// The round is one path: how often it will be chosen yet behind its first time.
    again: u64,
    /// How often it would have been.
    most: u64,
    clock: u64,
}

impl BatchRounds<'_> {
    /// `ranking` in any order, used until `clock`; there is at least one.
    #[inline(always)]
    pub(super) fn new(ranking: &mut [CostRank], stale: bool, clock: u64) -> BatchRounds<'_> {
        let rank = |turn: &CostRank| turn.rank_of_all(stale);
        if !ranking.is_sorted_by(|a, b| rank(a) < rank(b)) {
            ranking.sort_unstable_by_key(rank);
        }
        let busy = ranking.iter().take_while(|turn| !turn.is_idle).count();
        BatchRounds { ranking, stale, busy, from: 0, next: 0, to: 0, again: 0, most: 0, clock }
    }

    /// The path of the next.
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

    /// The end of the batch: the count of the last choice.
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
            // An idle one is chosen where it costs less than the least of the others.
            Some(idle) if idle.cost < least => (self.busy, self.ranking.len(), least),
            Some(idle) => (0, self.busy, idle.cost + 1),
            None => (0, self.busy, u64::MAX),
        };
        // Of one that has been chosen and one that costs as much the newest is next, or the oldest.
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

    /// The first of those that are busy is chosen: how often it will be again before any other is.
    fn repeats(&self) -> u64 {
        let (first, rest) = (&self.ranking[0], &self.ranking[1..]);
        // The one behind it, and the first that is idle.
        let limit = |place: usize| rest.get(place).map_or(u64::MAX, |turn| turn.cost);
        let limit = limit(0).min(limit(self.busy - 1));
        // Of two that cost the same the newest is next; where they are stale, the oldest.
        (limit - first.cost - u64::from(self.stale)) / first.step
    }

    /// Counts what has been chosen in this round.
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

    /// Puts the busy ones in their order behind a round.
    #[inline(always)]
    fn sort(&mut self) {
        let stale = self.stale;
        let chosen = &mut self.ranking[self.from..self.next];
        if !stale && !chosen.is_sorted_by(|a, b| a.cost < b.cost) {
            reverse_ties(chosen);
        }
        let busy = &mut self.ranking[..self.busy];
        if !busy.is_sorted_by(|a, b| a.rank(stale) < b.rank(stale)) {
            busy.sort_unstable_by_key(|turn| turn.rank(stale));
        }
    }
}

/// Turns those of the same cost round that are next to each other: the last comes first.
fn reverse_ties(ranking: &mut [CostRank]) {
    ranking.chunk_by_mut(|a, b| a.cost == b.cost).for_each(<[CostRank]>::reverse);
}
