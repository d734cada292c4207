//! Hedged requests: a request that is slower than nearly all recent ones gets a second one, and the
//! answer that arrives first is used.
//!
//! A store has few slow answers, but a read that is joined from many needs all of them. The extra
//! load is bounded: each request earns a part of a hedge, so hedges are at most 5 % of the requests
//! over time. Reads no clock.

use udm_core::Nanos;
use udm_wire::uri::HedgeSetting;

/// Percent of a hedge that each request earns, and that may be saved.
const EARNED: u32 = 5;
const SAVED_MAX: u32 = 400;
const COST: u32 = 100;

/// Recent requests of one length that are remembered, and that are needed for a judgement.
const RECENT_MAX: usize = 64;
const RECENT_MIN: usize = 20;

/// A server that answers faster is not asked twice.
const DELAY_MIN: Nanos = Nanos::from_millis(5);

/// Classes of lengths: up to 64 KiB, 128 KiB, and so on. Long ranges take longer.
const CLASSES: usize = 8;
const CLASS_FIRST: u64 = 64 << 10;

/// Times of recent requests, a ring.
#[derive(Default)]
struct RecentTimes {
    times: Vec<Nanos>,
    next: usize,
}

impl RecentTimes {
    fn add(&mut self, time: Nanos) {
        match self.times.len() < RECENT_MAX {
            true => self.times.push(time),
            false => self.times[self.next] = time,
        }
        self.next = (self.next + 1) % RECENT_MAX;
    }

    /// The time that 95 % of the requests did not exceed, and a quarter more; `None` if too few are
    /// known.
    fn delay(&self) -> Option<Nanos> {
        if self.times.len() < RECENT_MIN {
            return None;
        }
        let mut times = self.times.clone();
        let at = times.len() * 95 / 100;
        let (_, slow, _) = times.select_nth_unstable(at);
        Some(Nanos(slow.0 + slow.0 / 4).max(DELAY_MIN))
    }
}

/// The hedges of an object.
pub struct HedgePolicy {
    setting: HedgeSetting,
    recent: [RecentTimes; CLASSES],
    saved: u32,
}

impl HedgePolicy {
    /// Hedges as `setting` says.
    #[must_use]
    pub fn new(setting: HedgeSetting) -> HedgePolicy {
        HedgePolicy { setting, recent: Default::default(), saved: 0 }
    }

    /// Counts a request of `len` bytes. Returns how long its answer may take before it gets a
    /// second one; `None` for no end.
    pub fn begin(&mut self, len: u64) -> Option<Nanos> {
        self.saved = (self.saved + EARNED).min(SAVED_MAX);
        match self.setting {
            HedgeSetting::Off => None,
            HedgeSetting::After(time) => Some(time),
            HedgeSetting::Auto => self.recent[class_of(len)].delay(),
        }
    }

    /// Counts an answer with `len` bytes that took `time`.
    pub fn end(&mut self, len: u64, time: Nanos) {
        self.recent[class_of(len)].add(time);
    }

    /// True if a hedge may be sent now, which is counted.
    pub fn take(&mut self) -> bool {
        let may = self.saved >= COST;
        self.saved -= if may { COST } else { 0 };
        may
    }
}

fn class_of(len: u64) -> usize {
    let units = len.div_ceil(CLASS_FIRST).max(1).next_power_of_two();
    (units.trailing_zeros() as usize).min(CLASSES - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_delay_follows_the_recent_requests_of_the_length() {
        let mut policy = HedgePolicy::new(HedgeSetting::Auto);
        for n in 0..RECENT_MIN {
            assert_eq!(policy.begin(4096), None, "{n} are too few");
            policy.end(4096, Nanos::from_millis(20));
        }
        assert_eq!(policy.begin(4096), Some(Nanos::from_millis(25)));
        assert_eq!(policy.begin(65_537), None, "another length");
        // Few slow answers do not count, many do.
        (0..3).for_each(|_| policy.end(65_536, Nanos::from_millis(900)));
        assert_eq!(policy.begin(1), Some(Nanos::from_millis(1125)), "3 of 23 are more than 5 %");
        (0..RECENT_MAX).for_each(|_| policy.end(1, Nanos::from_millis(1)));
        assert_eq!(policy.begin(1), Some(DELAY_MIN));
        assert_eq!((class_of(0), class_of(65_536), class_of(65_537), class_of(4 << 20)), (0, 0, 1, 6));
        assert_eq!(class_of(u64::MAX >> 1), CLASSES - 1);
    }

    #[test]
    fn hedges_are_one_of_twenty_requests() {
        for setting in [HedgeSetting::After(Nanos(1)), HedgeSetting::Auto] {
            let mut policy = HedgePolicy::new(setting);
            let mut hedges = 0;
            for _ in 0..10_000 {
                policy.begin(4096);
                hedges += u32::from(policy.take());
            }
            assert_eq!(hedges, 500);
        }
        // A pause saves four at most.
        let mut policy = HedgePolicy::new(HedgeSetting::Off);
        (0..1000).for_each(|_| assert_eq!(policy.begin(1), None));
        assert_eq!((0..9).filter(|_| policy.take()).count(), 4);
    }
}
