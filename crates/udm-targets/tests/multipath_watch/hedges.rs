//! Hedges: which reads are hedged, on which path, and which answer counts.

use crate::rig::{MS, WatchRig, fill_window, hedge_settings};
use udm_core::{Nanos, OwnWork, Status};
use udm_dm::testing::{copy_bio_data, make_test_read_bio};

/// A read that takes longer than most is sent to a second path, and the first answer wins.
#[test]
fn a_hedge_answers_for_a_path_that_hangs() {
    let mut rig = WatchRig::new(2, hedge_settings());
    fill_window(&mut rig, 200);
    rig.disks[0].hold(true);
    for nth in 1..=5 {
        // Every second read is for the path that hangs.
        let (a, b) = (rig.read(), rig.read());
        assert_eq!(((a.0, a.1), (b.0, b.1)), ((Status::Ok, 2), (Status::Ok, 2)));
        assert_eq!(a.2.max(b.2), MS, "the shortest time before a hedge");
        let watch = rig.watch(0);
        assert_eq!((watch.hedges, watch.hedges_won, watch.hedges_wasted), (nth, nth, 0));
    }
    assert!(!rig.report(0).failed, "that is no reason to fail it");
    rig.disks[0].hold(false);
    rig.poll();
    assert_eq!(rig.watch(0).late_completions, 5);
    rig.rests();
}

/// The chosen path answers first: the hedge is wasted, and its answer is dropped.
#[test]
fn a_hedge_that_loses_is_dropped() {
    let mut rig = WatchRig::new(2, hedge_settings());
    fill_window(&mut rig, 200);
    rig.disks.iter().for_each(|disk| disk.hold(true));
    rig.start(make_test_read_bio(0, 8));
    rig.poll();
    rig.world.now = rig.world.now + MS;
    rig.poll();
    assert_eq!((rig.disks[0].waiting(), rig.disks[1].waiting()), (1, 1));
    rig.disks[0].release(1);
    rig.poll();
    assert_eq!(copy_bio_data(&rig.done.pop().unwrap())[0], 1);
    assert_eq!(rig.lane.own_work(), OwnWork::Required);
    rig.disks.iter().for_each(|disk| disk.hold(false));
    rig.poll();
    rig.poll();
    let watch = rig.watch(0);
    assert_eq!((watch.hedges, watch.hedges_won, watch.hedges_wasted), (1, 0, 1));
    rig.rests();
}

/// An error of a hedge completes no read and fails no path; an error of the chosen path does.
#[test]
fn an_error_of_a_hedge_is_not_believed() {
    let mut rig = WatchRig::new(2, hedge_settings());
    fill_window(&mut rig, 200);
    rig.disks[0].hold(true);
    rig.disks[1].fail(Status::Transport);
    rig.start(make_test_read_bio(0, 8));
    rig.poll();
    rig.world.now = rig.world.now + MS;
    (0..3).for_each(|_| rig.poll());
    assert!(rig.done.is_empty() && rig.watch(0).hedges_wasted == 1);
    assert!(!rig.report(0).failed && !rig.report(1).failed);
    rig.disks[0].hold(false);
    rig.poll();
    assert_eq!((rig.done[0].status, copy_bio_data(&rig.done[0])[0]), (Status::Ok, 1));
    rig.done.clear();
    rig.rests();
}

/// The hedge delay is known after the first reads, before a window ends.
#[test]
fn a_path_that_hangs_at_once_is_hedged() {
    let mut rig = WatchRig::new(2, hedge_settings());
    (0..64).for_each(|_| assert_eq!(rig.read().0, Status::Ok));
    rig.disks[0].hold(true);
    let took = [rig.read(), rig.read()].map(|(_, from, took)| (from, took));
    assert_eq!(took, [(2, MS), (2, Nanos(0))]);
    rig.disks[0].hold(false);
    rig.poll();
    rig.rests();
}

