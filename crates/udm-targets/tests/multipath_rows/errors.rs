//! Errors of paths, and requests for which there is no path. The rows are for request mode and bio
//! mode; udm always has the rule of bio mode.

use super::multipath_rig::{MultipathRig, SIZE, bare_read};
use udm_core::{Op, Status};
use udm_dm::testing::{bio_without_data, make_test_read_bio};

const FOUR: &str = "0 0 2 1 round-robin 0 2 0 253:0 253:1 round-robin 0 2 0 253:2 253:3";

/// The table in request mode and in bio mode, with `features` of `count` words.
fn both_queue_modes(count: u32, features: &str, rest: &str) -> [String; 2] {
    let bio = format!("{} {features} queue_mode bio {rest}", count + 2);
    [format!("{count} {features} {rest}"), bio].map(|text| text.replace("  ", " "))
}

fn read_bad_half() -> Box<udm_core::Bio> {
    make_test_read_bio(SIZE / 2, 8)
}

#[test]
fn e01_one_bad_path_is_left() {
    for params in both_queue_modes(0, "", "0 1 1 round-robin 0 2 0 253:0 253:1") {
        let mut rig = MultipathRig::new(&params);
        rig.bad_second_half(&[0], Status::IoErr);
        for _ in 0..3 {
            assert_eq!(rig.run(read_bad_half()), Status::Ok);
        }
        assert!(rig.status().ends_with("253:0 F 1 253:1 A 0 "), "{}", rig.status());
        assert_eq!(rig.events.count(), 1);
    }
}

/// If one request fails four paths, there is one event. Each failure is in the log (`path_log.rs`),
/// for which a kernel sends four uevents.
#[test]
fn e02_a_block_that_is_bad_on_all_paths_takes_them_all() {
    let mut rig = MultipathRig::new(FOUR);
    rig.bad_second_half(&[0, 1, 2, 3], Status::IoErr);
    assert_eq!(rig.run(read_bad_half()), Status::IoErr);
    let status = rig.status();
    for path in 0..4 {
        assert!(status.contains(&format!("253:{path} F 1")), "{status}");
    }
    assert_eq!(rig.events.count(), 1);
}

#[test]
fn e03_good_blocks_fail_then_too() {
    let mut rig = MultipathRig::new(FOUR);
    rig.bad_second_half(&[0, 1, 2, 3], Status::IoErr);
    assert_eq!((rig.run(read_bad_half()), rig.read()), (Status::IoErr, Status::IoErr));
}

#[test]
fn e04_a_medium_error_goes_up() {
    let mut rig = MultipathRig::new(FOUR);
    rig.bad_second_half(&[0, 1, 2, 3], Status::Medium);
    let got = rig.run(read_bad_half());
    assert_eq!((got, got.errno()), (Status::Medium, 61));
    assert!(!rig.status().contains('F'), "{}", rig.status());
    assert_eq!(rig.events.count(), 0);
}

#[test]
fn e05_errors_that_blame_the_request() {
    for (status, errno) in [
        (Status::NotSupp, 95),
        (Status::NoSpace, 28),
        (Status::Target, 121),
        (Status::ResvConflict, 52),
        (Status::Protection, 84),
    ] {
        for op in [Op::Read, Op::Write] {
            let mut rig = MultipathRig::new(FOUR);
            rig.disks.iter().for_each(|disk| disk.fail(status));
            let got = rig.run(bio_without_data(op, 0, 8));
            assert_eq!((got, got.errno()), (status, errno));
            assert!(!rig.status().contains('F'), "{status}");
        }
    }
}

#[test]
fn e06_errors_that_blame_the_path() {
    for status in [Status::Timeout, Status::Transport, Status::Resource, Status::Offline, Status::Again] {
        let mut rig = MultipathRig::new(FOUR);
        rig.disks[0].fail(status);
        assert_eq!(rig.read(), Status::Ok, "{status}");
        assert!(rig.status().contains("253:0 F 1 253:1 A 0"), "{status}");
    }
}

