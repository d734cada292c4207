//! The choices for a batch with two paths.
//!
//! Each choice is one comparison, or two if only one path is stale. Their results are
//! unpredictable, so they are computed without branches.

use super::super::BatchPathDispatch;
use super::MANY;
use super::batch_rounds::CostRankedPath;
use super::lane::{HistoricalServiceTimeLane, LanePathHistoryAndLoad};
use std::sync::atomic::Ordering::Relaxed;

/// Chooses one of two paths.
pub(super) trait TwoPathChooser {
    /// Chooses for the next bio: true for the second path.
    fn choose(&mut self) -> bool;

    /// The last choice: true for the second path.
    fn last(&self) -> bool;
}

/// Two paths that are both stale or both not stale; [`batch_rounds`](super::batch_rounds) has the
/// rules. Once one path is busy, the same comparison holds whether the other is idle or busy.
///
/// Costs are doubled, so that adding -1 decides a tie without changing other comparisons.
pub(super) struct SameStalenessPathPair {
    /// Twice the difference in cost: second path minus first path.
    dearer: i64,
    /// Change of `dearer` per choice: the first value always, the second in addition if the second
    /// path was chosen.
    adds: [i64; 2],
    /// All bits set if both are stale, otherwise 0.
    stale: i64,
    /// All bits set if the second path was chosen last, otherwise 0.
    last: i64,
}

impl SameStalenessPathPair {
    /// The state for two paths with the states `slots`, and whether their order was swapped. Their
    /// costs stay below 2^60 until the end of the batch.
    #[inline(always)]
    pub(super) fn new(slots: [&LanePathHistoryAndLoad; 2], stale: bool) -> (SameStalenessPathPair, bool) {
        let [mut a, mut b] = slots.map(|slot| CostRankedPath::new(0, slot, stale));
        let swapped = b.rank_of_all(stale) < a.rank_of_all(stale);
        if swapped {
            (a, b) = (b, a);
        }
        let stale = -i64::from(stale);
        let dearer = 2 * (b.cost as i64 - a.cost as i64);
        let adds = [-2 * a.step as i64, 2 * (a.step + b.step) as i64];
        // If both are idle, the first is chosen, whatever its cost.
        let force = i64::from(a.is_idle) << 62;
        (SameStalenessPathPair { dearer, adds, stale, last: stale ^ force }, swapped)
    }
}

impl TwoPathChooser for SameStalenessPathPair {
    #[inline(always)]
    fn choose(&mut self) -> bool {
        // A tie goes to the path chosen last, or to the other path if both are stale.
        self.last = (self.dearer + (self.last ^ self.stale)) >> 63;
        self.dearer += self.adds[0] + (self.adds[1] & self.last);
        self.last()
    }

    #[inline(always)]
    fn last(&self) -> bool {
        self.last != 0
    }
}

/// Two paths of which only the first is stale. An idle first path is chosen once. Then it is chosen
/// if it neither costs more nor has more bios in flight than the second. A tie in cost goes to the
/// path chosen last, a tie in bios in flight to the other path.
pub(super) struct OneStalePathPair {
    /// The difference in cost: second path minus first path.
    dearer: i64,
    /// Change of `dearer` per choice: the first value is always added, the second is subtracted if
    /// the first path was chosen.
    adds: [i64; 2],
    /// The difference in bios in flight: second path minus first path.
    more: i64,
    /// All bits set if the first path was chosen last, otherwise 0.
    last: i64,
    /// All bits set if the first path is next whatever its cost, otherwise 0.
    idle: i64,
}

