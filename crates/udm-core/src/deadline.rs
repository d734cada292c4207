//! Deadlines for replies of a path or a server.

use crate::units::Nanos;

/// How long to wait for a reply. The time counts from the last reply to any request: a server that
/// replies to others is busy, not silent. But a request may be lost while others are answered, so
/// each request waits at most [`ReplyDeadline::STARVED_FACTOR`] times as long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplyDeadline(pub Nanos);

/// State of a request without a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnansweredRequestState {
    /// Not overdue before this time.
    Pending(Nanos),
    /// Overdue: no request was answered for this long.
    Silent(Nanos),
    /// Overdue: others were answered, but this request was not for this long.
    Starved(Nanos),
}

impl ReplyDeadline {
    /// Maximum wait in deadlines while other requests are answered.
    pub const STARVED_FACTOR: u64 = 4;

    /// State at `now` of a request submitted at `sent`, if the last reply to any request came at
    /// `last_reply`. An older request is never overdue later than a newer one.
    #[must_use]
    pub fn check(self, sent: Nanos, last_reply: Nanos, now: Nanos) -> UnansweredRequestState {
        let most = Nanos(self.0.0.saturating_mul(Self::STARVED_FACTOR));
        let (silent, kept) = (sent.max(last_reply) + self.0, sent + most);
        match (silent <= now, kept <= now) {
            (true, _) => UnansweredRequestState::Silent(self.0),
            (false, true) => UnansweredRequestState::Starved(most),
            (false, false) => UnansweredRequestState::Pending(silent.min(kept)),
        }
    }
}

/// A [`ReplyDeadline`] of a lane that counts only time during which the core has run.
///
/// After a process was stopped or a machine was paused, all deadlines seem to have passed while
/// replies wait unread. Two rules prevent false timeouts. First, if the lane is polled much later
/// than it asked for, waiting requests count as sent now. Second, a request is overdue only after
/// one more check in a later turn.
#[derive(Clone, Copy, Debug)]
pub struct PauseAwareReplyDeadline {
    deadline: Nanos,
    /// Time at which the lane asked to be polled.
    due: Option<Nanos>,
    /// End of the last stop.
    resumed: Nanos,
    /// Time at which a request was first seen overdue.
    late: Option<Nanos>,
}

impl PauseAwareReplyDeadline {
    /// Creates a timer for replies that may take `deadline`.
    #[must_use]
    pub fn new(deadline: Nanos) -> PauseAwareReplyDeadline {
        PauseAwareReplyDeadline { deadline, due: None, resumed: Nanos(0), late: None }
    }

    /// Maximum delay of a poll that does not count as a stop.
    fn slack(&self) -> Nanos {
        Nanos((self.deadline.0 / 16).clamp(5_000_000, 1_000_000_000))
    }

    /// As [`ReplyDeadline::check`], for the oldest waiting request. The time of
    /// [`UnansweredRequestState::Pending`] is the time of the next check, and the lane asks to be
    /// polled then.
    #[must_use]
    pub fn check(&mut self, sent: Nanos, last_reply: Nanos, now: Nanos) -> UnansweredRequestState {
        if self.due.is_some_and(|due| due + self.slack() < now) {
            self.resumed = now;
        }
        let found = ReplyDeadline(self.deadline).check(sent.max(self.resumed), last_reply, now);
        let (late, found) = match (found, self.late) {
            (UnansweredRequestState::Pending(due), _) => (None, UnansweredRequestState::Pending(due)),
            (overdue, Some(at)) if at < now => (Some(at), overdue),
            (_, _) => (Some(now), UnansweredRequestState::Pending(now + Nanos(1))),
        };
        self.late = late;
        self.due = match found {
            UnansweredRequestState::Pending(due) => Some(due),
            UnansweredRequestState::Silent(_) | UnansweredRequestState::Starved(_) => Some(now),
        };
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// After a long stop of the core, no request is overdue; one that then waits for a whole
    /// deadline is.
    #[test]
    fn time_in_which_the_core_did_not_run_does_not_count() {
        let ms = Nanos::from_millis;
        let mut timer = PauseAwareReplyDeadline::new(ms(500));
        let (sent, last_reply) = (ms(1000), ms(1000));
        assert_eq!(timer.check(sent, last_reply, ms(1000)), UnansweredRequestState::Pending(ms(1500)));
        let resumed = ms(11_000);
        assert_eq!(timer.check(sent, last_reply, resumed), UnansweredRequestState::Pending(ms(11_500)));
        assert_eq!(timer.check(sent, last_reply, ms(11_499)), UnansweredRequestState::Pending(ms(11_500)));
        assert!(
            matches!(timer.check(sent, last_reply, ms(11_500)), UnansweredRequestState::Pending(_)),
            "it looks once more"
        );
        assert_eq!(timer.check(sent, last_reply, ms(11_501)), UnansweredRequestState::Silent(ms(500)));
        assert_eq!(
            timer.check(sent, last_reply, ms(11_501)),
            UnansweredRequestState::Silent(ms(500)),
            "and so is the next"
        );
    }

    /// A short stop: the lane looks into its ring before it times out.
    #[test]
    fn nothing_is_overdue_at_the_first_look() {
        let ms = Nanos::from_millis;
        let mut timer = PauseAwareReplyDeadline::new(ms(500));
        assert_eq!(timer.check(ms(0), ms(0), ms(0)), UnansweredRequestState::Pending(ms(500)));
        assert_eq!(timer.check(ms(0), ms(0), ms(510)), UnansweredRequestState::Pending(ms(510) + Nanos(1)));
        // A reply was there.
        assert_eq!(timer.check(ms(0), ms(511), ms(511)), UnansweredRequestState::Pending(ms(1011)));
        assert_eq!(
            timer.check(ms(0), ms(511), ms(1011)),
            UnansweredRequestState::Pending(ms(1011) + Nanos(1))
        );
        assert_eq!(timer.check(ms(0), ms(511), ms(1012)), UnansweredRequestState::Silent(ms(500)));
    }

    #[test]
    fn the_time_begins_anew_with_each_answer_and_has_an_end() {
        let (deadline, at) = (ReplyDeadline(Nanos(100)), Nanos(1000));
        let check = |last_reply: u64, now: u64| deadline.check(at, Nanos(last_reply), Nanos(now));
        assert_eq!(check(0, 1000), UnansweredRequestState::Pending(Nanos(1100)));
        assert_eq!(
            (check(0, 1099), check(0, 1100)),
            (UnansweredRequestState::Pending(Nanos(1100)), UnansweredRequestState::Silent(Nanos(100)))
        );
        assert_eq!(
            (check(1099, 1100), check(1099, 1199)),
            (UnansweredRequestState::Pending(Nanos(1199)), UnansweredRequestState::Silent(Nanos(100)))
        );
        assert_eq!(check(1399, 1399), UnansweredRequestState::Pending(Nanos(1400)));
        assert_eq!(check(1399, 1400), UnansweredRequestState::Starved(Nanos(400)));
        assert_eq!(
            ReplyDeadline(Nanos::NEVER).check(at, at, Nanos(u64::MAX - 1)),
            UnansweredRequestState::Pending(Nanos::NEVER)
        );
    }
}
