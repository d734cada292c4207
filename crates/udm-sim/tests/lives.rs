//! Worlds of servers that follow each other run clean, a seed is always the same run, and runs cover
//! what they are there for.

use udm_sim::counts::Count;
use udm_sim::lives::{self, Counts};
use udm_sim::{Class, Plan, Without};

/// Steps to a seed.
const STEPS: u64 = 5000;

fn clean(plan: &Plan) -> Counts {
    lives::run(plan).unwrap_or_else(|failure| {
        let (trace, what, options) = (failure.trace.join("\n"), failure.what, failure.plan.options());
        panic!("{trace}\n{what}\nreplay: udm-sim --lives {options}")
    })
}

#[test]
fn seeds_run_clean() {
    let mut all = Counts::default();
    for seed in 1..=150 {
        all.add(&clean(&Plan::new(seed, STEPS)));
    }
    assert!(all.verbs.iter().all(|verbs| *verbs > 20) && all.sectors > 50_000, "{all:?}");
    assert_eq!((all.missed(Without::default()), all.nothing()), (vec![], None), "{all:?}");
}

#[test]
fn the_same_seed_is_the_same_run() {
    for seed in 1000..1005 {
        let plan = Plan::new(seed, STEPS);
        let (a, b) = (clean(&plan), clean(&Plan { keep_events: 100_000, ..plan.clone() }));
        assert_eq!((a.hash, a.verbs, a.simulated), (b.hash, b.verbs, b.simulated), "seed {seed}");
        assert_ne!(a.hash, clean(&Plan::new(seed + 1, STEPS)).hash);
    }
}

#[test]
fn classes_can_be_left_out() {
    let quiet = clean(&Plan { without: Without::all(), ..Plan::new(11, STEPS) });
    assert_eq!((quiet.killed, quiet.away, quiet.replaced, quiet.released), (0, 0, 0, 0));
    for class in [Class::Crash, Class::Merge, Class::Reload, Class::Remove, Class::Suspend, Class::Paths] {
        let some = clean(&Plan { without: Without::default().and(class), ..Plan::new(12, STEPS) });
        assert!(some.all_verbs() > 0);
    }
}
