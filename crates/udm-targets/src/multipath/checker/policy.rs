//! Policies for the loss of the last path (`no_path_retry`) and for failback to a better group.

use udm_core::Nanos;
use udm_wire::multipath_conf::{Failback, MultipathSettings, NoPathRetry};

/// `no_path_retry`: whether requests are queued without a path, and for how long. A message may
/// override it until a path returns.
pub(super) struct NoPathPolicy {
    rule: Option<NoPathRetry>,
    interval: Nanos,
    /// The time when queueing ends.
    off: Nanos,
    /// Queueing has ended, by timeout or by message, and no path has returned since.
    ended: bool,
    /// A path has returned since the last look.
    returned: bool,
}

impl NoPathPolicy {
    pub fn new(settings: &MultipathSettings) -> NoPathPolicy {
        let (rule, interval) = (settings.no_path_retry, settings.polling_interval);
        NoPathPolicy { rule, interval, off: Nanos::NEVER, ended: false, returned: false }
    }

    /// The initial queueing mode; `None` if the table decides.
    pub fn begin(&self) -> Option<bool> {
        self.rule.map(|rule| rule != NoPathRetry::Fail)
    }

    /// A failed path is in use again.
    pub fn returned(&mut self) {
        self.returned = true;
    }

    /// Returns the new queueing mode if it changes. `valid` paths are in use; `queueing` is the
    /// current mode.
    pub fn look(&mut self, now: Nanos, valid: u32, queueing: bool) -> Option<bool> {
        let rule = self.rule?;
        let mut waits = queueing;
        if std::mem::take(&mut self.returned) || valid > 0 && self.ended {
            (self.off, self.ended) = (Nanos::NEVER, false);
            waits = rule != NoPathRetry::Fail;
        }
        if let NoPathRetry::Checks(checks) = rule {
            self.ended |= valid == 0 && !waits;
            if valid > 0 || self.ended {
                self.off = Nanos::NEVER;
            } else if self.off == Nanos::NEVER {
                self.off = now + Nanos(self.interval.0.saturating_mul(u64::from(checks)));
            } else if self.off <= now {
                (self.off, self.ended, waits) = (Nanos::NEVER, true, false);
            }
        }
        (waits != queueing).then_some(waits)
    }

    /// Time of the next look.
    pub fn next(&self) -> Nanos {
        self.off
    }
}

/// `failback`: when to switch to a better group than the one in use.
pub(super) struct FailbackPolicy {
    rule: Failback,
    /// The better group, and the time of the switch.
    plan: Option<(usize, Nanos)>,
}

/// The kind of a path's return.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PathReinstateKind {
    /// No return: the path still works.
    StillUp,
    /// A path returned, but others of its group were up or its group is not the best.
    Path,
    /// The first path of the best group returned.
    FirstOfBest,
}

impl FailbackPolicy {
    pub fn new(settings: &MultipathSettings) -> FailbackPolicy {
        FailbackPolicy { rule: settings.failback, plan: None }
    }

    /// A check succeeded. Returns the group to switch to now.
    pub fn look(
        &mut self,
        now: Nanos,
        best: Option<usize>,
        in_use: Option<usize>,
        who: PathReinstateKind,
    ) -> Option<usize> {
        let Some(best) = best.filter(|_| best != in_use) else {
            self.plan = None;
            return None;
        };
        match self.rule {
            Failback::Manual => None,
            Failback::Immediate => Some(best),
            Failback::Followover => (who == PathReinstateKind::FirstOfBest).then_some(best),
            Failback::After(time) => {
                // Each returning path restarts the delay.
                let kept = self.plan.filter(|&(to, _)| to == best && who == PathReinstateKind::StillUp);
                let (_, at) = *self.plan.insert(kept.unwrap_or((best, now + time)));
                (at <= now).then_some(best)
            }
        }
    }

    /// A path has failed: the plan is cancelled.
    pub fn failed(&mut self) {
        self.plan = None;
    }

    /// The better group, and the time of the switch.
    pub fn plan(&self) -> Option<(usize, Nanos)> {
        self.plan
    }

