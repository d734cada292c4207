//! A fixed set of seeds passes, and the same seed always gives the same run.

mod common;

use udm_sim::{DisturbanceClass, ExcludedDisturbances, RunPlan, run};

/// Steps per seed.
const STEPS: u64 = 5000;

fn clean(plan: &RunPlan) -> run::CleanRun {
    common::or_panic("", run::run(plan))
}

/// Seeds 1 to 100, and seeds that once found a bug in the tested code:
/// * 178: a lane of log-writes waited forever for the count of the mark at the end of the log,
///   which a resume had removed.
/// * 2608: a lane of log-writes, opened after the device below had begun to accept discards, sent
///   discards longer than the device accepts.
/// * 89: a suspend hung, because a bio to be handed back did not ask for the drain that takes it.
#[test]
fn seeds_run_clean() {
    let (mut requests, mut shared) = (0, 0);
    for seed in (1..=100).chain([178, 2608]) {
        let totals = clean(&RunPlan::new(seed, STEPS)).totals;
        requests += totals.report().requests;
        shared += totals.shared_tags;
    }
    assert!(shared > 5, "disks share tags in {shared} worlds");
    assert!(requests > 50_000, "{requests} requests are no test");
}

#[test]
fn the_same_seed_is_the_same_run() {
    for seed in 1000..1010 {
        let plan = RunPlan::new(seed, STEPS);
        let (a, b) = (clean(&plan), clean(&plan));
        assert_eq!(a.hash, b.hash, "seed {seed}");
        assert_eq!((a.totals.requests, a.totals.simulated), (b.totals.requests, b.totals.simulated));
        assert_ne!(a.hash, clean(&RunPlan::new(seed + 1, STEPS)).hash);
    }
}

/// The number of events that a trace keeps does not change the run.
#[test]
fn looking_changes_nothing() {
    let plan = RunPlan::new(7, STEPS);
    let kept = RunPlan { keep_events: 100_000, ..plan.clone() };
    assert_eq!(clean(&plan).hash, clean(&kept).hash);
}

#[test]
fn classes_can_be_left_out() {
    for class in DisturbanceClass::ALL {
        let without = ExcludedDisturbances::default().and(class);
        let totals = clean(&RunPlan { without, ..RunPlan::new(11, STEPS) }).totals;
        match class {
            DisturbanceClass::Crash => assert_eq!(totals.crashes, 0),
            DisturbanceClass::Reload => assert_eq!(totals.reloads, 0),
            DisturbanceClass::Suspend => assert_eq!(totals.suspends, 0),
            DisturbanceClass::Paths => assert_eq!(totals.losses, 0),
            _ => {}
        }
    }
    let quiet = clean(&RunPlan { without: ExcludedDisturbances::all(), ..RunPlan::new(11, STEPS) }).totals;
    assert_eq!((quiet.crashes, quiet.reloads, quiet.suspends, quiet.losses), (0, 0, 0, 0));
}
