//! What the checker knows of the paths, for whoever looks. Written by the checker alone, once a
//! check.

use super::checker::QuarantineStatus;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering::Relaxed};
use udm_core::Nanos;
use udm_dm::PathCheckState;

/// See the module.
pub(super) struct CheckerStatus {
    paths: Box<[PathCheckStatus]>,
    /// When requests without a path fail; never, where nothing is counted.
    fails_at: AtomicU64,
    /// When a better group is gone back to, and which, from 0.
    failback_at: AtomicU64,
    failback_group: AtomicU32,
}

struct PathCheckStatus {
    state: AtomicU8,
    /// Something that the table uses of it is missing.
    truncated: AtomicBool,
    /// One more than the priority; 0 for none.
    prio: AtomicU32,
    /// It is held back as it keeps failing: until when on the journal's clock, never where it is
    /// not; and what its last sample came to.
    held_until: AtomicU64,
    sent: AtomicU64,
    bad: AtomicU64,
}

impl CheckerStatus {
    pub fn new(paths: usize) -> CheckerStatus {
        let slot = |_| PathCheckStatus {
            state: AtomicU8::new(PathCheckState::Unchecked as u8),
            truncated: AtomicBool::new(false),
            prio: AtomicU32::new(0),
            held_until: AtomicU64::new(Nanos::NEVER.0),
            sent: AtomicU64::new(0),
            bad: AtomicU64::new(0),
        };
        CheckerStatus {
            paths: (0..paths).map(slot).collect(),
            fails_at: AtomicU64::new(Nanos::NEVER.0),
            failback_at: AtomicU64::new(Nanos::NEVER.0),
            failback_group: AtomicU32::new(0),
        }
    }

    /// What is counted down: until requests without a path fail, and until a group is gone back to.
    pub fn set_timers(&self, fails_at: Nanos, back: Option<(usize, Nanos)>) {
        self.fails_at.store(fails_at.0, Relaxed);
        let (to, at) = back.unwrap_or((0, Nanos::NEVER));
        self.failback_group.store(to as u32, Relaxed);
        self.failback_at.store(at.0, Relaxed);
    }

    /// When requests without a path fail; never, where nothing is counted.
    pub fn fails_at(&self) -> Nanos {
        Nanos(self.fails_at.load(Relaxed))
    }

    /// The group that is gone back to, from 0, and when.
    pub fn back(&self) -> Option<(usize, Nanos)> {
        let at = Nanos(self.failback_at.load(Relaxed));
        (at != Nanos::NEVER).then(|| (self.failback_group.load(Relaxed) as usize, at))
    }

    /// True when it is another state than before.
    pub fn set(&self, path: usize, state: PathCheckState) -> bool {
        self.paths[path].state.swap(state as u8, Relaxed) != state as u8
    }

    pub fn state(&self, path: usize) -> PathCheckState {
        let number = self.paths[path].state.load(Relaxed);
        PathCheckState::ALL[usize::from(number)]
    }

    pub fn set_truncated(&self, path: usize, truncated: bool) {
        self.paths[path].truncated.store(truncated, Relaxed);
    }

    /// Something that the table uses of the path was missing in its last check.
    pub fn is_truncated(&self, path: usize) -> bool {
        self.paths[path].truncated.load(Relaxed)
    }

    /// It is held back so, on the journal's clock, or not.
    pub fn set_quarantine(&self, path: usize, held: Option<QuarantineStatus>) {
        let slot = &self.paths[path];
        let QuarantineStatus { end, sent, bad } =
            held.unwrap_or(QuarantineStatus { end: Nanos::NEVER, sent: 0, bad: 0 });
        slot.sent.store(sent, Relaxed);
        slot.bad.store(bad, Relaxed);
        slot.held_until.store(end.0, Relaxed);
    }

    /// How a path is held back that keeps failing, on the journal's clock.
    pub fn quarantine_status(&self, path: usize) -> Option<QuarantineStatus> {
        let slot = &self.paths[path];
        let end = Nanos(slot.held_until.load(Relaxed));
        let held = || QuarantineStatus { end, sent: slot.sent.load(Relaxed), bad: slot.bad.load(Relaxed) };
        (end != Nanos::NEVER).then(held)
    }

    pub fn set_prio(&self, path: usize, prio: Option<u32>) {
        self.paths[path].prio.store(prio.map_or(0, |prio| prio.saturating_add(1)), Relaxed);
    }

    /// What the path is worth, where that is known.
    pub fn prio(&self, path: usize) -> Option<u32> {
        self.paths[path].prio.load(Relaxed).checked_sub(1)
    }
}
