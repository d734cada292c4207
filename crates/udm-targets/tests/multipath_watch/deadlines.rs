//! Deadlines: requests past them, and late answers.

use crate::rig::{DEADLINE, MS, WatchRig};
use udm_core::{Batch, DrainMode, Nanos, Op, OwnWork, Status};
use udm_dm::testing::{bio_without_data, make_test_read_bio, make_test_write_bio};
use udm_targets::multipath::PathWatchOptions;

fn deadline() -> PathWatchOptions {
    PathWatchOptions { deadline: Some(DEADLINE), ..PathWatchOptions::default() }
}

/// One of eight paths takes requests and never answers. Every read completes within the deadline
/// plus the time on another path.
#[test]
fn m10_reads_of_a_hung_path_end_within_the_deadline() {
    let mut rig = WatchRig::new(8, deadline());
    rig.disks[3].hold(true);
    let mut longest = Nanos(0);
    for _ in 0..64 {
        let (status, from, took) = rig.read();
        assert_eq!(status, Status::Ok);
        assert_ne!(from, 4, "nothing is of the path that hangs");
        longest = longest.max(took);
    }
    assert_eq!(longest, DEADLINE + Nanos(1), "one had to wait, and no longer");
    let report = rig.report(3);
    assert!(report.failed && report.fail_count == 1 && rig.events() == 1, "{report:?}");
    let watch = rig.watch(3);
    assert_eq!((watch.abandoned_reads, watch.waiting, watch.late_completions), (1, 0, 0));
    assert_eq!(
        (rig.disks[3].waiting(), rig.lane.own_work()),
        (1, OwnWork::Required),
        "it has the copy still"
    );
    rig.disks[3].hold(false);
    rig.poll();
    assert_eq!(rig.watch(3).late_completions, 1, "what comes late is dropped");
    rig.rests();
}

/// A path that is slower than its load answers all requests: it is busy, not silent.
#[test]
fn a_path_that_answers_others_is_busy() {
    let mut rig = WatchRig::new(2, deadline());
    rig.disks.iter().for_each(|disk| disk.hold(true));
    (0..6).for_each(|_| rig.start(make_test_read_bio(0, 8)));
    rig.poll();
    for _ in 0..3 {
        rig.world.now = rig.world.now + Nanos(DEADLINE.0 * 3 / 4);
        rig.disks.iter().for_each(|disk| disk.release(1));
        rig.poll();
    }
    let ends: Vec<_> = rig.done.drain(..).map(|bio| bio.status).collect();
    assert_eq!(ends, [Status::Ok; 6], "the last of them took longer than the deadline");
    for path in 0..2 {
        assert!(!rig.report(path).failed && rig.watch(path).abandoned_reads == 0);
    }
    rig.rests();
}

/// A path answers all requests but one: that one is given up after four deadlines.
#[test]
fn what_a_busy_path_keeps_is_given_up() {
    for lost in [make_test_read_bio(0, 8), make_test_write_bio(0, 8, 99)] {
        let (op, from) = (lost.op, MS);
        let mut rig = WatchRig::new(2, deadline());
        rig.disks[0].hold(true);
        rig.disks[0].reverse(true);
        rig.start(lost);
        rig.start(make_test_read_bio(0, 8));
        rig.poll();
        while !rig.report(0).failed {
            rig.done.clear();
            rig.world.now = rig.world.now + Nanos(DEADLINE.0 / 2);
            (0..2).for_each(|_| rig.start(make_test_read_bio(0, 8)));
            rig.disks[0].release(1);
            rig.poll();
            // One more poll.
            rig.world.now = rig.world.now + Nanos(1);
            rig.poll();
            rig.world.now = Nanos(rig.world.now.0 - 1);
            assert!(rig.world.now <= from + Nanos(4 * DEADLINE.0), "for ever");
        }
        assert_eq!(rig.world.now.since(from), Nanos(4 * DEADLINE.0));
        let watch = rig.watch(0);
        match op {
            Op::Read => assert_eq!((watch.abandoned_reads, watch.waiting), (1, 0)),
            _ => assert_eq!((watch.abandoned_reads, watch.waiting), (0, 1)),
        }
        rig.disks[0].hold(false);
        rig.poll();
        assert!(rig.done.iter().all(|bio| bio.status == Status::Ok));
        rig.done.clear();
        rig.rests();
    }
}

