//! The state of a multipath device that all cores share, and the operations that change it.
//!
//! One 64-bit word decides where bios go. It holds flags, the current group, the next group and a
//! generation. The generation changes with every change of a path or a bypass mark. A lane compares
//! the word with the last one it saw, once per batch. While they are equal, the lane reads no other
//! shared state. Messages change the word; the data path does so only if a path failed or a group
//! must be chosen. All changes are compare-and-swap loops, without locks.
//!
//! Ordering: a change of a path or a bypass mark is written first, and then the word is updated
//! with Release. A lane loads the word with Acquire and then reads the paths. If a lane read path
//! state that is newer than the generation of its word, the next comparison finds a different word.

mod packed;

use super::ejection::PathEjectionState;
use super::path_log::{PathEventLogger, PathFailReason, ReinstateReason};
use crossbeam_utils::CachePadded;
#[cfg(feature = "loom")]
use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::Arc;
#[cfg(not(feature = "loom"))]
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use udm_core::{Nanos, WaitQueue, interleave};
use udm_dm::target::TargetHostServices;

pub(super) use packed::PackedMultipathState;

/// A group as seen by the lane that chooses a group.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PriorityGroupUsability {
    /// Number of paths that the lane's selector can choose.
    pub(super) usable: usize,
    /// The group is used only if no other group works (`disable_group`).
    pub(super) bypassed: bool,
}

/// Chooses the group for the next bios and returns the word after that choice.
///
/// The next group (`switch_group`, or the table's initial group) is tried first, once, even if it
/// is bypassed. If it has no path, the choice is the current group, then the first usable group,
/// then the first usable bypassed group.
pub(super) fn choose_group(
    word: PackedMultipathState,
    groups: &[PriorityGroupUsability],
) -> (PackedMultipathState, Option<usize>) {
    let settled = word.with(PackedMultipathState::QUEUE_IO, false);
    let usable = |g: &usize| groups[*g].usable > 0;
    let scan = |bypassed: bool| (0..groups.len()).find(|g| usable(g) && groups[*g].bypassed == bypassed);
    let group = word
        .next()
        .filter(usable)
        .or_else(|| word.current().filter(usable))
        .or_else(|| scan(false))
        .or_else(|| scan(true));
    match group {
        Some(_) => (settled.with_next(None).with_current(group), group),
        // If no path is left, the next group is kept: it is used when the first path returns.
        None => (settled.with_current(None), None),
    }
}

/// A path as all cores see it. It is written only when the path fails or returns, so it needs no
/// cache line of its own.
#[derive(Debug, Default)]
struct SharedPathState {
    /// Bits [`SharedPathState::FAILED`] and [`SharedPathState::ADMIN_FAILED`]. The bits above count
    /// the failures since the table was loaded.
    state: AtomicU64,
    /// Sequence number of the last reinstatement, counted per device; 0 for never. Lanes sort
    /// reinstated paths by this number.
    stamp: AtomicU64,
    /// Claim of the caller that reinstates the path: [`SharedPathState::REINSTATE_IDLE`],
    /// [`SharedPathState::REINSTATE_RUNNING`] or [`SharedPathState::REINSTATE_AGAIN`]. If a message
    /// and the checker reinstate a path at the same time, only one of them does the work.
    reinstating: AtomicU32,
    /// Time of the last failure or reinstatement, and the total failed time before it, in ns on the
    /// clock of the path log. Only reports use them.
    since: AtomicU64,
    failed_for: AtomicU64,
    ejection: PathEjectionState,
}

impl SharedPathState {
    const FAILED: u64 = 1;
    /// An administrator failed the path: no check reinstates it. Set only together with `FAILED`.
    const ADMIN_FAILED: u64 = 2;
    /// The failure count's unit.
    const ONE_FAILURE: u64 = 4;

    /// No caller reinstates the path.
    const REINSTATE_IDLE: u32 = 0;
    /// One caller reinstates the path.
    const REINSTATE_RUNNING: u32 = 1;
    /// One caller reinstates the path and must repeat its attempt afterwards.
    const REINSTATE_AGAIN: u32 = 2;
}

/// A snapshot of a path's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PathStateSnapshot {
    pub(super) failed: bool,
    /// An administrator failed the path, so only a command or a message reinstates it.
    pub(super) held: bool,
    pub(super) fail_count: u64,
    pub(super) stamp: u64,
    /// The path is ejected because it is slow.
    pub(super) ejected: bool,
}

