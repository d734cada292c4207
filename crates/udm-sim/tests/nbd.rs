//! Worlds of the NBD server pass, the same seed always gives the same run, and runs cover their
//! purpose.

mod common;

use udm_sim::counts::AccumulateRuns;
use udm_sim::nbd::{self, NbdServerCounts};
use udm_sim::{DisturbanceClass, ExcludedDisturbances, RunPlan};

/// Steps per seed.
const STEPS: u64 = 3000;

fn clean(plan: &RunPlan) -> NbdServerCounts {
    common::or_panic("--nbd ", nbd::run(plan))
}

#[test]
fn seeds_run_clean() {
    let mut all = NbdServerCounts::default();
    for seed in 1..=120 {
        all.add(&clean(&RunPlan::new(seed, STEPS)));
    }
    let report = all.report();
    assert!(report.requests > 8000 && all.compared > 1_000_000, "{} requests", report.requests);
    common::covers_all(&report);
    assert!(all.full > 0 && all.statuses > 0 && all.crashes > 0 && all.ends > 0);
}

#[test]
fn the_same_seed_is_the_same_run() {
    common::same_seed_is_same_run(1000..1010, STEPS, |plan| {
        let run = clean(plan);
        (run.hash, (run.requests, run.simulated))
    });
}

#[test]
fn classes_can_be_left_out() {
    let quiet = clean(&RunPlan { without: ExcludedDisturbances::all(), ..RunPlan::new(11, STEPS) });
    assert_eq!((quiet.cuts, quiet.failed, quiet.lost, quiet.stalls), (0, 0, 0, 0));
    assert_eq!((quiet.nonsense, quiet.moves, quiet.suspends, quiet.crashes), (0, 0, 0, 0));
    let classes = [
        DisturbanceClass::Cuts,
        DisturbanceClass::Lost,
        DisturbanceClass::Stalls,
        DisturbanceClass::Nonsense,
        DisturbanceClass::Moves,
        DisturbanceClass::Crash,
    ];
    common::runs_without(&classes, STEPS, |plan| clean(plan).report().requests);
}
