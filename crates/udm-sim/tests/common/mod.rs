//! The parts of tests that are the same for each kind of world.

#![allow(dead_code, reason = "each test file uses some of them")]

use std::fmt::Debug;
use udm_sim::counts::{CombinedRunHash, RunReport};
use udm_sim::{DisturbanceClass, ExcludedDisturbances, RunFailure, RunPlan};

/// Returns the counters of a run. Panics with the trace and the replay, with `flag`, of a failure.
pub fn or_panic<C>(flag: &str, outcome: Result<C, Box<RunFailure>>) -> C {
    outcome.unwrap_or_else(|failure| {
        let (trace, what, options) = (failure.trace.join("\n"), failure.what, failure.plan.options());
        panic!("{trace}\n{what}\nreplay: udm-sim {flag}{options}")
    })
}

/// Checks that each disturbance occurred, and that something was tested.
pub fn covers_all(report: &RunReport) {
    let missed = report.uncovered(ExcludedDisturbances::default());
    assert_eq!((missed, report.nothing), (vec![], None), "{}", report.coverage);
}

/// Checks that a seed always gives the same run, however many events its trace keeps, and that the
/// next seed gives another one. `run` returns the hash and other results of a run.
pub fn same_seed_is_same_run<R: PartialEq + Debug>(
    seeds: std::ops::Range<u64>,
    steps: u64,
    run: impl Fn(&RunPlan) -> (CombinedRunHash, R),
) {
    for seed in seeds {
        let plan = RunPlan::new(seed, steps);
        let once = run(&plan);
        assert_eq!(once, run(&RunPlan { keep_events: 100_000, ..plan }), "seed {seed}");
        assert_ne!(once.0, run(&RunPlan::new(seed + 1, steps)).0);
    }
}

/// Checks that runs still do something without one of `classes`. `run` returns the number of
/// requests or verbs.
pub fn runs_without(classes: &[DisturbanceClass], steps: u64, run: impl Fn(&RunPlan) -> u64) {
    for class in classes {
        let without = ExcludedDisturbances::default().and(*class);
        assert!(run(&RunPlan { without, ..RunPlan::new(12, steps) }) > 0);
    }
}
