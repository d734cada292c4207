//! Path failure, retry, queueing, groups and messages: cases that are not in the recordings.

mod multipath_rig;

use multipath_rig::{MultipathRig, bare_read, disks};
use udm_core::{DrainMode, Nanos, Op, Status};
use udm_dm::testing::{TestDisk, bio_without_data, copy_bio_data, make_test_read_bio, make_test_write_bio};
use udm_dm::{MultipathTarget, Target};

const TWO: &str = "0 0 1 1 round-robin 0 2 0 253:0 253:1";

/// An error that blames the request is returned unchanged; an error that blames the path fails only
/// this path.
#[test]
fn error_classes() {
    for &status in Status::ALL.iter().filter(|s| !s.is_ok()) {
        let mut rig = MultipathRig::new(TWO);
        rig.disks[0].fail(status);
        let got = rig.read();
        if status == Status::Requeue {
            continue;
        }
        if status.is_path_error() {
            assert_eq!((got, rig.events.count()), (Status::Ok, 1), "{status}");
            assert!(rig.status().contains("253:0 F 1 253:1 A 0"), "{status}");
            assert_eq!(rig.counts()[..2], [1, 1], "{status}: tried once on each");
        } else {
            assert_eq!((got, rig.events.count()), (status, 0));
            assert!(rig.status().contains("253:0 A 0 253:1 A 0"), "{status}");
            assert_eq!(rig.counts()[..2], [1, 0]);
        }
    }
}

/// A bio that a path returns with `Requeue`, because of a connection that was closed long ago, is
/// retried and fails no path.
#[test]
fn what_is_to_be_sent_again_fails_no_path() {
    let mut rig = MultipathRig::new("0 0 1 1 round-robin 0 1 0 253:0");
    let mut first = true;
    rig.disks[0].set_verdict(move |_| if std::mem::take(&mut first) { Status::Requeue } else { Status::Ok });
    assert_eq!(rig.read(), Status::Ok);
    assert!(rig.status().contains("253:0 A 0"), "{}", rig.status());
    assert_eq!(rig.events.count(), 0);
}

/// A retried bio is unchanged, and its data arrives.
#[test]
fn a_retried_bio_is_unchanged() {
    let stored = || TestDisk::new(multipath_rig::SIZE);
    let (_, mut resolver) = disks(0);
    let disks: Vec<_> = (0..2).map(|_| stored()).collect();
    for (minor, disk) in (0..).zip(&disks) {
        resolver.add(&format!("p{minor}"), udm_core::DevNo { major: 253, minor }, disk.clone());
    }
    let mut rig = MultipathRig::with_disks(TWO, (disks, resolver));
    rig.disks[0].fail(Status::Offline);
    let mut bio = make_test_write_bio(40, 3, 7);
    bio.cookie = 0x5eed;
    rig.submit(bio);
    rig.poll();
    let bio = rig.finished.pop().expect("it came back in the same poll");
    assert_eq!((bio.status, bio.cookie, bio.op), (Status::Ok, 0x5eed, Op::Write));
    assert_eq!((bio.sector.0, bio.sectors.0, copy_bio_data(&bio)[512]), (40, 3, 8));
    assert_eq!(rig.disks[1].bytes(40, 3), copy_bio_data(&bio));
    assert_eq!(rig.disks[0].bytes(40, 3), [0; 1536]);
}

/// Bios in flight on a failed path stay there, complete with the path's status, and are not sent
/// twice.
#[test]
fn a_failed_path_finishes_what_it_has() {
    let mut rig = MultipathRig::new("0 0 1 1 queue-length 0 2 0 253:0 253:1");
    rig.disks[0].hold(true);
    rig.start(bare_read(8));
    rig.tell("fail_path 253:0");
    assert!(rig.status().ends_with("253:0 F 1 1 253:1 A 0 0 "));
    rig.disks[0].hold(false);
    rig.poll();
    assert_eq!(rig.results(), [Status::Ok]);
    assert!(rig.status().ends_with("253:0 F 1 0 253:1 A 0 0 "));
    assert_eq!(rig.counts()[..2], [1, 0]);
    // With an error they would have gone to the other path. The path is failed already, so there is
    // no second event.
    rig.tell("reinstate_path 253:0");
    rig.disks[0].hold(true);
    rig.start(bare_read(8));
    rig.start(bare_read(8));
    rig.tell("fail_path 253:0");
    let events = rig.events.count();
    rig.disks[0].fail(Status::IoErr);
    rig.disks[0].hold(false);
    rig.poll();
    assert_eq!(rig.results(), [Status::Ok; 1 + 1]);
    assert!(rig.status().ends_with("253:0 F 2 0 253:1 A 0 0 "));
    assert_eq!(rig.events.count(), events);
}

