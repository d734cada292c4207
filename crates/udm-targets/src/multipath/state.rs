//! What the cores share of a multipath device, and each change that can happen to it.
//!
//! One word holds all that decides where bios go: flags, current group, next group, and a
//! generation that moves with every change to a path or a bypass mark. A lane compares it with the
//! one it saw last, once a batch; while they are equal nothing of this is looked at again. Changes
//! are compare-and-swap loops: they come from messages, and from the data path only where a path
//! failed or a group has to be chosen anew. There is no lock here.
//!
//! Ordering: whoever changes a path or a bypass mark writes it first and moves the word after it
//! with Release; a lane loads the word with Acquire and then reads them. A lane that read something
//! newer than its word's generation sees the word move at its next look.

use super::ejection::Ejection;
use super::path_log::{FailReason, PathLog, ReinstateReason};
use crossbeam_utils::CachePadded;
#[cfg(feature = "loom")]
use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::Arc;
#[cfg(not(feature = "loom"))]
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use udm_core::bugs::{self, Bug};
use udm_core::{Nanos, WaitQueue, interleave};
use udm_dm::target::TargetHost;

/// Flags, current group, next group and generation: a snapshot of [`MultipathState::word`]. Groups count
/// from 0 here and from 1 in what is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PackedState(u64);

impl PackedState {
    /// Hold bios that find no path (`queue_if_no_path`).
    pub(super) const QUEUE_IF_NO_PATH: u64 = 1 << 0;
    /// What the flag was before the suspend cleared it.
    pub(super) const SAVED: u64 = 1 << 1;
    /// Set from load until the first bio looked for a path; the second number of `status`.
    pub(super) const QUEUE_IO: u64 = 1 << 2;
    /// The suspend under way hands bios back instead of failing them.
    pub(super) const NOFLUSH: u64 = 1 << 3;
    /// Where the numbers of the groups are: 12 bits each, 0 for none. A table has at most 1024.
    const CURRENT: u32 = 8;
    const NEXT: u32 = 20;
    const GROUP: u64 = 0xfff;
    /// The top half. It wraps: a lane would have to sleep through exactly 2^32 changes to miss one.
    const GENERATION: u32 = 32;

    /// The state after a load: nothing current, `next` first.
    fn loaded(queue_if_no_path: bool, next: Option<usize>) -> PackedState {
        PackedState(PackedState::QUEUE_IO)
            .with(PackedState::QUEUE_IF_NO_PATH, queue_if_no_path)
            .with_next(next)
    }

    /// A word that differs from this one in every part: what a lane has seen that saw none.
    pub(super) fn unseen(self) -> PackedState {
        PackedState(!self.0)
    }

    pub(super) fn has(self, flag: u64) -> bool {
        self.0 & flag != 0
    }

    fn with(self, flag: u64, on: bool) -> PackedState {
        PackedState(if on { self.0 | flag } else { self.0 & !flag })
    }

    fn group(self, shift: u32) -> Option<usize> {
        (((self.0 >> shift) & PackedState::GROUP) as usize).checked_sub(1)
    }

    fn with_group(self, shift: u32, group: Option<usize>) -> PackedState {
        let number = group.map_or(0, |g| g as u64 + 1);
        PackedState((self.0 & !(PackedState::GROUP << shift)) | (number << shift))
    }

    /// The group in use.
    pub(super) fn current(self) -> Option<usize> {
        self.group(PackedState::CURRENT)
    }

    /// The group to try first, once.
    pub(super) fn next(self) -> Option<usize> {
        self.group(PackedState::NEXT)
    }

    fn with_current(self, group: Option<usize>) -> PackedState {
        self.with_group(PackedState::CURRENT, group)
    }

    fn with_next(self, group: Option<usize>) -> PackedState {
        self.with_group(PackedState::NEXT, group)
    }

    pub(super) fn generation(self) -> u32 {
        (self.0 >> PackedState::GENERATION) as u32
    }

    fn moved(self) -> PackedState {
        PackedState(self.0.wrapping_add(1 << PackedState::GENERATION))
    }