impl OneStalePathPair {
    /// The state for two paths with the states `slots`; `last` is true if the first was chosen
    /// last. Their costs stay below 2^60 until the end of the batch.
    #[inline(always)]
    pub(super) fn new(slots: [&LanePathHistoryAndLoad; 2], last: bool) -> OneStalePathPair {
        let [a, b] = slots.map(|slot| CostRankedPath::new(0, slot, false));
        OneStalePathPair {
            dearer: b.cost as i64 - a.cost as i64,
            adds: [b.step as i64, (a.step + b.step) as i64],
            more: slots[1].load as i64 - slots[0].load as i64,
            last: -i64::from(last),
            idle: -i64::from(a.is_idle),
        }
    }
}

impl TwoPathChooser for OneStalePathPair {
    #[inline(always)]
    fn choose(&mut self) -> bool {
        let first = !((self.dearer - 1 - self.last) | (self.more + self.last)) >> 63 | self.idle;
        self.dearer += self.adds[0] - (self.adds[1] & first);
        self.more += 1 + 2 * first;
        (self.last, self.idle) = (first, 0);
        self.last()
    }

    #[inline(always)]
    fn last(&self) -> bool {
        self.last == 0
    }
}

impl HistoricalServiceTimeLane {
    /// Updates the loads of two `paths`, given in the order of the list, and returns which of them
    /// are stale. Returns `None` if `count` bios must be chosen by the list.
    #[inline(always)]
    pub(super) fn refresh_pair(&mut self, paths: [usize; 2], count: usize) -> Option<[bool; 2]> {
        let (limit, loads) = (MANY.saturating_sub(count as u64), self.selector.loads.all());
        let Ok([a, b]) = self.slots.get_disjoint_mut(paths) else { unreachable!("two paths") };
        a.look(loads[paths[0]].load(Relaxed));
        b.look(loads[paths[1]].load(Relaxed));
        let stale = [a.is_stale(self.now), b.is_stale(self.now)];
        let idle_first = (a.load == 0) | (b.load > 0);
        let plain = a.is_plain(limit) & b.is_plain(limit) & (idle_first | (stale[0] != stale[1]));
        (plain & (self.selector.threshold == 0)).then_some(stale)
    }

    /// The choices for a batch between two `paths`, given in the order of the list.
    #[inline(always)]
    pub(super) fn choose_between(
        &mut self,
        mut paths: [usize; 2],
        stale: [bool; 2],
        bios: impl BatchPathDispatch,
    ) {
        if stale[0] != stale[1] {
            return self.choose_with_one_stale(paths, stale[1], bios);
        }
        let (pair, swapped) = SameStalenessPathPair::new(paths.map(|path| &self.slots[path]), stale[0]);
        if swapped {
            paths.swap(0, 1);
        }
        self.dispatch_to_two(paths, pair, bios);
    }

    /// The choices if one path is stale. `last` is true if the stale path was chosen last.
    #[inline(never)]
    fn choose_with_one_stale(&mut self, mut paths: [usize; 2], last: bool, bios: impl BatchPathDispatch) {
        if last {
            paths.swap(0, 1);
        }
        let pair = OneStalePathPair::new(paths.map(|path| &self.slots[path]), last);
        self.dispatch_to_two(paths, pair, bios);
    }

    /// Distributes a batch to `paths` with the choices of `pair`.
    #[inline(always)]
    fn dispatch_to_two(
        &mut self,
        mut paths: [usize; 2],
        mut pair: impl TwoPathChooser,
        bios: impl BatchPathDispatch,
    ) {
        let (count, now) = (bios.left(), self.now);
        let seconds = bios.between(paths, |bio| {
            bio.sent = now;
            pair.choose()
        });
        let mut times = [count - seconds, seconds];
        if !pair.last() {
            paths.swap(0, 1);
            times.swap(0, 1);
        }
        // Only the order of the last choices matters.
        for (place, (path, times)) in paths.into_iter().zip(times).enumerate() {
            let slot = &mut self.slots[path];
            self.clock += u64::from(times > 0);
            slot.used = if times > 0 { self.clock } else { slot.used };
            slot.unpublished = slot.unpublished.wrapping_add(times as u64);
            self.order[place] = path as u32;
        }
    }
}
