//! Drives a world: servers are started, serve, and end or are killed.
//!
//! The world stands where verbs that block find it: they take its steps until they can go on.

use super::ask::Verb;
use super::life;
use super::world::{Phase, Turn, World};
use crate::env::lock;
use crate::lines;
use crate::model::Wrong;
use crate::plan::Plan;
use std::cell::RefCell;
use std::task::Poll;
use udm_control::blocked;

/// The most steps until all that must end has ended.
const STEPS_MAX: u64 = 60_000;

thread_local! {
    static WORLD: RefCell<Option<Box<World>>> = const { RefCell::new(None) };
}

/// The world of this thread, which is over.
pub(super) fn take() -> Option<Box<World>> {
    WORLD.take()
}

pub(super) fn with<T>(f: impl FnOnce(&mut World) -> T) -> T {
    WORLD.with_borrow_mut(|world| f(world.as_mut().expect("it was built")))
}

/// Takes all the steps of the plan in lives, and one more with all stores there.
pub(super) fn run(plan: &Plan) -> Result<(), Wrong> {
    let world = World::new(plan)?;
    WORLD.set(Some(Box::new(world)));
    let _lines = lines::listen("udm_control");
    blocked::turn_instead(Some(turn_of_blocked));
    while with(|world| world.machine.step < world.machine.plan.steps) {
        life::live(false)?;
    }
    life::live(true)?;
    blocked::turn_instead(None);
    with(|world| world.outside.files().remove());
    Ok(())
}

/// A verb blocks: the others go on. What is wrong meanwhile ends the run here: who waits below has
/// nobody to tell.
fn turn_of_blocked() {
    with(|world| world.depth += 1);
    let stepped = step();
    with(|world| {
        world.depth -= 1;
        // What the verb sends from here on is in order with what it sent before.
        world.machine.set_turn(None);
        let told = world.outside.files().tell_writes(&lock(&world.machine.env));
        let over = world.machine.step > world.machine.plan.steps + 20 * STEPS_MAX;
        let stuck = || format!("a verb does not come to its end: {}", world.waits());
        let wrong = stepped.err().or(told.err().map(|e| e.to_string())).or_else(|| over.then(stuck));
        world.wrong = world.wrong.take().or(wrong);
    });
    if with(|world| world.wrong.is_some()) {
        panic!("the world is wrong");
    }
}

pub(super) fn step() -> Result<(), Wrong> {
    match with(World::step)? {
        None => Ok(()),
        Some(Turn::Work(work)) => {
            work();
            Ok(())
        }
        Some(Turn::Job(mut job)) => {
            let polled = job.waiting.poll();
            with(|world| {
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
pub(super) fn go_on_until(what: &str, done: impl Fn(&World) -> bool) -> Result<(), Wrong> {
    let (from, phase) = with(|world| (world.machine.step, world.phase));
    while !with(|world| done(world) || world.phase != phase) {
        if with(|world| world.machine.step) - from > STEPS_MAX {
            return Err(format!("{what} do not come to an end: {}", with(|world| world.waits())));
        }
        step()?;
    }
    Ok(())
}

/// Asks for `verb`, and goes on until all verbs are done.
pub(super) fn ask(verb: Verb) -> Result<(), Wrong> {
    with(|world| world.begin(verb));
    go_on_until("verbs", World::is_over)
}

/// Is the server still what it was?
pub(super) fn is(phase: Phase) -> bool {
    with(|world| world.phase == phase)
}