    /// True when a bio without a path is held and not failed. A no-flush suspend clears the flag in
    /// bio mode and remembers it, and bios must survive that too.
    pub(super) fn queueing(self) -> bool {
        self.has(PackedState::QUEUE_IF_NO_PATH)
            || (self.has(PackedState::SAVED) && self.has(PackedState::NOFLUSH))
    }

    /// The same, and of a suspended device what holds from its resume on.
    pub(super) fn queues_after_resume(self) -> bool {
        self.has(PackedState::QUEUE_IF_NO_PATH) || self.has(PackedState::SAVED)
    }
}

/// What a group looks like to the lane that chooses one.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct GroupView {
    /// Paths that the lane's selector can choose.
    pub(super) usable: usize,
    /// Only when nothing else works (`disable_group`).
    pub(super) bypassed: bool,
}

/// Chooses the group for the next bios, and the word after that choice (spec C.2). Asked for group:
/// tried first, once, bypassed or not, and forgotten if it has no path. Then the current one, the
/// others in order, and at last the bypassed ones.
pub(super) fn choose_group(word: PackedState, groups: &[GroupView]) -> (PackedState, Option<usize>) {
    let settled = word.with(PackedState::QUEUE_IO, false);
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
        // With no path at all the wish for a group is kept: it holds for the first path that
        // returns.
        None => (settled.with_current(None), None),
    }
}

/// A path as all cores see it. Written when it fails or returns only, so it needs no cache line of
/// its own.
#[derive(Debug, Default)]
struct PathState {
    /// [`PathState::FAILED`] and [`PathState::ADMIN_FAILED`]. Above: how often it failed since the table
    /// was loaded.
    state: AtomicU64,
    /// When it was last reinstated, on the device's count of reinstatements; 0 for never. Lanes
    /// that look later rebuild the order from it.
    stamp: AtomicU64,
    /// Whether somebody is about to reinstate it ([`PathState::REINSTATE_IDLE`] and what follows): of a
    /// message and the checker one does.
    reinstating: AtomicU32,
    /// When it last failed or was reinstated, and how long it was failed before that, in ns on the
    /// journal's clock. For who asks; nothing hangs on it.
    since: AtomicU64,
    failed_for: AtomicU64,
    ejection: Ejection,
}

impl PathState {
    const FAILED: u64 = 1;
    /// An administrator failed it: no check reinstates it. Set only where it is failed.
    const ADMIN_FAILED: u64 = 2;
    /// One failure.
    const ONE_FAILURE: u64 = 4;

    /// Nobody reinstates it.
    const REINSTATE_IDLE: u32 = 0;
    /// Somebody does.
    const REINSTATE_RUNNING: u32 = 1;
    /// And is asked to look again.
    const REINSTATE_AGAIN: u32 = 2;
}

/// A path, read at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PathView {
    pub(super) failed: bool,
    /// By an administrator, whose word it takes to bring it back.
    pub(super) held: bool,
    pub(super) fail_count: u64,
    pub(super) stamp: u64,
    /// Out of use for being slow.
    pub(super) ejected: bool,
}

impl PathView {
    /// Neither failed nor slow.
    pub(super) fn is_in_use(self) -> bool {
        !self.failed && !self.ejected
    }
}

/// How long a path has been in its state, and how long it was failed in all, this time included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct PathTimes {
    pub(super) in_state: Nanos,
    pub(super) failed: Nanos,
}

/// The shared state of one loaded table. A reload makes a new one.
pub(super) struct MultipathState {
    /// On a line of its own: the one thing that every batch reads.
    word: CachePadded<AtomicU64>,
    /// Paths that have not failed, over all groups.
    valid: AtomicU32,
    stamps: AtomicU64,
    /// Paths that are out of use for being slow.
    ejected: AtomicU32,
    bypassed: Box<[AtomicBool]>,
    /// The group that a person has switched to, from 1; 0 for none. The checker ends it.
    by_hand: AtomicU32,
    paths: Box<[PathState]>,
    pub(super) path_log: PathLog,
    /// Rung when a path failed, or by a message that the checker has to know of: it waits for it.
    pub(super) bell: Arc<WaitQueue>,
}

