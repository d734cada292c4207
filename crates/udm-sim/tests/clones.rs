//! Worlds of a clone pass, a power cut at any write or flush loses nothing that was flushed, and
//! runs cover their purpose.

mod common;

use udm_sim::clones::{self, CloneCounts};
use udm_sim::counts::AccumulateRuns;
use udm_sim::{DisturbanceClass, ExcludedDisturbances, RunPlan};

/// Steps per seed.
const STEPS: u64 = 4000;

fn clean(plan: &RunPlan) -> CloneCounts {
    common::or_panic("--clones ", clones::run(plan))
}

#[test]
fn seeds_run_clean() {
    let mut all = CloneCounts::default();
    for seed in 1..=300 {
        all.add(&clean(&RunPlan::new(seed, STEPS)));
    }
    let report = all.report();
    assert!(report.requests > 100_000 && all.sectors > 500_000, "{all:?} is no test");
    common::covers_all(&report);
    assert!(all.linear > 100 && all.complete > 300, "{all:?}");
}

/// Cuts the power at every write and flush of short runs in which regions are hydrated.
#[test]
fn a_cut_at_any_write_loses_nothing() {
    const CHANGES: std::ops::Range<u64> = 60..300;
    let without = ExcludedDisturbances::default().and(DisturbanceClass::Crash);
    let plan = |seed| RunPlan { without, keep_events: 100, ..RunPlan::new(seed, 400) };
    let mut all = CloneCounts::default();
    let seeds = (1..1000).filter(|seed| CHANGES.contains(&clean(&plan(*seed)).changes)).take(8);
    for seed in seeds.collect::<Vec<u64>>() {
        all.add(&common::or_panic("--clones ", clones::run_every_power_cut(&plan(seed))));
    }
    assert!(all.cuts[0] > 500 && all.cuts[1] > 100, "{all:?} is no test");
}

#[test]
fn the_same_seed_is_the_same_run() {
    common::same_seed_is_same_run(1..11, STEPS, |plan| {
        let run = clean(plan);
        (run.hash, (run.requests, run.simulated))
    });
}

#[test]
fn classes_can_be_left_out() {
    let quiet = clean(&RunPlan { without: ExcludedDisturbances::all(), ..RunPlan::new(11, STEPS) });
    assert_eq!((quiet.cuts, quiet.suspends, quiet.reloads, quiet.faults), ([0, 0], 0, 0, 0));
    let classes = [
        DisturbanceClass::Crash,
        DisturbanceClass::Errors,
        DisturbanceClass::Trim,
        DisturbanceClass::Messages,
        DisturbanceClass::Remove,
    ];
    common::runs_without(&classes, STEPS, |plan| clean(plan).report().requests);
}
