//! Rules for hedged reads: when a read is also sent to a second path, and how often.
//!
//! A read is hedged if it takes longer than most reads. The limit is [`PERCENTILE`] of the reads of
//! its group in the last window, and at least [`AFTER_MIN`]. Until the first window ends, the reads
//! so far are used. Each read earns a twentieth of a *hedge*; at most [`SAVED_MAX`] hedges are
//! saved up.
//!
//! If the storage behind all paths is slow, hedges do not win and only add load. So if fewer than
//! [`WON_MIN`] of the last [`WIN_CHECK_HEDGES`] hedges answered first, hedging pauses, each time
//! for twice as long.
//!
//! If the first path is *quiet* (it completes nothing) and the second is not, a hedge adds no load:
//! such a hedge is free. Otherwise the reads of a hanging path would use up the budget quickly, and
//! later reads would wait for the path. Free hedges are also sent during a pause, if the second
//! path is known to answer: storage that was slow earlier says nothing about a path that hangs now.
//! A read that was refused a hedge is examined again while it waits.
//!
//! **One hedge at a time.** If several paths hang at once, for example behind one switch, a hedge
//! may go to a path that also hangs. If the hedge fails or its path becomes quiet, the read may be
//! hedged again by the same rules, at most once per path. Otherwise it would wait for its deadline.

use udm_core::Nanos;

/// Percent of reads that complete before a hedge is sent.
pub(super) const PERCENTILE: u32 = 95;
/// Minimum time before a hedge is sent.
pub(super) const AFTER_MIN: Nanos = Nanos::from_millis(1);
/// A path is quiet if it completes nothing for this many times the hedge delay.
pub(super) const QUIET_FACTOR: u64 = 4;
/// Minimum number of reads in a window for it to be evaluated.
pub(super) const READS_MIN: u32 = 64;
/// Number of reads that earn one hedge.
pub(super) const READS_A_HEDGE: u64 = 20;
/// Maximum number of saved hedges.
pub(super) const SAVED_MAX: u64 = 64;
/// Number of hedges after which the won hedges are checked.
const WIN_CHECK_HEDGES: u32 = 32;
const WON_MIN: u32 = 4;
/// Length of the first and of the longest pause.
const PAUSE: Nanos = Nanos::from_millis(1_000);
const PAUSE_MAX: Nanos = Nanos::from_millis(64_000);

/// The hedge budget of one group on one core.
#[derive(Debug)]
pub(super) struct HedgeBudget {
    /// Reads that have not been spent on hedges.
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
    /// Adds `reads` sent reads.
    pub(super) fn earn(&mut self, reads: u64) {
        self.saved = (self.saved + reads).min(SAVED_MAX * READS_A_HEDGE);
    }

    /// Takes one hedge from the budget. Returns false if none is available.
    pub(super) fn take(&mut self, now: Nanos) -> bool {
        if self.paused(now) || self.saved < READS_A_HEDGE {
            return false;
        }
        self.saved -= READS_A_HEDGE;
        true
    }

    /// True during a pause because too few hedges won.
    pub(super) fn paused(&self, now: Nanos) -> bool {
        now < self.until
    }

    /// Counts a finished hedge; `won` is true if it answered first.
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
