//! The choices for a batch where there are two paths.
//!
//! Which is next is one comparison, or two where one path is stale and the other is not. There is
//! no saying which way they go, so there is no branch in them.

use super::lane::Slot;
use super::rounds::Turn;

/// Which of two paths is next.
pub(super) trait Pair {
    /// True when the next is the second's.
    fn choose(&mut self) -> bool;

    /// True when the last was the second's.
    fn last(&self) -> bool;
}

/// Both paths are stale, or none ([`rounds`](super::rounds) has the rules). Once one of them is
/// busy the rules are the same whether the other is or not, as an idle one is the one not chosen
/// for longest, and while all are stale the one with nothing in flight.
///
/// All is doubled, so that ties have a place between.
pub(super) struct Alike {
    /// What the second costs more than the first.
    dearer: i64,
    /// What a turn of the first adds to it, and what one of the second adds besides.
    adds: [i64; 2],
    /// All bits where all are stale, or none.
    stale: i64,
    /// All bits where the second was chosen last, or none.
    last: i64,
}

impl Alike {
    /// Of the `slots` of two paths, which are stale, or not; true where the second of them is the
    /// first here. What they cost is below 2^60 until the end of the batch.
    #[inline(always)]
    pub(super) fn new(slots: [&Slot; 2], stale: bool) -> (Alike, bool) {
        let [mut a, mut b] = slots.map(|slot| Turn::new(0, slot, stale));
        let swapped = b.rank_of_all(stale) < a.rank_of_all(stale);
        if swapped {
            (a, b) = (b, a);
        }
        let stale = -i64::from(stale);
        let dearer = 2 * (b.cost as i64 - a.cost as i64);
        let adds = [-2 * a.step as i64, 2 * (a.step + b.step) as i64];
        // Where both are idle the first is chosen, whatever they cost.
        let force = i64::from(a.is_idle) << 62;
        (Alike { dearer, adds, stale, last: stale ^ force }, swapped)
    }
}

impl Pair for Alike {
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
pub(super) struct OneStale {
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

impl OneStale {
    /// Of the `slots` of the two; `last` where the first was chosen last. What they cost is below
    /// 2^60 until the end of the batch.
    #[inline(always)]
    pub(super) fn new(slots: [&Slot; 2], last: bool) -> OneStale {
        let [a, b] = slots.map(|slot| Turn::new(0, slot, false));
        OneStale {
            dearer: b.cost as i64 - a.cost as i64,
            adds: [b.step as i64, (a.step + b.step) as i64],
            more: slots[1].load as i64 - slots[0].load as i64,
            last: -i64::from(last),
            idle: -i64::from(a.is_idle),
        }
    }
}

impl Pair for OneStale {
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
