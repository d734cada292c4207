//! What must hold however cores and messages interleave, and whatever each load may return: loom
//! tries the ways.
//!
//! The lane's half is the real one, [`Router`], over selectors that share nothing.

use super::*;
use crate::multipath::route::Router;
use crate::multipath::selector::SelectorLane;
use loom::thread;
use udm_core::CoreId;

/// A lane over groups of one path each.
struct Core {
    shared: Arc<MultipathState>,
    router: Router,
}

impl Core {
    fn new(shared: &Arc<MultipathState>) -> Core {
        let groups = (0..shared.group_count()).map(|_| (1, SelectorLane::by_turns(1, CoreId(0))));
        Core { router: Router::new(shared, groups), shared: Arc::clone(shared) }
    }

    /// As `submit` does: looks again when the word has moved, and says which group the batch goes
    /// to.
    fn submit(&mut self) -> Option<usize> {
        if self.shared.word() != self.router.seen() {
            self.router.look(&self.shared);
        }
        self.router.group().map(|group| group.paths.start)
    }
}

/// The state of a table with `groups` groups of one path each.
fn shared(groups: usize) -> Arc<MultipathState> {
    Arc::new(MultipathState::new(groups, groups, false, None, PathLog::default()))
}

/// Lets loom try `model` twice, with either side of its [`race`] begun first. Loom remembers one
/// access of an atomic only and so passes over some switches between threads. But a load that comes
/// late may return what was there before, so the two orders reach those as well.
fn explore(model: impl Fn(Begins) + Copy + Send + Sync + 'static) {
    for begins in [Begins::Left, Begins::Right] {
        loom::model(move || model(begins));
    }
}

/// Which side of a race loom runs first to begin with.
#[derive(Clone, Copy)]
enum Begins {
    Left,
    Right,
}

/// Runs two cores at the same time and waits for both.
fn race<L: 'static, R: 'static>(
    begins: Begins,
    shared: &Arc<MultipathState>,
    left: impl FnOnce(&Arc<MultipathState>) -> L + 'static,
    right: impl FnOnce(&Arc<MultipathState>) -> R + 'static,
) -> (L, R) {
    let theirs = Arc::clone(shared);
    match begins {
        Begins::Left => {
            let right = thread::spawn(move || right(&theirs));
            (left(shared), right.join().unwrap())
        }
        Begins::Right => {
            let left = thread::spawn(move || left(&theirs));
            let right = right(shared);
            (left.join().unwrap(), right)
        }
    }
}

/// A batch for `core`, which it hands back.
fn submit(mut core: Core) -> impl FnOnce(&Arc<MultipathState>) -> Core {
    move |_| {
        core.submit();
        core
    }
}

/// Of two cores that fail the same path one counts it, and one tells.
#[test]
fn of_two_failures_one_counts() {
    explore(|begins| {
        let s = shared(2);
        let before = s.word();
        let (one, other) =
            race(begins, &s, |s| s.fail(0, &FailReason::Message), |s| s.fail(0, &FailReason::Message));
        assert!(one != other, "one PATH_FAILED");
        assert_eq!((s.path(0).fail_count, s.path(0).failed, s.valid()), (1, true, 1));
        assert_eq!(s.word().generation(), before.generation().wrapping_add(1));
    });
}

/// A path fails while a message reinstates it: the count of valid paths ends right, and meanwhile
/// never wraps.
#[test]
fn the_count_of_valid_paths_ends_right() {
    explore(|begins| {
        let s = shared(1);
        assert!(s.fail(0, &FailReason::Message));
        let fail = |s: &Arc<MultipathState>| {
            let failed = s.fail(0, &FailReason::Message);
            assert!(s.valid() <= 1, "{} of one path are valid", s.valid());
            failed
        };
        let (reinstated, failed) = race(begins, &s, |s| s.reinstate(0, ReinstateReason::Message), fail);
        assert!(reinstated);
        let path = s.path(0);
        assert_eq!((path.failed, path.fail_count), (failed, 1 + u64::from(failed)));
        assert_eq!(s.valid(), u32::from(!failed));
    });
}

/// Whoever sees the generation that a failure made sees the failure.
#[test]
fn a_generation_brings_its_paths_along() {
    explore(|begins| {
        let s = shared(1);
        let before = s.word().generation();
        let look = move |s: &Arc<MultipathState>| {
            if s.word().generation() != before {
                assert!(s.path(0).failed);
            }
        };
        race(begins, &s, |s| s.fail(0, &FailReason::Message), look);
    });
}

/// Whoever sees a path active again sees when it returned, too.
#[test]
fn a_returned_path_brings_its_stamp_along() {
    explore(|begins| {
        let s = shared(1);
        s.fail(0, &FailReason::Message);
        let look = |s: &Arc<MultipathState>| {
            let path = s.path(0);
            assert!(path.failed || path.stamp == 1, "{path:?}");
        };
        race(begins, &s, |s| s.reinstate(0, ReinstateReason::Message), look);
    });
}

