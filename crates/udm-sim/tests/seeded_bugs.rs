//! The simulator must find each bug that was put in on purpose, within a bounded number of seeds.
#![expect(clippy::print_stdout, reason = "the table of what was found is what the test is run for")]

use udm_dm::bugs::{Bug, set};
use udm_sim::{Plan, run};

/// Steps to a seed, and the seeds that a bug may take to be found. The table in docs/simulator.md comes from this test's output.
const STEPS: u64 = 5000;
const SEEDS_MAX: u64 = 2000;

#[test]
fn every_seeded_bug_is_found() {
    let mut missed = Vec::new();
    for bug in Bug::ALL {
        set(Some(bug));
        let found = (1..=SEEDS_MAX).find_map(|seed| run::run(&Plan::new(seed, STEPS)).err());
        set(None);
        match found {
            Some(failure) => {
                let line = failure.what.lines().next().unwrap_or_default();
                let shown: String = line.chars().take(150).collect();
                println!("| {bug:?} | {} | {} | {shown} |", failure.plan.seed, failure.plan.steps);
            }
            None => missed.push(bug),
        }
    }
    assert!(missed.is_empty(), "not found in {SEEDS_MAX} seeds: {missed:?}");
}