impl PathStateSnapshot {
    /// True if the path is neither failed nor ejected.
    pub(super) fn is_in_use(self) -> bool {
        !self.failed && !self.ejected
    }
}

/// How long a path has been in its state, and its total failed time including the current failure.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct PathStateDurations {
    pub(super) in_state: Nanos,
    pub(super) failed: Nanos,
}

/// The shared state of one loaded table. A reload makes a new one.
pub(super) struct MultipathState {
    /// On its own cache line, because every batch reads it.
    word: CachePadded<AtomicU64>,
    /// Number of paths that have not failed, over all groups.
    valid: AtomicU32,
    stamps: AtomicU64,
    /// Number of paths that are ejected because they are slow.
    ejected: AtomicU32,
    bypassed: Box<[AtomicBool]>,
    /// The group that the message `switch_group` chose, counted from 1; 0 for none. The checker
    /// clears it.
    manual_group: AtomicU32,
    paths: Box<[SharedPathState]>,
    pub(super) path_log: PathEventLogger,
    /// Wakes the checker if a path failed, or if a message concerns it.
    pub(super) wait_queue: Arc<WaitQueue>,
}

impl MultipathState {
    /// The state after a load: all paths active, no group bypassed.
    pub(super) fn new(
        groups: usize,
        paths: usize,
        queue_if_no_path: bool,
        next: Option<usize>,
        path_log: PathEventLogger,
    ) -> MultipathState {
        MultipathState {
            word: CachePadded::new(AtomicU64::new(PackedMultipathState::loaded(queue_if_no_path, next).0)),
            valid: AtomicU32::new(paths as u32),
            stamps: AtomicU64::new(0),
            ejected: AtomicU32::new(0),
            manual_group: AtomicU32::new(0),
            bypassed: (0..groups).map(|_| AtomicBool::new(false)).collect(),
            paths: (0..paths).map(|_| SharedPathState::default()).collect(),
            path_log,
            wait_queue: Arc::new(WaitQueue::new()),
        }
    }

    /// Loads the word. All writes before its last change are visible afterwards.
    pub(super) fn word(&self) -> PackedMultipathState {
        interleave::mark_interleave_point();
        PackedMultipathState(self.word.load(Ordering::Acquire))
    }

    /// Publishes a lane's choice of group. Returns false if the word has changed since `old`; the
    /// lane must then choose again.
    pub(super) fn commit(&self, old: PackedMultipathState, new: PackedMultipathState) -> bool {
        interleave::mark_interleave_point();
        if old == new {
            return true;
        }
        let done = self.word.compare_exchange(old.0, new.0, Ordering::AcqRel, Ordering::Acquire).is_ok();
        if let Some(group) = new.current().filter(|_| done && new.current() != old.current()) {
            self.path_log.group_in_use(group);
        }
        done
    }