/// Without groups bios are queued too, if the table says so, until a message changes it.
#[test]
fn no_groups_and_queueing() {
    let mut rig = MultipathRig::new("1 queue_if_no_path 0 0 0");
    rig.start(bare_read(8));
    assert_eq!(rig.status(), "2 0 0 0 0 0 ");
    rig.tell("fail_if_no_path");
    assert_eq!(rig.results(), [Status::IoErr]);
    assert_eq!(rig.table(), "0 0 0 0 ");
}

/// A path that failed and returned between two refreshes of the lane loses its position, as if the
/// lane had seen the failure.
#[test]
fn failed_and_reinstated_unseen() {
    let three = |selector: &str| MultipathRig::new(&format!("0 0 1 1 {selector} 0 3 0 253:0 253:1 253:2"));
    let both = |rig: &mut MultipathRig, paths: &[u32]| {
        for path in paths {
            for verb in ["fail_path", "reinstate_path"] {
                let words = [verb.to_string(), format!("253:{path}")];
                rig.target.message(&words, &mut rig.resolver).unwrap();
            }
        }
    };
    let mut rig = three("round-robin");
    assert_eq!(rig.order(2), [0, 1]);
    both(&mut rig, &[0, 1]);
    assert_eq!(rig.order(4), [1, 0, 2, 1], "the last one reinstated is first");
    let mut rig = three("queue-length");
    both(&mut rig, &[1, 0]);
    assert_eq!(rig.order(4), [2, 1, 0, 2], "reinstated paths are last");
    let mut rig = three("service-time");
    assert_eq!(rig.order(4), [0, 1, 2, 0]);
}

/// A lane that is opened after paths failed and returned has the kernel's order.
#[test]
fn a_late_lane_knows_the_order() {
    let mut rig = MultipathRig::new("0 0 1 1 queue-length 0 3 0 253:0 253:1 253:2");
    rig.tell("fail_path 253:0");
    rig.tell("reinstate_path 253:0");
    rig.lane = rig.world.turn(0, |cx| rig.target.open(cx)).unwrap();
    assert_eq!(rig.order(4), [1, 2, 0, 1]);
}

/// Names, numbers and the table's own words all name a path. All entries of a device fail together,
/// with one event.
#[test]
fn paths_by_any_name() {
    let mut rig =
        MultipathRig::new("0 0 2 1 round-robin 0 2 0 /dev/nullb0 253:0 round-robin 0 2 0 253:0 253:1");
    rig.tell("fail_path /dev/nullb0");
    assert!(rig.status().ends_with("E 0 2 0 253:0 F 1 253:0 F 1 E 0 2 0 253:0 F 1 253:1 A 0 "));
    assert_eq!(rig.events.count(), 1);
    rig.tell("REINSTATE_PATH 253:0");
    rig.tell("fail_path /dev/nullb1");
    assert!(rig.status().ends_with("E 0 2 0 253:0 A 1 253:0 A 1 E 0 2 0 253:0 A 1 253:1 F 1 "));
    let error = rig.message("fail_path /dev/nullb2").unwrap_err();
    assert_eq!(error.errno, 22, "known, but not in the table");
    let error = rig.message("fail_path nosuch").unwrap_err();
    assert_eq!((error.errno, error.text.as_str()), (2, "multipath: message: error getting device nosuch"));
    for (message, text) in [
        ("bogus arg", "multipath: Unrecognised multipath message received: bogus"),
        ("bogus", "multipath: Invalid multipath message arguments. Expected 2 arguments, got 1."),
        (
            "fail_path 253:0 extra",
            "multipath: Invalid multipath message arguments. Expected 2 arguments, got 3.",
        ),
        ("queue_if_no_path 1", "multipath: Unrecognised multipath message received: queue_if_no_path"),
        ("disable_group 2x", "multipath: invalid PG number supplied to bypass_pg"),
        ("switch_group 9", "multipath: invalid PG number supplied to switch_pg_num"),
    ] {
        let error = rig.message(message).unwrap_err();
        assert_eq!((error.errno, error.text.as_str()), (22, text));
    }
}

/// A no-flush suspend takes back a bio whose last path fails during the suspend.
#[test]
fn lost_while_draining() {
    for features in ["1 queue_if_no_path", "3 queue_if_no_path queue_mode bio"] {
        let mut rig = MultipathRig::new(&format!("{features} 0 1 1 round-robin 0 1 0 253:0"));
        rig.disks[0].hold(true);
        rig.start(bare_read(8));
        rig.target.presuspend(true);
        let drain = |rig: &mut MultipathRig| {
            rig.world.turn(0, |cx| rig.lane.drain(DrainMode::NoFlush, &mut rig.back, cx));
        };
        drain(&mut rig);
        rig.poll();
        assert!(rig.back.is_empty() && rig.finished.is_empty(), "it is on its way");
        rig.disks[0].fail(Status::IoErr);
        rig.disks[0].hold(false);
        drain(&mut rig);
        assert!(rig.back.is_empty());
        rig.world.wake = Nanos::NEVER;
        rig.poll();
        assert!(rig.finished.is_empty(), "not failed");
        assert_eq!(rig.world.wake, rig.world.now, "the core turns again to hand it back");
        drain(&mut rig);
        assert_eq!(rig.back.len(), 1);
        rig.suspended = true;
        rig.load("0 0 1 1 round-robin 0 1 0 253:1");
        rig.resume();
        assert_eq!(rig.results(), [Status::Ok]);
    }
}

