//! Worlds of the NBD server pass, the same seed always gives the same run, and runs cover their
//! purpose.

use udm_sim::counts::AccumulateRuns;
use udm_sim::nbd::{self, NbdServerCounts};
use udm_sim::{DisturbanceClass, ExcludedDisturbances, RunPlan};

/// Steps per seed.
const STEPS: u64 = 3000;

fn clean(plan: &RunPlan) -> NbdServerCounts {
    nbd::run(plan).unwrap_or_else(|failure| {
        let (trace, what, options) = (failure.trace.join("\n"), failure.what, failure.plan.options());
        panic!("{trace}\n{what}\nreplay: udm-sim --nbd {options}")
    })
}

#[test]
fn seeds_run_clean() {
    let mut all = NbdServerCounts::default();
    for seed in 1..=120 {
        all.add(&clean(&RunPlan::new(seed, STEPS)));
    }
    assert!(all.all_requests() > 8000 && all.compared > 1_000_000, "{} requests", all.all_requests());
    assert_eq!((all.uncovered(ExcludedDisturbances::default()), all.nothing()), (vec![], None));
    assert!(all.full > 0 && all.statuses > 0 && all.crashes > 0 && all.ends > 0);
}

#[test]
fn the_same_seed_is_the_same_run() {
    for seed in 1000..1010 {
        let plan = RunPlan::new(seed, STEPS);
        let (a, b) = (clean(&plan), clean(&RunPlan { keep_events: 100_000, ..plan.clone() }));
        assert_eq!((a.hash, a.requests, a.simulated), (b.hash, b.requests, b.simulated), "seed {seed}");
        assert_ne!(a.hash, clean(&RunPlan::new(seed + 1, STEPS)).hash);
    }
}

#[test]
fn classes_can_be_left_out() {
    let quiet = clean(&RunPlan { without: ExcludedDisturbances::all(), ..RunPlan::new(11, STEPS) });
    assert_eq!((quiet.cuts, quiet.failed, quiet.lost, quiet.stalls), (0, 0, 0, 0));
    assert_eq!((quiet.nonsense, quiet.moves, quiet.suspends, quiet.crashes), (0, 0, 0, 0));
    for class in [
        DisturbanceClass::Cuts,
        DisturbanceClass::Lost,
        DisturbanceClass::Stalls,
        DisturbanceClass::Nonsense,
        DisturbanceClass::Moves,
        DisturbanceClass::Crash,
    ] {
        let some = clean(&RunPlan {
            without: ExcludedDisturbances::default().and(class),
            ..RunPlan::new(12, STEPS)
        });
        assert!(some.all_requests() > 0);
    }
}
