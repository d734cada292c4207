//! Worlds of a mirror pass, and a power cut at any write or flush of a mirror or of its switch
//! loses nothing that was flushed.

mod common;

use udm_sim::clones::{self, CloneCounts};
use udm_sim::counts::AccumulateRuns;
use udm_sim::{DisturbanceClass, ExcludedDisturbances, RunPlan};

/// Steps per seed.
const STEPS: u64 = 4000;

fn clean(plan: &RunPlan) -> CloneCounts {
    common::or_panic("--mirrors ", clones::run_mirror(plan))
}

#[test]
fn seeds_of_mirrors_run_clean() {
    let mut all = CloneCounts::default();
    for seed in 1..=300 {
        all.add(&clean(&RunPlan::new(seed, STEPS)));
    }
    assert!(all.requests.iter().sum::<u64>() > 100_000 && all.sectors > 500_000, "{all:?} is no test");
    assert!(all.linear > 100 && all.complete > 300 && all.broken > 3, "{all:?}");
    assert!(all.cuts[1] > 20 && all.reloads > 100 && all.suspends > 100 && all.faults > 100, "{all:?}");
}

/// Cuts the power at every write and flush of short runs with a copy and a switch.
#[test]
fn a_cut_at_any_write_of_a_move_loses_nothing() {
    const CHANGES: std::ops::Range<u64> = 60..300;
    let without = ExcludedDisturbances::default().and(DisturbanceClass::Crash);
    let plan = |seed| RunPlan { without, keep_events: 100, ..RunPlan::new(seed, 400) };
    let mut all = CloneCounts::default();
    let seeds = (1..1000).filter(|seed| CHANGES.contains(&clean(&plan(*seed)).changes)).take(8);
    for seed in seeds.collect::<Vec<u64>>() {
        all.add(&common::or_panic("--mirrors ", clones::run_every_power_cut_of_mirror(&plan(seed))));
    }
    assert!(all.cuts[0] > 500 && all.cuts[1] > 20 && all.linear > 500, "{all:?} is no test");
}

#[test]
fn the_same_seed_is_the_same_run() {
    common::same_seed_is_same_run(1..11, STEPS, |plan| {
        let run = clean(plan);
        (run.hash, (run.requests, run.simulated))
    });
}