impl MultipathState {
    /// The state after a load: all paths active, no group bypassed.
    pub(super) fn new(
        groups: usize,
        paths: usize,
        queue_if_no_path: bool,
        next: Option<usize>,
        path_log: PathLog,
    ) -> MultipathState {
        MultipathState {
            word: CachePadded::new(AtomicU64::new(PackedState::loaded(queue_if_no_path, next).0)),
            valid: AtomicU32::new(paths as u32),
            stamps: AtomicU64::new(0),
            ejected: AtomicU32::new(0),
            by_hand: AtomicU32::new(0),
            bypassed: (0..groups).map(|_| AtomicBool::new(false)).collect(),
            paths: (0..paths).map(|_| PathState::default()).collect(),
            path_log,
            bell: Arc::new(WaitQueue::new()),
        }
    }

    /// The word, and with it all that was written before it moved.
    pub(super) fn word(&self) -> PackedState {
        interleave::point();
        PackedState(self.word.load(Ordering::Acquire))
    }

    /// Takes a lane's choice of group. False when the word has moved since: look again.
    pub(super) fn commit(&self, old: PackedState, new: PackedState) -> bool {
        interleave::point();
        if old == new {
            return true;
        }
        let done = self.word.compare_exchange(old.0, new.0, Ordering::AcqRel, Ordering::Acquire).is_ok();
        if let Some(group) = new.current().filter(|_| done && new.current() != old.current()) {
            self.path_log.group_in_use(group);
        }
        done
    }

    fn update(&self, change: impl Fn(PackedState) -> PackedState) {
        // The closure never says no, so this ends when the compare-and-swap succeeds.
        let _ =
            self.word.fetch_update(Ordering::AcqRel, Ordering::Acquire, |w| Some(change(PackedState(w)).0));
    }

    pub(super) fn group_count(&self) -> usize {
        self.bypassed.len()
    }

    pub(super) fn path_count(&self) -> usize {
        self.paths.len()
    }

    pub(super) fn path(&self, path: usize) -> PathView {
        interleave::point();
        let state = self.paths[path].state.load(Ordering::Acquire);
        let stamp = self.paths[path].stamp.load(Ordering::Relaxed);
        let ejected = self.paths[path].ejection.is_ejected();
        let is = |bit| state & bit != 0;
        let (failed, held) = (is(PathState::FAILED), is(PathState::ADMIN_FAILED));
        PathView { failed, held, fail_count: state / PathState::ONE_FAILURE, stamp, ejected }
    }

    /// How long `path` has been what it is.
    pub(super) fn times(&self, path: usize) -> PathTimes {
        let (failed, path) = (self.path(path).failed, &self.paths[path]);
        let in_state = self.path_log.now().since(Nanos(path.since.load(Ordering::Relaxed)));
        let before = Nanos(path.failed_for.load(Ordering::Relaxed));
        PathTimes { in_state, failed: if failed { before + in_state } else { before } }
    }

    /// The table is loaded into a device, by whose clock times are told.
    pub(super) fn attach(&self, notify: Arc<dyn TargetHost>) {
        self.path_log.attach(notify);
        let now = self.path_log.now();
        self.paths.iter().for_each(|path| path.since.store(now.0, Ordering::Relaxed));
    }

    pub(super) fn is_bypassed(&self, group: usize) -> bool {
        self.bypassed[group].load(Ordering::Relaxed)
    }

    /// Paths that have not failed.
    pub(super) fn valid(&self) -> u32 {
        self.valid.load(Ordering::Acquire)
    }

