//! Unit tests of groups, paths and flags, without concurrency.

use super::*;

fn views(groups: &[(usize, bool)]) -> Vec<PriorityGroupUsability> {
    groups.iter().map(|&(usable, bypassed)| PriorityGroupUsability { usable, bypassed }).collect()
}

/// Columns: next group, current group, groups (usable paths, bypassed), then the chosen group and
/// the next group afterwards.
#[test]
fn groups_are_chosen_in_the_kernels_order() {
    type Row = (Option<usize>, Option<usize>, &'static [(usize, bool)], Option<usize>, Option<usize>);
    let rows: &[Row] = &[
        (Some(1), None, &[(1, false), (1, false)], Some(1), None),
        (Some(1), None, &[(1, false), (1, true)], Some(1), None),
        (Some(1), Some(0), &[(1, false), (0, false)], Some(0), None),
        (None, Some(1), &[(1, false), (1, false)], Some(1), None),
        (None, Some(1), &[(1, false), (0, false)], Some(0), None),
        (None, Some(1), &[(1, true), (0, false), (1, false)], Some(2), None),
        (None, None, &[(1, true), (0, false)], Some(0), None),
        (None, None, &[], None, None),
        (Some(1), Some(0), &[(0, false), (0, false)], None, Some(1)),
    ];
    for &(next, current, groups, want, then) in rows {
        let word = PackedMultipathState::loaded(true, next).with_current(current);
        let (after, got) = choose_group(word, &views(groups));
        assert_eq!((got, after.current(), after.next()), (want, want, then), "{word:?} {groups:?}");
        assert!(
            !after.has(PackedMultipathState::QUEUE_IO) && after.has(PackedMultipathState::QUEUE_IF_NO_PATH)
        );
        assert_eq!(after.generation(), word.generation());
    }
}

#[test]
fn failing_twice_counts_once() {
    let s = MultipathState::new(1, 2, false, Some(0), PathEventLogger::default());
    let before = s.word();
    assert!(s.fail(0, &PathFailReason::Message) && !s.fail(0, &PathFailReason::Message));
    assert_eq!((s.valid(), s.path(0).fail_count), (1, 1));
    assert_ne!(s.word().generation(), before.generation());
    let back = |path| s.reinstate(path, ReinstateReason::Message);
    assert!(back(0) && !back(0) && !back(1));
    let back = PathStateSnapshot { failed: false, held: false, fail_count: 1, stamp: 1, ejected: false };
    assert_eq!(s.path(0), back);
    assert!(!s.commit(before, before.with_current(Some(0))), "a choice on old facts does not count");
}

#[test]
fn what_a_command_failed_no_check_brings_back() {
    let s = MultipathState::new(1, 1, false, None, PathEventLogger::default());
    let is = || (s.path(0).failed, s.path(0).held, s.path(0).fail_count, s.valid());
    assert!(s.fail(0, &PathFailReason::Message) && !s.fail(0, &PathFailReason::Command));
    assert_eq!(is(), (true, true, 1, 0), "it was failed, and is held from now on");
    assert!(!s.reinstate(0, ReinstateReason::CheckPassed));
    assert!(!s.fail(0, &PathFailReason::Message));
    assert_eq!(is(), (true, true, 1, 0));
    assert!(s.reinstate(0, ReinstateReason::Command));
    assert_eq!(is(), (false, false, 1, 1));
    assert!(s.fail(0, &PathFailReason::Command));
    assert_eq!(is(), (true, true, 2, 0));
    assert!(s.reinstate(0, ReinstateReason::Message), "a message is somebody's word, too");
    assert!(s.fail(0, &PathFailReason::Message) && s.reinstate(0, ReinstateReason::CheckPassed));
}

#[test]
fn a_suspend_saves_the_flag_once() {
    let s = MultipathState::new(1, 1, true, None, PathEventLogger::default());
    s.presuspend(true, true);
    assert!(!s.word().has(PackedMultipathState::QUEUE_IF_NO_PATH) && s.word().queueing());
    s.presuspend(false, true);
    assert!(!s.word().queueing());
    s.resume();
    assert!(
        s.word().has(PackedMultipathState::QUEUE_IF_NO_PATH) && !s.word().has(PackedMultipathState::SAVED)
    );
    s.presuspend(true, false);
    assert!(
        s.word().has(PackedMultipathState::QUEUE_IF_NO_PATH),
        "request mode keeps it in a no-flush suspend"
    );
    s.presuspend(false, true);
    s.set_queueing(false);
    s.resume();
    assert!(!s.word().queueing(), "fail_if_no_path forgets what was saved");
}
