//! Paths that keep failing. If a path fails twice in a short time, it is held back and sampled with
//! reads until few enough of them fail.

use crate::multipath::quarantine_status::QuarantineStatus;
use udm_core::Nanos;
use udm_wire::multipath_conf::MarginalPathPolicy;

/// Interval between two reads of a sample.
const SAMPLE_INTERVAL: Nanos = Nanos::from_millis(100);

/// A read that takes longer counts as an error: no read is sent in the last 60 s of a sample, or in
/// the second half of a shorter one.
const SAMPLE_TIMEOUT: Nanos = Nanos::from_millis(60_000);

/// Maximum number of reads in flight per path.
pub(super) const SAMPLES_MAX: usize = 32;

/// The quarantine state of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PathQuarantineState {
    /// Not in quarantine. The value is the time of the last failure.
    Healthy(Option<Nanos>),
    /// The path is sampled with reads.
    Sampling {
        /// Start of the sample.
        since: Nanos,
        /// Time of the next read.
        due: Nanos,
        /// Reads so far.
        sent: u64,
        /// Failed reads so far.
        bad: u64,
    },
    /// The sample had too many errors.
    Failed {
        /// Time of the next sample.
        until: Nanos,
        /// Reads of the sample.
        sent: u64,
        /// Failed reads of the sample.
        bad: u64,
    },
}

/// The next step for a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum QuarantinedPathAction {
    /// Nothing.
    Nothing,
    /// Send a sample read.
    Sample,
    /// End the quarantine: check the path, which may then be reinstated.
    Release,
}

impl PathQuarantineState {
    /// The path has failed. If no path is left, there is no quarantine: the path is checked again
    /// as any failed path.
    pub fn failed(&mut self, now: Nanos, rule: &MarginalPathPolicy, none_left: bool) {
        if let PathQuarantineState::Healthy(last) = self {
            *self = match last {
                Some(at) if now.since(*at) <= rule.double_failed_time && !none_left => {
                    PathQuarantineState::sample(now)
                }
                _ => PathQuarantineState::Healthy(Some(now)),
            };
        }
    }

    fn sample(now: Nanos) -> PathQuarantineState {
        PathQuarantineState::Sampling { since: now, due: now, sent: 0, bad: 0 }
    }

    /// True if the path must not be reinstated.
    pub fn is_quarantined(&self) -> bool {
        !matches!(self, PathQuarantineState::Healthy(_))
    }

    /// The end and reason of the quarantine, if there is one.
    pub fn quarantine_status(&self, rule: &MarginalPathPolicy) -> Option<QuarantineStatus> {
        match *self {
            PathQuarantineState::Healthy(_) => None,
            PathQuarantineState::Sampling { since, .. } => {
                Some(QuarantineStatus { end: since + rule.err_sample_time, sent: 0, bad: 0 })
            }
            PathQuarantineState::Failed { until, sent, bad } => {
                Some(QuarantineStatus { end: until, sent, bad })
            }
        }
    }

    /// Returns the next step; `in_flight` sample reads are pending. If no path is left, the
    /// quarantine ends, because a path with errors is better than none.
    pub fn look(
        &mut self,
        now: Nanos,
        rule: &MarginalPathPolicy,
        in_flight: usize,
        none_left: bool,
    ) -> QuarantinedPathAction {
        if none_left && self.is_quarantined() {
            *self = PathQuarantineState::Healthy(None);
            return QuarantinedPathAction::Release;
        }
        match self {
            PathQuarantineState::Healthy(_) => QuarantinedPathAction::Nothing,
            PathQuarantineState::Failed { until, .. } => {
                if *until <= now {
                    *self = PathQuarantineState::sample(now);
                    return self.look(now, rule, in_flight, none_left);
                }
                QuarantinedPathAction::Nothing
            }
            PathQuarantineState::Sampling { since, due, sent, bad } => {
                let end = *since + rule.err_sample_time;
                if end <= now {
                    let errors = *bad + in_flight as u64;
                    if errors * 1000 <= *sent * u64::from(rule.err_rate_threshold) {
                        *self = PathQuarantineState::Healthy(None);
                        return QuarantinedPathAction::Release;
                    }
                    let until = now + rule.err_recheck_gap_time;
                    *self = PathQuarantineState::Failed { until, sent: *sent, bad: errors };
                    return QuarantinedPathAction::Nothing;
                }
                if now < *due {
                    return QuarantinedPathAction::Nothing;
                }
                let quiet = Nanos(SAMPLE_TIMEOUT.0.min(rule.err_sample_time.0 / 2));
                if now + quiet >= end {
                    *due = end;
                    return QuarantinedPathAction::Nothing;
                }
                *due = now + SAMPLE_INTERVAL;
                if in_flight >= SAMPLES_MAX {
                    return QuarantinedPathAction::Nothing;
                }
                *sent += 1;
                QuarantinedPathAction::Sample
            }
        }
    }

