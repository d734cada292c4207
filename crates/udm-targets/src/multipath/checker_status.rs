//! The checker's knowledge of the paths, for reports. Only the checker writes it, once per check.

use super::quarantine_status::QuarantineStatus;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering::Relaxed};
use udm_core::Nanos;
use udm_dm::PathCheckResult;

/// Results and timers of the checker.
pub(super) struct PathCheckerStatus {
    paths: Box<[LastPathCheckResult]>,
    /// Time when requests without a path fail; [`Nanos::NEVER`] if no timer runs.
    fails_at: AtomicU64,
    /// Time of a planned failback, and its group, counted from 0.
    failback_at: AtomicU64,
    failback_group: AtomicU32,
}

struct LastPathCheckResult {
    state: AtomicU8,
    /// The path is shorter than the table's range.
    truncated: AtomicBool,
    /// The priority plus one; 0 for none.
    prio: AtomicU32,
    /// End of the quarantine on the path log's clock, [`Nanos::NEVER`] if there is none; and the
    /// reads and errors of the last sample.
    held_until: AtomicU64,
    sent: AtomicU64,
    bad: AtomicU64,
}

impl PathCheckerStatus {
    pub fn new(paths: usize) -> PathCheckerStatus {
        let slot = |_| LastPathCheckResult {
            state: AtomicU8::new(PathCheckResult::Unchecked as u8),
            truncated: AtomicBool::new(false),
            prio: AtomicU32::new(0),
            held_until: AtomicU64::new(Nanos::NEVER.0),
            sent: AtomicU64::new(0),
            bad: AtomicU64::new(0),
        };
        PathCheckerStatus {
            paths: (0..paths).map(slot).collect(),
            fails_at: AtomicU64::new(Nanos::NEVER.0),
            failback_at: AtomicU64::new(Nanos::NEVER.0),
            failback_group: AtomicU32::new(0),
        }
    }

    /// Sets both timers: when requests without a path fail, and the planned failback.
    pub fn set_timers(&self, fails_at: Nanos, back: Option<(usize, Nanos)>) {
        self.fails_at.store(fails_at.0, Relaxed);
        let (to, at) = back.unwrap_or((0, Nanos::NEVER));
        self.failback_group.store(to as u32, Relaxed);
        self.failback_at.store(at.0, Relaxed);
    }

    /// Time when requests without a path fail; [`Nanos::NEVER`] if no timer runs.
    pub fn fails_at(&self) -> Nanos {
        Nanos(self.fails_at.load(Relaxed))
    }

    /// The group of a planned failback, counted from 0, and its time.
    pub fn back(&self) -> Option<(usize, Nanos)> {
        let at = Nanos(self.failback_at.load(Relaxed));
        (at != Nanos::NEVER).then(|| (self.failback_group.load(Relaxed) as usize, at))
    }

    /// Stores the state of a path. Returns true if the state changed.
    pub fn set(&self, path: usize, state: PathCheckResult) -> bool {
        self.paths[path].state.swap(state as u8, Relaxed) != state as u8
    }

    pub fn state(&self, path: usize) -> PathCheckResult {
        let number = self.paths[path].state.load(Relaxed);
        PathCheckResult::ALL[usize::from(number)]
    }

    pub fn set_truncated(&self, path: usize, truncated: bool) {
        self.paths[path].truncated.store(truncated, Relaxed);
    }

    /// True if the path was shorter than the table's range at its last check.
    pub fn is_truncated(&self, path: usize) -> bool {
        self.paths[path].truncated.load(Relaxed)
    }

    /// Sets or clears the quarantine of a path, in times of the path log's clock.
    pub fn set_quarantine(&self, path: usize, held: Option<QuarantineStatus>) {
        let slot = &self.paths[path];
        let QuarantineStatus { end, sent, bad } =
            held.unwrap_or(QuarantineStatus { end: Nanos::NEVER, sent: 0, bad: 0 });
        slot.sent.store(sent, Relaxed);
        slot.bad.store(bad, Relaxed);
        slot.held_until.store(end.0, Relaxed);
    }

    /// The quarantine of a path, in times of the path log's clock.
    pub fn quarantine_status(&self, path: usize) -> Option<QuarantineStatus> {
        let slot = &self.paths[path];
        let end = Nanos(slot.held_until.load(Relaxed));
        let held = || QuarantineStatus { end, sent: slot.sent.load(Relaxed), bad: slot.bad.load(Relaxed) };
        (end != Nanos::NEVER).then(held)
    }

    pub fn set_prio(&self, path: usize, prio: Option<u32>) {
        self.paths[path].prio.store(prio.map_or(0, |prio| prio.saturating_add(1)), Relaxed);
    }

    /// The priority of a path, if known.
    pub fn prio(&self, path: usize) -> Option<u32> {
        self.paths[path].prio.load(Relaxed).checked_sub(1)
    }
}
