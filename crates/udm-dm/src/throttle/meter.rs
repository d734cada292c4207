//! One limit: a bucket that refills with time, as a single atomic number.
//!
//! The number is the time up to which the rate is used. A bucket that is full is used up to its
//! burst before now. `amount` units need `amount` times the time per unit, and pass at the end of
//! that time. This is the generic cell rate algorithm (ITU-T I.371) with atomics.

use std::sync::atomic::{AtomicU64, Ordering};
use udm_core::Nanos;
use udm_wire::throttle::ThrottleRate;

/// Added to all times, so that a burst may reach back to before the origin of the clock.
const TIME_OFFSET: u64 = 1 << 62;

/// Fraction bits of the time per unit. A rate of 10 GB/s is then exact to 10 parts in a million.
const FRACTION_BITS: u32 = 20;

#[derive(Debug)]
pub(super) struct Meter {
    /// Time per unit, in 2^-20 ns.
    per_unit: u64,
    /// Time in which the burst refills, in ns.
    burst: u64,
    /// In ns, on the clock of the cores, and [`TIME_OFFSET`].
    used_until: AtomicU64,
}

impl Meter {
    pub fn new(rate: ThrottleRate) -> Meter {
        let per_unit = (1_000_000_000_u64 << FRACTION_BITS).div_ceil(rate.per_second);
        let mut meter = Meter { per_unit, burst: 0, used_until: AtomicU64::new(0) };
        meter.burst = meter.cost(rate.burst).min(TIME_OFFSET);
        meter
    }

    /// Counts what `old` has used. Places that are reserved in `old` after `now` do not count:
    /// their lanes reserve again here.
    pub fn continue_from(&self, old: &Meter, now: Nanos) {
        let used = old.used_until.load(Ordering::Relaxed);
        self.used_until.fetch_max(used.min(now.0 + TIME_OFFSET), Ordering::Relaxed);
    }

    /// Time that `units` take, in ns.
    pub fn cost(&self, units: u64) -> u64 {
        let cost = (u128::from(units) * u128::from(self.per_unit)) >> FRACTION_BITS;
        u64::try_from(cost).unwrap_or(u64::MAX)
    }

    /// The units that take at most `time`.
    pub fn units_in(&self, time: Nanos) -> u64 {
        let units = (u128::from(time.0) << FRACTION_BITS) / u128::from(self.per_unit.max(1));
        u64::try_from(units).unwrap_or(u64::MAX)
    }

    /// The end of the next place that takes `cost`, if the rate is used up to `used`.
    fn end(&self, used: u64, cost: u64, now: Nanos) -> u64 {
        used.max(now.0 + TIME_OFFSET - self.burst).saturating_add(cost)
    }

