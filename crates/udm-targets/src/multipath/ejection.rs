//! The ejection of a slow path, as all cores see it.
//!
//! An ejection is advice: if a group has no other path, it uses its ejected paths
//! ([`super::route`]). So no request fails because of an ejection. The state is written only when a
//! path is ejected, tried or taken back.

use std::sync::atomic::{AtomicU64, Ordering};
use udm_core::Nanos;

/// Minimum and maximum time of an ejection.
const EJECTION_TIME: Nanos = Nanos::from_millis(10_000);
const EJECTION_TIME_MAX: Nanos = Nanos::from_millis(320_000);

/// The ejection state of one path.
#[derive(Debug, Default)]
pub(super) struct PathEjectionState {
    /// Time of the next trial, in ns on the cores' clock; 0 while the path is not ejected.
    until: AtomicU64,
    /// Length of the last ejection, in ns.
    length: AtomicU64,
    /// Time when the last ejection ended.
    back: AtomicU64,
    count: AtomicU64,
}

impl PathEjectionState {
    /// True while the path is ejected.
    pub(super) fn is_ejected(&self) -> bool {
        self.until.load(Ordering::Relaxed) != 0
    }

    /// Number of ejections.
    pub(super) fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// Ejects the path and returns for how long. The time doubles if the last ejection ended less
    /// than its own length ago. Returns `None` if the path is ejected already.
    pub(super) fn begin(&self, now: Nanos) -> Option<Nanos> {
        let length = Nanos(self.length.load(Ordering::Relaxed));
        let soon = length > Nanos(0) && now.since(Nanos(self.back.load(Ordering::Relaxed))) < length;
        let length = if soon { Nanos((length.0 * 2).min(EJECTION_TIME_MAX.0)) } else { EJECTION_TIME };
        let until = (now + length).0;
        self.until.compare_exchange(0, until, Ordering::AcqRel, Ordering::Relaxed).ok()?;
        self.length.store(length.0, Ordering::Relaxed);
        self.count.fetch_add(1, Ordering::Relaxed);
        Some(length)
    }

    /// Returns true if a trial is due and the caller must make it. No other caller gets the trial
    /// before `until`.
    pub(super) fn claim_trial(&self, now: Nanos, until: Nanos) -> bool {
        let due = |at: u64| (at != 0 && at <= now.0).then_some(until.0);
        self.until.fetch_update(Ordering::AcqRel, Ordering::Relaxed, due).is_ok()
    }

    /// The trial failed: the path stays ejected for twice as long.
    pub(super) fn trial_failed(&self, now: Nanos) {
        let length = (self.length.load(Ordering::Relaxed) * 2).clamp(EJECTION_TIME.0, EJECTION_TIME_MAX.0);
        let longer = |at: u64| (at != 0).then_some(now.0.saturating_add(length));
        if self.until.fetch_update(Ordering::AcqRel, Ordering::Relaxed, longer).is_ok() {
            self.length.store(length, Ordering::Relaxed);
        }
    }

    /// The trial had no result: the next one begins at `until`.
    pub(super) fn postpone_trial(&self, until: Nanos) {
        let out = |at: u64| (at != 0).then_some(until.0);
        let _ = self.until.fetch_update(Ordering::AcqRel, Ordering::Relaxed, out);
    }

    /// Ends the ejection. Returns false if the path was not ejected.
    pub(super) fn end(&self, now: Nanos) -> bool {
        self.back.store(now.0, Ordering::Relaxed);
        self.until.swap(0, Ordering::AcqRel) != 0
    }
}
