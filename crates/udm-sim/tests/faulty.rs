//! Worlds in which disks have the faults of null devices pass.

use udm_sim::counts::AccumulateRuns;
use udm_sim::{RunPlan, RunTotals, run};

#[test]
fn seeds_run_clean() {
    let mut all = RunTotals::default();
    for seed in 1..=150 {
        let plan = RunPlan { faulty: true, ..RunPlan::new(seed, 4000) };
        let clean = run::run(&plan).unwrap_or_else(|failure| {
            let (trace, what) = (failure.trace.join("\n"), failure.what);
            panic!("{trace}\n{what}\nreplay: udm-sim {}", failure.plan.options())
        });
        all.add(&clean.totals);
    }
    assert!(all.null_caches > 50 && all.crashes > 50, "{all:?} cut no power");
    assert!(all.seen.injected > 500 && all.all_requests() > 50_000, "{all:?} is no test");
}
