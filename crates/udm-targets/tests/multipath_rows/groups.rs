//! Groups and messages: the group in use, the printed state, and the events.

use super::multipath_rig::{MultipathRig, disks};
use udm_core::errno::{EINVAL, ENOENT};

const TWO: &str = "0 0 2 1 round-robin 0 2 0 253:0 253:1 round-robin 0 2 0 253:2 253:3";
const THREE: &str = "0 0 3 1 round-robin 0 1 0 253:0 round-robin 0 1 0 253:1 round-robin 0 1 0 253:2";

/// Two groups of two paths, in the state of `g02`: both paths of the first group are failed.
fn failed_over() -> MultipathRig {
    let mut rig = MultipathRig::new(TWO);
    rig.tell("fail_path 253:0");
    rig.tell("fail_path 253:1");
    assert_eq!(rig.order(1), [2]);
    rig
}

#[test]
fn g01_the_first_group_is_used() {
    let mut rig = MultipathRig::new(TWO);
    assert_eq!(rig.order(1), [0]);
    let want = "2 0 0 0 2 1 A 0 2 0 253:0 A 0 253:1 A 0 E 0 2 0 253:2 A 0 253:3 A 0 ";
    assert_eq!((rig.status().as_str(), rig.events.count()), (want, 0));
}

#[test]
fn g02_a_group_without_paths_is_left() {
    let rig = failed_over();
    let want = "2 0 0 0 2 2 E 0 2 0 253:0 F 1 253:1 F 1 A 0 2 0 253:2 A 0 253:3 A 0 ";
    assert_eq!((rig.status().as_str(), rig.events.count()), (want, 2));
}

#[test]
fn g03_the_target_does_not_fail_back() {
    let mut rig = failed_over();
    rig.tell("reinstate_path 253:0");
    assert_eq!((rig.order(1), rig.events.count()), (vec![3], 3));
}

#[test]
fn g04_a_switch_is_shown_and_then_made() {
    let mut rig = failed_over();
    rig.tell("reinstate_path 253:0");
    rig.tell("switch_group 1");
    let want = "2 0 0 0 2 1 E 0 2 0 253:0 A 1 253:1 F 1 E 0 2 0 253:2 A 0 253:3 A 0 ";
    assert_eq!((rig.status().as_str(), rig.events.count()), (want, 4));
    assert_eq!(rig.order(1), [0]);
    assert!(rig.status().starts_with("2 0 0 0 2 1 A "), "{}", rig.status());
}

#[test]
fn g05_groups_that_there_are_not() {
    let mut rig = MultipathRig::new(TWO);
    for message in ["switch_group 0", "switch_group 3", "switch_group x", "switch_group"] {
        assert_eq!(rig.message(message).expect_err(message).errno, EINVAL, "{message}");
    }
    assert_eq!(rig.events.count(), 0);
}

#[test]
fn g06_a_switch_wins_over_a_later_mark() {
    let mut rig = MultipathRig::new(TWO);
    rig.tell("switch_group 2");
    rig.tell("disable_group 2");
    assert_eq!(rig.order(1), [2]);
    let want = "2 0 0 0 2 2 E 0 2 0 253:0 A 0 253:1 A 0 D 0 2 0 253:2 A 0 253:3 A 0 ";
    assert_eq!(rig.status(), want);
}

#[test]
fn g07_with_all_groups_disabled_one_is_used() {
    let mut rig = MultipathRig::new(TWO);
    rig.tell("disable_group 1");
    rig.tell("disable_group 2");
    assert_eq!(rig.order(1), [0]);
    let want = "2 0 0 0 2 1 D 0 2 0 253:0 A 0 253:1 A 0 D 0 2 0 253:2 A 0 253:3 A 0 ";
    assert_eq!(rig.status(), want);
}

#[test]
fn g08_a_switch_enables_all_groups() {
    let mut rig = MultipathRig::new(TWO);
    rig.tell("disable_group 1");
    rig.tell("disable_group 2");
    rig.tell("switch_group 1");
    assert!(!rig.status().contains('D'), "{}", rig.status());
}

#[test]
fn g09_disabling_any_group_has_the_next_request_look_from_the_first() {
    let mut rig = MultipathRig::new(THREE);
    rig.tell("switch_group 2");
    assert_eq!(rig.order(1), [1]);
    rig.tell("disable_group 3");
    assert_eq!(rig.order(1), [0]);
}

#[test]
fn g11_a_switch_to_a_group_without_paths_is_forgotten() {
    let mut rig = MultipathRig::new(THREE);
    rig.tell("fail_path 253:2");
    rig.tell("switch_group 3");
    assert_eq!(rig.order(1), [0]);
    rig.tell("reinstate_path 253:2");
    assert_eq!(rig.order(1), [0]);
}

#[test]
fn g12_messages_in_capitals_and_paths_by_name() {
    let mut rig = MultipathRig::new(TWO);
    rig.tell("FAIL_PATH /dev/nullb1");
    assert!(rig.status().contains("253:1 F 1"), "{}", rig.status());
}

#[test]
fn g14_a_path_that_works_is_reinstated() {
    let mut rig = MultipathRig::new(TWO);
    rig.tell("reinstate_path 253:0");
    assert_eq!(rig.events.count(), 0);
}

#[test]
fn g15_paths_that_are_not_in_the_table() {
    let mut rig = MultipathRig::with_disks("0 0 1 1 round-robin 0 1 0 253:0", disks(2));
    assert_eq!(rig.message("fail_path 253:1").expect_err("of another").errno, EINVAL);
    assert_eq!(rig.message("fail_path /dev/nosuch").expect_err("missing").errno, ENOENT);
}

#[test]
fn g16_messages_that_are_none() {
    let mut rig = MultipathRig::new(TWO);
    for message in ["nonsense", "nonsense 1", "fail_path", "", "queue_if_no_path x", "switch_group 1 2"] {
        assert_eq!(rig.message(message).expect_err(message).errno, EINVAL, "{message:?}");
    }
    assert_eq!(rig.events.count(), 0);
}

#[test]
fn g17_each_entry_of_a_device_fails_with_it() {
    let mut rig = MultipathRig::new("0 0 2 1 round-robin 0 2 0 253:0 253:0 round-robin 0 2 0 253:0 253:1");
    rig.tell("fail_path 253:0");
    let want = "2 1 0 0 2 1 E 0 2 0 253:0 F 1 253:0 F 1 E 0 2 0 253:0 F 1 253:1 A 0 ";
    assert_eq!((rig.status().as_str(), rig.events.count()), (want, 1));
    assert_eq!(rig.order(2), [1, 1], "one entry of four is left");
}

#[test]
fn g19_a_reload_begins_afresh() {
    let mut rig = MultipathRig::new(TWO);
    rig.tell("fail_path 253:0");
    assert_eq!(rig.order(1), [1]);
    rig.suspend(false);
    rig.load(TWO);
    rig.resume();
    let want = "2 1 0 0 2 1 E 0 2 0 253:0 A 0 253:1 A 0 E 0 2 0 253:2 A 0 253:3 A 0 ";
    assert_eq!((rig.status().as_str(), rig.events.count()), (want, 1));
}
