//! The number of hedges, and the delay before a hedge.

use crate::rig::{MS, WatchRig, fill_window, hedge_settings};
use udm_core::{Nanos, Status};
use udm_dm::testing::{copy_bio_data, make_test_read_bio, make_test_write_bio};

/// Twenty reads earn one hedge, and refused hedges are counted. Writes are never hedged.
#[test]
fn hedges_keep_to_their_budget() {
    let mut rig = WatchRig::new(2, hedge_settings());
    fill_window(&mut rig, 100);
    rig.disks[0].hold(true);
    (0..40).for_each(|_| rig.start(make_test_read_bio(0, 8)));
    (0..4).for_each(|_| rig.start(make_test_write_bio(8, 8, 7)));
    rig.world.now = rig.world.now + MS;
    (0..3).for_each(|_| rig.poll());
    let watch = rig.watch(0);
    assert_eq!((watch.hedges, watch.hedges_refused), (7, 13), "of 140 reads");
    assert_eq!(rig.disks[0].waiting(), 22, "20 reads and two writes");
    rig.disks[0].hold(false);
    (0..3).for_each(|_| rig.poll());
    assert_eq!(rig.done.len(), 44);
    rig.done.clear();
    rig.rests();
}

/// A path goes silent for more reads than the budget has hedges for. Each read completes within a
/// few hedge delays, whether the reads come at once or one by one.
#[test]
fn the_budget_keeps_no_read_waiting_for_a_silent_path() {
    for depth in [1, 16, 300] {
        let mut rig = WatchRig::new(2, hedge_settings());
        fill_window(&mut rig, 100);
        rig.disks[0].hold(true);
        for _ in 0..600u32.div_ceil(depth) {
            let from = rig.world.now;
            (0..depth).for_each(|_| rig.start(make_test_read_bio(0, 8)));
            let mut back = 0;
            while back < depth {
                rig.wait();
                back += rig.done.len() as u32;
                assert!(
                    rig.done.drain(..).all(|bio| bio.status == Status::Ok && copy_bio_data(&bio)[0] == 2)
                );
            }
            let took = rig.world.now.since(from);
            assert!(took <= Nanos::from_millis(5), "{took:?} at depth {depth}");
        }
        let watch = rig.watch(0);
        assert!(watch.hedges == watch.hedges_won && watch.hedges > 200, "{watch:?}");
        assert!(watch.hedges - watch.free_hedges <= 700 / 20, "{watch:?}");
        rig.disks[0].hold(false);
        (0..20).for_each(|_| rig.poll());
        rig.rests();
    }
}

/// If the storage behind all paths is slow, no hedges are sent beyond the budget.
#[test]
fn nothing_is_free_where_all_paths_are_silent() {
    let mut rig = WatchRig::new(2, hedge_settings());
    fill_window(&mut rig, 100);
    rig.disks.iter().for_each(|disk| disk.hold(true));
    (0..200).for_each(|_| rig.start(make_test_read_bio(0, 8)));
    for _ in 0..50 {
        rig.world.now = rig.world.now + MS;
        rig.poll();
    }
    let (a, b) = (rig.watch(0), rig.watch(1));
    assert_eq!((a.free_hedges + b.free_hedges, a.hedges + b.hedges), (0, 15), "of 300 reads");
    rig.disks.iter().for_each(|disk| disk.hold(false));
    (0..20).for_each(|_| rig.poll());
    rig.done.clear();
    rig.rests();
}

/// Hedging pauses after hedges that did not win. If a path goes silent during the pause, no read
/// waits long.
#[test]
fn a_rest_keeps_no_read_waiting_for_a_silent_path() {
    let mut rig = WatchRig::new(2, hedge_settings());
    fill_window(&mut rig, 700);
    for nth in 0..32 {
        rig.disks.iter().for_each(|disk| disk.hold(true));
        rig.start(make_test_read_bio(0, 8));
        rig.poll();
        rig.world.now = rig.world.now + MS;
        rig.poll();
        // Alternating: the chosen path always answers first.
        rig.disks[nth % 2].hold(false);
        rig.poll();
        assert_eq!(rig.done.drain(..).count(), 1);
        rig.disks[1 - nth % 2].hold(false);
        (0..3).for_each(|_| rig.poll());
    }
    let lost = (rig.watch(0).hedges + rig.watch(1).hedges, rig.watch(0).hedges_won + rig.watch(1).hedges_won);
    assert_eq!(lost, (32, 0));
    rig.disks[0].hold(true);
    for _ in 0..4 {
        rig.start(make_test_read_bio(0, 8));
        rig.start(make_test_read_bio(0, 8));
        let from = rig.world.now;
        for _ in 0..2 {
            rig.wait();
            assert_eq!(copy_bio_data(&rig.done.pop().unwrap())[0], 2);
        }
        let took = rig.world.now.since(from);
        assert!(took <= Nanos::from_millis(5), "{took:?}");
    }
    let watch = rig.watch(0);
    assert_eq!((watch.hedges_won, watch.free_hedges), (4, 4), "nothing else is had in a rest");
    rig.disks[0].hold(false);
    (0..3).for_each(|_| rig.poll());
    rig.rests();
}

