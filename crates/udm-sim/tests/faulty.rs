//! Worlds in which disks have the faults of null devices pass.

mod common;

use udm_sim::counts::AccumulateRuns;
use udm_sim::{RunPlan, RunTotals, run};

#[test]
fn seeds_run_clean() {
    let mut all = RunTotals::default();
    for seed in 1..=150 {
        let plan = RunPlan { faulty: true, ..RunPlan::new(seed, 4000) };
        all.add(&common::or_panic("", run::run(&plan)).totals);
    }
    assert!(all.null_caches > 50 && all.crashes > 50, "{all:?} cut no power");
    assert!(all.seen.injected > 500 && all.report().requests > 50_000, "{all:?} is no test");
}
