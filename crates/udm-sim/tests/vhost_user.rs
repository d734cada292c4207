//! Worlds of disks of virtual machines pass, the same seed always gives the same run, and runs
//! cover their purpose.

mod common;

use udm_sim::counts::AccumulateRuns;
use udm_sim::vhost_user::{self, VhostUserCounts};
use udm_sim::{DisturbanceClass, ExcludedDisturbances, RunPlan};

/// Steps per seed.
const STEPS: u64 = 3000;

fn clean(plan: &RunPlan) -> VhostUserCounts {
    common::or_panic("--vhost-user ", vhost_user::run(plan))
}

#[test]
fn seeds_run_clean() {
    let mut all = VhostUserCounts::default();
    for seed in 1..=200 {
        all.add(&clean(&RunPlan::new(seed, STEPS)));
    }
    let report = all.report();
    assert!(report.requests > 10_000 && all.compared > 50_000, "{} requests", report.requests);
    common::covers_all(&report);
    assert!(all.requests.iter().all(|n| *n > 0) && all.memory_changes > 0 && all.ends > 0);
    assert!(all.kinds.iter().all(|n| *n > 500), "{:?}", all.kinds);
    assert!(all.kicks.iter().all(|n| *n > 0) && all.in_flight > 0, "{:?}", all.kicks);
    let is_interleaved = cfg!(feature = "interleave");
    assert_eq!((all.interleaved > 0, all.kills[1] > 0), (is_interleaved, is_interleaved));
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
    assert_eq!((quiet.kills, quiet.lost, quiet.cut, quiet.nonsense), ([0, 0], 0, 0, 0));
    assert_eq!((quiet.acts, quiet.restarts, quiet.troubles), (0, 0, 0));
    let classes = [
        DisturbanceClass::Crash,
        DisturbanceClass::Lost,
        DisturbanceClass::Cuts,
        DisturbanceClass::Nonsense,
        DisturbanceClass::Wild,
        DisturbanceClass::Reopen,
    ];
    common::runs_without(&classes, STEPS, |plan| clean(plan).report().requests);
}
