//! Worlds of a mirror with a log pass: a mirror that continues from its log after a power cut, at
//! any write or flush of the disks and of the log, has the same data on both devices at its end.

mod common;

use udm_sim::clones::{self, CloneCounts};
use udm_sim::counts::AccumulateRuns;
use udm_sim::{DisturbanceClass, ExcludedDisturbances, RunPlan};

/// Steps per seed.
const STEPS: u64 = 4000;

fn clean(plan: &RunPlan) -> CloneCounts {
    common::or_panic("--mirror-logs ", clones::run_logged_mirror(plan))
}

#[test]
fn seeds_of_mirrors_with_logs_run_clean() {
    let mut all = CloneCounts::default();
    for seed in 1..=300 {
        all.add(&clean(&RunPlan::new(seed, STEPS)));
    }
    assert!(all.requests.iter().sum::<u64>() > 100_000 && all.sectors > 500_000, "{all:?} is no test");
    assert!(all.linear > 100 && all.complete > 300 && all.continued > 100, "{all:?}");
    assert!(all.lost_logs > 3 && all.cuts[1] > 20 && all.reloads > 100, "{all:?}");
}

/// Cuts the power at every write and flush of short runs with a copy and a switch.
#[test]
fn a_cut_at_any_write_of_a_log_loses_nothing() {
    const CHANGES: std::ops::Range<u64> = 60..400;
    let without = ExcludedDisturbances::default().and(DisturbanceClass::Crash);
    let plan = |seed| RunPlan { without, keep_events: 100, ..RunPlan::new(seed, 400) };
    let mut all = CloneCounts::default();
    let seeds = (1..1000).filter(|seed| CHANGES.contains(&clean(&plan(*seed)).changes)).take(8);
    for seed in seeds.collect::<Vec<u64>>() {
        let every_cut = clones::run_every_power_cut_of_logged_mirror(&plan(seed));
        all.add(&common::or_panic("--mirror-logs ", every_cut));
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
