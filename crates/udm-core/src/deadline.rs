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

#[cfg(test)]
mod tests {
    use super::*;

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
