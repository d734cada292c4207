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
use super::journal::{Back, Journal, Why};
use crossbeam_utils::CachePadded;
#[cfg(feature = "loom")]
use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::Arc;
#[cfg(not(feature = "loom"))]
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use udm_core::bugs::{self, Bug};
use udm_core::{Bell, Nanos, interleave};
use udm_dm::target::Notify;

/// Flags, current group, next group and generation: a snapshot of [`Shared::word`]. Groups count
/// from 0 here and from 1 in what is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Word(u64);

impl Word {
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
    fn loaded(queue_if_no_path: bool, next: Option<usize>) -> Word {
        Word(Word::QUEUE_IO).with(Word::QUEUE_IF_NO_PATH, queue_if_no_path).with_next(next)
    }

    /// A word that differs from this one in every part: what a lane has seen that saw none.
    pub(super) fn unseen(self) -> Word {
        Word(!self.0)
    }

    pub(super) fn has(self, flag: u64) -> bool {
        self.0 & flag != 0
    }

    fn with(self, flag: u64, on: bool) -> Word {
        Word(if on { self.0 | flag } else { self.0 & !flag })
    }

    fn group(self, shift: u32) -> Option<usize> {
        (((self.0 >> shift) & Word::GROUP) as usize).checked_sub(1)
    }

    fn with_group(self, shift: u32, group: Option<usize>) -> Word {
        let number = group.map_or(0, |g| g as u64 + 1);
        Word((self.0 & !(Word::GROUP << shift)) | (number << shift))
    }

    /// The group in use.
    pub(super) fn current(self) -> Option<usize> {
        self.group(Word::CURRENT)
    }

    /// The group to try first, once.
    pub(super) fn next(self) -> Option<usize> {
        self.group(Word::NEXT)
    }

    fn with_current(self, group: Option<usize>) -> Word {
        self.with_group(Word::CURRENT, group)
    }

    fn with_next(self, group: Option<usize>) -> Word {
        self.with_group(Word::NEXT, group)
    }

    pub(super) fn generation(self) -> u32 {
        (self.0 >> Word::GENERATION) as u32
    }

    fn moved(self) -> Word {
        Word(self.0.wrapping_add(1 << Word::GENERATION))
    }

    /// True when a bio without a path is held and not failed. A no-flush suspend clears the flag in
    /// bio mode and remembers it, and bios must survive that too.
    pub(super) fn queueing(self) -> bool {
        self.has(Word::QUEUE_IF_NO_PATH) || (self.has(Word::SAVED) && self.has(Word::NOFLUSH))
    }

