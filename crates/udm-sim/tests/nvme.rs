//! Worlds of the NVMe/TCP target pass, the same seed always gives the same run, and runs cover their
//! purpose. A host that repeats writes without a fence loses data, and the world finds it.

mod common;

use udm_sim::counts::AccumulateRuns;
use udm_sim::nvme::{self, NvmeTargetCounts, RetryPolicy};
use udm_sim::{DisturbanceClass, RunPlan};

/// Steps per seed.
const STEPS: u64 = 6000;

fn clean(plan: &RunPlan) -> NvmeTargetCounts {
    common::or_panic("--nvme ", nvme::run(plan))
}

#[test]
fn seeds_run_clean() {
    let mut all = NvmeTargetCounts::default();
    for seed in 1..=60 {
        all.add(&clean(&RunPlan::new(seed, STEPS)));
    }
    let report = all.report();
    assert!(report.requests > 4000 && all.compared > 1000, "{}", report.coverage);
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
        DisturbanceClass::Cuts,
        DisturbanceClass::Lost,
        DisturbanceClass::Hang,
        DisturbanceClass::Paths,
        DisturbanceClass::Late,
        DisturbanceClass::Nonsense,
    ];
    common::runs_without(&classes, STEPS, |plan| clean(plan).report().requests);
}

/// The hazard: a host that repeats writes over another path at once, as Linux does until TP8028. In
/// some run, a write of the lost path lands after the repeated one was acknowledged. The same runs
/// with either fence are clean.
#[test]
fn a_write_that_is_repeated_without_a_fence_lands_late() {
    let mut found = 0;
    for seed in 1..=20 {
        let plan = RunPlan::new(seed, STEPS);
        if let Err(failure) = nvme::run_with_policy(&plan, Some(RetryPolicy::AtOnce)) {
            // The late write is seen when it lands, or by a read of what it has overwritten.
            let is_late =
                ["but it was replaced", "a read returns"].iter().any(|how| failure.what.contains(how));
            assert!(is_late, "seed {seed}: {}", failure.what);
            found += 1;
        }
        for policy in [RetryPolicy::Reset, RetryPolicy::Wait] {
            common::or_panic("--nvme ", nvme::run_with_policy(&plan, Some(policy)));
        }
    }
    assert!(found > 0, "no write landed late in 20 runs");
}

/// A reset that counts as complete although requests are at the disk, as with a target that answers
/// early or forgets the association too soon: the disk finds the write that lands after it.
#[test]
fn a_reset_that_is_answered_early_is_found() {
    let landed = |seed: &u64| {
        let run = nvme::run_with_policy(&RunPlan::new(*seed, STEPS), Some(RetryPolicy::EarlyReset));
        run.is_err_and(|failure| failure.what.contains("the target has fenced its association"))
    };
    assert!((1..=60).any(|seed| landed(&seed)), "no write landed after an early answer");
}