/// A command fails a path, failed already, that a check is about to reinstate: it is held in the
/// end, and counted out.
#[test]
fn a_command_holds_a_path_that_a_check_brings_back() {
    explore(|begins| {
        let s = shared(1);
        assert!(s.fail(0, &FailReason::Message));
        let checker = |s: &Arc<MultipathState>| s.reinstate(0, ReinstateReason::CheckPassed);
        let command = |s: &Arc<MultipathState>| s.fail(0, &FailReason::Command);
        race(begins, &s, checker, command);
        let path = s.path(0);
        assert!(path.failed && path.held, "{path:?}");
        assert_eq!(s.valid(), 0);
    });
}

/// And one that it takes back at once is not held by the check that was about to.
#[test]
fn a_command_that_is_taken_back_leaves_no_hold() {
    explore(|begins| {
        let s = shared(1);
        assert!(s.fail(0, &FailReason::Message));
        let checker = |s: &Arc<MultipathState>| s.reinstate(0, ReinstateReason::CheckPassed);
        let command = |s: &Arc<MultipathState>| {
            s.fail(0, &FailReason::Command);
            s.reinstate(0, ReinstateReason::Command)
        };
        race(begins, &s, checker, command);
        let path = s.path(0);
        assert!(!path.failed && !path.held, "{path:?}");
        assert_eq!(s.valid(), 1);
    });
}

/// A lane looks while a group message comes in. No choice takes its change back or stands on what
/// was before, and the next batch goes to the second group.
fn goes_to_the_second_group(message: fn(&Arc<MultipathState>)) {
    explore(move |begins| {
        let s = shared(2);
        let before = s.word().generation();
        let ((), mut core) = race(begins, &s, message, submit(Core::new(&s)));
        let after = s.word();
        assert_eq!(after.generation(), before.wrapping_add(1), "a choice took a change back");
        assert_ne!(after.current(), Some(0), "a choice on old facts stands: {after:?}");
        assert_eq!(core.submit(), Some(1));
        assert_eq!(s.word().current(), Some(1));
    });
}

#[test]
fn a_bypass_is_not_missed() {
    goes_to_the_second_group(|s| s.bypass(0, true));
}

#[test]
fn a_switch_is_not_missed() {
    goes_to_the_second_group(|s| s.switch(1));
}

#[test]
fn a_failed_path_is_not_missed() {
    explore(|begins| {
        let s = shared(1);
        let (_, mut core) = race(begins, &s, |s| s.fail(0, &FailReason::Message), submit(Core::new(&s)));
        assert_eq!(core.submit(), None);
        assert_eq!(s.word().current(), None);
    });
}

#[test]
fn a_returned_path_is_not_missed() {
    explore(|begins| {
        let s = shared(1);
        s.fail(0, &FailReason::Message);
        let (_, mut core) =
            race(begins, &s, |s| s.reinstate(0, ReinstateReason::Message), submit(Core::new(&s)));
        assert_eq!(core.submit(), Some(0));
        assert_eq!((s.word().current(), s.valid()), (Some(0), 1));
    });
}

/// A lane chooses while a message changes a flag: neither takes back what the other did.
#[test]
fn a_choice_and_a_message_keep_each_others_bits() {
    explore(|begins| {
        let s = shared(2);
        s.fail(0, &FailReason::Message);
        race(begins, &s, |s| s.set_queueing(true), submit(Core::new(&s)));
        let word = s.word();
        assert!(word.has(PackedState::QUEUE_IF_NO_PATH) && !word.has(PackedState::QUEUE_IO), "{word:?}");
        assert_eq!(word.current(), Some(1));
    });
}

/// A path fails under one lane while another one chooses: both end in the other group.
#[test]
fn two_lanes_agree() {
    explore(|begins| {
        let s = shared(2);
        let fail_over = |s: &Arc<MultipathState>| {
            assert!(s.fail(0, &FailReason::Message));
            Core::new(s).submit()
        };
        let (theirs, mut ours) = race(begins, &s, fail_over, submit(Core::new(&s)));
        assert_eq!((theirs, ours.submit()), (Some(1), Some(1)));
        assert_eq!(s.word().current(), Some(1));
    });
}

/// A message and the checker reinstate a path at once: one does, and it counts once.
#[test]
fn of_two_that_reinstate_a_path_one_does() {
    explore(|begins| {
        let s = shared(1);
        assert!(s.fail(0, &FailReason::Message));
        let checker = |s: &Arc<MultipathState>| s.reinstate(0, ReinstateReason::CheckPassed);
        let (message, checker) = race(begins, &s, |s| s.reinstate(0, ReinstateReason::Message), checker);
        assert!(message ^ checker);
        assert_eq!((s.valid(), s.path(0).failed), (1, false));
    });
}
