//! The ANA state `change`, in which a namespace may be for a limited time (ANATT).
//!
//! Requests fail meanwhile, as in the state `inaccessible`. The log is read again from time to
//! time, so that a lost event costs little. A controller that stays in the state for twice the time
//! that it has promised is reset, as by Linux (`nvme_anatt_timeout`).

use udm_core::Nanos;
use udm_wire::nvme::AnaState;

/// Pause between reads of the log in the state `change`.
const READ_PERIOD: Nanos = Nanos(1_000_000_000);

/// What is due in the state `change`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AnaTransitionStep {
    /// Nothing before this time.
    Wait(Nanos),
    /// The log must be read, and nothing else before this time.
    ReadLog(Nanos),
    /// The state has lasted for too long.
    TooLong,
}

/// The time that an association has spent in the state `change`.
#[derive(Default)]
pub(super) struct AnaTransition {
    since: Option<Nanos>,
    read_at: Nanos,
}

impl AnaTransition {
    /// Looks at the state of an association whose controller needs at most `promised` for a change.
    pub(super) fn look(&mut self, state: AnaState, promised: Nanos, now: Nanos) -> AnaTransitionStep {
        if state != AnaState::Change {
            self.since = None;
            return AnaTransitionStep::Wait(Nanos::NEVER);
        }
        let Some(since) = self.since else {
            (self.since, self.read_at) = (Some(now), now + READ_PERIOD);
            return AnaTransitionStep::Wait(self.read_at);
        };
        if now >= since + promised + promised {
            return AnaTransitionStep::TooLong;
        }
        if now < self.read_at {
            return AnaTransitionStep::Wait(self.read_at);
        }
        self.read_at = now + READ_PERIOD;
        AnaTransitionStep::ReadLog(self.read_at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn s(seconds: u64) -> Nanos {
        Nanos(seconds * 1_000_000_000)
    }

    /// The log is read each second, and after twice the promised time the controller is reset. A
    /// state that ends in time has no effect on the next one.
    #[test]
    fn a_change_has_a_limit() {
        use AnaTransitionStep::{ReadLog, TooLong, Wait};
        let mut transition = AnaTransition::default();
        for state in
            [AnaState::Optimized, AnaState::NonOptimized, AnaState::Inaccessible, AnaState::PersistentLoss]
        {
            assert_eq!(transition.look(state, s(0), s(99)), Wait(Nanos::NEVER), "no limit in this state");
        }
        for begin in [100, 200] {
            let mut look = |after| transition.look(AnaState::Change, s(2), s(begin + after));
            assert_eq!(
                (look(0), look(1), look(1)),
                (Wait(s(begin + 1)), ReadLog(s(begin + 2)), Wait(s(begin + 2)))
            );
            assert_eq!((look(3), look(4)), (ReadLog(s(begin + 4)), TooLong));
            transition.look(AnaState::Optimized, s(2), s(begin + 5));
        }
    }
}
