//! Loom tests: rules that hold for every interleaving of cores and messages, and for every value
//! that a load may return.
//!
//! The lane's part is the real [`Router`], with selectors that share nothing.

use super::*;
use crate::multipath::route::LanePriorityGroups;
use crate::multipath::selector::SelectorLane;
use loom::thread;
use udm_core::CoreId;

/// A lane over groups of one path each.
struct Core {
    shared: Arc<MultipathState>,
    router: LanePriorityGroups,
}

impl Core {
    fn new(shared: &Arc<MultipathState>) -> Core {
        let groups = (0..shared.group_count()).map(|_| (1, SelectorLane::by_turns(1, CoreId(0))));
        Core { router: LanePriorityGroups::new(shared, groups), shared: Arc::clone(shared) }
    }

    /// As `submit` of the lane: refreshes if the word has changed. Returns the group that the batch
    /// goes to.
    fn submit(&mut self) -> Option<usize> {
        if self.shared.word() != self.router.seen() {
            self.router.look(&self.shared);
        }
        self.router.group().map(|group| group.paths.start)
    }
}

/// The state of a table with `groups` groups of one path each.
fn shared(groups: usize) -> Arc<MultipathState> {
    Arc::new(MultipathState::new(groups, groups, false, None, PathEventLogger::default()))
}

/// Lets loom try `model` twice, starting with either side of its [`race`]. Loom remembers only one
/// access per atomic and skips some switches between threads. A late load may still return an old
/// value, so the two orders cover these cases too.
fn explore(model: impl Fn(Begins) + Copy + Send + Sync + 'static) {
    for begins in [Begins::Left, Begins::Right] {
        loom::model(move || model(begins));
    }
}

/// The side of a race that loom starts first.
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

/// Submits a batch on `core` and returns the core.
fn submit(mut core: Core) -> impl FnOnce(&Arc<MultipathState>) -> Core {
    move |_| {
        core.submit();
        core
    }
}

/// If two cores fail the same path, it is counted and logged once.
#[test]
fn of_two_failures_one_counts() {
    explore(|begins| {
        let s = shared(2);
        let before = s.word();
        let (one, other) = race(
            begins,
            &s,
            |s| s.fail(0, &PathFailReason::Message),
            |s| s.fail(0, &PathFailReason::Message),
        );
        assert!(one != other, "one PATH_FAILED");
        assert_eq!((s.path(0).fail_count, s.path(0).failed, s.valid()), (1, true, 1));
        assert_eq!(s.word().generation(), before.generation().wrapping_add(1));
    });
}

/// A path fails while a message reinstates it: the count of valid paths is right at the end and
/// never wraps.
#[test]
fn the_count_of_valid_paths_ends_right() {
    explore(|begins| {
        let s = shared(1);
        assert!(s.fail(0, &PathFailReason::Message));
        let fail = |s: &Arc<MultipathState>| {
            let failed = s.fail(0, &PathFailReason::Message);
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

/// A core that sees the generation after a failure also sees the failure.
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
        race(begins, &s, |s| s.fail(0, &PathFailReason::Message), look);
    });
}

/// A core that sees a path active again also sees its new stamp.
#[test]
fn a_returned_path_brings_its_stamp_along() {
    explore(|begins| {
        let s = shared(1);
        s.fail(0, &PathFailReason::Message);
        let look = |s: &Arc<MultipathState>| {
            let path = s.path(0);
            assert!(path.failed || path.stamp == 1, "{path:?}");
        };
        race(begins, &s, |s| s.reinstate(0, ReinstateReason::Message), look);
    });
}

/// A command fails a failed path while a check reinstates it: at the end the path is failed by an
/// administrator and not counted as valid.
#[test]
fn a_command_holds_a_path_that_a_check_brings_back() {
    explore(|begins| {
        let s = shared(1);
        assert!(s.fail(0, &PathFailReason::Message));
        let checker = |s: &Arc<MultipathState>| s.reinstate(0, ReinstateReason::CheckPassed);
        let command = |s: &Arc<MultipathState>| s.fail(0, &PathFailReason::Command);
        race(begins, &s, checker, command);
        let path = s.path(0);
        assert!(path.failed && path.held, "{path:?}");
        assert_eq!(s.valid(), 0);
    });
}

/// If a command fails a path and reinstates it at once, a concurrent check does not mark it as
/// failed by an administrator.
#[test]
fn a_command_that_is_taken_back_leaves_no_hold() {
    explore(|begins| {
        let s = shared(1);
        assert!(s.fail(0, &PathFailReason::Message));
        let checker = |s: &Arc<MultipathState>| s.reinstate(0, ReinstateReason::CheckPassed);
        let command = |s: &Arc<MultipathState>| {
            s.fail(0, &PathFailReason::Command);
            s.reinstate(0, ReinstateReason::Command)
        };
        race(begins, &s, checker, command);
        let path = s.path(0);
        assert!(!path.failed && !path.held, "{path:?}");
        assert_eq!(s.valid(), 1);
    });
}

/// A lane chooses a group during a group message. The choice neither reverts the message nor stays
/// if it was based on old state. The next batch goes to the second group.
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
        let (_, mut core) = race(begins, &s, |s| s.fail(0, &PathFailReason::Message), submit(Core::new(&s)));
        assert_eq!(core.submit(), None);
        assert_eq!(s.word().current(), None);
    });
}

#[test]
fn a_returned_path_is_not_missed() {
    explore(|begins| {
        let s = shared(1);
        s.fail(0, &PathFailReason::Message);
        let (_, mut core) =
            race(begins, &s, |s| s.reinstate(0, ReinstateReason::Message), submit(Core::new(&s)));
        assert_eq!(core.submit(), Some(0));
        assert_eq!((s.word().current(), s.valid()), (Some(0), 1));
    });
}

/// A lane chooses a group while a message changes a flag: neither reverts the other.
#[test]
fn a_choice_and_a_message_keep_each_others_bits() {
    explore(|begins| {
        let s = shared(2);
        s.fail(0, &PathFailReason::Message);
        race(begins, &s, |s| s.set_queueing(true), submit(Core::new(&s)));
        let word = s.word();
        assert!(
            word.has(PackedMultipathState::QUEUE_IF_NO_PATH) && !word.has(PackedMultipathState::QUEUE_IO),
            "{word:?}"
        );
        assert_eq!(word.current(), Some(1));
    });
}

/// A path fails on one lane while another lane chooses: both use the other group at the end.
#[test]
fn two_lanes_agree() {
    explore(|begins| {
        let s = shared(2);
        let fail_over = |s: &Arc<MultipathState>| {
            assert!(s.fail(0, &PathFailReason::Message));
            Core::new(s).submit()
        };
        let (theirs, mut ours) = race(begins, &s, fail_over, submit(Core::new(&s)));
        assert_eq!((theirs, ours.submit()), (Some(1), Some(1)));
        assert_eq!(s.word().current(), Some(1));
    });
}

/// A message and the checker reinstate a path at once: one does it, and it counts once.
#[test]
fn of_two_that_reinstate_a_path_one_does() {
    explore(|begins| {
        let s = shared(1);
        assert!(s.fail(0, &PathFailReason::Message));
        let checker = |s: &Arc<MultipathState>| s.reinstate(0, ReinstateReason::CheckPassed);
        let (message, checker) = race(begins, &s, |s| s.reinstate(0, ReinstateReason::Message), checker);
        assert!(message ^ checker);
        assert_eq!((s.valid(), s.path(0).failed), (1, false));
    });
}
