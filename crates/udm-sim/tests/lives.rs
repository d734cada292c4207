//! Worlds of servers that run one after another pass, the same seed always gives the same run, and
//! runs cover their purpose.

mod common;

use udm_sim::counts::AccumulateRuns;
use udm_sim::lifecycle::{self, LifecycleCounts};
use udm_sim::{DisturbanceClass, ExcludedDisturbances, RunPlan};

/// Steps per seed.
const STEPS: u64 = 5000;

fn clean(plan: &RunPlan) -> LifecycleCounts {
    common::or_panic("--lives ", lifecycle::run(plan))
}

#[test]
fn seeds_run_clean() {
    let mut all = LifecycleCounts::default();
    for seed in 1..=150 {
        all.add(&clean(&RunPlan::new(seed, STEPS)));
    }
    let report = all.report();
    assert!(all.verbs.iter().all(|verbs| *verbs > 20) && all.sectors > 50_000, "{all:?}");
    assert_eq!(
        (report.uncovered(ExcludedDisturbances::default()), report.nothing),
        (vec![], None),
        "{all:?}"
    );
}

#[test]
fn the_same_seed_is_the_same_run() {
    common::same_seed_is_same_run(1000..1005, STEPS, |plan| {
        let run = clean(plan);
        (run.hash, (run.verbs, run.simulated))
    });
}

#[test]
fn classes_can_be_left_out() {
    let quiet = clean(&RunPlan { without: ExcludedDisturbances::all(), ..RunPlan::new(11, STEPS) });
    assert_eq!((quiet.killed, quiet.away, quiet.replaced, quiet.released), (0, 0, 0, 0));
    let classes = [
        DisturbanceClass::Crash,
        DisturbanceClass::Merge,
        DisturbanceClass::Reload,
        DisturbanceClass::Remove,
        DisturbanceClass::Suspend,
        DisturbanceClass::Paths,
    ];
    common::runs_without(&classes, STEPS, |plan| clean(plan).verbs.iter().sum());
}