    /// A sample read completed.
    pub fn sampled(&mut self, well: bool) {
        if let PathQuarantineState::Sampling { bad, .. } = self {
            *bad += u64::from(!well);
        }
    }

    /// Time of the next call of [`PathQuarantineState::look`].
    pub fn next(&self) -> Nanos {
        match self {
            PathQuarantineState::Healthy(_) => Nanos::NEVER,
            PathQuarantineState::Sampling { due, .. } => *due,
            PathQuarantineState::Failed { until, .. } => *until,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Nanos {
        Nanos::from_millis(ms)
    }

    fn rule(threshold: u32) -> MarginalPathPolicy {
        MarginalPathPolicy {
            double_failed_time: at(60_000),
            err_sample_time: at(160_000),
            err_rate_threshold: threshold,
            err_recheck_gap_time: at(300_000),
        }
    }

    /// Runs a sample in which every `n`th read fails. Returns the number of reads and the last
    /// step.
    fn sample(
        quarantine: &mut PathQuarantineState,
        rule: &MarginalPathPolicy,
        from: Nanos,
        n: u64,
    ) -> (u64, QuarantinedPathAction) {
        let (mut now, mut reads) = (from, 0);
        loop {
            match quarantine.look(now, rule, 0, false) {
                QuarantinedPathAction::Sample => {
                    reads += 1;
                    quarantine.sampled(!u64::is_multiple_of(reads, n));
                }
                QuarantinedPathAction::Nothing
                    if matches!(quarantine, PathQuarantineState::Sampling { .. }) => {}
                act => return (reads, act),
            }
            now = quarantine.next();
        }
    }

    #[test]
    fn d07_few_errors_and_it_is_back_many_and_it_is_held() {
        for (threshold, act) in [(10, QuarantinedPathAction::Release), (1, QuarantinedPathAction::Nothing)] {
            let rule = rule(threshold);
            let mut quarantine = PathQuarantineState::Healthy(None);
            quarantine.failed(at(0), &rule, false);
            assert!(!quarantine.is_quarantined(), "once is nothing");
            quarantine.failed(at(60_000), &rule, false);
            assert!(quarantine.is_quarantined());
            // 1000 reads: one per 100 ms for 160 s, without the last 60 s.
            assert_eq!(sample(&mut quarantine, &rule, at(60_000), 200), (1000, act));
            if act == QuarantinedPathAction::Nothing {
                let until = at(60_000 + 160_000 + 300_000);
                assert_eq!(quarantine, PathQuarantineState::Failed { until, sent: 1000, bad: 5 });
                let again = at(520_000);
                assert_eq!(
                    quarantine.look(again, &rule, 0, false),
                    QuarantinedPathAction::Sample,
                    "after the gap it is sampled again"
                );
                assert_eq!(
                    quarantine.look(again, &rule, 0, true),
                    QuarantinedPathAction::Release,
                    "no other path"
                );
            }
            assert!(!quarantine.is_quarantined());
        }
    }

    #[test]
    fn failures_far_apart_are_nothing() {
        let mut quarantine = PathQuarantineState::Healthy(None);
        for minute in 0..10 {
            quarantine.failed(at(minute * 61_000), &rule(1), false);
            assert!(!quarantine.is_quarantined());
        }
    }

    #[test]
    fn reads_without_an_answer_are_errors_and_bounded() {
        let rule = rule(10);
        let mut quarantine = PathQuarantineState::sample(at(0));
        let (mut sent, mut now) = (0, at(0));
        while now < at(160_000) {
            sent += usize::from(quarantine.look(now, &rule, sent, false) == QuarantinedPathAction::Sample);
            now = quarantine.next();
        }
        assert_eq!(sent, SAMPLES_MAX);
        assert_eq!(quarantine.look(now, &rule, sent, false), QuarantinedPathAction::Nothing);
        assert!(matches!(quarantine, PathQuarantineState::Failed { sent: 32, bad: 32, .. }));
    }
}