/// In request mode the kernel returns the path's own error here; udm returns EIO, as in bio mode.
#[test]
fn e07_the_last_path_fails() {
    for params in both_queue_modes(0, "", "0 1 1 round-robin 0 1 0 253:0") {
        let mut rig = MultipathRig::new(&params);
        rig.disks[0].fail(Status::Transport);
        assert_eq!(rig.read(), Status::IoErr);
    }
}

#[test]
fn e09_what_is_in_flight_stays_where_it_is() {
    let mut rig = MultipathRig::new(FOUR);
    rig.disks[0].hold(true);
    rig.start(bare_read(8));
    rig.tell("fail_path 253:0");
    assert!(rig.results().is_empty());
    rig.disks[0].hold(false);
    rig.poll();
    assert_eq!(rig.results(), [Status::Ok]);
    assert_eq!(rig.counts(), [1, 0, 0, 0], "it was sent once");
}

#[test]
fn n01_no_path_and_no_queueing() {
    for params in both_queue_modes(0, "", "0 1 1 round-robin 0 1 0 253:0") {
        let mut rig = MultipathRig::new(&params);
        assert_eq!(rig.read(), Status::Ok);
        rig.tell("fail_path 253:0");
        assert!(rig.status().contains(" A 0 1 0 253:0 F 1"), "{}", rig.status());
        assert_eq!(rig.read(), Status::IoErr);
        assert!(rig.status().contains(" E 0 1 0 253:0 F 1"), "{}", rig.status());
        rig.tell("reinstate_path 253:0");
        assert_eq!(rig.read(), Status::Ok);
        assert!(rig.status().ends_with(" A 0 1 0 253:0 A 1 "), "{}", rig.status());
    }
}

/// One failed path, and a read that waits for it.
fn rig_with_waiting_read(params: &str) -> MultipathRig {
    let mut rig = MultipathRig::new(params);
    rig.tell("fail_path 253:0");
    rig.start(bare_read(8));
    assert!(rig.results().is_empty());
    rig
}

fn queueing_tables() -> [String; 2] {
    both_queue_modes(1, "queue_if_no_path", "0 1 1 round-robin 0 1 0 253:0")
}

#[test]
fn n02_a_request_waits_for_a_path() {
    for params in queueing_tables() {
        let mut rig = rig_with_waiting_read(&params);
        assert_eq!(rig.status(), "2 0 0 0 1 1 E 0 1 0 253:0 F 1 ");
        rig.tell("fail_if_no_path");
    }
}

#[test]
fn n03_it_goes_when_the_path_returns() {
    for params in queueing_tables() {
        let mut rig = rig_with_waiting_read(&params);
        rig.tell("reinstate_path 253:0");
        assert_eq!(rig.results(), [Status::Ok]);
    }
}

#[test]
fn n04_it_fails_when_nothing_is_to_wait() {
    for params in queueing_tables() {
        let mut rig = rig_with_waiting_read(&params);
        rig.tell("fail_if_no_path");
        assert_eq!(rig.results(), [Status::IoErr]);
        assert!(!rig.table().contains("queue_if_no_path"), "{}", rig.table());
    }
}

#[test]
fn n06_a_thousand_wait() {
    for params in queueing_tables() {
        let mut rig = MultipathRig::new(&params);
        rig.tell("fail_path 253:0");
        for cookie in 0..1000 {
            let mut bio = bio_without_data(if cookie % 2 == 0 { Op::Read } else { Op::Write }, cookie, 8);
            bio.cookie = cookie;
            rig.start(bio);
        }
        rig.tell("reinstate_path 253:0");
        let back = &mut rig.finished;
        back.sort_by_key(|bio| bio.cookie);
        assert!(back.iter().map(|bio| (bio.cookie, bio.sector.0)).eq((0..1000).map(|n| (n, n))));
        assert_eq!(rig.results(), [Status::Ok; 1000]);
    }
}
