//! Worlds of the registry and its verbs pass, the same seed always gives the same run, and runs
//! cover their purpose.

mod common;

use udm_sim::counts::AccumulateRuns;
use udm_sim::verbs::{self, RegistryCounts};
use udm_sim::{DisturbanceClass, ExcludedDisturbances, RunPlan};

/// Steps per seed.
const STEPS: u64 = 3000;

fn clean(plan: &RunPlan) -> RegistryCounts {
    common::or_panic("--verbs ", verbs::run(plan))
}

#[test]
fn seeds_run_clean() {
    let mut all = RegistryCounts::default();
    for seed in 1..=100 {
        all.add(&clean(&RunPlan::new(seed, STEPS)));
    }
    let report = all.report();
    assert!(all.verbs.iter().all(|verbs| *verbs > 500) && all.requests > 5000, "{all:?}");
    common::covers_all(&report);
}

#[test]
fn the_same_seed_is_the_same_run() {
    common::same_seed_is_same_run(1000..1010, STEPS, |plan| {
        let run = clean(plan);
        (run.hash, (run.verbs, run.simulated))
    });
}

#[test]
fn classes_can_be_left_out() {
    let quiet = clean(&RunPlan { without: ExcludedDisturbances::all(), ..RunPlan::new(11, STEPS) });
    assert_eq!((quiet.hung_up, quiet.moved, quiet.hangs, quiet.stacks), (0, 0, 0, 0));
    assert_eq!((quiet.not_opened, quiet.no_lanes, quiet.messages), (0, 0, 0));
    let classes = [
        DisturbanceClass::Cancel,
        DisturbanceClass::Reload,
        DisturbanceClass::Remove,
        DisturbanceClass::Stacks,
        DisturbanceClass::Suspend,
    ];
    common::runs_without(&classes, STEPS, |plan| clean(plan).report().requests);
}