    /// Fails a path. False when it was failed already: nothing has changed then, but that a command
    /// holds it. Called by messages and, on a path error, by lanes of any core: of several at once
    /// one wins, and says so.
    pub(super) fn fail(&self, path: usize, why: &FailReason<'_>) -> bool {
        interleave::point();
        if bugs::on(Bug::FailNotAtomic) {
            let found = self.paths[path].state.load(Ordering::Acquire);
            interleave::point();
            if found & PathState::FAILED == 0 {
                self.paths[path].state.store(found, Ordering::Release);
            }
        }
        let held = if matches!(why, FailReason::Command) { PathState::ADMIN_FAILED } else { 0 };
        let fail = |s: u64| {
            let failed = s | PathState::FAILED | held;
            let once = if s & PathState::FAILED == 0 { PathState::ONE_FAILURE } else { 0 };
            (failed != s).then_some(failed + once)
        };
        if bugs::on(Bug::FailCountedTwice) && self.path(path).failed {
            self.paths[path].state.fetch_add(PathState::ONE_FAILURE, Ordering::AcqRel);
        }
        match self.paths[path].state.fetch_update(Ordering::AcqRel, Ordering::Acquire, fail) {
            Ok(before) if before & PathState::FAILED == 0 => {}
            Ok(_) => {
                self.path_log.held(path);
                return false;
            }
            Err(_) => return false,
        }
        self.paths[path].since.store(self.path_log.now().0, Ordering::Relaxed);
        interleave::point();
        let left = self.valid.fetch_sub(1, Ordering::AcqRel) - 1;
        interleave::point();
        self.update(PackedState::moved);
        self.path_log.failed(path, why, left);
        if !bugs::on(Bug::FailNotRung) {
            self.bell.wake_up();
        }
        true
    }

    /// Makes a failed path usable again. False when it was, and to a check when the path is held.
    /// Of several at once one does it: a check leaves it to the other, and others have it look
    /// again, since the path may have failed since it looked.
    pub(super) fn reinstate(&self, path: usize, mut back: ReinstateReason) -> bool {
        let p = &self.paths[path];
        let claim = |now| match (now, back) {
            (PathState::REINSTATE_IDLE, _) => Some(PathState::REINSTATE_RUNNING),
            (_, ReinstateReason::CheckPassed) => None,
            _ => Some(PathState::REINSTATE_AGAIN),
        };
        // Acquire pairs with the releases below: who is next sees the state that the last one left.
        if p.reinstating.fetch_update(Ordering::AcqRel, Ordering::Acquire, claim)
            != Ok(PathState::REINSTATE_IDLE)
        {
            return false;
        }
        let mut done = false;
        loop {
            done |= self.reinstate_once(path, back);
            let (mine, free) = (PathState::REINSTATE_RUNNING, PathState::REINSTATE_IDLE);
            if p.reinstating.compare_exchange(mine, free, Ordering::AcqRel, Ordering::Acquire).is_ok() {
                return done;
            }
            p.reinstating.swap(mine, Ordering::AcqRel);
            back = ReinstateReason::Message;
        }
    }

    /// The work of [`MultipathState::reinstate`], for one at a time.
    fn reinstate_once(&self, path: usize, back: ReinstateReason) -> bool {
        let p = &self.paths[path];
        let by_check = matches!(back, ReinstateReason::CheckPassed);
        let state = p.state.load(Ordering::Acquire);
        if state & PathState::FAILED == 0 || by_check && state & PathState::ADMIN_FAILED != 0 {
            return false;
        }
        // Before the state, whose Release makes it visible to whoever sees the path active.
        p.stamp.store(self.stamps.fetch_add(1, Ordering::Relaxed) + 1, Ordering::Relaxed);
        let now = self.path_log.now();
        let failed = now.since(Nanos(p.since.swap(now.0, Ordering::Relaxed)));
        p.failed_for.fetch_add(failed.0, Ordering::Relaxed);
        let up = self.valid.fetch_add(1, Ordering::AcqRel) + 1;
        // Before bios that waited go on.
        self.path_log.reinstated(path, back, up);
        let before = p.state.fetch_and(!(PathState::FAILED | PathState::ADMIN_FAILED), Ordering::AcqRel);
        self.update(PackedState::moved);
        // A command came in between, and found it failed.
        let held = by_check && before & PathState::ADMIN_FAILED != 0;
        if held {
            self.fail(path, &FailReason::Command);
        }
        !held
    }

