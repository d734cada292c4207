//! When a request is given up for the silence of whom it was sent to.

use crate::units::Nanos;

/// How long answers are waited for. It counts from the last answer: who answers others is busy, and
/// not silent. But a request may be lost while others are answered, so one is waited for
/// [`ReplyDeadline::STARVED_FACTOR`] times as long at the most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplyDeadline(pub Nanos);

/// What there is to say of a request that is not answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeadlineStatus {
    /// It is not, before this time.
    Pending(Nanos),
    /// Nothing was answered for so long.
    Silent(Nanos),
    /// Others were answered, and this was not for so long.
    Starved(Nanos),
}

impl ReplyDeadline {
    /// How many deadlines a request is waited for while others are answered.
    pub const STARVED_FACTOR: u64 = 4;

    /// What there is to say at `now` of a request of `sent`, when the last answer to any came at
    /// `last_reply`. Of two requests the older one is never overdue later.
    #[must_use]
    pub fn check(self, sent: Nanos, last_reply: Nanos, now: Nanos) -> DeadlineStatus {
        let most = Nanos(self.0.0.saturating_mul(Self::STARVED_FACTOR));
        let (silent, kept) = (sent.max(last_reply) + self.0, sent + most);
        match (silent <= now, kept <= now) {
            (true, _) => DeadlineStatus::Silent(self.0),
            (false, true) => DeadlineStatus::Starved(most),
            (false, false) => DeadlineStatus::Pending(silent.min(kept)),
        }
    }
}

/// A [`ReplyDeadline`] as a lane keeps it: only time counts in which the core has run.
///
/// A process that was stopped, or a machine that was paused, finds all its deadlines passed and the
/// answers where it has yet to look. So two things keep a lane from believing the clock. Who is
/// polled much later than it asked for was held up: what waits then waits as if it had been sent
/// now. And nothing is overdue before the lane has looked once more, in another turn.
#[derive(Clone, Copy, Debug)]
pub struct DeadlineTimer {
    deadline: Nanos,
    /// When the lane asked to be polled.
    due: Option<Nanos>,
    /// When it last was held up.
    resumed: Nanos,
    /// Since when something is overdue.
    late: Option<Nanos>,
}

impl DeadlineTimer {
    /// For answers that are waited for as long as `deadline`.
    #[must_use]
    pub fn new(deadline: Nanos) -> DeadlineTimer {
        DeadlineTimer { deadline, due: None, resumed: Nanos(0), late: None }
    }

    /// How much later than it asked for a lane may be polled without having been held up.
    fn slack(&self) -> Nanos {
        Nanos((self.deadline.0 / 16).clamp(5_000_000, 1_000_000_000))
    }

    /// As [`ReplyDeadline::check`], for the oldest request that waits. The time of an [`DeadlineStatus::Pending`] is
    /// when to look next, and the lane asks to be polled then.
    #[must_use]
    pub fn check(&mut self, sent: Nanos, last_reply: Nanos, now: Nanos) -> DeadlineStatus {
        if self.due.is_some_and(|due| due + self.slack() < now) {
            self.resumed = now;
        }
        let found = ReplyDeadline(self.deadline).check(sent.max(self.resumed), last_reply, now);
        let (late, found) = match (found, self.late) {
            (DeadlineStatus::Pending(due), _) => (None, DeadlineStatus::Pending(due)),
            (overdue, Some(at)) if at < now => (Some(at), overdue),
            (_, _) => (Some(now), DeadlineStatus::Pending(now + Nanos(1))),
        };
        self.late = late;
        self.due = match found {
            DeadlineStatus::Pending(due) => Some(due),
            DeadlineStatus::Silent(_) | DeadlineStatus::Starved(_) => Some(now),
        };
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A core that was stopped for long: nothing is overdue because of that, and what then waits
    /// for a whole deadline is.
    #[test]
    fn time_in_which_the_core_did_not_run_does_not_count() {
        let ms = Nanos::from_millis;
        let mut patience = DeadlineTimer::new(ms(500));
        let (sent, last_reply) = (ms(1000), ms(1000));
        assert_eq!(patience.check(sent, last_reply, ms(1000)), DeadlineStatus::Pending(ms(1500)));
        let resumed = ms(11_000);
        assert_eq!(patience.check(sent, last_reply, resumed), DeadlineStatus::Pending(ms(11_500)));
        assert_eq!(patience.check(sent, last_reply, ms(11_499)), DeadlineStatus::Pending(ms(11_500)));
        assert!(
            matches!(patience.check(sent, last_reply, ms(11_500)), DeadlineStatus::Pending(_)),
            "it looks once more"
        );
        assert_eq!(patience.check(sent, last_reply, ms(11_501)), DeadlineStatus::Silent(ms(500)));
        assert_eq!(
            patience.check(sent, last_reply, ms(11_501)),
            DeadlineStatus::Silent(ms(500)),
            "and so is the next"
        );
    }

    /// A short one: the lane looks into its ring before it believes the clock.
    #[test]
    fn nothing_is_overdue_at_the_first_look() {
        let ms = Nanos::from_millis;
        let mut patience = DeadlineTimer::new(ms(500));
        assert_eq!(patience.check(ms(0), ms(0), ms(0)), DeadlineStatus::Pending(ms(500)));
        assert_eq!(patience.check(ms(0), ms(0), ms(510)), DeadlineStatus::Pending(ms(510) + Nanos(1)));
        // An answer was there.
        assert_eq!(patience.check(ms(0), ms(511), ms(511)), DeadlineStatus::Pending(ms(1011)));
        assert_eq!(patience.check(ms(0), ms(511), ms(1011)), DeadlineStatus::Pending(ms(1011) + Nanos(1)));
        assert_eq!(patience.check(ms(0), ms(511), ms(1012)), DeadlineStatus::Silent(ms(500)));
    }

    #[test]
    fn the_time_begins_anew_with_each_answer_and_has_an_end() {
        let (deadline, at) = (ReplyDeadline(Nanos(100)), Nanos(1000));
        let check = |last_reply: u64, now: u64| deadline.check(at, Nanos(last_reply), Nanos(now));
        assert_eq!(check(0, 1000), DeadlineStatus::Pending(Nanos(1100)));
        assert_eq!(
            (check(0, 1099), check(0, 1100)),
            (DeadlineStatus::Pending(Nanos(1100)), DeadlineStatus::Silent(Nanos(100)))
        );
        assert_eq!(
            (check(1099, 1100), check(1099, 1199)),
            (DeadlineStatus::Pending(Nanos(1199)), DeadlineStatus::Silent(Nanos(100)))
        );
        assert_eq!(check(1399, 1399), DeadlineStatus::Pending(Nanos(1400)));
        assert_eq!(check(1399, 1400), DeadlineStatus::Starved(Nanos(400)));
        assert_eq!(
            ReplyDeadline(Nanos::NEVER).check(at, at, Nanos(u64::MAX - 1)),
            DeadlineStatus::Pending(Nanos::NEVER)
        );
    }
}
