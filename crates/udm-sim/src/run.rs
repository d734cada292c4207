//! Runs a plan, and makes one that fails smaller.

use crate::counts::Count;
use crate::env::lock;
use crate::model::Wrong;
use crate::plan::{Class, Plan, Without};
use crate::snap;
use crate::totals::Totals;
use crate::turn::Turns;
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

/// A kind of world.
pub(crate) trait Runs: Turns + Sized {
    /// Builds the world of `plan`.
    fn build(plan: &Plan) -> Result<Self, Wrong>;

    /// Takes all the steps of the plan, and brings it to rest.
    fn run(&mut self) -> Result<(), Wrong>;

    /// Adds to the totals what is not in those of its machine.
    fn count(&self, _: &mut Totals) {}
}

/// Runs `plan`.
///
/// # Errors
/// The failure, with its trace. The world of a failed run is not taken apart, since requests are
/// still in it: its memory stays taken.
pub fn run(plan: &Plan) -> Result<Clean, Box<Failure>> {
    match plan.snapshots {
        false => run_in::<World>(plan),
        true => run_in::<snap::World>(plan),
    }
}

/// Runs `plan` without a cut, and then once for each write and flush that a disk begins or ends in
/// it, with the power cut there and no other.
///
/// # Errors
/// The first failure.
pub fn every_cut(plan: &Plan) -> Result<Clean, Box<Failure>> {
    let plan = Plan { without: plan.without.and(Class::Crash), cut: None, ..plan.clone() };
    let whole = run(&plan)?;
    let mut totals = whole.totals;
    for cut in 1..=whole.totals.changes {
        totals.add(&run(&Plan { cut: Some(cut), ..plan.clone() })?.totals);
    }
    Ok(Clean { totals, ..whole })
}

fn run_in<W: Runs>(plan: &Plan) -> Result<Clean, Box<Failure>> {
    let mut world = None;
    let outcome = guard(|| {
        let world = world.insert(W::build(plan)?);
        world.run()
    });
    let (mut plan, mut trace) = (plan.clone(), Vec::new());
    let Some(mut world) = world else {
        return Err(Box::new(Failure { plan, what: outcome.err().unwrap_or_default(), trace }));
    };
    let Err(what) = outcome else {
        let totals = totals(&mut world);
        return Ok(Clean { totals, hash: lock(&world.machine().env).trace.hash() });
    };
    let machine = world.machine();
    plan.steps = machine.step.min(plan.steps);
    trace.extend(lock(&machine.env).trace.last().map(crate::trace::Event::line));
    Box::leak(Box::new(world));
    Err(Box::new(Failure { plan, what, trace }))
}

fn totals(world: &mut impl Runs) -> Totals {
    let machine = world.machine();
    let env = lock(&machine.env);
    let (faults, seen, sectors, changes) = (env.faults, env.seen, machine.model.compared, env.changes);
    drop(env);
    let mut totals = Totals { sectors, faults, seen, changes, ..machine.totals };
    world.count(&mut totals);
    totals
}

impl Runs for World {
    fn build(plan: &Plan) -> Result<World, Wrong> {
        World::new(plan)
    }

    fn run(&mut self) -> Result<(), Wrong> {
        World::run(self)
    }

    fn count(&self, totals: &mut Totals) {
        totals.logs = self.log.looks;
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