    /// Puts a path out of use for being slow. False when it is already.
    pub(super) fn eject(&self, path: usize, now: Nanos) -> bool {
        let Some(length) = self.paths[path].ejection.begin(now) else { return false };
        self.ejected.fetch_add(1, Ordering::Relaxed);
        self.update(PackedState::moved);
        self.path_log.ejected(path, length);
        true
    }

    /// True when a path is out of use for being slow.
    pub(super) fn has_ejected(&self) -> bool {
        self.ejected.load(Ordering::Relaxed) > 0
    }

    /// Since when and how often `path` is out of use for being slow.
    pub(super) fn ejection(&self, path: usize) -> &Ejection {
        &self.paths[path].ejection
    }

    /// The trial of `path` went well: it is in use again.
    pub(super) fn end_ejection(&self, path: usize, now: Nanos) {
        if self.paths[path].ejection.end(now) {
            self.ejected.fetch_sub(1, Ordering::Relaxed);
            self.update(PackedState::moved);
            self.path_log.ejection_ended(path);
        }
    }

    /// Sets or clears the bypass mark of a group; the next bio chooses a group anew.
    pub(super) fn bypass(&self, group: usize, on: bool) {
        self.bypassed[group].store(on, Ordering::Relaxed);
        self.update(|w| w.moved().with_current(None));
    }

    /// Asks for a group and clears every bypass mark.
    pub(super) fn switch(&self, group: usize) {
        for b in &self.bypassed {
            b.store(false, Ordering::Relaxed);
        }
        self.update(|w| w.moved().with_current(None).with_next(Some(group)));
    }

    /// The message `switch_group`: it holds, whichever group is better, until no path of it is left
    /// ([`MultipathState::clear_manual_group`]).
    pub(super) fn switch_manually(&self, group: usize) {
        self.by_hand.store(group as u32 + 1, Ordering::Relaxed);
        self.switch(group);
    }

    /// The group that a person has switched to.
    pub(super) fn by_hand(&self) -> Option<usize> {
        (self.by_hand.load(Ordering::Relaxed) as usize).checked_sub(1)
    }

    /// What a person chose counts no more, if it was `group`.
    pub(super) fn clear_manual_group(&self, group: usize) {
        let (was, none) = (group as u32 + 1, 0);
        // Whoever chooses another meanwhile has it.
        let _ = self.by_hand.compare_exchange(was, none, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// The messages `queue_if_no_path` and `fail_if_no_path`. The latter also forgets what a
    /// suspend saved.
    pub(super) fn set_queueing(&self, on: bool) {
        self.update(|w| {
            let w = if on { w } else { w.with(PackedState::SAVED, false) };
            w.with(PackedState::QUEUE_IF_NO_PATH, on)
        });
    }

    /// Before a suspend. With `save` the flag is remembered and cleared, so that held bios end; a
    /// second save would lose the first.
    pub(super) fn presuspend(&self, noflush: bool, save: bool) {
        self.update(|w| {
            let queueing = w.has(PackedState::QUEUE_IF_NO_PATH);
            let w = w.with(PackedState::NOFLUSH, noflush);
            match (save, queueing || !w.has(PackedState::SAVED)) {
                (true, true) => {
                    w.with(PackedState::SAVED, queueing).with(PackedState::QUEUE_IF_NO_PATH, false)
                }
                _ => w,
            }
        });
    }

    /// Restores what [`MultipathState::presuspend`] saved.
    pub(super) fn resume(&self) {
        self.update(|w| {
            let queueing = w.has(PackedState::QUEUE_IF_NO_PATH) || w.has(PackedState::SAVED);
            w.with(PackedState::NOFLUSH | PackedState::SAVED, false)
                .with(PackedState::QUEUE_IF_NO_PATH, queueing)
        });
    }
}

#[cfg(all(test, feature = "loom"))]
mod loom_tests;

#[cfg(test)]
mod tests;
