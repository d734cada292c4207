//! Rate limit per log callsite: a burst of 32 lines, then one line per second.
//!
//! A site is a `tracing` callsite. Its budget is one atomic: the time at which the budget is full
//! again. There is no lock, because cores log too.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};

/// Number of sites with their own budget. The program has a few dozen; if there are more, the
/// others share a budget.
const SITES: usize = 256;

/// Lines that a site may log at once.
const BURST: u64 = 32;

/// Milliseconds of budget per line.
const LINE_MS: u64 = 1000;

pub(super) struct LogRateLimiter {
    sites: Box<[LogCallsiteBudget]>,
    /// True if a site has dropped lines since the last report.
    left_out: AtomicBool,
}

#[derive(Default)]
struct LogCallsiteBudget {
    /// Address of the callsite; 0 if the slot is free.
    key: AtomicUsize,
    /// Time in milliseconds at which the budget is full again.
    whole_at_ms: AtomicU64,
    left_out: AtomicU64,
}

/// The decision on a line of a site.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum LogRateDecision {
    /// Write the line; the number is the index of the site.
    Write(usize),
    /// Drop the line. True for the first line dropped since a report: the caller must wake the
    /// writer, which will report it.
    LeaveOut(bool),
}

impl LogRateLimiter {
    pub fn new() -> LogRateLimiter {
        LogRateLimiter {
            sites: (0..SITES).map(|_| LogCallsiteBudget::default()).collect(),
            left_out: AtomicBool::new(false),
        }
    }

    /// Decides on a line of the callsite `key`, which is not 0.
    pub fn line(&self, key: usize, now_ms: u64) -> LogRateDecision {
        let index = self.site(key);
        let site = &self.sites[index];
        let take = |whole_at: u64| {
            let whole_at = whole_at.max(now_ms) + LINE_MS;
            (whole_at - now_ms <= BURST * LINE_MS).then_some(whole_at)
        };
        if site.whole_at_ms.fetch_update(Relaxed, Relaxed, take).is_ok() {
            return LogRateDecision::Write(index);
        }
        site.left_out.fetch_add(1, Relaxed);
        LogRateDecision::LeaveOut(!self.left_out.swap(true, Relaxed))
    }

    /// True if there are dropped lines to report.
    pub fn has_left_out(&self) -> bool {
        self.left_out.load(Relaxed)
    }

    /// Calls `say` with each site that has dropped lines since the last report, and their number.
    pub fn report(&self, mut say: impl FnMut(usize, u64)) {
        self.left_out.store(false, Relaxed);
        for (index, site) in self.sites.iter().enumerate() {
            let n = site.left_out.swap(0, Relaxed);
            if n > 0 {
                say(index, n);
            }
        }
    }

    /// The index of a callsite, assigned on its first line.
    fn site(&self, key: usize) -> usize {
        // Callsites are statics at least 16 bytes apart.
        let first = (key >> 4) % SITES;
        (0..SITES)
            .map(|i| (first + i) % SITES)
            .find(|&i| {
                let site = &self.sites[i].key;
                // A known site is only read, so that its cache line stays shared between cores.
                match site.load(Relaxed) {
                    0 => site.compare_exchange(0, key, Relaxed, Relaxed).is_ok() || site.load(Relaxed) == key,
                    taken => taken == key,
                }
            })
            .unwrap_or(SITES - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(limit: &LogRateLimiter, key: usize, now_ms: u64, lines: usize) -> usize {
        (0..lines).filter(|_| matches!(limit.line(key, now_ms), LogRateDecision::Write(_))).count()
    }

    #[test]
    fn a_burst_and_then_one_a_second() {
        let limit = LogRateLimiter::new();
        assert_eq!(written(&limit, 16, 5, 1000), 32);
        assert_eq!(written(&limit, 16, 1004, 10), 0);
        assert_eq!(written(&limit, 16, 1005, 10), 1);
        assert_eq!(written(&limit, 16, 11_005, 100), 10);
        assert_eq!(written(&limit, 16, 1_000_000, 100), 32, "a budget is whole again and not more");
        assert_eq!(written(&limit, 32, 5, 1000), 32, "other sites have their own");
    }

    #[test]
    fn what_is_left_out_is_counted_and_reported_once() {
        let limit = LogRateLimiter::new();
        assert_eq!(written(&limit, 16, 0, 32), 32);
        assert!(!limit.has_left_out());
        assert_eq!(limit.line(16, 0), LogRateDecision::LeaveOut(true));
        assert_eq!(limit.line(16, 0), LogRateDecision::LeaveOut(false));
        let mut reported = Vec::new();
        limit.report(|site, n| reported.push((site, n)));
        assert_eq!(reported, [(1, 2)]);
        assert!(!limit.has_left_out());
        limit.report(|_, _| panic!("twice"));
        assert_eq!(limit.line(16, 0), LogRateDecision::LeaveOut(true));
    }

    #[test]
    fn more_places_than_are_told_apart() {
        let limit = LogRateLimiter::new();
        for key in 1..=2 * SITES {
            // The index is in range, and the search ends.
            written(&limit, key << 4, 0, 1);
        }
    }
}
