//! Runs a world: servers start, serve, and end or are killed.
//!
//! The world is in a thread-local variable, because a verb that blocks runs steps of the world
//! until it can continue.

use super::server_life;
use super::verb_jobs::ServerVerb;
use super::world::{LifecycleStepOutsideBorrow, ServerLifecycleWorld, ServerPhase};
use crate::environment::lock_environment;
use crate::log_capture;
use crate::model::Violation;
use crate::plan::RunPlan;
use std::cell::RefCell;
use std::task::Poll;
use udm_control::wait_hook;

/// Maximum number of steps until all work completes.
const STEPS_MAX: u64 = 60_000;

thread_local! {
    static WORLD: RefCell<Option<Box<ServerLifecycleWorld>>> = const { RefCell::new(None) };
}

/// Removes and returns the world of this thread.
pub(super) fn take_world() -> Option<Box<ServerLifecycleWorld>> {
    WORLD.take()
}

pub(super) fn with_world<T>(f: impl FnOnce(&mut ServerLifecycleWorld) -> T) -> T {
    WORLD.with_borrow_mut(|world| f(world.as_mut().expect("it was built")))
}

/// Runs servers until the steps of the plan are used up, and then one more with all stores present.
pub(super) fn run_servers_in_sequence(plan: &RunPlan) -> Result<(), Violation> {
    let world = ServerLifecycleWorld::new(plan)?;
    WORLD.set(Some(Box::new(world)));
    let _lines = log_capture::capture_log("udm_control");
    wait_hook::set_wait_hook(Some(run_world_while_verb_blocks));
    while with_world(|world| world.machine.step < world.machine.plan.steps) {
        server_life::run_server(false)?;
    }
    server_life::run_server(true)?;
    wait_hook::set_wait_hook(None);
    with_world(|world| world.outside.files().remove());
    Ok(())
}

/// Runs a step of the world while a verb blocks. A violation panics here, because the blocked verb
/// cannot return it.
fn run_world_while_verb_blocks() {
    with_world(|world| world.depth += 1);
    let stepped = step_world();
    with_world(|world| {
        world.depth -= 1;
        // Messages that the verb sends next must follow those that it sent before.
        world.machine.set_turn(None);
        let written = world.outside.files().tell_writes(&lock_environment(&world.machine.env));
        let over = world.machine.step > world.machine.plan.steps + 20 * STEPS_MAX;
        let stuck = || format!("a verb does not come to its end: {}", world.waits());
        let wrong = stepped.err().or(written.err().map(|e| e.to_string())).or_else(|| over.then(stuck));
        world.wrong = world.wrong.take().or(wrong);
    });
    if with_world(|world| world.wrong.is_some()) {
        panic!("the world is wrong");
    }
}

pub(super) fn step_world() -> Result<(), Violation> {
    match with_world(ServerLifecycleWorld::step)? {
        None => Ok(()),
        Some(LifecycleStepOutsideBorrow::Work(work)) => {
            work();
            Ok(())
        }
        Some(LifecycleStepOutsideBorrow::ServerVerbJob(mut job)) => {
            let polled = job.waiting.poll();
            with_world(|world| {
                world.below.pop();
                match polled {
                    Poll::Pending => world.jobs.push(*job),
                    Poll::Ready(outcome) => return world.ended(&job, outcome),
                }
                Ok(())
            })
        }
    }
}

/// Runs steps until `done`, or until the phase of the server changes.
pub(super) fn step_until(what: &str, done: impl Fn(&ServerLifecycleWorld) -> bool) -> Result<(), Violation> {
    let (from, phase) = with_world(|world| (world.machine.step, world.phase));
    while !with_world(|world| done(world) || world.phase != phase) {
        if with_world(|world| world.machine.step) - from > STEPS_MAX {
            return Err(format!("{what} do not come to an end: {}", with_world(|world| world.waits())));
        }
        step_world()?;
    }
    Ok(())
}

/// Starts `verb`, and runs steps until all verbs are done.
pub(super) fn run_verb(verb: ServerVerb) -> Result<(), Violation> {
    with_world(|world| world.begin(verb));
    step_until("verbs", ServerLifecycleWorld::is_over)
}

/// True if the server is in `phase`.
pub(super) fn is_server_in_phase(phase: ServerPhase) -> bool {
    with_world(|world| world.phase == phase)
}
