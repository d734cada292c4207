//! Runs a plan, and shrinks a failing one.

use crate::counts::AccumulateRuns;
use crate::environment::lock_environment;
use crate::model::Violation;
use crate::plan::{DisturbanceClass, ExcludedDisturbances, RunPlan};
use crate::snapshots;
use crate::totals::RunTotals;
use crate::turn::MachineWorld;
use crate::world::MappedDeviceStackWorld;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

/// A failed run.
#[derive(Clone, Debug)]
pub struct RunFailure {
    /// The plan, up to the step that showed the failure.
    pub plan: RunPlan,
    /// The violation.
    pub what: String,
    /// The last events, oldest first.
    pub trace: Vec<String>,
}

/// A run without a failure.
#[derive(Clone, Copy, Debug, Default)]
pub struct CleanRun {
    /// Counters of the run.
    pub totals: RunTotals,
    /// Hash of all events.
    pub hash: u64,
}

thread_local! {
    /// Text of the last panic, while this thread executes a run.
    static PANIC: RefCell<Option<Option<String>>> = const { RefCell::new(None) };
}

/// Installs a panic hook that stores the text of panics inside runs. Other panics are printed as
/// before.
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

/// Calls `f`, and turns a panic into a violation.
pub(crate) fn catch_panic(f: impl FnOnce() -> Result<(), Violation>) -> Result<(), Violation> {
    capture_panic_messages();
    PANIC.set(Some(None));
    let outcome = catch_unwind(AssertUnwindSafe(f));
    let text = PANIC.take().flatten();
    outcome.unwrap_or_else(|_| Err(text.unwrap_or_else(|| "a panic without a text".into())))
}

/// A kind of world that a plan can run.
pub(crate) trait RunnableWorld: MachineWorld + Sized {
    /// Builds the world of `plan`.
    fn build(plan: &RunPlan) -> Result<Self, Violation>;

    /// Runs all steps of the plan, and quiesces the world.
    fn run(&mut self) -> Result<(), Violation>;

    /// Adds counters that the machine does not have.
    fn count(&self, _: &mut RunTotals) {}
}

/// Runs `plan`.
///
/// # Errors
/// The failure, with its trace. The world of a failed run is leaked, because requests are still in
/// flight in it.
pub fn run(plan: &RunPlan) -> Result<CleanRun, Box<RunFailure>> {
    match plan.snapshots {
        false => run_world::<MappedDeviceStackWorld>(plan),
        true => run_world::<snapshots::SnapshotWorld>(plan),
    }
}

/// Runs `plan` without a power cut. Then repeats it once per start and completion of a write or
/// flush, with one power cut there.
///
/// # Errors
/// The first failure.
pub fn run_every_power_cut(plan: &RunPlan) -> Result<CleanRun, Box<RunFailure>> {
    let plan = RunPlan { without: plan.without.and(DisturbanceClass::Crash), cut: None, ..plan.clone() };
    let whole = run(&plan)?;
    let mut totals = whole.totals;
    for cut in 1..=whole.totals.changes {
        totals.add(&run(&RunPlan { cut: Some(cut), ..plan.clone() })?.totals);
    }
    Ok(CleanRun { totals, ..whole })
}

fn run_world<W: RunnableWorld>(plan: &RunPlan) -> Result<CleanRun, Box<RunFailure>> {
    let mut world = None;
    let outcome = catch_panic(|| world.insert(W::build(plan)?).run());
    let clean = |world: &mut W| {
        let totals = collect_run_totals(world);
        CleanRun { totals, hash: lock_environment(&world.machine().env).trace.hash() }
    };
    finish_run(plan, outcome, world, clean, |world| world.machine().last_events())
}

/// Returns the result of a run: the counters of its world, or the failure with the step and the
/// last events of its world. The world of a failed run is leaked, because requests are still in
/// flight in it.
pub(crate) fn finish_run<W, C: Default>(
    plan: &RunPlan,
    outcome: Result<(), Violation>,
    world: Option<W>,
    counts: impl FnOnce(&mut W) -> C,
    last_events: impl FnOnce(&mut W) -> (u64, Vec<String>),
) -> Result<C, Box<RunFailure>> {
    let Err(what) = outcome else {
        return Ok(world.map(|mut world| counts(&mut world)).unwrap_or_default());
    };
    let mut failure = Box::new(RunFailure { plan: plan.clone(), what, trace: Vec::new() });
    if let Some(mut world) = world {
        let (step, trace) = last_events(&mut world);
        failure.plan.steps = step.min(plan.steps);
        failure.trace = trace;
        Box::leak(Box::new(world));
    }
    Err(failure)
}

fn collect_run_totals(world: &mut impl RunnableWorld) -> RunTotals {
    let machine = world.machine();
    let env = lock_environment(&machine.env);
    let (faults, seen, sectors, changes) = (env.faults, env.seen, machine.model.compared, env.changes);
    drop(env);
    let mut totals =
        RunTotals { snapshots: machine.plan.snapshots, sectors, faults, seen, changes, ..machine.totals };
    world.count(&mut totals);
    totals
}

impl RunnableWorld for MappedDeviceStackWorld {
    fn build(plan: &RunPlan) -> Result<MappedDeviceStackWorld, Violation> {
        MappedDeviceStackWorld::new(plan)
    }

    fn run(&mut self) -> Result<(), Violation> {
        MappedDeviceStackWorld::run(self)
    }

    fn count(&self, totals: &mut RunTotals) {
        totals.logs = self.log.looks;
    }
}

/// Maximum number of runs for shrinking a failure.
const TRIES_MAX: usize = 64;

/// Searches for a smaller run that fails too: with fewer classes of disturbance, cores, requests in
/// flight, and steps. `run` executes a plan. Returns the smallest failure, which may be `failure`
/// itself.
#[must_use]
pub fn shrink_failure_with_runner(
    failure: RunFailure,
    run: &dyn Fn(&RunPlan) -> Result<(), Box<RunFailure>>,
) -> RunFailure {
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
    // Excludes all classes first, then one after another.
    if !try_one(&mut best, &|p| p.without = ExcludedDisturbances::all()) {
        for class in DisturbanceClass::ALL {
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
    // A failure found at quiescence may exist earlier, so try fewer steps.
    for part in [8, 4, 2] {
        if try_one(&mut best, &|p| p.steps -= p.steps / part) {
            try_one(&mut best, &|p| p.steps -= p.steps / part);
        }
    }
    best
}