/// During a pause no hedge is sent to a path that has not answered for long, even if it just got a
/// request. Once the path answers, it gets hedges.
#[test]
fn nothing_is_free_in_a_rest_but_where_a_path_answers() {
    let mut rig = WatchRig::new(2, hedge_settings());
    fill_window(&mut rig, 700);
    rig.disks.iter().for_each(|disk| disk.hold(true));
    (0..64).for_each(|_| rig.start(make_test_read_bio(0, 8)));
    rig.world.now = rig.world.now + MS;
    rig.poll();
    assert_eq!(rig.watch(0).hedges + rig.watch(1).hedges, 38, "of 764 reads");
    // Each path completes its own reads, then the hedges, which have lost.
    rig.disks.iter().for_each(|disk| disk.hold(false));
    (0..4).for_each(|_| rig.poll());
    assert_eq!(rig.done.drain(..).count(), 64);
    rig.world.now = rig.world.now + Nanos::from_millis(100);
    rig.disks.iter().for_each(|disk| disk.hold(true));
    rig.start(make_test_read_bio(0, 8));
    rig.world.now = rig.world.now + Nanos::from_millis(4);
    (0..20).for_each(|_| rig.start(make_test_read_bio(0, 8)));
    rig.poll();
    assert_eq!((rig.watch(0).free_hedges, rig.watch(1).free_hedges), (0, 0));
    // The second path is polled after the first, whose read is examined again then.
    rig.disks[1].hold(false);
    rig.world.wake = Nanos::NEVER;
    rig.poll();
    assert!(rig.watch(0).free_hedges == 0 && rig.world.wake <= rig.world.now, "nobody would wake the lane");
    rig.poll();
    assert_eq!(rig.watch(0).free_hedges, 1);
    rig.disks[0].hold(false);
    (0..4).for_each(|_| rig.poll());
    rig.done.clear();
    rig.rests();
}

/// Late answers of a path that hung do not change the latencies: the next hedge has the same delay
/// as before.
#[test]
fn late_answers_put_off_no_hedge() {
    let mut rig = WatchRig::new(2, hedge_settings());
    fill_window(&mut rig, 200);
    rig.disks[0].hold(true);
    (0..200).for_each(|_| assert_eq!((rig.read().0, rig.done.len()), (Status::Ok, 0)));
    rig.world.now = rig.world.now + Nanos::from_millis(5_000);
    rig.disks[0].hold(false);
    (0..20).for_each(|_| rig.poll());
    assert_eq!(rig.watch(0).late_completions, 100);
    // The next read ends the window.
    (0..2).for_each(|_| assert_eq!(rig.read().0, Status::Ok));
    rig.disks[0].hold(true);
    // The budget is used up: a read waits until its path is known to be silent.
    let longest = (0..4).map(|_| rig.read().2).max().unwrap();
    assert!(longest > Nanos(0) && longest <= Nanos(4 * MS.0), "{longest:?}");
    rig.disks[0].hold(false);
    (0..3).for_each(|_| rig.poll());
    rig.rests();
}

/// A short stall of all paths doubles the hedge delay at most, however long the stall was.
#[test]
fn a_standstill_puts_hedges_off_by_little() {
    let mut rig = WatchRig::new(2, hedge_settings());
    fill_window(&mut rig, 200);
    rig.disks.iter().for_each(|disk| disk.hold(true));
    (0..200).for_each(|_| rig.start(make_test_read_bio(0, 8)));
    rig.poll();
    rig.world.now = rig.world.now + Nanos::from_millis(3_000);
    rig.disks.iter().for_each(|disk| disk.hold(false));
    (0..20).for_each(|_| rig.poll());
    assert_eq!(rig.done.drain(..).count(), 200);
    (0..2).for_each(|_| assert_eq!(rig.read().0, Status::Ok));
    rig.disks[0].hold(true);
    // During a pause of hedging, a read waits until its path is quiet.
    let longest = (0..4).map(|_| rig.read().2).max().unwrap();
    assert!(longest > MS && longest <= Nanos(8 * MS.0), "{longest:?}");
    rig.disks[0].hold(false);
    (0..3).for_each(|_| rig.poll());
    rig.rests();
}
