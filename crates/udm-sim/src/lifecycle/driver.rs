//! Drives a world: servers are started, serve, and end or are killed.
//!
//! The world stands where verbs that block find it: they take its steps until they can go on.

use super::ask::ServerVerb;
use super::server_life;
use super::world::{LifecycleWorld, ReentrantStep, ServerPhase};
use crate::environment::lock;
use crate::log_capture;
use crate::model::Violation;
use crate::plan::RunPlan;
use std::cell::RefCell;
use std::task::Poll;
use udm_control::wait_hook;

/// The most steps until all that must end has ended.
const STEPS_MAX: u64 = 60_000;

thread_local! {
    static WORLD: RefCell<Option<Box<LifecycleWorld>>> = const { RefCell::new(None) };
}

/// The world of this thread, which is over.
pub(super) fn take() -> Option<Box<LifecycleWorld>> {
    WORLD.take()
}

pub(super) fn with_world<T>(f: impl FnOnce(&mut LifecycleWorld) -> T) -> T {
    WORLD.with_borrow_mut(|world| f(world.as_mut().expect("it was built")))
}

/// Takes all the steps of the plan in lives, and one more with all stores there.
pub(super) fn run(plan: &RunPlan) -> Result<(), Violation> {
    let world = LifecycleWorld::new(plan)?;
    WORLD.set(Some(Box::new(world)));
    let _lines = log_capture::capture_log("udm_control");
    wait_hook::set_wait_hook(Some(run_others_while_blocked));
    while with_world(|world| world.machine.step < world.machine.plan.steps) {
        server_life::run_server(false)?;
    }
    server_life::run_server(true)?;
    wait_hook::set_wait_hook(None);
    with_world(|world| world.outside.files().remove());
    Ok(())
}

/// A verb blocks: the others go on. What is wrong meanwhile ends the run here: who waits below has
/// nobody to tell.
fn run_others_while_blocked() {
    with_world(|world| world.depth += 1);
    let stepped = step();
    with_world(|world| {
        world.depth -= 1;
        // What the verb sends from here on is in order with what it sent before.
        world.machine.set_turn(None);
        let told = world.outside.files().tell_writes(&lock(&world.machine.env));
        let over = world.machine.step > world.machine.plan.steps + 20 * STEPS_MAX;
        let stuck = || format!("a verb does not come to its end: {}", world.waits());
        let wrong = stepped.err().or(told.err().map(|e| e.to_string())).or_else(|| over.then(stuck));
        world.wrong = world.wrong.take().or(wrong);
    });
    if with_world(|world| world.wrong.is_some()) {
        panic!("the world is wrong");
    }
}

pub(super) fn step() -> Result<(), Violation> {
    match with_world(LifecycleWorld::step)? {
        None => Ok(()),
        Some(ReentrantStep::Work(work)) => {
            work();
            Ok(())
        }
        Some(ReentrantStep::ServerVerbJob(mut job)) => {
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

/// Goes on until `done`, or until the server is killed where that ends it.
pub(super) fn step_until(what: &str, done: impl Fn(&LifecycleWorld) -> bool) -> Result<(), Violation> {
    let (from, phase) = with_world(|world| (world.machine.step, world.phase));
    while !with_world(|world| done(world) || world.phase != phase) {
        if with_world(|world| world.machine.step) - from > STEPS_MAX {
            return Err(format!("{what} do not come to an end: {}", with_world(|world| world.waits())));
        }
        step()?;
    }
    Ok(())
}

/// Asks for `verb`, and goes on until all verbs are done.
pub(super) fn ask(verb: ServerVerb) -> Result<(), Violation> {
    with_world(|world| world.begin(verb));
    step_until("verbs", LifecycleWorld::is_over)
}

/// Is the server still what it was?
pub(super) fn is(phase: ServerPhase) -> bool {
    with_world(|world| world.phase == phase)
}
