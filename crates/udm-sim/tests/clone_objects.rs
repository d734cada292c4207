//! Worlds of a clone of an object pass: whatever the server answers, no wrong byte is read, reads
//! wait as long as they may, and the copy goes on when the server is well again.

mod common;

use udm_sim::clones::{self, CloneCounts};
use udm_sim::counts::AccumulateRuns;
use udm_sim::{DisturbanceClass, ExcludedDisturbances, RunPlan};

/// Steps per seed.
const STEPS: u64 = 4000;

fn clean(plan: &RunPlan) -> CloneCounts {
    common::or_panic("--objects ", clones::run_clone_of_object(plan))
}

#[test]
fn seeds_of_clones_of_objects_run_clean() {
    let mut all = CloneCounts::default();
    for seed in 1..=200 {
        all.add(&clean(&RunPlan::new(seed, STEPS)));
    }
    let report = all.report();
    assert!(report.requests > 30_000 && all.sectors > 200_000, "{all:?} is no test");
    assert!(all.linear > 100 && all.lies > 1000 && all.replaced > 30 && all.hedges > 30, "{all:?}");
}

/// Cuts the power at every write and flush of short runs in which regions are hydrated.
#[test]
fn a_cut_at_any_write_of_a_clone_of_an_object_loses_nothing() {
    const CHANGES: std::ops::Range<u64> = 60..300;
    let without = ExcludedDisturbances::default().and(DisturbanceClass::Crash);
    let plan = |seed| RunPlan { without, keep_events: 100, ..RunPlan::new(seed, 400) };
    let mut all = CloneCounts::default();
    let seeds = (1..1000).filter(|seed| CHANGES.contains(&clean(&plan(*seed)).changes)).take(4);
    for seed in seeds.collect::<Vec<u64>>() {
        let every_cut = clones::run_every_power_cut_of_clone_of_object(&plan(seed));
        all.add(&common::or_panic("--objects ", every_cut));
    }
    assert!(all.cuts[0] > 200 && all.cuts[1] > 40, "{all:?} is no test");
}

#[test]
fn the_same_seed_is_the_same_run() {
    common::same_seed_is_same_run(1..5, STEPS, |plan| {
        let run = clean(plan);
        (run.hash, (run.requests, run.simulated))
    });
}
