//! Decides if and how long a core spins before it sleeps.
//!
//! Spinning saves the time to wake up, but uses a CPU. Whether it pays depends on facts that a
//! program cannot query: how long a CPU takes to wake up, and whether the client needs the CPU that
//! spins. So the core tries both modes from time to time, for a short time. It compares *rounds*,
//! from the end of one wait to the end of the next, and keeps the mode with shorter rounds. If the
//! difference is small, the core sleeps.

use udm_core::Nanos;

/// Number of waits per mode in a trial.
const TRIAL: u32 = 128;

/// Number of waits between trials.
const TRIAL_PAUSE: u32 = 4096;

/// Number of waits before the first trial.
const FIRST: u32 = 256;

/// Stage of a trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SpinTrialStage {
    /// No trial is in progress.
    Idle,
    /// The current mode is measured.
    Current,
    /// The other mode is measured. The rounds of the current mode took `own` ns.
    Alternative { own: u64 },
}

/// Decides if and how long a core spins, by trials of both modes.
#[derive(Debug)]
pub(crate) struct SpinPolicy {
    /// The longest spin in ns.
    max: u64,
    /// The next spin in ns, if the core spins.
    length: u64,
    spins: bool,
    stage: SpinTrialStage,
    /// Number of waits until the stage ends, and duration of its rounds in ns.
    left: u32,
    spent: u64,
    /// End of the last wait.
    last: Nanos,
}

impl SpinPolicy {
    /// Creates a policy with spins of at most `max` ns; 0 means no spins.
    pub(crate) fn new(max: u64) -> SpinPolicy {
        SpinPolicy {
            max,
            length: 0,
            spins: false,
            stage: SpinTrialStage::Idle,
            left: FIRST,
            spent: 0,
            last: Nanos(0),
        }
    }

    /// Duration of the next spin in ns; 0 if the core sleeps at once.
    pub(crate) fn length(&self) -> u64 {
        if self.spins { self.length } else { 0 }
    }

    /// Records a wait from `begin` to `end`, whether spun or slept.
    pub(crate) fn waited(&mut self, begin: Nanos, end: Nanos) {
        let waited = end.since(begin).0;
        if waited > self.length() {
            // The spin was too short. If the event came within `max`, a longer spin would have
            // paid; if later, no spin would have. A spin that paid keeps its length, since a
            // shorter one would miss slightly later events.
            self.length = if waited <= self.max { (waited * 2).min(self.max) } else { self.length / 2 };
            if self.length < 1000 {
                self.length = 0;
            }
        }
        // A round longer than the longest spin depends on the client or on other users of the CPU,
        // not on the mode.
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
            SpinTrialStage::Idle if self.max == 0 => (SpinTrialStage::Idle, TRIAL_PAUSE),
            SpinTrialStage::Idle => (SpinTrialStage::Current, TRIAL),
            SpinTrialStage::Current => {
                self.spins = !self.spins;
                self.length = self.max;
                (SpinTrialStage::Alternative { own: spent }, TRIAL)
            }
            SpinTrialStage::Alternative { own } => {
                let (spun, slept) = if self.spins { (spent, own) } else { (own, spent) };
                // Spinning must save at least a fifth, since it uses a whole CPU.
                self.spins = spun < slept - slept / 5;
                (SpinTrialStage::Idle, TRIAL_PAUSE)
            }
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX: u64 = 50_000;

    /// Runs two trials with the given round times of both modes. Returns how many of the waits
    /// since then spun.
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
