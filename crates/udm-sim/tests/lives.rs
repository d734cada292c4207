//! Worlds of servers that run one after another pass, the same seed always gives the same run, and
//! runs cover their purpose.

use udm_sim::counts::AccumulateRuns;
use udm_sim::lifecycle::{self, LifecycleCounts};
use udm_sim::{DisturbanceClass, ExcludedDisturbances, RunPlan};

/// Steps per seed.
const STEPS: u64 = 5000;

fn clean(plan: &RunPlan) -> LifecycleCounts {
    lifecycle::run(plan).unwrap_or_else(|failure| {
        let (trace, what, options) = (failure.trace.join("\n"), failure.what, failure.plan.options());
        panic!("{trace}\n{what}\nreplay: udm-sim --lives {options}")
    })
}

#[test]
fn seeds_run_clean() {
    let mut all = LifecycleCounts::default();
    for seed in 1..=150 {
        all.add(&clean(&RunPlan::new(seed, STEPS)));
    }
    assert!(all.verbs.iter().all(|verbs| *verbs > 20) && all.sectors > 50_000, "{all:?}");
    assert_eq!((all.uncovered(ExcludedDisturbances::default()), all.nothing()), (vec![], None), "{all:?}");
}

#[test]
fn the_same_seed_is_the_same_run() {
    for seed in 1000..1005 {
        let plan = RunPlan::new(seed, STEPS);
        let (a, b) = (clean(&plan), clean(&RunPlan { keep_events: 100_000, ..plan.clone() }));
        assert_eq!((a.hash, a.verbs, a.simulated), (b.hash, b.verbs, b.simulated), "seed {seed}");
        assert_ne!(a.hash, clean(&RunPlan::new(seed + 1, STEPS)).hash);
    }
}

#[test]
fn classes_can_be_left_out() {
    let quiet = clean(&RunPlan { without: ExcludedDisturbances::all(), ..RunPlan::new(11, STEPS) });
    assert_eq!((quiet.killed, quiet.away, quiet.replaced, quiet.released), (0, 0, 0, 0));
    for class in [
        DisturbanceClass::Crash,
        DisturbanceClass::Merge,
        DisturbanceClass::Reload,
        DisturbanceClass::Remove,
        DisturbanceClass::Suspend,
        DisturbanceClass::Paths,
    ] {
        let some = clean(&RunPlan {
            without: ExcludedDisturbances::default().and(class),
            ..RunPlan::new(12, STEPS)
        });
        assert!(some.all_verbs() > 0);
    }
}
