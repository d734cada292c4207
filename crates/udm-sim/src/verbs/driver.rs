//! Drives a world: takes its steps, brings it to rest, and removes everything at the end.
//!
//! The world stands where the outside finds it: a load that asks what a name leads to has the
//! others go on meanwhile, from within.

use super::ask::{ControlVerb, ControlVerbJob, VerbOutcome, WakeableFuture};
use super::look::number;
use super::model::Actor;
use super::world::RegistryWorld;
use crate::environment::lock;
use crate::model::Violation;
use crate::plan::{Disturbance, RunPlan};
use std::cell::RefCell;
use std::convert::Infallible;
use std::task::Poll;
use udm_control::config::DesiredState;
use udm_control::verbs::RemoveOptions;

/// How often devices are resumed until none is suspended any more.
const RESUMES_MAX: usize = 20;

/// The most steps until all that must end has ended.
const STEPS_MAX: u64 = 50_000;

thread_local! {
    static WORLD: RefCell<Option<Box<RegistryWorld>>> = const { RefCell::new(None) };
}

/// The world of this thread, which is over.
pub(super) fn take() -> Option<Box<RegistryWorld>> {
    WORLD.take()
}

fn with_world<T>(f: impl FnOnce(&mut RegistryWorld) -> T) -> T {
    WORLD.with_borrow_mut(|world| f(world.as_mut().expect("it was built")))
}

/// The file is read by the reconfigure that goes on.
pub(super) fn read_file() -> Result<DesiredState, String> {
    with_world(RegistryWorld::read_file)
}

/// Takes all the steps of the plan, comes to rest now and then, and removes everything.
pub(super) fn run(plan: &RunPlan) -> Result<(), Violation> {
    let world = RegistryWorld::new(plan);
    WORLD.set(Some(Box::new(world)));
    while with_world(|world| world.machine.step < world.machine.plan.steps) {
        step()?;
        if with_world(|world| world.machine.step >= world.rest_at) {
            rest()?;
            with_world(|world| world.rest_at = world.machine.step + 200 + world.work.span(800));
        }
    }
    rest()?;
    remove_all()
}

/// While a load asks the file system the others go on.
pub(super) fn run_others_during_lookup() {
    with_world(RegistryWorld::look_at_file);
    let steps = with_world(|world| match &world.loading {
        Some(_) if !world.beside && !world.resting => {
            world.beside = true;
            world.work.below(40)
        }
        _ => 0,
    });
    run_others(steps);
    with_world(|world| world.outside.world().actor = world.loading.as_ref().map_or(0, |(id, ..)| *id));
}

/// The others go on between the look of who waits for an event and his wait.
#[cfg(feature = "interleave")]
fn run_others_before_wait() {
    let steps = with_world(|world| match world.beside || world.resting || !world.work.one_in(4) {
        true => 0,
        false => {
            world.beside = true;
            world.work.below(20)
        }
    });
    run_others(steps);
}

/// Lets a verb go on.
fn poll(job: &mut ControlVerbJob) -> Poll<VerbOutcome> {
    #[cfg(feature = "interleave")]
    udm_core::interleave::set(
        matches!(job.verb, ControlVerb::Wait { .. }).then_some(run_others_before_wait as fn()),
    );
    let polled = job.waiting.poll();
    #[cfg(feature = "interleave")]
    udm_core::interleave::set(None);
    polled
}

/// The others take so many steps beside a verb that goes on.
fn run_others(steps: u64) {
    for _ in 0..steps {
        let stepped = step();
        let wrong = stepped.is_err();
        with_world(|world| world.wrong = world.wrong.take().or(stepped.err()));
        if wrong {
            break;
        }
    }
    if steps > 0 {
        with_world(|world| {
            world.beside = false;
            // What the verb sends from here on is in order with what it sent before.
            world.machine.set_turn(None);
        });
    }
}