    /// Takes the next place for `units` and returns its end: the time at which they may pass.
    pub fn reserve(&self, units: u64, now: Nanos) -> Nanos {
        let cost = self.cost(units);
        // Relaxed, here and below: nothing else is published with the number.
        let take = |used| Some(self.end(used, cost, now));
        let used = self.used_until.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take);
        Nanos(self.end(used.unwrap_or_else(|used| used), cost, now).saturating_sub(TIME_OFFSET))
    }

    /// Takes a place for `units` only if they may pass now.
    pub fn try_take(&self, units: u64, now: Nanos) -> bool {
        let cost = self.cost(units);
        let take = |used| Some(self.end(used, cost, now)).filter(|end| *end <= now.0 + TIME_OFFSET);
        self.used_until.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok()
    }

    /// Gives the place of `units` back.
    pub fn cancel(&self, units: u64) {
        let cost = self.cost(units);
        let give = |used: u64| Some(used.saturating_sub(cost));
        let _ = self.used_until.fetch_update(Ordering::Relaxed, Ordering::Relaxed, give);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn meter(per_second: u64, burst: u64) -> Meter {
        Meter::new(ThrottleRate { per_second, burst })
    }

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn a_burst_passes_at_once_and_then_the_rate() {
        let meter = meter(1000, 5);
        let now = Nanos(10 * SECOND);
        for _ in 0..5 {
            assert!(meter.reserve(1, now) <= now);
        }
        assert_eq!(meter.reserve(1, now), now + Nanos::from_millis(1));
        assert_eq!(meter.reserve(1, now), now + Nanos::from_millis(2));
        meter.cancel(1);
        assert_eq!(meter.reserve(1, now), now + Nanos::from_millis(2));
        assert!(!meter.try_take(1, now));
        assert_eq!(meter.reserve(1, now), now + Nanos::from_millis(3), "what is refused takes no place");
        // After a long pause there is one burst, not more.
        let later = Nanos(1000 * SECOND);
        assert!(meter.try_take(2, later) && meter.try_take(3, later) && !meter.try_take(1, later));
        assert_eq!(meter.reserve(1, later), later + Nanos::from_millis(1));
    }

    #[test]
    fn amounts_larger_than_the_burst_wait_for_the_rest() {
        let meter = meter(1000, 5);
        let now = Nanos(10 * SECOND);
        assert_eq!(meter.reserve(8, now), now + Nanos::from_millis(3));
    }

    #[test]
    fn extremes_do_not_overflow() {
        let slow = meter(1, 1);
        let now = Nanos(SECOND);
        assert_eq!(slow.reserve(1 << 30, now).0, (1 << 30) * SECOND);
        assert_eq!(slow.reserve(u64::MAX, now).0, u64::MAX - TIME_OFFSET);
        assert_eq!(slow.reserve(u64::MAX, now).0, u64::MAX - TIME_OFFSET);
        // A burst that is longer than the clock has run.
        assert!(meter(1, 1 << 20).try_take(1 << 20, now));
        let fast = meter((1 << 63) - 1, (1 << 63) - 1);
        assert!(fast.reserve(1 << 40, now) <= now + Nanos::from_millis(2));
    }

    #[test]
    fn other_limits_give_no_new_burst_and_keep_no_place_in_the_future() {
        let now = Nanos(10 * SECOND);
        let old = meter(1, 1);
        assert!(old.reserve(1, now) <= now);
        let _ = old.reserve(3600, now);
        let new = meter(1000, 100);
        new.continue_from(&old, now);
        assert_eq!(new.reserve(1, now), now + Nanos::from_millis(1));
    }

    proptest! {
        /// In no span of time passes more than the rate gives in it and one burst, or one amount if
        /// that is larger.
        #[test]
        fn no_span_has_more_than_its_share(
            rate in 1..2_000_000_000_u64, burst in 1..2_000_000_000_u64,
            steps in proptest::collection::vec((0..20_000_000_u64, 1..5_000_000_u64, any::<bool>()), 1..60),
        ) {
            let meter = meter(rate, burst);
            let mut now = Nanos(SECOND);
            let mut passed: Vec<(u64, u64)> = Vec::new();
            for (pause, units, cancelled) in steps {
                now = now + Nanos(pause);
                let at = meter.reserve(units, now).max(now);
                if cancelled && at > now {
                    meter.cancel(units);
                } else {
                    passed.push((at.0, units));
                }
            }
            let largest = passed.iter().map(|(_, units)| *units).max().unwrap_or(0).max(burst);
            for (i, (from, _)) in passed.iter().enumerate() {
                for (j, (to, _)) in passed.iter().enumerate() {
                    let sum: u128 = passed.iter().filter(|(at, _)| (from..=to).contains(&at))
                        .map(|(_, units)| u128::from(*units)).sum();
                    let may = u128::from(rate) * u128::from(to.saturating_sub(*from)) / u128::from(SECOND)
                        + u128::from(largest) + 2 + passed.len() as u128 * u128::from(rate.div_ceil(SECOND));
                    prop_assert!(to < from || sum <= may, "{i} to {j}: {sum} > {may}");
                }
            }
        }
    }
}
