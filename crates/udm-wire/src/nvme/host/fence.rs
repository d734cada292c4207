//! When a write of a lost association can no longer change the namespace.
//!
//! A controller executes no command of an association after its keep-alive timer has expired and
//! the commands in flight have ended. It has at most the time CQT for the latter (*Base* 2.1,
//! 9.6.2). The timer runs for one KATO from the last Keep Alive that the controller got. A host
//! that heard the controller last at `t` sends no Keep Alive after `t + KATO / 2`, so the timer has
//! expired at `t + 2 * KATO`. With traffic-based keep alive any command may restart the timer, and
//! the controller looks only once per KATO. The host sends commands until it notices the loss, one
//! KATO after `t` at the latest. So the timer has expired at `t + 3 * KATO`.

use udm_core::Nanos;

/// The times of an association that decide about its unanswered writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteFence {
    /// The keep-alive timeout.
    pub kato: Nanos,
    /// The controller restarts its timer with any command (CTRATT bit TBKAS).
    pub is_traffic_based: bool,
    /// The longest time that commands in flight need after the timer has expired (CQT).
    pub quiesce: Nanos,
}

impl WriteFence {
    /// Time at which no command of the association can change the namespace any more. `last_heard`
    /// is the time of the last byte from the controller, `lost` the time at which the host stopped
    /// to send. A host that noticed the loss late has sent late: then `lost` counts.
    #[must_use]
    pub fn ends_at(&self, last_heard: Nanos, lost: Nanos) -> Nanos {
        let heard = last_heard.0.max(lost.0.saturating_sub(self.kato.0)).min(lost.0);
        let timeouts = if self.is_traffic_based { 3 } else { 2 };
        Nanos(heard.saturating_add(self.kato.0.saturating_mul(timeouts)).saturating_add(self.quiesce.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn s(seconds: u64) -> Nanos {
        Nanos(seconds * 1_000_000_000)
    }

    #[test]
    fn a_write_waits_for_the_timer_and_the_commands_in_flight() {
        let fence = WriteFence { kato: s(5), is_traffic_based: false, quiesce: s(0) };
        assert_eq!(fence.ends_at(s(100), s(100)), s(110));
        assert_eq!(fence.ends_at(s(100), s(103)), s(110), "from the last byte on");
        let traffic = WriteFence { is_traffic_based: true, ..fence };
        assert_eq!(traffic.ends_at(s(100), s(103)), s(115));
        assert_eq!(WriteFence { quiesce: s(7), ..fence }.ends_at(s(100), s(103)), s(117));
    }

    /// A host that was stopped notices the loss late, and has sent until then.
    #[test]
    fn a_late_host_counts_from_its_last_command() {
        let fence = WriteFence { kato: s(5), is_traffic_based: false, quiesce: s(0) };
        assert_eq!(fence.ends_at(s(100), s(160)), s(165));
        assert_eq!(fence.ends_at(s(0), s(2)), s(10));
        assert_eq!(fence.ends_at(s(9), s(2)), s(12), "a clock that the lane reads later");
    }

    /// No answer of the rule is before the last Keep Alive's timer, whatever the times are.
    #[test]
    fn the_timer_of_the_last_keep_alive_has_always_expired() {
        for (kato, heard, lost) in
            (1..4).flat_map(|k| (0..9).flat_map(move |h| (h..20).map(move |l| (k, h, l))))
        {
            let fence = WriteFence { kato: s(kato), is_traffic_based: false, quiesce: s(0) };
            let last_keep_alive = if lost > heard + kato { lost } else { heard };
            assert!(fence.ends_at(s(heard), s(lost)) >= s(last_keep_alive + kato), "{kato} {heard} {lost}");
            assert!(fence.ends_at(s(heard), s(lost)) > s(lost), "{kato} {heard} {lost}");
        }
    }
}
