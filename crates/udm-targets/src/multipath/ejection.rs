//! Whether a path is out of use for being slow, as all cores see it.
//!
//! That is advice: where a group has nothing else its paths are used all the same
//! ([`super::route`]), so no request fails for it. Written when a path is put out of use, tried and
//! taken back only.

use std::sync::atomic::{AtomicU64, Ordering};
use udm_core::Nanos;

/// How long a path is out of use, first and at the most.
const EJECTION_TIME: Nanos = Nanos::from_millis(10_000);
const EJECTION_TIME_MAX: Nanos = Nanos::from_millis(320_000);

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Ejection {
    /// When it may be tried again, in ns on the cores' clock; 0 while it is in use.
    until: AtomicU64,
    /// How long it was out of use when it last was, in ns.
    length: AtomicU64,
    /// When it came back.
    back: AtomicU64,
    count: AtomicU64,
}

impl Ejection {
    /// True while it is out of use.
    pub(super) fn is_ejected(&self) -> bool {
        self.until.load(Ordering::Relaxed) != 0
    }

    /// How often it was put out of use.
    pub(super) fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// Puts it out of use: for how long; twice as long as before where that is as short a time ago.
    /// `None` when it is already.
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

    /// True when its time is over and the caller is to try it; until `until` nobody else does.
    pub(super) fn claim_trial(&self, now: Nanos, until: Nanos) -> bool {
        let due = |at: u64| (at != 0 && at <= now.0).then_some(until.0);
        self.until.fetch_update(Ordering::AcqRel, Ordering::Relaxed, due).is_ok()
    }

    /// Its trial went badly: it stays out of use for twice as long.
    pub(super) fn trial_failed(&self, now: Nanos) {
        let length = (self.length.load(Ordering::Relaxed) * 2).clamp(EJECTION_TIME.0, EJECTION_TIME_MAX.0);
        let longer = |at: u64| (at != 0).then_some(now.0.saturating_add(length));
        if self.until.fetch_update(Ordering::AcqRel, Ordering::Relaxed, longer).is_ok() {
            self.length.store(length, Ordering::Relaxed);
        }
    }

    /// Its trial had nothing to go by: the next one begins at `until`.
    pub(super) fn postpone_trial(&self, until: Nanos) {
        let out = |at: u64| (at != 0).then_some(until.0);
        let _ = self.until.fetch_update(Ordering::AcqRel, Ordering::Relaxed, out);
    }

    /// It is in use again. False when it was.
    pub(super) fn end(&self, now: Nanos) -> bool {
        self.back.store(now.0, Ordering::Relaxed);
        self.until.swap(0, Ordering::AcqRel) != 0
    }
}
