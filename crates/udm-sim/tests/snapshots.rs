//! Worlds of origins and their snapshots pass, and a power cut at any write or flush leaves each
//! snapshot as promised.

mod common;

use udm_sim::counts::AccumulateRuns;
use udm_sim::{DisturbanceClass, ExcludedDisturbances, RunPlan, RunTotals, run};

fn clean(plan: &RunPlan) -> run::CleanRun {
    common::or_panic("", run::run(plan))
}

/// Seeds 1 to 300. Some once found a bug in the tested code.
#[test]
fn seeds_run_clean() {
    let mut all = RunTotals::default();
    for seed in 1..=300 {
        all.add(&clean(&RunPlan::snapshots(seed, 5000)).totals);
    }
    let report = all.report();
    assert!(report.requests > 100_000 && all.sectors > 500_000, "{all:?} is no test");
    common::covers_all(&report);
}

/// Cuts the power at every write and flush of short runs. In these runs a persistent snapshot is
/// created, several are created together, one is merged, or a store grows.
#[test]
fn a_cut_at_any_write_loses_nothing() {
    const CHANGES_MAX: u64 = 160;
    type RunFilter = fn(&RunTotals) -> bool;
    let what: [(&str, u64, RunFilter); 5] = [
        ("made", 600, |t| t.snap.made > 0),
        ("made together", 600, |t| t.snap.grouped > 1),
        ("merged", 1500, |t| t.snap.merges > 0),
        ("grown", 600, |t| t.snap.grew > 1),
        ("of a snapshot", 1500, |t| t.snap.stacked > 0),
    ];
    let mut all = RunTotals::default();
    for (name, steps, suits) in what {
        let without = ExcludedDisturbances::default().and(DisturbanceClass::Crash);
        let plan = |seed| RunPlan { without, keep_events: 100, ..RunPlan::snapshots(seed, steps) };
        let is_one = |seed: &u64| {
            let totals = clean(&plan(*seed)).totals;
            suits(&totals) && (20..CHANGES_MAX).contains(&totals.changes)
        };
        let seeds: Vec<u64> = (1..1000).filter(is_one).take(2).collect();
        assert!(!seeds.is_empty(), "{name}: no seed");
        for seed in seeds {
            all.add(&common::or_panic("", run::run_every_power_cut(&plan(seed))).totals);
        }
    }
    let snap = &all.snap;
    let enough = snap.cuts > 400 && snap.survived > 100 && snap.cut_merges > 20 && snap.cut_groups > 20;
    assert!(enough, "{snap:?} is no test");
}

#[test]
fn the_same_seed_is_the_same_run() {
    for seed in 1..=10 {
        let plan = RunPlan::snapshots(seed, 3000);
        assert_eq!(clean(&plan).hash, clean(&plan).hash, "seed {seed}");
    }
}