/// Who goes on outside of the world: what it does calls back into it.
pub(super) enum ReentrantStep {
    ControlVerbJob(Box<ControlVerbJob>),
    Deferred(WakeableFuture<Infallible>),
}

fn step() -> Result<(), Violation> {
    match with_world(RegistryWorld::step)? {
        None => Ok(()),
        Some(ReentrantStep::ControlVerbJob(mut job)) => {
            let polled = poll(&mut job);
            with_world(|world| world.after_poll(*job, polled))
        }
        Some(ReentrantStep::Deferred(mut waiting)) => {
            let Poll::Pending = waiting.poll();
            with_world(|world| {
                world.deferred = Some(waiting);
                world.look(Actor::Deferred)
            })
        }
    }
}

fn step_until(what: &str, done: impl Fn(&RegistryWorld) -> bool) -> Result<(), Violation> {
    let from = with_world(|world| world.machine.step);
    while !with_world(|world| done(world)) {
        if with_world(|world| world.machine.step) - from > STEPS_MAX {
            return Err(format!("{what} do not come to an end: {}", with_world(|world| world.waits())));
        }
        step()?;
    }
    Ok(())
}

fn rest() -> Result<(), Violation> {
    let fails = with_world(|world| {
        world.counts.rests += 1;
        world.resting = true;
        world.machine.resting = true;
        world.machine.say("no more is asked for");
        lock(&world.machine.env).open_fails = None;
        std::mem::take(&mut world.outside.world().fails)
    });
    // Whoever is called off does not wait for storage.
    if with_world(|world| world.on(Disturbance::Cancel) && world.work.one_in(2)) {
        with_world(|world| (0..world.jobs.len()).for_each(|at| world.hang_up(at)));
        step_until("verbs that were called off", |world| world.jobs.is_empty())?;
    }
    with_world(|world| (0..world.machine.paths.len()).for_each(|path| world.release_path(path)));
    // A suspend may wait for what a device holds that is suspended, and so on up the stack.
    for _ in 0..RESUMES_MAX {
        step_until("verbs", |world| world.is_over() || world.is_stuck())?;
        let suspended = with_world(|world| world.suspended());
        if suspended.is_empty() {
            break;
        }
        with_world(|world| {
            suspended.into_iter().for_each(|word| world.begin(ControlVerb::Resume { words: vec![word] }))
        });
    }
    step_until("verbs", RegistryWorld::is_over)?;
    let quiet = |world: &RegistryWorld| {
        let lanes = world.machine.cores.iter().flat_map(|core| &core.open);
        world.model.view.0.iter().any(|seen| seen.suspended)
            || lanes.map(|open| open.in_flight).sum::<usize>() == 0
    };
    step_until("requests", quiet)?;
    step_until("removals that were deferred", RegistryWorld::is_quiet)?;
    with_world(|world| {
        world.look(Actor::Other)?;
        world.check_rest()?;
        world.resting = false;
        world.machine.resting = false;
        world.outside.world().fails = fails;
        Ok(())
    })
}

/// Removes all devices; nothing is left of them.
fn remove_all() -> Result<(), Violation> {
    with_world(|world| {
        world.resting = true;
        world.machine.resting = true;
        (0..world.clients.len()).rev().try_for_each(|at| world.go(at))
    })?;
    let unused = |world: &RegistryWorld| {
        let seen = world.model.view.0.iter().find(|seen| seen.open == 0);
        seen.map(|seen| number(seen.minor))
    };
    while let Some(word) = with_world(|world| unused(world)) {
        with_world(|world| world.begin(ControlVerb::Remove { word, how: RemoveOptions::default() }));
        step_until("removals", RegistryWorld::is_quiet)?;
    }
    // Whoever waited for an event has had one.
    step_until("waits", |world| world.jobs.is_empty())?;
    with_world(|world| {
        if let Some(left) = world.model.view.0.first() {
            return Err(format!("all devices were removed, and {left:?} is left"));
        }
        world.check_rest()?;
        world.machine.paths_are_closed()
    })
}