    /// The same, and of a suspended device what holds from its resume on.
    pub(super) fn means_to_queue(self) -> bool {
        self.has(Word::QUEUE_IF_NO_PATH) || self.has(Word::SAVED)
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
pub(super) fn choose(word: Word, groups: &[GroupView]) -> (Word, Option<usize>) {
    let settled = word.with(Word::QUEUE_IO, false);
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
    /// [`PathState::FAILED`] and [`PathState::HELD`]. Above: how often it failed since the table
    /// was loaded.
    state: AtomicU64,
    /// When it was last reinstated, on the device's count of reinstatements; 0 for never. Lanes
    /// that look later rebuild the order from it.
    stamp: AtomicU64,
    /// Whether somebody is about to reinstate it ([`PathState::NOBODY`] and what follows): of a
    /// message and the checker one does.
    returning: AtomicU32,
    /// When it last failed or was reinstated, and how long it was failed before that, in ns on the
    /// journal's clock. For who asks; nothing hangs on it.
    since: AtomicU64,
    failed_for: AtomicU64,
    ejection: Ejection,
}

impl PathState {
    const FAILED: u64 = 1;
    /// An administrator failed it: no check reinstates it. Set only where it is failed.
    const HELD: u64 = 2;
    /// One failure.
    const ONCE: u64 = 4;

    /// Nobody reinstates it.
    const NOBODY: u32 = 0;
    /// Somebody does.
    const SOMEBODY: u32 = 1;
    /// And is asked to look again.
    const ASKED: u32 = 2;
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
pub(super) struct Times {
    pub(super) in_state: Nanos,
    pub(super) failed: Nanos,
}

/// The shared state of one loaded table. A reload makes a new one.
pub(super) struct Shared {
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
    pub(super) journal: Journal,
    /// Rung when a path failed, or by a message that the checker has to know of: it waits for it.
    pub(super) bell: Arc<Bell>,
}

impl Shared {
    /// The state after a load: all paths active, no group bypassed.
    pub(super) fn new(
        groups: usize,
        paths: usize,
        queue_if_no_path: bool,
        next: Option<usize>,
        journal: Journal,
    ) -> Shared {
        Shared {
            word: CachePadded::new(AtomicU64::new(Word::loaded(queue_if_no_path, next).0)),
            valid: AtomicU32::new(paths as u32),
            stamps: AtomicU64::new(0),
            ejected: AtomicU32::new(0),
            by_hand: AtomicU32::new(0),
            bypassed: (0..groups).map(|_| AtomicBool::new(false)).collect(),
            paths: (0..paths).map(|_| PathState::default()).collect(),
            journal,
            bell: Arc::new(Bell::new()),
        }
    }

    /// The word, and with it all that was written before it moved.
    pub(super) fn word(&self) -> Word {
        interleave::point();
        Word(self.word.load(Ordering::Acquire))
    }

    /// Takes a lane's choice of group. False when the word has moved since: look again.
    pub(super) fn commit(&self, old: Word, new: Word) -> bool {
        interleave::point();
        if old == new {
            return true;
        }
        let done = self.word.compare_exchange(old.0, new.0, Ordering::AcqRel, Ordering::Acquire).is_ok();
        if let Some(group) = new.current().filter(|_| done && new.current() != old.current()) {
            self.journal.group_in_use(group);
        }
        done
    }

    fn update(&self, change: impl Fn(Word) -> Word) {
        // The closure never says no, so this ends when the compare-and-swap succeeds.
        let _ = self.word.fetch_update(Ordering::AcqRel, Ordering::Acquire, |w| Some(change(Word(w)).0));
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
        let ejected = self.paths[path].ejection.is_out();
        let is = |bit| state & bit != 0;
        let (failed, held) = (is(PathState::FAILED), is(PathState::HELD));
        PathView { failed, held, fail_count: state / PathState::ONCE, stamp, ejected }
    }

    /// How long `path` has been what it is.
    pub(super) fn times(&self, path: usize) -> Times {
        let (failed, path) = (self.path(path).failed, &self.paths[path]);
        let in_state = self.journal.now().since(Nanos(path.since.load(Ordering::Relaxed)));
        let before = Nanos(path.failed_for.load(Ordering::Relaxed));
        Times { in_state, failed: if failed { before + in_state } else { before } }
    }

    /// The table is loaded into a device, by whose clock times are told.
    pub(super) fn attach(&self, notify: Arc<dyn Notify>) {
        self.journal.attach(notify);
        let now = self.journal.now();
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
    pub(super) fn fail(&self, path: usize, why: &Why<'_>) -> bool {
        interleave::point();
        if bugs::on(Bug::FailNotAtomic) {
            let found = self.paths[path].state.load(Ordering::Acquire);
            interleave::point();
            if found & PathState::FAILED == 0 {
                self.paths[path].state.store(found, Ordering::Release);
            }
        }
        let held = if matches!(why, Why::Command) { PathState::HELD } else { 0 };
        let fail = |s: u64| {
            let failed = s | PathState::FAILED | held;
            let once = if s & PathState::FAILED == 0 { PathState::ONCE } else { 0 };
            (failed != s).then_some(failed + once)
        };
        if bugs::on(Bug::FailCountedTwice) && self.path(path).failed {
            self.paths[path].state.fetch_add(PathState::ONCE, Ordering::AcqRel);
        }
        match self.paths[path].state.fetch_update(Ordering::AcqRel, Ordering::Acquire, fail) {
            Ok(before) if before & PathState::FAILED == 0 => {}
            Ok(_) => {
                self.journal.held(path);
                return false;
            }
            Err(_) => return false,
        }
        self.paths[path].since.store(self.journal.now().0, Ordering::Relaxed);
        interleave::point();
        let left = self.valid.fetch_sub(1, Ordering::AcqRel) - 1;
        interleave::point();
        self.update(Word::moved);
        self.journal.failed(path, why, left);
        if !bugs::on(Bug::FailNotRung) {
            self.bell.ring();
        }
        true
    }

    /// Makes a failed path usable again. False when it was, and to a check when the path is held.
    /// Of several at once one does it: a check leaves it to the other, and others have it look
    /// again, since the path may have failed since it looked.
    pub(super) fn reinstate(&self, path: usize, mut back: Back) -> bool {
        let p = &self.paths[path];
        let claim = |now| match (now, back) {
            (PathState::NOBODY, _) => Some(PathState::SOMEBODY),
            (_, Back::Answers) => None,
            _ => Some(PathState::ASKED),
        };
        // Acquire pairs with the releases below: who is next sees the state that the last one left.
        if p.returning.fetch_update(Ordering::AcqRel, Ordering::Acquire, claim) != Ok(PathState::NOBODY) {
            return false;
        }
        let mut done = false;
        loop {
            done |= self.bring_back(path, back);
            let (mine, free) = (PathState::SOMEBODY, PathState::NOBODY);
            if p.returning.compare_exchange(mine, free, Ordering::AcqRel, Ordering::Acquire).is_ok() {
                return done;
            }
            p.returning.swap(mine, Ordering::AcqRel);
            back = Back::Message;
        }
    }

    /// The work of [`Shared::reinstate`], for one at a time.
    fn bring_back(&self, path: usize, back: Back) -> bool {
        let p = &self.paths[path];
        let by_check = matches!(back, Back::Answers);
        let state = p.state.load(Ordering::Acquire);
        if state & PathState::FAILED == 0 || by_check && state & PathState::HELD != 0 {
            return false;
        }
        // Before the state, whose Release makes it visible to whoever sees the path active.
        p.stamp.store(self.stamps.fetch_add(1, Ordering::Relaxed) + 1, Ordering::Relaxed);
        let now = self.journal.now();
        let failed = now.since(Nanos(p.since.swap(now.0, Ordering::Relaxed)));
        p.failed_for.fetch_add(failed.0, Ordering::Relaxed);
        let up = self.valid.fetch_add(1, Ordering::AcqRel) + 1;
        // Before bios that waited go on.
        self.journal.reinstated(path, back, up);
        let before = p.state.fetch_and(!(PathState::FAILED | PathState::HELD), Ordering::AcqRel);
        self.update(Word::moved);
        // A command came in between, and found it failed.
        let held = by_check && before & PathState::HELD != 0;
        if held {
            self.fail(path, &Why::Command);
        }
        !held
    }

    /// Puts a path out of use for being slow. False when it is already.
    pub(super) fn eject(&self, path: usize, now: Nanos) -> bool {
        let Some(length) = self.paths[path].ejection.begin(now) else { return false };
        self.ejected.fetch_add(1, Ordering::Relaxed);
        self.update(Word::moved);
        self.journal.ejected(path, length);
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
    pub(super) fn admit(&self, path: usize, now: Nanos) {
        if self.paths[path].ejection.end(now) {
            self.ejected.fetch_sub(1, Ordering::Relaxed);
            self.update(Word::moved);
            self.journal.admitted(path);
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
    /// ([`Shared::end_by_hand`]).
    pub(super) fn switch_by_hand(&self, group: usize) {
        self.by_hand.store(group as u32 + 1, Ordering::Relaxed);
        self.switch(group);
    }

    /// The group that a person has switched to.
    pub(super) fn by_hand(&self) -> Option<usize> {
        (self.by_hand.load(Ordering::Relaxed) as usize).checked_sub(1)
    }

    /// What a person chose counts no more, if it was `group`.
    pub(super) fn end_by_hand(&self, group: usize) {
        let (was, none) = (group as u32 + 1, 0);
        // Whoever chooses another meanwhile has it.
        let _ = self.by_hand.compare_exchange(was, none, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// The messages `queue_if_no_path` and `fail_if_no_path`. The latter also forgets what a
    /// suspend saved.
    pub(super) fn set_queueing(&self, on: bool) {
        self.update(|w| {
            let w = if on { w } else { w.with(Word::SAVED, false) };
            w.with(Word::QUEUE_IF_NO_PATH, on)
        });
    }

    /// Before a suspend. With `save` the flag is remembered and cleared, so that held bios end; a
    /// second save would lose the first.
    pub(super) fn presuspend(&self, noflush: bool, save: bool) {
        self.update(|w| {
            let queueing = w.has(Word::QUEUE_IF_NO_PATH);
            let w = w.with(Word::NOFLUSH, noflush);
            match (save, queueing || !w.has(Word::SAVED)) {
                (true, true) => w.with(Word::SAVED, queueing).with(Word::QUEUE_IF_NO_PATH, false),
                _ => w,
            }
        });
    }

    /// Restores what [`Shared::presuspend`] saved.
    pub(super) fn resume(&self) {
        self.update(|w| {
            let queueing = w.has(Word::QUEUE_IF_NO_PATH) || w.has(Word::SAVED);
            w.with(Word::NOFLUSH | Word::SAVED, false).with(Word::QUEUE_IF_NO_PATH, queueing)
        });
    }
}

#[cfg(all(test, feature = "loom"))]
mod loom_tests;

#[cfg(test)]
mod tests;
