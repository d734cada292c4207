//! Runs a plan, and makes one that fails smaller.

use crate::env::lock;
use crate::model::Wrong;
use crate::plan::{Class, Plan, Without};
use crate::totals::Totals;
use crate::world::World;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

/// A run that went wrong.
#[derive(Clone, Debug)]
pub struct Failure {
    /// What was run, up to the step that showed it.
    pub plan: Plan,
    /// What is wrong.
    pub what: String,
    /// The last events, oldest first.
    pub trace: Vec<String>,
}

/// A run that went well.
#[derive(Clone, Copy, Debug)]
pub struct Clean {
    /// What was done.
    pub totals: Totals,
    /// The hash of all events.
    pub hash: u64,
}

thread_local! {
    /// The text of the last panic, while a run is under way on this thread.
    static PANIC: RefCell<Option<Option<String>>> = const { RefCell::new(None) };
}

/// Keeps the text of panics inside runs, and prints no others' less.
fn catch_texts() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let ours = PANIC.with_borrow_mut(|slot| match slot {
                Some(text) => {
                    *text = Some(info.to_string().replace('\n', " "));
                    true
                }
                None => false,
            });
            if !ours {
                usual(info);
            }
        }));
    });
}

/// Runs `f`; a panic in it is what is wrong.
pub(crate) fn guard(f: impl FnOnce() -> Result<(), Wrong>) -> Result<(), Wrong> {
    catch_texts();
    PANIC.set(Some(None));
    let outcome = catch_unwind(AssertUnwindSafe(f));
    let text = PANIC.take().flatten();
    outcome.unwrap_or_else(|_| Err(text.unwrap_or_else(|| "a panic without a text".into())))
}

/// Runs `plan`.
///
/// # Errors
/// The failure, with its trace. The world of a failed run is not taken apart, since requests are
/// still in it: its memory stays taken.
pub fn run(plan: &Plan) -> Result<Clean, Box<Failure>> {
    let mut world = None;
    let outcome = guard(|| {
        let world = world.insert(World::new(plan)?);
        world.run()
    });
    let wrong = outcome.err();
    let Some(what) = wrong else {
        let world = world.as_ref().expect("a run without an error has a world");
        return Ok(Clean { totals: totals(world), hash: lock(&world.env).trace.hash() });
    };
    let mut plan = plan.clone();
    let mut trace = Vec::new();
    if let Some(world) = world {
        plan.steps = world.step.min(plan.steps);
        trace.extend(lock(&world.env).trace.last().map(crate::trace::Event::line));
        Box::leak(Box::new(world));
    }
    Err(Box::new(Failure { plan, what, trace }))
}

fn totals(world: &World) -> Totals {
    let env = lock(&world.env);
    Totals {
        logs: world.log.looks,
        sectors: world.model.compared,
        faults: env.faults,
        seen: env.seen,
        ..world.totals
    }
}

/// How many runs making a failure smaller may take.
const TRIES_MAX: usize = 64;

/// Looks for a smaller run that fails too: classes of disturbance left out, fewer cores, fewer
/// requests in flight, fewer steps. Returns the smallest, which may be the one given.
#[must_use]
pub fn shrink(failure: Failure) -> Failure {
    shrink_by(failure, &|plan| run(plan).map(drop))
}

/// The same for worlds that `run` runs.
#[must_use]
pub fn shrink_by(failure: Failure, run: &dyn Fn(&Plan) -> Result<(), Box<Failure>>) -> Failure {
    let mut best = failure;
    let mut tries = 0;
    let mut try_one = |best: &mut Failure, change: &dyn Fn(&mut Plan)| -> bool {
        let mut plan = best.plan.clone();
        change(&mut plan);
        tries += 1;
        if tries > TRIES_MAX {
            return false;
        }
        match run(&plan) {
            Err(smaller) => {
                *best = *smaller;
                true
            }
            Ok(()) => false,
        }
    };
    // All at once first, then one by one.
    if !try_one(&mut best, &|p| p.without = Without::all()) {
        for class in Class::ALL {
            try_one(&mut best, &|p| p.without = p.without.and(class));
        }
    }
    for cores in 1..4 {
        if best.plan.cores.is_none_or(|now| cores < now) && try_one(&mut best, &|p| p.cores = Some(cores)) {
            break;
        }
    }
    for depth in [1, 2, 4, 8] {
        if best.plan.depth.is_none_or(|now| depth < now) && try_one(&mut best, &|p| p.depth = Some(depth)) {
            break;
        }
    }
    // A failure that is seen at rest may be there sooner: rest sooner.
    for part in [8, 4, 2] {
        if try_one(&mut best, &|p| p.steps -= p.steps / part) {
            try_one(&mut best, &|p| p.steps -= p.steps / part);
        }
    }
    best
}
