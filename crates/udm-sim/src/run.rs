//! Runs a plan, and makes one that fails smaller.

use crate::counts::Accumulate;
use crate::environment::lock;
use crate::model::Violation;
use crate::plan::{Disturbance, ExcludedDisturbances, RunPlan};
use crate::snapshots;
use crate::totals::RunTotals;
use crate::turn::MachineWorld;
use crate::world::TargetWorld;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

/// A run that went wrong.
#[derive(Clone, Debug)]
pub struct RunFailure {
    /// What was run, up to the step that showed it.
    pub plan: RunPlan,
    /// What is wrong.
    pub what: String,
    /// The last events, oldest first.
    pub trace: Vec<String>,
}

/// A run that went well.
#[derive(Clone, Copy, Debug)]
pub struct CleanRun {
    /// What was done.
    pub totals: RunTotals,
    /// The hash of all events.
    pub hash: u64,
}

thread_local! {
    /// The text of the last panic, while a run is under way on this thread.
    static PANIC: RefCell<Option<Option<String>>> = const { RefCell::new(None) };
}

/// Keeps the text of panics inside runs, and prints no others' less.
fn capture_panic_messages() {
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
pub(crate) fn catch_panic(f: impl FnOnce() -> Result<(), Violation>) -> Result<(), Violation> {
    capture_panic_messages();
    PANIC.set(Some(None));
    let outcome = catch_unwind(AssertUnwindSafe(f));
    let text = PANIC.take().flatten();
    outcome.unwrap_or_else(|_| Err(text.unwrap_or_else(|| "a panic without a text".into())))
}

/// A kind of world.
pub(crate) trait RunnableWorld: MachineWorld + Sized {
    /// Builds the world of `plan`.
    fn build(plan: &RunPlan) -> Result<Self, Violation>;

    /// Takes all the steps of the plan, and brings it to rest.
    fn run(&mut self) -> Result<(), Violation>;

    /// Adds to the totals what is not in those of its machine.
    fn count(&self, _: &mut RunTotals) {}
}

/// Runs `plan`.
///
/// # Errors
/// The failure, with its trace. The world of a failed run is not taken apart, since requests are
/// still in it: its memory stays taken.
pub fn run(plan: &RunPlan) -> Result<CleanRun, Box<RunFailure>> {
    match plan.snapshots {
        false => run_world::<TargetWorld>(plan),
        true => run_world::<snapshots::SnapshotWorld>(plan),
    }
}

/// Runs `plan` without a cut, and then once for each write and flush that a disk begins or ends in
/// it, with the power cut there and no other.
///
/// # Errors
/// The first failure.
pub fn run_every_power_cut(plan: &RunPlan) -> Result<CleanRun, Box<RunFailure>> {
    let plan = RunPlan { without: plan.without.and(Disturbance::Crash), cut: None, ..plan.clone() };
    let whole = run(&plan)?;
    let mut totals = whole.totals;
    for cut in 1..=whole.totals.changes {
        totals.add(&run(&RunPlan { cut: Some(cut), ..plan.clone() })?.totals);
    }
    Ok(CleanRun { totals, ..whole })
}

fn run_world<W: RunnableWorld>(plan: &RunPlan) -> Result<CleanRun, Box<RunFailure>> {
    let mut world = None;
    let outcome = catch_panic(|| {
        let world = world.insert(W::build(plan)?);
        world.run()
    });
    let (mut plan, mut trace) = (plan.clone(), Vec::new());
    let Some(mut world) = world else {
        return Err(Box::new(RunFailure { plan, what: outcome.err().unwrap_or_default(), trace }));
    };
    let Err(what) = outcome else {
        let totals = totals(&mut world);
        return Ok(CleanRun { totals, hash: lock(&world.machine().env).trace.hash() });
    };
    let machine = world.machine();
    plan.steps = machine.step.min(plan.steps);
    trace.extend(lock(&machine.env).trace.last().map(crate::trace::TraceEvent::line));
    Box::leak(Box::new(world));
    Err(Box::new(RunFailure { plan, what, trace }))
}

fn totals(world: &mut impl RunnableWorld) -> RunTotals {
    let machine = world.machine();
    let env = lock(&machine.env);
    let (faults, seen, sectors, changes) = (env.faults, env.seen, machine.model.compared, env.changes);
    drop(env);
    let mut totals = RunTotals { sectors, faults, seen, changes, ..machine.totals };
    world.count(&mut totals);
    totals
}

impl RunnableWorld for TargetWorld {
    fn build(plan: &RunPlan) -> Result<TargetWorld, Violation> {
        TargetWorld::new(plan)
    }

    fn run(&mut self) -> Result<(), Violation> {
        TargetWorld::run(self)
    }

    fn count(&self, totals: &mut RunTotals) {
        totals.logs = self.log.looks;
    }
}

/// How many runs making a failure smaller may take.
const TRIES_MAX: usize = 64;

/// Looks for a smaller run that fails too: classes of disturbance left out, fewer cores, fewer
/// requests in flight, fewer steps. Returns the smallest, which may be the one given.
#[must_use]
pub fn shrink(failure: RunFailure) -> RunFailure {
    shrink_by(failure, &|plan| run(plan).map(drop))
}

/// The same for worlds that `run` runs.
#[must_use]
pub fn shrink_by(failure: RunFailure, run: &dyn Fn(&RunPlan) -> Result<(), Box<RunFailure>>) -> RunFailure {
    let mut best = failure;
    let mut tries = 0;
    let mut try_one = |best: &mut RunFailure, change: &dyn Fn(&mut RunPlan)| -> bool {
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
    if !try_one(&mut best, &|p| p.without = ExcludedDisturbances::all()) {
        for class in Disturbance::ALL {
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