/// If two of three paths are silent, a hedge goes to the third, whatever its load.
#[test]
fn a_hedge_goes_to_no_silent_path() {
    let mut rig = WatchRig::new(3, hedge_settings());
    fill_window(&mut rig, 99);
    rig.disks.iter().for_each(|disk| disk.hold(true));
    (0..30).for_each(|_| rig.start(make_test_read_bio(0, 8)));
    rig.poll();
    rig.disks[..2].iter().for_each(|disk| disk.release(9));
    rig.poll();
    rig.world.now = rig.world.now + Nanos(MS.0 / 2);
    rig.disks[2].release(1);
    rig.poll();
    assert_eq!(rig.done.drain(..).count(), 19);
    rig.world.now = rig.world.now + Nanos(MS.0 * 7 / 2);
    rig.poll();
    let hedges = [0, 1, 2].map(|path| rig.watch(path).hedges);
    assert_eq!((hedges[0], hedges[1]), (1, 1));
    rig.disks[2].hold(false);
    let mut back = 0;
    while back < 11 {
        rig.wait();
        back += rig.done.drain(..).count();
    }
    assert_eq!([0, 1].map(|path| rig.watch(path).hedges_won), [1, 1]);
    rig.disks.iter().for_each(|disk| disk.hold(false));
    (0..4).for_each(|_| rig.poll());
    rig.rests();
}

/// Two of four paths become silent at once, and a hedge goes from one to the other. The read is
/// hedged again as soon as the second path is known to be silent.
#[test]
fn a_hedge_on_a_silent_path_is_not_the_last() {
    let mut rig = WatchRig::new(4, hedge_settings());
    fill_window(&mut rig, 400);
    rig.disks[..2].iter().for_each(|disk| disk.hold(true));
    let (status, from, took) = rig.read();
    assert_eq!((status, from, took), (Status::Ok, 3, Nanos(5 * MS.0)), "a hedge, and four times its wait");
    let watch = rig.watch(0);
    assert_eq!((watch.hedges, watch.hedges_won, watch.hedges_wasted), (2, 1, 1));
    for _ in 0..7 {
        let (status, from, took) = rig.read();
        assert!(status == Status::Ok && from > 2 && took <= Nanos(5 * MS.0), "{took:?}");
    }
    rig.disks.iter().for_each(|disk| disk.hold(false));
    (0..4).for_each(|_| rig.poll());
    rig.rests();
}

/// If a hedge fails, the read is hedged on a third path, and not on the same one again.
#[test]
fn a_hedge_that_fails_is_not_the_last() {
    let mut rig = WatchRig::new(3, hedge_settings());
    fill_window(&mut rig, 300);
    rig.disks[0].hold(true);
    rig.disks[1].fail(Status::Transport);
    let (status, from, took) = rig.read();
    assert_eq!((status, from, took), (Status::Ok, 3, MS));
    let watch = rig.watch(0);
    assert_eq!((watch.hedges, watch.hedges_won, watch.hedges_wasted), (2, 1, 1));
    assert!(!rig.report(1).failed, "an error of a hedge is not believed");
    rig.disks[0].hold(false);
    (0..4).for_each(|_| rig.poll());
    rig.rests();
}

/// Of two paths one hangs, and the other is slow to answer the hedge, as a path that connects first.
/// There is no third path, so the answer of the hedge counts whenever it comes.
#[test]
fn a_late_hedge_on_the_last_path_counts() {
    let mut rig = WatchRig::new(2, hedge_settings());
    fill_window(&mut rig, 200);
    rig.disks.iter().for_each(|disk| disk.hold(true));
    rig.start(make_test_read_bio(0, 8));
    rig.poll();
    // The hedge, and much later than its path is quiet.
    for _ in 0..30 {
        rig.world.now = rig.world.now + MS;
        rig.poll();
    }
    assert_eq!((rig.disks[0].waiting(), rig.disks[1].waiting()), (1, 1));
    rig.disks[1].release(1);
    rig.poll();
    assert_eq!(copy_bio_data(&rig.done.pop().expect("the answer of the hedge"))[0], 2);
    let watch = rig.watch(0);
    assert_eq!((watch.hedges, watch.hedges_won, watch.hedges_wasted), (1, 1, 0));
    rig.disks.iter().for_each(|disk| disk.hold(false));
    (0..4).for_each(|_| rig.poll());
    rig.rests();
}
