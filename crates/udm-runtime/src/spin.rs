//! Whether a core spins before it sleeps, and for how long.
//!
//! A core that spins saves its waking, and takes a CPU for that. Whether it pays depends on what
//! nobody tells a program: how long a CPU takes to wake up, and whether the client wants the very
//! CPU that is spun on. So both ways are tried, now and then for a short time: the shorter *rounds*
//! say which is better, from the end of one wait to the end of the next. Where there is little
//! between them the core sleeps.

use udm_core::Nanos;

/// Waits that a way is tried for.
const TRIAL: u32 = 128;

/// Waits between trials.
const TRIAL_PAUSE: u32 = 4096;

/// A core that has waited so often tries for the first time.
const FIRST: u32 = 256;

/// How far a trial has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TrialStage {
    /// None is under way.
    Idle,
    /// The way that is in use is timed.
    Current,
    /// The other one is, which took this long in all.
    Alternative { own: u64 },
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct SpinPolicy {
    /// The longest in ns.
    max: u64,
    /// The next in ns, when the core spins.
    length: u64,
    spins: bool,
    stage: TrialStage,
    /// Waits until the stage ends, and what its rounds took.
    left: u32,
    spent: u64,
    /// When the last wait ended.
    last: Nanos,
}

impl SpinPolicy {
    /// Spins of `max` ns at the most; 0 for none.
    pub(crate) fn new(max: u64) -> SpinPolicy {
        SpinPolicy {
            max,
            length: 0,
            spins: false,
            stage: TrialStage::Idle,
            left: FIRST,
            spent: 0,
            last: Nanos(0),
        }
    }

    /// How long to spin now, in ns.
    pub(crate) fn length(&self) -> u64 {
        if self.spins { self.length } else { 0 }
    }

    /// A wait, spun or slept, from `begin` to `end`.
    pub(crate) fn waited(&mut self, begin: Nanos, end: Nanos) {
        let waited = end.since(begin).0;
        if waited > self.length() {
            // What came soon after a spin ended would have been worth a longer one; what came much
            // later was not worth any. A spin that was worth it stays as it is: shorter ones would
            // miss what comes a little later.
            self.length = if waited <= self.max { (waited * 2).min(self.max) } else { self.length / 2 };
            if self.length < 1000 {
                self.length = 0;
            }
        }
        // A round that took longer than the longest spin tells of the client, or of who else wants
        // the CPU, and not of the way.
        self.spent += end.since(self.last).0.min(self.max);
        self.last = end;
        self.left -= 1;
        if self.left == 0 {
            self.next_stage();
        }
    }

    fn next_stage(&mut self) {
        let spent = std::mem::take(&mut self.spent);
        (self.stage, self.left) = match self.stage {
            TrialStage::Idle if self.max == 0 => (TrialStage::Idle, TRIAL_PAUSE),
            TrialStage::Idle => (TrialStage::Current, TRIAL),
            TrialStage::Current => {
                self.spins = !self.spins;
                self.length = self.max;
                (TrialStage::Alternative { own: spent }, TRIAL)
            }
            TrialStage::Alternative { own } => {
                let (spun, slept) = if self.spins { (spent, own) } else { (own, spent) };
                // A fifth, at the least: it is a whole CPU that is spent.
                self.spins = spun < slept - slept / 5;
                (TrialStage::Idle, TRIAL_PAUSE)
            }
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX: u64 = 50_000;

    /// Waits until two trials are over, with rounds that take so long when the core spins and when
    /// it sleeps; says in how many of the waits since it spun.
    fn settle(spun: u64, slept: u64) -> usize {
        let mut spin = SpinPolicy::new(MAX);
        let mut now = Nanos(1_000_000_000);
        let mut n = 0;
        for wait in 0..3 * (TRIAL_PAUSE + 2 * TRIAL) {
            let spins = spin.length() > 0;
            let begin = now + Nanos(1000);
            now = now + Nanos(if spins { spun } else { slept });
            spin.waited(begin, now);
            n += usize::from(spins && wait > FIRST + TRIAL_PAUSE + 4 * TRIAL);
        }
        n
    }

    #[test]
    fn the_shorter_way_is_taken() {
        let all = (2 * TRIAL_PAUSE - FIRST) as usize;
        assert!(settle(10_000, 20_000) > all - 2 * TRIAL as usize, "spinning pays");
        assert!(settle(20_000, 10_000) <= 2 * TRIAL as usize, "it does not: it is only tried");
        assert!(settle(8_500, 10_000) <= 2 * TRIAL as usize, "it is hardly worth a CPU");
        assert!(settle(3_000_000, 3_000_000) <= 2 * TRIAL as usize, "a client that comes rarely");
    }

    #[test]
    fn none_is_none() {
        let mut spin = SpinPolicy::new(0);
        for i in 0..20_000 {
            spin.waited(Nanos(i * 10_000), Nanos(i * 10_000 + 5_000));
            assert_eq!(spin.length(), 0);
        }
    }
}