    fn update(&self, change: impl Fn(PackedMultipathState) -> PackedMultipathState) {
        // The closure never returns `None`, so this ends when the compare-and-swap succeeds.
        let _ = self
            .word
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |w| Some(change(PackedMultipathState(w)).0));
    }

    pub(super) fn group_count(&self) -> usize {
        self.bypassed.len()
    }

    pub(super) fn path_count(&self) -> usize {
        self.paths.len()
    }

    pub(super) fn path(&self, path: usize) -> PathStateSnapshot {
        interleave::mark_interleave_point();
        let state = self.paths[path].state.load(Ordering::Acquire);
        let stamp = self.paths[path].stamp.load(Ordering::Relaxed);
        let ejected = self.paths[path].ejection.is_ejected();
        let is = |bit| state & bit != 0;
        let (failed, held) = (is(SharedPathState::FAILED), is(SharedPathState::ADMIN_FAILED));
        PathStateSnapshot { failed, held, fail_count: state / SharedPathState::ONE_FAILURE, stamp, ejected }
    }

    /// How long `path` has been in its state, and its total failed time.
    pub(super) fn times(&self, path: usize) -> PathStateDurations {
        let (failed, path) = (self.path(path).failed, &self.paths[path]);
        let in_state = self.path_log.now().since(Nanos(path.since.load(Ordering::Relaxed)));
        let before = Nanos(path.failed_for.load(Ordering::Relaxed));
        PathStateDurations { in_state, failed: if failed { before + in_state } else { before } }
    }

    /// Connects the table to the device it is loaded into, whose clock is used from now on.
    pub(super) fn attach(&self, notify: Arc<dyn TargetHostServices>) {
        self.path_log.attach(notify);
        let now = self.path_log.now();
        self.paths.iter().for_each(|path| path.since.store(now.0, Ordering::Relaxed));
    }

    pub(super) fn is_bypassed(&self, group: usize) -> bool {
        self.bypassed[group].load(Ordering::Relaxed)
    }

    /// Number of paths that have not failed.
    pub(super) fn valid(&self) -> u32 {
        self.valid.load(Ordering::Acquire)
    }

    /// Fails a path. Returns false if the path was failed already; a command then only marks it as
    /// failed by an administrator. Called by messages, and by lanes of any core on a path error. If
    /// several callers fail a path at once, one of them gets true and writes the log line.
    pub(super) fn fail(&self, path: usize, why: &PathFailReason<'_>) -> bool {
        interleave::mark_interleave_point();
        let held = if matches!(why, PathFailReason::Command) { SharedPathState::ADMIN_FAILED } else { 0 };
        let fail = |s: u64| {
            let failed = s | SharedPathState::FAILED | held;
            let once = if s & SharedPathState::FAILED == 0 { SharedPathState::ONE_FAILURE } else { 0 };
            (failed != s).then_some(failed + once)
        };
        match self.paths[path].state.fetch_update(Ordering::AcqRel, Ordering::Acquire, fail) {
            Ok(before) if before & SharedPathState::FAILED == 0 => {}
            Ok(_) => {
                self.path_log.held(path);
                return false;
            }
            Err(_) => return false,
        }
        self.paths[path].since.store(self.path_log.now().0, Ordering::Relaxed);
        interleave::mark_interleave_point();
        let left = self.valid.fetch_sub(1, Ordering::AcqRel) - 1;
        interleave::mark_interleave_point();
        self.update(PackedMultipathState::moved);
        self.path_log.failed(path, why, left);
        self.wait_queue.wake_up();
        true
    }

    /// Reinstates a failed path. Returns false if the path is not failed, or if a check wants to
    /// reinstate a path that an administrator failed.
    ///
    /// If several callers reinstate a path at once, one does the work. A check leaves it to the
    /// other caller. A message or command makes the other caller repeat its attempt, because the
    /// path may have failed again in between.
    pub(super) fn reinstate(&self, path: usize, mut back: ReinstateReason) -> bool {
        let p = &self.paths[path];
        let claim = |now| match (now, back) {
            (SharedPathState::REINSTATE_IDLE, _) => Some(SharedPathState::REINSTATE_RUNNING),
            (_, ReinstateReason::CheckPassed) => None,
            _ => Some(SharedPathState::REINSTATE_AGAIN),
        };
        // Acquire pairs with the releases below: the next caller sees the state that the last one
        // left.
        if p.reinstating.fetch_update(Ordering::AcqRel, Ordering::Acquire, claim)
            != Ok(SharedPathState::REINSTATE_IDLE)
        {
            return false;
        }
        let mut done = false;
        loop {
            done |= self.reinstate_once(path, back);
            let (mine, free) = (SharedPathState::REINSTATE_RUNNING, SharedPathState::REINSTATE_IDLE);
            if p.reinstating.compare_exchange(mine, free, Ordering::AcqRel, Ordering::Acquire).is_ok() {
                return done;
            }
            p.reinstating.swap(mine, Ordering::AcqRel);
            back = ReinstateReason::Message;
        }
    }

    /// One attempt of [`MultipathState::reinstate`]. Only one caller per path runs at a time.
    fn reinstate_once(&self, path: usize, back: ReinstateReason) -> bool {
        let p = &self.paths[path];
        let by_check = matches!(back, ReinstateReason::CheckPassed);
        let state = p.state.load(Ordering::Acquire);
        if state & SharedPathState::FAILED == 0 || by_check && state & SharedPathState::ADMIN_FAILED != 0 {
            return false;
        }
        // Written before the state: its Release makes the stamp visible to every core that sees the
        // path active.
        p.stamp.store(self.stamps.fetch_add(1, Ordering::Relaxed) + 1, Ordering::Relaxed);
        let now = self.path_log.now();
        let failed = now.since(Nanos(p.since.swap(now.0, Ordering::Relaxed)));
        p.failed_for.fetch_add(failed.0, Ordering::Relaxed);
        let up = self.valid.fetch_add(1, Ordering::AcqRel) + 1;
        // Logged before queued bios are resubmitted.
        self.path_log.reinstated(path, back, up);
        let before =
            p.state.fetch_and(!(SharedPathState::FAILED | SharedPathState::ADMIN_FAILED), Ordering::AcqRel);
        self.update(PackedMultipathState::moved);
        // A command marked the path as failed in the meantime.
        let held = by_check && before & SharedPathState::ADMIN_FAILED != 0;
        if held {
            self.fail(path, &PathFailReason::Command);
        }
        !held
    }

    /// Ejects a path because it is slow. Returns false if the path is ejected already.
    pub(super) fn eject(&self, path: usize, now: Nanos) -> bool {
        let Some(length) = self.paths[path].ejection.begin(now) else { return false };
        self.ejected.fetch_add(1, Ordering::Relaxed);
        self.update(PackedMultipathState::moved);
        self.path_log.ejected(path, length);
        true
    }

    /// True if any path is ejected.
    pub(super) fn has_ejected(&self) -> bool {
        self.ejected.load(Ordering::Relaxed) > 0
    }

    /// The ejection state of `path`.
    pub(super) fn ejection(&self, path: usize) -> &PathEjectionState {
        &self.paths[path].ejection
    }

    /// Ends the ejection of `path` after a successful trial.
    pub(super) fn end_ejection(&self, path: usize, now: Nanos) {
        if self.paths[path].ejection.end(now) {
            self.ejected.fetch_sub(1, Ordering::Relaxed);
            self.update(PackedMultipathState::moved);
            self.path_log.ejection_ended(path);
        }
    }

    /// Sets or clears the bypass mark of a group; the next bio chooses a group again.
    pub(super) fn bypass(&self, group: usize, on: bool) {
        self.bypassed[group].store(on, Ordering::Relaxed);
        self.update(|w| w.moved().with_current(None));
    }

    /// Makes `group` the next group and clears every bypass mark.
    pub(super) fn switch(&self, group: usize) {
        for b in &self.bypassed {
            b.store(false, Ordering::Relaxed);
        }
        self.update(|w| w.moved().with_current(None).with_next(Some(group)));
    }

    /// The message `switch_group`. The choice holds, even if another group is better, until the
    /// group has no usable path ([`MultipathState::clear_manual_group`]).
    pub(super) fn switch_manually(&self, group: usize) {
        self.manual_group.store(group as u32 + 1, Ordering::Relaxed);
        self.switch(group);
    }

    /// The group chosen by the message `switch_group`.
    pub(super) fn manual_group(&self) -> Option<usize> {
        (self.manual_group.load(Ordering::Relaxed) as usize).checked_sub(1)
    }

    /// Forgets the manual choice of `group`.
    pub(super) fn clear_manual_group(&self, group: usize) {
        let (was, none) = (group as u32 + 1, 0);
        // If another group was chosen in the meantime, that choice stays.
        let _ = self.manual_group.compare_exchange(was, none, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// The messages `queue_if_no_path` and `fail_if_no_path`. `fail_if_no_path` also discards the
    /// value that a suspend saved.
    pub(super) fn set_queueing(&self, on: bool) {
        self.update(|w| {
            let w = if on { w } else { w.with(PackedMultipathState::SAVED, false) };
            w.with(PackedMultipathState::QUEUE_IF_NO_PATH, on)
        });
    }

    /// Called before a suspend. If `save` is set, the queue flag is saved and cleared, so that
    /// queued bios complete. A second save does not overwrite the first.
    pub(super) fn presuspend(&self, noflush: bool, save: bool) {
        self.update(|w| {
            let queueing = w.has(PackedMultipathState::QUEUE_IF_NO_PATH);
            let w = w.with(PackedMultipathState::NOFLUSH, noflush);
            match (save, queueing || !w.has(PackedMultipathState::SAVED)) {
                (true, true) => w
                    .with(PackedMultipathState::SAVED, queueing)
                    .with(PackedMultipathState::QUEUE_IF_NO_PATH, false),
                _ => w,
            }
        });
    }

    /// Restores the flag that [`MultipathState::presuspend`] saved.
    pub(super) fn resume(&self) {
        self.update(|w| {
            let queueing =
                w.has(PackedMultipathState::QUEUE_IF_NO_PATH) || w.has(PackedMultipathState::SAVED);
            w.with(PackedMultipathState::NOFLUSH | PackedMultipathState::SAVED, false)
                .with(PackedMultipathState::QUEUE_IF_NO_PATH, queueing)
        });
    }
}

#[cfg(all(test, feature = "loom"))]
mod loom_tests;

#[cfg(test)]
mod tests;
