//! When a read is sent to a second path, and how often that may be.
//!
//! A read that has taken longer than most do ([`PERCENTILE`] of those of its group in the last
//! window, at first of those there are, and never less than [`AFTER_MIN`]) goes to a second path as
//! well. Each read earns a twentieth of such a *hedge*, and no more than [`SAVED_MAX`] are saved
//! up. Where hedges do not win (storage that is slow behind all paths) they only add to its load:
//! when fewer than [`WON_MIN`] of the last [`WIN_CHECK_HEDGES`] were the first to answer, there are none for a
//! while, twice as long each time.
//!
//! What is sent in place of a path that is *quiet*, and of no other, is no additional load: such a
//! hedge is free, as long as the path that it goes to is not quiet too. Else the reads of a path
//! that hangs would use up the budget within a few times the shortest wait, and then wait for the
//! path. That holds while there are none for want of success, too, where the other path is known to
//! answer: storage that was slow behind all paths a while ago says nothing about a path that hangs
//! now. A read that was refused is looked at again while it waits.
//!
//! **One hedge at a time.** Where several paths hang at once, since they share a switch, a hedge
//! may go to one of those that nobody knows of yet. When it comes back with an error, or its path
//! has become quiet, the read may have another one, by the same rules, and on each path one at the
//! most. Else it would wait for its deadline, and the longest read is what hedges are for.

use udm_core::Nanos;
use udm_core::bugs::{self, Bug};

/// Of a hundred reads so many are through before a hedge is sent.
pub(super) const PERCENTILE: u32 = 95;
/// No hedge is sent sooner.
pub(super) const AFTER_MIN: Nanos = Nanos::from_millis(1);
/// A path that has answered nothing for so many times as long is quiet.
pub(super) const QUIET_FACTOR: u64 = 4;
/// Reads that a window must have to go by it.
pub(super) const READS_MIN: u32 = 64;
/// Reads that earn one hedge.
pub(super) const READS_A_HEDGE: u64 = 20;
/// The most hedges that are saved up.
pub(super) const SAVED_MAX: u64 = 64;
/// Hedges after which it is looked how many have won.
const WIN_CHECK_HEDGES: u32 = 32;
const WON_MIN: u32 = 4;
/// How long there are none, first and at the most.
const PAUSE: Nanos = Nanos::from_millis(1_000);
const PAUSE_MAX: Nanos = Nanos::from_millis(64_000);

/// The budget of one lane.
#[derive(Debug)]
pub(super) struct HedgeBudget {
    /// Reads not spent.
    saved: u64,
    ended: u32,
    won: u32,
    pause: Nanos,
    until: Nanos,
}

impl Default for HedgeBudget {
    fn default() -> HedgeBudget {
        HedgeBudget { saved: 0, ended: 0, won: 0, pause: PAUSE, until: Nanos(0) }
    }
}

impl HedgeBudget {
    /// `reads` were sent.
    pub(super) fn earn(&mut self, reads: u64) {
        self.saved = (self.saved + reads).min(SAVED_MAX * READS_A_HEDGE);
    }

    /// Takes one hedge; false when there is none to be had.
    pub(super) fn take(&mut self, now: Nanos) -> bool {
        if bugs::on(Bug::HedgeUnpaid) {
            return true;
        }
        if self.paused(now) || self.saved < READS_A_HEDGE {
            return false;
        }
        self.saved -= READS_A_HEDGE;
        true
    }

    /// True while there are none for want of success.
    pub(super) fn paused(&self, now: Nanos) -> bool {
        now < self.until
    }

    /// A hedge has ended: it was the first to answer, or not.
    pub(super) fn ended(&mut self, won: bool, now: Nanos) {
        self.ended += 1;
        self.won += u32::from(won);
        if self.ended < WIN_CHECK_HEDGES {
            return;
        }
        if self.won < WON_MIN {
            self.until = now + self.pause;
            self.pause = Nanos((self.pause.0 * 2).min(PAUSE_MAX.0));
        } else {
            (self.pause, self.until) = (PAUSE, Nanos(0));
        }
        (self.ended, self.won) = (0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Nanos = Nanos::from_millis(1);

    fn taken(budget: &mut HedgeBudget, now: Nanos) -> u64 {
        (0..10_000).take_while(|_| budget.take(now)).count() as u64
    }

    #[test]
    fn one_in_twenty() {
        let mut budget = HedgeBudget::default();
        assert_eq!(taken(&mut budget, NOW), 0, "nothing is had in advance");
        budget.earn(19);
        assert_eq!(taken(&mut budget, NOW), 0);
        budget.earn(181);
        assert_eq!(taken(&mut budget, NOW), 10);
        budget.earn(1 << 40);
        assert_eq!(taken(&mut budget, NOW), SAVED_MAX);
    }

    #[test]
    fn hedges_that_do_not_win_rest_longer_each_time() {
        let mut budget = HedgeBudget::default();
        budget.earn(1 << 40);
        let (mut now, mut paused) = (NOW, Vec::new());
        for _ in 0..9 {
            (0..WIN_CHECK_HEDGES).for_each(|i| budget.ended(i < WON_MIN - 1, now));
            assert!(!budget.take(now));
            paused.push(budget.until.since(now));
            now = budget.until;
            budget.earn(READS_A_HEDGE);
            assert!(budget.take(now), "they come back");
        }
        assert_eq!((paused[0], paused[1], paused[8]), (PAUSE, Nanos(2 * PAUSE.0), PAUSE_MAX));
        (0..WIN_CHECK_HEDGES).for_each(|_| budget.ended(false, now));
        assert!(budget.paused(now));
        (0..WIN_CHECK_HEDGES).for_each(|i| budget.ended(i < WON_MIN, now));
        assert!(budget.take(now), "those that win end the rest");
        (0..WIN_CHECK_HEDGES).for_each(|_| budget.ended(false, now));
        assert_eq!(budget.until.since(now), PAUSE, "those that win make up for it");
    }
}
