//! Worlds of the NBD client pass, the same seed always gives the same run, and runs cover their
//! purpose.

mod common;

use udm_sim::counts::AccumulateRuns;
use udm_sim::nbd_client::{self, NbdClientCounts};
use udm_sim::{DisturbanceClass, ExcludedDisturbances, RunPlan};

/// Steps per seed.
const STEPS: u64 = 3000;

fn clean(plan: &RunPlan) -> NbdClientCounts {
    common::or_panic("--nbd-client ", nbd_client::run(plan))
}

#[test]
fn seeds_run_clean() {
    let mut all = NbdClientCounts::default();
    for seed in 1..=120 {
        all.add(&clean(&RunPlan::new(seed, STEPS)));
    }
    let report = all.report();
    assert!(report.requests > 10_000 && all.compared > 100_000, "{}", report.coverage);
    common::covers_all(&report);
    assert!(all.full > 0 && all.called_off > 0 && all.lines > 0, "{}", report.coverage);
}

#[test]
fn the_same_seed_is_the_same_run() {
    common::same_seed_is_same_run(1000..1008, STEPS, |plan| {
        let run = clean(plan);
        (run.hash, (run.requests, run.simulated))
    });
}

#[test]
fn classes_can_be_left_out() {
    let quiet = clean(&RunPlan { without: ExcludedDisturbances::all(), ..RunPlan::new(11, STEPS) });
    assert_eq!((quiet.cuts, quiet.failed, quiet.violations, quiet.hangs, quiet.refused), (0, 0, 0, 0, 0));
    assert_eq!(
        (quiet.stopped, quiet.unreachable, quiet.killed, quiet.others, quiet.crashes),
        (0, 0, 0, 0, 0)
    );
    assert_eq!(quiet.errors, 0);
    let classes = [
        DisturbanceClass::Cuts,
        DisturbanceClass::Lost,
        DisturbanceClass::Stalls,
        DisturbanceClass::Nonsense,
        DisturbanceClass::Late,
        DisturbanceClass::Crash,
    ];
    common::runs_without(&classes, STEPS, |plan| clean(plan).report().requests);
}
