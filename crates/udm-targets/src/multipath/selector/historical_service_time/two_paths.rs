//! The choices for a batch where there are two paths.
//!
//! Which is next is one comparison, or two where one path is stale and the other is not. There is
//! no saying which way they go, so there is no branch in them.

use super::super::BioDispatch;
use super::MANY;
use super::batch_rounds::CostRank;
use super::lane::{HistoricalLane, PathEstimate};
use std::sync::atomic::Ordering::Relaxed;

/// Which of two paths is next.
pub(super) trait TwoPathChooser {
    /// True when the next is the second's.
    fn choose(&mut self) -> bool;

    /// True when the last was the second's.
    fn last(&self) -> bool;
}

/// Both paths are stale, or none ([`batch_rounds`](super::rounds) has the rules). Once one of them is
/// busy the rules are the same whether the other is or not, as an idle one is the one not chosen
/// for longest, and while all are stale the one with nothing in flight.
///
/// All is doubled, so that ties have a place between.
pub(super) struct SameStalenessPair {
    /// What the second costs more than the first.
    dearer: i64,
    /// What a turn of the first adds to it, and what one of the second adds besides.
    adds: [i64; 2],
    /// All bits where all are stale, or none.
    stale: i64,
    /// All bits where the second was chosen last, or none.
    last: i64,
}

impl SameStalenessPair {
    /// Of the `in_flight` of two paths, which are stale, or not; true where the second of them is the
    /// first here. What they cost is below 2^60 until the end of the batch.
    #[inline(always)]
    pub(super) fn new(slots: [&PathEstimate; 2], stale: bool) -> (SameStalenessPair, bool) {
        let [mut a, mut b] = slots.map(|slot| CostRank::new(0, slot, stale));
        let swapped = b.rank_of_all(stale) < a.rank_of_all(stale);
        if swapped {
            (a, b) = (b, a);
        }
        let stale = -i64::from(stale);
        let dearer = 2 * (b.cost as i64 - a.cost as i64);
        let adds = [-2 * a.step as i64, 2 * (a.step + b.step) as i64];
        // Where both are idle the first is chosen, whatever they cost.
        let force = i64::from(a.is_idle) << 62;
        (SameStalenessPair { dearer, adds, stale, last: stale ^ force }, swapped)
    }
}

impl TwoPathChooser for SameStalenessPair {
    #[inline(always)]
    fn choose(&mut self) -> bool {
        // While none is stale the one chosen last is chosen of two that cost the same, and the
        // other one while all are.
        self.last = (self.dearer + (self.last ^ self.stale)) >> 63;
        self.dearer += self.adds[0] + (self.adds[1] & self.last);
        self.last()
    }

    #[inline(always)]
    fn last(&self) -> bool {
        self.last != 0
    }
}

/// The first is stale and the second is not. An idle first is chosen. Else the first is chosen
/// where it neither costs more nor has more in flight; of the two ties one, that of what is in
/// flight, goes to the one not chosen last, and the other to the one that was.
pub(super) struct OneStalePair {
    /// What the second costs more than the first.
    dearer: i64,
    /// What a turn of the second adds to it, and what one of the first takes away besides.
    adds: [i64; 2],
    /// How many more the second has in flight.
    more: i64,
    /// All bits where the first was chosen last, or none.
    last: i64,
    /// All bits where the first is next whatever it costs, or none.
    idle: i64,
}

impl OneStalePair {
    /// Of the `in_flight` of the two; `last` where the first was chosen last. What they cost is below
    /// 2^60 until the end of the batch.
    #[inline(always)]
    pub(super) fn new(slots: [&PathEstimate; 2], last: bool) -> OneStalePair {
        let [a, b] = slots.map(|slot| CostRank::new(0, slot, false));
        OneStalePair {
            dearer: b.cost as i64 - a.cost as i64,
            adds: [b.step as i64, (a.step + b.step) as i64],
            more: slots[1].load as i64 - slots[0].load as i64,
            last: -i64::from(last),
            idle: -i64::from(a.is_idle),
        }
    }
}

impl TwoPathChooser for OneStalePair {
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

impl HistoricalLane {
    /// Reads what is in flight on two `paths`, in the order of the list, and says which of them are
    /// stale; `None` where `count` bios have to be chosen for by the list.
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

    /// The choices for a batch between two `paths`, which are in the order of the list.
    #[inline(always)]
    pub(super) fn choose_between(&mut self, mut paths: [usize; 2], stale: [bool; 2], bios: impl BioDispatch) {
        if stale[0] != stale[1] {
            return self.choose_with_one_stale(paths, stale[1], bios);
        }
        let (pair, swapped) = SameStalenessPair::new(paths.map(|path| &self.slots[path]), stale[0]);
        if swapped {
            paths.swap(0, 1);
        }
        self.dispatch_to_two(paths, pair, bios);
    }

    /// The same where one of them is stale: the one chosen last, if `last`.
    #[inline(never)]
    fn choose_with_one_stale(&mut self, mut paths: [usize; 2], last: bool, bios: impl BioDispatch) {
        if last {
            paths.swap(0, 1);
        }
        let pair = OneStalePair::new(paths.map(|path| &self.slots[path]), last);
        self.dispatch_to_two(paths, pair, bios);
    }

    /// Deals a batch out to the first and the second of `paths`, as `two_paths` says.
    #[inline(always)]
    fn dispatch_to_two(
        &mut self,
        mut paths: [usize; 2],
        mut pair: impl TwoPathChooser,
        bios: impl BioDispatch,
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
        // What matters is who was chosen after whom.
        for (place, (path, times)) in paths.into_iter().zip(times).enumerate() {
            let slot = &mut self.slots[path];
            self.clock += u64::from(times > 0);
            slot.used = if times > 0 { self.clock } else { slot.used };
            slot.unpublished = slot.unpublished.wrapping_add(times as u64);
            self.order[place] = path as u32;
        }
    }
}