    /// Time of the next look.
    pub fn next(&self) -> Nanos {
        self.plan.map_or(Nanos::NEVER, |(_, at)| at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Nanos {
        Nanos::from_millis(seconds * 1000)
    }

    fn settings(no_path_retry: Option<NoPathRetry>, failback: Failback) -> MultipathSettings {
        MultipathSettings { no_path_retry, failback, ..MultipathSettings::every(5) }
    }

    fn queueing(rule: Option<NoPathRetry>) -> NoPathPolicy {
        NoPathPolicy::new(&settings(rule, Failback::Manual))
    }

    #[test]
    fn d04_requests_wait_for_so_many_checks() {
        let mut three = queueing(Some(NoPathRetry::Checks(3)));
        assert_eq!(three.begin(), Some(true));
        assert_eq!((three.look(at(0), 2, true), three.next()), (None, Nanos::NEVER));
        assert_eq!((three.look(at(100), 0, true), three.next()), (None, at(115)));
        assert_eq!(three.look(at(114), 0, true), None);
        assert_eq!(three.look(at(115), 0, true), Some(false));
        assert_eq!((three.look(at(200), 0, false), three.next()), (None, Nanos::NEVER), "once");
        assert_eq!(three.look(at(201), 1, false), Some(true), "with the first path");
        assert_eq!(three.look(at(202), 1, true), None);
        assert_eq!(three.look(at(300), 0, true), None);
        assert_eq!(three.look(at(310), 1, true), None, "it came back in time");
        assert_eq!((three.look(at(311), 0, true), three.next()), (None, at(326)), "and begins again");
        three.returned();
        assert_eq!((three.look(at(320), 0, true), three.next()), (None, at(335)), "it came and went");
        for (rule, begin) in
            [(None, None), (Some(NoPathRetry::Fail), Some(false)), (Some(NoPathRetry::Queue), Some(true))]
        {
            let mut queueing = queueing(rule);
            assert_eq!(queueing.begin(), begin);
            let waits = begin.unwrap_or(true);
            assert_eq!((queueing.look(at(0), 0, waits), queueing.look(at(1000), 0, waits)), (None, None));
        }
    }

    /// A message overrides the policy until a path returns.
    #[test]
    fn a_message_holds_until_a_path_comes_back() {
        for (rule, waits) in
            [(NoPathRetry::Fail, false), (NoPathRetry::Queue, true), (NoPathRetry::Checks(3), true)]
        {
            for (lost, back) in [(0, 1), (1, 2)] {
                let mut queueing = queueing(Some(rule));
                assert_eq!(queueing.look(at(0), 2, waits), None);
                assert_eq!((queueing.look(at(1), lost, !waits), queueing.next()), (None, Nanos::NEVER));
                assert_eq!(queueing.look(at(100), lost, !waits), None, "{rule:?}");
                queueing.returned();
                assert_eq!(queueing.look(at(101), back, !waits), Some(waits), "{rule:?}");
            }
        }
        // If a message stops queueing during the countdown, a second message does not restart the
        // countdown.
        let mut three = queueing(Some(NoPathRetry::Checks(3)));
        assert_eq!((three.look(at(0), 0, true), three.next()), (None, at(15)));
        assert_eq!((three.look(at(5), 0, false), three.next()), (None, Nanos::NEVER));
        assert_eq!((three.look(at(6), 0, true), three.next()), (None, Nanos::NEVER));
        let mut none = queueing(None);
        none.returned();
        assert_eq!(none.look(at(0), 1, false), None, "it is left to messages");
    }

    /// A group better than group 1, which is in use, returns: the behaviour of each policy over
    /// time.
    #[test]
    fn d05_failback() {
        let look = |back: &mut FailbackPolicy, now, who| back.look(at(now), Some(0), Some(1), who);
        let back = |rule| FailbackPolicy::new(&settings(None, rule));
        let mut manual = back(Failback::Manual);
        assert_eq!(look(&mut manual, 0, PathReinstateKind::FirstOfBest), None);
        assert_eq!(
            (look(&mut manual, 1000, PathReinstateKind::StillUp), manual.next()),
            (None, Nanos::NEVER)
        );
        assert_eq!(look(&mut back(Failback::Immediate), 0, PathReinstateKind::Path), Some(0));
        let mut over = back(Failback::Followover);
        assert_eq!(look(&mut over, 0, PathReinstateKind::Path), None, "others of its group were up");
        assert_eq!(look(&mut over, 1, PathReinstateKind::StillUp), None);
        assert_eq!(look(&mut over, 2, PathReinstateKind::FirstOfBest), Some(0));
        let mut ten = back(Failback::After(at(10)));
        assert_eq!((look(&mut ten, 0, PathReinstateKind::FirstOfBest), ten.next()), (None, at(10)));
        assert_eq!(look(&mut ten, 9, PathReinstateKind::StillUp), None);
        assert_eq!(look(&mut ten, 10, PathReinstateKind::StillUp), Some(0));
        let mut ten = back(Failback::After(at(10)));
        look(&mut ten, 0, PathReinstateKind::FirstOfBest);
        assert_eq!(
            (look(&mut ten, 5, PathReinstateKind::Path), ten.next()),
            (None, at(15)),
            "another came back"
        );
        ten.failed();
        assert_eq!(ten.next(), Nanos::NEVER, "a failure cancels it");
        assert_eq!(
            (look(&mut ten, 16, PathReinstateKind::StillUp), ten.next()),
            (None, at(26)),
            "and it is planned again"
        );
        assert_eq!(
            ten.look(at(30), Some(1), Some(1), PathReinstateKind::StillUp),
            None,
            "the best is in use"
        );
        assert_eq!(ten.next(), Nanos::NEVER);
    }
}
