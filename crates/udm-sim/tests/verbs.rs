//! Worlds of the registry and its verbs run clean, a seed is always the same run, and runs cover
//! what they are there for.

use udm_sim::counts::Count;
use udm_sim::verbs::{self, Counts};
use udm_sim::{Class, Plan, Without};

/// Steps to a seed.
const STEPS: u64 = 3000;

fn clean(plan: &Plan) -> Counts {
    verbs::run(plan).unwrap_or_else(|failure| {
        let (trace, what, options) = (failure.trace.join("\n"), failure.what, failure.plan.options());
        panic!("{trace}\n{what}\nreplay: udm-sim --verbs {options}")
    })
}

#[test]
fn seeds_run_clean() {
    let mut all = Counts::default();
    for seed in 1..=100 {
        all.add(&clean(&Plan::new(seed, STEPS)));
    }
    assert!(all.verbs.iter().all(|verbs| *verbs > 500) && all.requests > 5000, "{all:?}");
    assert_eq!((all.missed(Without::default()), all.nothing()), (vec![], None));
}

#[test]
fn the_same_seed_is_the_same_run() {
    for seed in 1000..1010 {
        let plan = Plan::new(seed, STEPS);
        let (a, b) = (clean(&plan), clean(&Plan { keep_events: 100_000, ..plan.clone() }));
        assert_eq!((a.hash, a.verbs, a.simulated), (b.hash, b.verbs, b.simulated), "seed {seed}");
        assert_ne!(a.hash, clean(&Plan::new(seed + 1, STEPS)).hash);
    }
}

#[test]
fn classes_can_be_left_out() {
    let quiet = clean(&Plan { without: Without::all(), ..Plan::new(11, STEPS) });
    assert_eq!((quiet.hung_up, quiet.moved, quiet.hangs, quiet.stacks), (0, 0, 0, 0));
    assert_eq!((quiet.not_opened, quiet.no_lanes, quiet.messages), (0, 0, 0));
    for class in [Class::Cancel, Class::Reload, Class::Remove, Class::Stacks, Class::Suspend] {
        let some = clean(&Plan { without: Without::default().and(class), ..Plan::new(12, STEPS) });
        assert!(some.all_verbs() > 0);
    }
}
