//! Slow paths: ejection, trial and return.

use crate::rig::WatchRig;
use udm_core::{Nanos, Status};
use udm_dm::Target;
use udm_dm::testing::{make_test_read_bio, make_test_write_bio};
use udm_targets::multipath::PathWatchOptions;

fn ejection_settings() -> PathWatchOptions {
    PathWatchOptions { eject_slow: true, ..PathWatchOptions::default() }
}

impl WatchRig {
    /// A window of reads in which the first path takes `slow` and the others 0.25 ms. Returns the
    /// number of reads of the first path.
    fn window(&mut self, slow: Nanos) -> usize {
        self.window_of(1, slow)
    }

    /// As `window`, with `slow_paths` slow paths.
    fn window_of(&mut self, slow_paths: usize, slow: Nanos) -> usize {
        let mut slowed = 0;
        for _ in 0..40 {
            self.disks.iter().for_each(|disk| disk.hold(true));
            (0..self.disks.len()).for_each(|_| self.start(make_test_read_bio(0, 8)));
            self.poll();
            self.world.now = self.world.now + Nanos(250_000);
            self.disks[slow_paths..].iter().for_each(|disk| disk.hold(false));
            self.poll();
            slowed += self.disks[0].waiting();
            self.world.now = self.world.now + slow;
            self.disks[..slow_paths].iter().for_each(|disk| disk.hold(false));
            (0..3).for_each(|_| self.poll());
            assert_eq!(self.done.len(), self.disks.len());
            self.done.clear();
        }
        self.world.now = self.world.now + Nanos::from_millis(300);
        slowed
    }
}

/// A path that is slower than the others in several windows is ejected. When its time is over, it
/// is tried with copies of reads, and is used again if it is fast enough.
#[test]
fn a_slow_path_is_put_out_of_use_and_comes_back() {
    let (slow, even) = (Nanos::from_millis(5), Nanos(0));
    let mut rig = WatchRig::new(3, ejection_settings());
    (0..3).for_each(|_| assert_eq!(rig.window(slow), 40));
    assert!(rig.window(slow) <= 1, "the fourth begins with the verdict");
    assert!(rig.report(0).ejected && !rig.report(0).failed && rig.report(0).ejections == 1);
    assert!(rig.target.status().contains("253:0 A 0 "), "{}", rig.target.status());
    assert_eq!(rig.events(), 0);
    // Still slow in its trial: no request waits for the trial, and the path is ejected for twice as
    // long.
    rig.world.now = rig.world.now + Nanos::from_millis(10_000);
    let tried = rig.window(slow);
    assert!(tried > 0 && tried <= 8, "{tried} copies");
    assert!(rig.report(0).ejected);
    rig.world.now = rig.world.now + Nanos::from_millis(15_000);
    assert_eq!(rig.window(even), 0, "out for twice as long");
    rig.world.now = rig.world.now + Nanos::from_millis(5_000);
    rig.window(even);
    rig.window(even);
    assert!(!rig.report(0).ejected, "it has done well");
    assert_eq!((rig.window(even), rig.report(0).ejections), (40, 1));
    rig.rests();
}

/// A trial without reads has no result: the path is tried again soon.
#[test]
fn a_trial_without_reads_is_not_held_against_the_path() {
    let mut rig = WatchRig::new(3, ejection_settings());
    for _ in 0..4 {
        rig.window(Nanos::from_millis(5));
    }
    assert!(rig.report(0).ejected);
    rig.world.now = rig.world.now + Nanos::from_millis(10_000);
    rig.start(make_test_write_bio(0, 8, 1));
    rig.wait();
    rig.done.clear();
    rig.world.now = rig.world.now + Nanos::from_millis(10_000);
    for _ in 0..6 {
        rig.window(Nanos(0));
    }
    assert!(!rig.report(0).ejected, "not out for twice as long");
    rig.rests();
}

/// An ejected path is used if no other is left; no request fails because of an ejection.
#[test]
fn what_is_slow_serves_where_nothing_else_does() {
    let mut rig = WatchRig::new(2, ejection_settings());
    for _ in 0..4 {
        rig.window(Nanos::from_millis(5));
    }
    assert!(rig.report(0).ejected);
    rig.disks[1].fail(Status::Transport);
    (0..4).for_each(|_| assert_eq!((rig.read().0, rig.read().1), (Status::Ok, 1)));
    assert!(rig.report(0).ejected && rig.report(1).failed);
}

/// A trial that takes too long ends, and its copy may still be answered later. That answer is no
/// result of the trial of another path.
#[test]
fn a_late_answer_of_one_trial_counts_in_no_other() {
    let mut rig = WatchRig::new(4, ejection_settings());
    for _ in 0..5 {
        rig.window_of(2, Nanos::from_millis(5));
    }
    assert!(rig.report(0).ejected && rig.report(1).ejected);
    let read = |rig: &mut WatchRig| {
        rig.start(make_test_read_bio(0, 8));
        rig.wait();
        assert_eq!(rig.done.drain(..).map(|bio| bio.status).collect::<Vec<_>>(), [Status::Ok]);
    };
    rig.disks[..2].iter().for_each(|disk| disk.hold(true));
    let in_trial = |rig: &mut WatchRig, first: usize, second: usize| {
        rig.world.now = rig.world.now + Nanos::from_millis(10_000);
        read(rig);
        assert_eq!([rig.disks[0].waiting(), rig.disks[1].waiting()], [first, second]);
    };
    in_trial(&mut rig, 1, 0);
    in_trial(&mut rig, 1, 1);
    rig.disks[0].hold(false);
    rig.poll();
    read(&mut rig);
    assert_eq!(rig.disks[1].waiting(), 1, "one copy at a time, and the trial still waits for it");
    // This copy and seven more are the trial.
    rig.disks[1].hold(false);
    rig.poll();
    (0..7).for_each(|_| {
        assert!(rig.report(1).ejected);
        read(&mut rig);
        rig.poll();
    });
    assert!(rig.report(0).ejected && !rig.report(1).ejected);
    rig.rests();
}