/// A write that hangs is sent to no other path, fails its path, and is counted while it waits.
#[test]
fn a_write_waits_for_its_path() {
    let mut rig = WatchRig::new(2, deadline());
    rig.disks[0].hold(true);
    rig.start(make_test_write_bio(0, 8, 99));
    rig.start(bio_without_data(Op::Flush, 0, 0));
    rig.disks[1].hold(true);
    rig.start(bio_without_data(Op::Flush, 0, 0));
    rig.disks[1].hold(false);
    rig.poll();
    assert_eq!(rig.done.drain(..).map(|bio| bio.op).collect::<Vec<_>>(), [Op::Flush]);
    rig.world.now = rig.world.now + DEADLINE;
    rig.poll();
    assert!(!rig.report(0).failed, "it looks once more");
    rig.world.now = rig.world.now + Nanos(1);
    rig.poll();
    assert!(rig.done.is_empty() && rig.report(0).failed && rig.watch(0).waiting == 2);
    assert!(!rig.disks[1].take_log().iter().any(|seen| seen.op == Op::Write), "not on two paths");
    // The next reads do not go to the failed path.
    (0..4).for_each(|_| assert_eq!(rig.read().1, 2));
    rig.disks[0].hold(false);
    rig.poll();
    assert_eq!(rig.done.drain(..).map(|bio| bio.status).collect::<Vec<_>>(), [Status::Ok; 2]);
    assert_eq!(rig.watch(0).waiting, 0);
    assert_eq!(rig.disks[0].bytes(0, 1), [99; 512]);
    rig.rests();
}

/// If a path returns its write late with an error that blames the path, only then the write is sent
/// to another path.
#[test]
fn a_write_that_comes_back_late_goes_elsewhere() {
    let mut rig = WatchRig::new(2, deadline());
    rig.disks[0].hold(true);
    let bio = make_test_write_bio(0, 8, 99);
    rig.start(bio);
    rig.world.now = rig.world.now + DEADLINE;
    rig.poll();
    rig.disks[0].fail(Status::Transport);
    rig.disks[0].hold(false);
    rig.poll();
    let back = rig.done.pop().unwrap();
    assert_eq!((back.status, back.op, rig.report(1).retries), (Status::Ok, Op::Write, 1));
    assert_eq!((rig.disks[1].bytes(0, 1), rig.events()), (vec![99; 512], 1));
    rig.rests();
}

/// Requests are returned as they were submitted: cookie, owner and memory.
#[test]
fn bios_come_back_as_they_were() {
    let mut rig = WatchRig::new(2, deadline());
    for mut bio in [
        make_test_read_bio(0, 8),
        make_test_write_bio(8, 8, 1),
        bio_without_data(Op::Flush, 0, 0),
        bio_without_data(Op::Discard, 8, 8),
    ] {
        (bio.cookie, bio.owner) = (77, udm_core::BioOwnerId(5));
        let addr = |bio: &udm_core::Bio| bio.data.iter().next().map(|piece| piece.addr());
        let (op, memory) = (bio.op, addr(&bio));
        rig.start(bio);
        rig.wait();
        let back = rig.done.pop().unwrap();
        assert_eq!((back.op, back.cookie, back.owner.0, addr(&back)), (op, 77, 5, memory));
    }
}

/// A no-flush suspend takes back the requests that a path holds back, as they were submitted.
#[test]
fn what_is_handed_back_is_as_it_was() {
    let mut rig = WatchRig::new(2, deadline());
    for disk in &rig.disks {
        disk.hold(true);
        disk.hand_back(true);
    }
    for mut bio in [make_test_read_bio(0, 8), make_test_write_bio(8, 8, 1)] {
        bio.cookie = 77;
        rig.start(bio);
    }
    let mut back = Batch::new();
    rig.world.turn(0, |cx| rig.lane.drain(DrainMode::NoFlush, &mut back, cx));
    let ops: Vec<_> = back.iter().map(|bio| (bio.op, bio.cookie, bio.status, bio.data.len())).collect();
    assert_eq!(ops, [(Op::Read, 77, Status::Ok, 4096), (Op::Write, 77, Status::Ok, 4096)]);
    back.iter_mut().for_each(|bio| bio.finish());
    rig.disks.iter().for_each(|disk| disk.hold(false));
    rig.rests();
}

/// If the last path is silent, requests fail as with any failure of the last path.
#[test]
fn the_last_path_may_be_silent_too() {
    let mut rig = WatchRig::new(1, deadline());
    rig.disks[0].hold(true);
    assert_eq!(rig.read().0, Status::IoErr);
    rig.disks[0].hold(false);
    rig.rests();
}
