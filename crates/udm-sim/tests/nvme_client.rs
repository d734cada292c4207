//! Worlds of the NVMe/TCP initiator pass, the same seed always gives the same run, and runs cover
//! their purpose.

mod common;

use udm_sim::counts::AccumulateRuns;
use udm_sim::nvme_client::{self, NvmeClientCounts};
use udm_sim::{DisturbanceClass, RunPlan};

/// Steps per seed.
const STEPS: u64 = 5000;

fn clean(plan: &RunPlan) -> NvmeClientCounts {
    common::or_panic("--nvme-client ", nvme_client::run(plan))
}

#[test]
fn seeds_run_clean() {
    let mut all = NvmeClientCounts::default();
    for seed in 1..=150 {
        all.add(&clean(&RunPlan::new(seed, STEPS)));
    }
    let report = all.report();
    assert!(report.requests > 10_000 && all.compared > 100_000, "{}", report.coverage);
    common::covers_all(&report);
}

#[test]
fn the_same_seed_is_the_same_run() {
    common::same_seed_is_same_run(1000..1006, STEPS, |plan| {
        let run = clean(plan);
        (run.hash, (run.requests, run.simulated))
    });
}

#[test]
fn classes_can_be_left_out() {
    let classes = [
        DisturbanceClass::Crash,
        DisturbanceClass::Paths,
        DisturbanceClass::Errors,
        DisturbanceClass::Messages,
        DisturbanceClass::Flush,
        DisturbanceClass::Trim,
        DisturbanceClass::Long,
        DisturbanceClass::Hang,
        DisturbanceClass::Limits,
        DisturbanceClass::Late,
        DisturbanceClass::Watch,
        DisturbanceClass::Cuts,
        DisturbanceClass::Lost,
        DisturbanceClass::Stalls,
        DisturbanceClass::Nonsense,
    ];
    common::runs_without(&classes, STEPS, |plan| clean(plan).report().requests);
}
