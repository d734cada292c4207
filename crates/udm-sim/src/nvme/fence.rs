//! When a host may repeat the unanswered writes of a lost association through another one.

use udm_core::Nanos;

/// The rule by which a host repeats writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetryPolicy {
    /// After a Cross-Controller Reset; if it is refused, as [`RetryPolicy::Wait`].
    Reset,
    /// As [`RetryPolicy::Reset`], but the host takes a reset in progress for a complete one. This
    /// is how a target looks that answers before the requests have left the disk.
    EarlyReset,
    /// After two keep-alive timeouts and the quiesce time.
    Wait,
    /// At once, as Linux until TP8028. Writes may land late.
    AtOnce,
}

/// The time from which no write of an association can land, if the host stopped to send at `lost`.
///
/// The last Keep Alive was sent at `lost` at the latest, so the timer of the controller expires one
/// timeout later (`kato`); the second timeout covers the time in which the network held it. Then
/// the controller needs the quiesce time at most.
pub(super) fn fenced_at(lost: Nanos, kato: Nanos, quiesce: Nanos) -> Nanos {
    Nanos(lost.0 + 2 * kato.0 + quiesce.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wait_covers_both_timers() {
        assert_eq!(fenced_at(Nanos(100), Nanos(5), Nanos(7)), Nanos(117));
    }
}
