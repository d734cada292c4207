//! Paths that keep failing (spec G7a): two failures in a short time, and a path is held back and
//! read from, until few enough of the reads fail.

use udm_core::Nanos;
use udm_wire::multipath_conf::Marginal;

/// From one read of a sample to the next.
const EVERY: Nanos = Nanos::from_millis(100);

/// A read that takes longer is an error: nothing new is sent in the last so much of a sample.
const QUIET: Nanos = Nanos::from_millis(60_000);

/// Reads in flight on one path, at the most.
pub(super) const SAMPLES_MAX: usize = 32;

/// What is thought of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Watch {
    /// Nothing bad. When it last failed.
    Fine(Option<Nanos>),
    /// It is being read from.
    Sampling {
        /// Since when.
        since: Nanos,
        /// When it is read from next.
        due: Nanos,
        /// Reads so far.
        sent: u64,
        /// Those that failed.
        bad: u64,
    },
    /// It had too many errors. Until when.
    Held(Nanos),
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Act {
    /// Nothing.
    Nothing,
    /// A read.
    Sample,
    /// It may be reinstated: check it.
    Release,
}

impl Watch {
    /// The path has failed.
    pub fn failed(&mut self, now: Nanos, rule: &Marginal) {
        if let Watch::Fine(last) = self {
            *self = match last {
                Some(at) if now.since(*at) <= rule.double_failed_time => Watch::sample(now),
                _ => Watch::Fine(Some(now)),
            };
        }
    }

    fn sample(now: Nanos) -> Watch {
        Watch::Sampling { since: now, due: now, sent: 0, bad: 0 }
    }

    /// It must not be reinstated.
    pub fn holds(&self) -> bool {
        !matches!(self, Watch::Fine(_))
    }

    /// Goes on; `in_flight` reads have no answer yet. Where no path is left at all, an error now
    /// and then is better than nothing.
    pub fn look(&mut self, now: Nanos, rule: &Marginal, in_flight: usize, none_left: bool) -> Act {
        if none_left && self.holds() {
            *self = Watch::Fine(None);
            return Act::Release;
        }
        match self {
            Watch::Fine(_) => Act::Nothing,
            Watch::Held(until) => {
                if *until <= now {
                    *self = Watch::sample(now);
                    return self.look(now, rule, in_flight, none_left);
                }
                Act::Nothing
            }
            Watch::Sampling { since, due, sent, bad } => {
                let end = *since + rule.err_sample_time;
                if end <= now {
                    let errors = *bad + in_flight as u64;
                    if errors * 1000 <= *sent * u64::from(rule.err_rate_threshold) {
                        *self = Watch::Fine(None);
                        return Act::Release;
                    }
                    *self = Watch::Held(now + rule.err_recheck_gap_time);
                    return Act::Nothing;
                }
                if now < *due {
                    return Act::Nothing;
                }
                let quiet = Nanos(QUIET.0.min(rule.err_sample_time.0 / 2));
                if now + quiet >= end {
                    *due = end;
                    return Act::Nothing;
                }
                *due = now + EVERY;
                if in_flight >= SAMPLES_MAX {
                    return Act::Nothing;
                }
                *sent += 1;
                Act::Sample
            }
        }
    }

    /// A read of a sample is back.
    pub fn sampled(&mut self, well: bool) {
        if let Watch::Sampling { bad, .. } = self {
            *bad += u64::from(!well);
        }
    }

    /// When it has to be looked at.
    pub fn next(&self) -> Nanos {
        match self {
            Watch::Fine(_) => Nanos::NEVER,
            Watch::Sampling { due, .. } => *due,
            Watch::Held(until) => *until,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Nanos {
        Nanos::from_millis(ms)
    }

    fn rule(threshold: u32) -> Marginal {
        Marginal {
            double_failed_time: at(60_000),
            err_sample_time: at(160_000),
            err_rate_threshold: threshold,
            err_recheck_gap_time: at(300_000),
        }
    }

    /// Samples to the end, where each `n`th read fails: how many reads there were, and the end.
    fn sample(watch: &mut Watch, rule: &Marginal, from: Nanos, n: u64) -> (u64, Act) {
        let (mut now, mut reads) = (from, 0);
        loop {
            match watch.look(now, rule, 0, false) {
                Act::Sample => {
                    reads += 1;
                    watch.sampled(!u64::is_multiple_of(reads, n));
                }
                Act::Nothing if matches!(watch, Watch::Sampling { .. }) => {}
                act => return (reads, act),
            }
            now = watch.next();
        }
    }

    #[test]
    fn d07_few_errors_and_it_is_back_many_and_it_is_held() {
        for (threshold, act) in [(10, Act::Release), (1, Act::Nothing)] {
            let rule = rule(threshold);
            let mut watch = Watch::Fine(None);
            watch.failed(at(0), &rule);
            assert!(!watch.holds(), "once is nothing");
            watch.failed(at(60_000), &rule);
            assert!(watch.holds());
            // 1000 reads: each 100 ms for 160 s, but for the last 60.
            assert_eq!(sample(&mut watch, &rule, at(60_000), 200), (1000, act));
            if act == Act::Nothing {
                assert_eq!(watch, Watch::Held(at(60_000 + 160_000 + 300_000)));
                let again = at(520_000);
                assert_eq!(
                    watch.look(again, &rule, 0, false),
                    Act::Sample,
                    "behind the gap it is sampled anew"
                );
                assert_eq!(watch.look(again, &rule, 0, true), Act::Release, "no other path");
            }
            assert!(!watch.holds());
        }
    }

    #[test]
    fn failures_far_apart_are_nothing() {
        let mut watch = Watch::Fine(None);
        for minute in 0..10 {
            watch.failed(at(minute * 61_000), &rule(1));
            assert!(!watch.holds());
        }
    }

    #[test]
    fn reads_without_an_answer_are_errors_and_bounded() {
        let rule = rule(10);
        let mut watch = Watch::sample(at(0));
        let (mut sent, mut now) = (0, at(0));
        while now < at(160_000) {
            sent += usize::from(watch.look(now, &rule, sent, false) == Act::Sample);
            now = watch.next();
        }
        assert_eq!(sent, SAMPLES_MAX);
        assert_eq!(watch.look(now, &rule, sent, false), Act::Nothing);
        assert!(matches!(watch, Watch::Held(_)));
    }
}