/// Bios that a path holds back complete with a suspend too, and are removed from the load.
#[test]
fn paths_that_hold_bios_back() {
    let mut rig = MultipathRig::new("0 0 1 1 queue-length 0 2 0 253:0 253:1");
    for disk in &rig.disks[..2] {
        disk.hold(true);
        disk.hand_back(true);
    }
    rig.start(bare_read(8));
    rig.start(bare_read(8));
    rig.suspend(true);
    assert_eq!((rig.back.len(), rig.finished.len()), (2, 0));
    assert!(rig.status().ends_with("253:0 A 0 0 253:1 A 0 0 "), "{}", rig.status());
    rig.disks.iter().for_each(|d| d.hold(false));
    rig.resume();
    assert_eq!(rig.results(), [Status::Ok; 2]);
}

/// A flush goes to one path and adds no load for service-time.
#[test]
fn a_flush_has_no_bytes() {
    let mut rig = MultipathRig::new("0 0 1 1 service-time 0 2 0 253:0 253:1");
    rig.disks.iter().for_each(|d| d.hold(true));
    rig.start(bio_without_data(Op::Flush, 0, 0));
    rig.start(bio_without_data(Op::Discard, 0, 16));
    assert!(rig.status().ends_with("253:0 A 0 0 1 253:1 A 0 8192 1 "), "{}", rig.status());
    rig.disks.iter().for_each(|d| d.hold(false));
    rig.poll();
    assert_eq!(rig.results(), [Status::Ok; 2]);
    assert_eq!(rig.counts()[..2], [1, 1]);
}

#[test]
fn reports_say_what_went_where() {
    let mut rig = MultipathRig::new("0 0 2 1 round-robin 0 1 0 /dev/nullb0 round-robin 0 1 0 253:1");
    assert_eq!(
        (rig.run(make_test_read_bio(0, 8)), rig.run(make_test_read_bio(0, 16))),
        (Status::Ok, Status::Ok)
    );
    rig.disks[0].fail(Status::Timeout);
    assert_eq!(rig.run(make_test_read_bio(0, 8)), Status::Ok);
    let check = |rig: &MultipathRig| {
        let rows: Vec<_> = rig.target.path_reports().into_iter().collect();
        let numbers = |i: usize| {
            let r = &rows[i];
            (r.name.as_str(), r.group, r.failed, r.fail_count, r.bios, r.bytes, r.errors)
        };
        assert_eq!(numbers(0), ("/dev/nullb0", 1, true, 1, 3, 32 * 512, 1));
        assert_eq!(numbers(1), ("253:1", 2, false, 0, 1, 8 * 512, 0));
        let more = |i: usize| (rows[i].ops[Op::Read as usize], rows[i].in_flight, rows[i].retries);
        assert_eq!((more(0), more(1)), (((3, 32 * 512), 0, 0), ((1, 8 * 512), 0, 1)));
        assert_eq!(rows[0].errors_by, [(Status::Timeout, 1)]);
    };
    check(&rig);
    rig.lane = rig.world.turn(0, |cx| rig.target.open(cx)).unwrap();
    check(&rig);
}

/// A cancelled suspend leaves no state: a bio that loses its last path later is queued again.
#[test]
fn called_off_while_draining() {
    let mut rig = MultipathRig::new("1 queue_if_no_path 0 1 1 round-robin 0 1 0 253:0");
    rig.disks[0].hold(true);
    rig.start(bare_read(8));
    rig.target.presuspend(false);
    rig.world.turn(0, |cx| rig.lane.drain(DrainMode::Flush, &mut rig.back, cx));
    rig.poll();
    rig.target.resume();
    rig.disks[0].fail(Status::IoErr);
    rig.disks[0].hold(false);
    rig.poll();
    assert!(rig.finished.is_empty() && rig.back.is_empty(), "held");
    rig.disks[0].fail(Status::Ok);
    rig.message("reinstate_path 253:0").unwrap();
    rig.poll();
    assert_eq!(rig.results(), [Status::Ok]);
}

/// A bio that arrives after a path returned must not hide the return from queued bios.
#[test]
fn held_bios_go_when_a_new_one_saw_the_path_first() {
    let mut rig = MultipathRig::new("1 queue_if_no_path 0 1 1 round-robin 0 1 0 253:0");
    rig.message("fail_path 253:0").unwrap();
    rig.start(bare_read(8));
    rig.poll();
    assert!(rig.finished.is_empty(), "held");
    rig.message("reinstate_path 253:0").unwrap();
    rig.start(bare_read(8));
    rig.poll();
    rig.poll();
    assert_eq!(rig.results(), [Status::Ok; 2]);
}
