//! When a request is given up for the silence of whom it was sent to.

use crate::units::Nanos;

/// How long answers are waited for. It counts from the last answer: who answers others is busy, and
/// not silent. But a request may be lost while others are answered, so one is waited for
/// [`Deadline::KEPT`] times as long at the most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deadline(pub Nanos);

/// What there is to say of a request that is not answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overdue {
    /// It is not, before this time.
    No(Nanos),
    /// Nothing was answered for so long.
    Silent(Nanos),
    /// Others were answered, and this was not for so long.
    Kept(Nanos),
}

impl Deadline {
    /// How many deadlines a request is waited for while others are answered.
    pub const KEPT: u64 = 4;

    /// What there is to say at `now` of a request of `sent`, when the last answer to any came at
    /// `heard`. Of two requests the older one is never overdue later.
    #[must_use]
    pub fn look(self, sent: Nanos, heard: Nanos, now: Nanos) -> Overdue {
        let most = Nanos(self.0.0.saturating_mul(Self::KEPT));
        let (silent, kept) = (sent.max(heard) + self.0, sent + most);
        match (silent <= now, kept <= now) {
            (true, _) => Overdue::Silent(self.0),
            (false, true) => Overdue::Kept(most),
            (false, false) => Overdue::No(silent.min(kept)),
        }
    }
}

/// A [`Deadline`] as a lane keeps it: only time counts in which the core has run.
///
/// A process that was stopped, or a machine that was paused, finds all its deadlines passed and the
/// answers where it has yet to look. So two things keep a lane from believing the clock. Who is
/// polled much later than it asked for was held up: what waits then waits as if it had been sent
/// now. And nothing is overdue before the lane has looked once more, in another turn.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    deadline: Nanos,
    /// When the lane asked to be polled.
    due: Option<Nanos>,
    /// When it last was held up.
    resumed: Nanos,
    /// Since when something is overdue.
    late: Option<Nanos>,
}

impl Patience {
    /// For answers that are waited for as long as `deadline`.
    #[must_use]
    pub fn new(deadline: Nanos) -> Patience {
        Patience { deadline, due: None, resumed: Nanos(0), late: None }
    }

    /// How much later than it asked for a lane may be polled without having been held up.
    fn slack(&self) -> Nanos {
        Nanos((self.deadline.0 / 16).clamp(5_000_000, 1_000_000_000))
    }

    /// As [`Deadline::look`], for the oldest request that waits. The time of an [`Overdue::No`] is
    /// when to look next, and the lane asks to be polled then.
    #[must_use]
    pub fn look(&mut self, sent: Nanos, heard: Nanos, now: Nanos) -> Overdue {
        if self.due.is_some_and(|due| due + self.slack() < now) {
            self.resumed = now;
        }
        let found = Deadline(self.deadline).look(sent.max(self.resumed), heard, now);
        let (late, found) = match (found, self.late) {
            (Overdue::No(due), _) => (None, Overdue::No(due)),
            (overdue, Some(at)) if at < now => (Some(at), overdue),
            (_, _) => (Some(now), Overdue::No(now + Nanos(1))),
        };
        self.late = late;
        self.due = match found {
            Overdue::No(due) => Some(due),
            Overdue::Silent(_) | Overdue::Kept(_) => Some(now),
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
        let mut patience = Patience::new(ms(500));
        let (sent, heard) = (ms(1000), ms(1000));
        assert_eq!(patience.look(sent, heard, ms(1000)), Overdue::No(ms(1500)));
        let resumed = ms(11_000);
        assert_eq!(patience.look(sent, heard, resumed), Overdue::No(ms(11_500)));
        assert_eq!(patience.look(sent, heard, ms(11_499)), Overdue::No(ms(11_500)));
        assert!(matches!(patience.look(sent, heard, ms(11_500)), Overdue::No(_)), "it looks once more");
        assert_eq!(patience.look(sent, heard, ms(11_501)), Overdue::Silent(ms(500)));
        assert_eq!(patience.look(sent, heard, ms(11_501)), Overdue::Silent(ms(500)), "and so is the next");
    }

    /// A short one: the lane looks into its ring before it believes the clock.
    #[test]
    fn nothing_is_overdue_at_the_first_look() {
        let ms = Nanos::from_millis;
        let mut patience = Patience::new(ms(500));
        assert_eq!(patience.look(ms(0), ms(0), ms(0)), Overdue::No(ms(500)));
        assert_eq!(patience.look(ms(0), ms(0), ms(510)), Overdue::No(ms(510) + Nanos(1)));
        // An answer was there.
        assert_eq!(patience.look(ms(0), ms(511), ms(511)), Overdue::No(ms(1011)));
        assert_eq!(patience.look(ms(0), ms(511), ms(1011)), Overdue::No(ms(1011) + Nanos(1)));
        assert_eq!(patience.look(ms(0), ms(511), ms(1012)), Overdue::Silent(ms(500)));
    }

    #[test]
    fn the_time_begins_anew_with_each_answer_and_has_an_end() {
        let (deadline, at) = (Deadline(Nanos(100)), Nanos(1000));
        let look = |heard: u64, now: u64| deadline.look(at, Nanos(heard), Nanos(now));
        assert_eq!(look(0, 1000), Overdue::No(Nanos(1100)));
        assert_eq!((look(0, 1099), look(0, 1100)), (Overdue::No(Nanos(1100)), Overdue::Silent(Nanos(100))));
        assert_eq!(
            (look(1099, 1100), look(1099, 1199)),
            (Overdue::No(Nanos(1199)), Overdue::Silent(Nanos(100)))
        );
        assert_eq!(look(1399, 1399), Overdue::No(Nanos(1400)));
        assert_eq!(look(1399, 1400), Overdue::Kept(Nanos(400)));
        assert_eq!(Deadline(Nanos::NEVER).look(at, at, Nanos(u64::MAX - 1)), Overdue::No(Nanos::NEVER));
    }
}
