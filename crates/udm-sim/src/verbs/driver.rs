//! Runs a world: executes its steps, quiesces it, and removes everything at the end.
//!
//! The world is in a thread-local variable. When a load resolves a name, the lookup runs steps of
//! the others from within.

use super::model::LastRegistryActor;
use super::observation::format_device_number;
use super::verb_jobs::{ControlVerb, ControlVerbJob, VerbOutcome, WakeableFuture};
use super::world::RegistryWorld;
use crate::environment::lock_environment;
use crate::model::Violation;
use crate::plan::{DisturbanceClass, RunPlan};
use std::cell::RefCell;
use std::convert::Infallible;
use std::task::Poll;
use udm_control::config::DesiredState;
use udm_control::verbs::RemoveOptions;

/// Maximum number of rounds in which suspended devices are resumed.
const RESUMES_MAX: usize = 20;

/// Maximum number of steps until all work completes.
const STEPS_MAX: u64 = 50_000;

thread_local! {
    static WORLD: RefCell<Option<Box<RegistryWorld>>> = const { RefCell::new(None) };
}

/// Removes and returns the world of this thread.
pub(super) fn take_world() -> Option<Box<RegistryWorld>> {
    WORLD.take()
}

fn with_world<T>(f: impl FnOnce(&mut RegistryWorld) -> T) -> T {
    WORLD.with_borrow_mut(|world| f(world.as_mut().expect("it was built")))
}

/// Reads the configuration file for the running reconfigure.
pub(super) fn read_simulated_config_file() -> Result<DesiredState, String> {
    with_world(RegistryWorld::read_file)
}

/// Runs all steps of the plan with quiescence in between, and removes everything.
pub(super) fn run_registry_steps(plan: &RunPlan) -> Result<(), Violation> {
    let world = RegistryWorld::new(plan);
    WORLD.set(Some(Box::new(world)));
    while with_world(|world| world.machine.step < world.machine.plan.steps) {
        step_world()?;
        if with_world(|world| world.machine.step >= world.rest_at) {
            run_to_rest()?;
            with_world(|world| world.rest_at = world.machine.step + 200 + world.work.span(800));
        }
    }
    run_to_rest()?;
    remove_all_devices()
}

/// Runs others while a load accesses the file system.
pub(super) fn run_world_during_table_load() {
    with_world(RegistryWorld::look_at_file);
    let steps = with_world(|world| match &world.loading {
        Some(_) if !world.beside && !world.resting => {
            world.beside = true;
            world.work.below(40)
        }
        _ => 0,
    });
    run_world_during_verb(steps);
    with_world(|world| world.outside.world().actor = world.loading.as_ref().map_or(0, |(id, ..)| *id));
}

/// Runs others between the check and the wait of a client that waits for an event.
#[cfg(feature = "interleave")]
fn run_others_before_event_wait() {
    let steps = with_world(|world| match world.beside || world.resting || !world.work.one_in(4) {
        true => 0,
        false => {
            world.beside = true;
            world.work.below(20)
        }
    });
    run_world_during_verb(steps);
}

/// Polls a verb.
fn poll_verb_job(job: &mut ControlVerbJob) -> Poll<VerbOutcome> {
    #[cfg(feature = "interleave")]
    udm_core::interleave::set_interleave_hook(
        matches!(job.verb, ControlVerb::Wait { .. }).then_some(run_others_before_event_wait as fn()),
    );
    let polled = job.waiting.poll();
    #[cfg(feature = "interleave")]
    udm_core::interleave::set_interleave_hook(None);
    polled
}

/// Runs `steps` steps of others while a verb runs.
fn run_world_during_verb(steps: u64) {
    for _ in 0..steps {
        let stepped = step_world();
        let wrong = stepped.is_err();
        with_world(|world| world.wrong = world.wrong.take().or(stepped.err()));
        if wrong {
            break;
        }
    }
    if steps > 0 {
        with_world(|world| {
            world.beside = false;
            // Messages that the verb sends next must follow those that it sent before.
            world.machine.set_turn(None);
        });
    }
}

/// A step that runs outside of the borrowed world, because it calls back into the world.
pub(super) enum RegistryStepOutsideBorrow {
    ControlVerbJob(Box<ControlVerbJob>),
    Deferred(WakeableFuture<Infallible>),
}

fn step_world() -> Result<(), Violation> {
    match with_world(RegistryWorld::step)? {
        None => Ok(()),
        Some(RegistryStepOutsideBorrow::ControlVerbJob(mut job)) => {
            let polled = poll_verb_job(&mut job);
            with_world(|world| world.after_poll(*job, polled))
        }
        Some(RegistryStepOutsideBorrow::Deferred(mut waiting)) => {
            let Poll::Pending = waiting.poll();
            with_world(|world| {
                world.deferred = Some(waiting);
                world.look(LastRegistryActor::Deferred)
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
        step_world()?;
    }
    Ok(())
}

fn run_to_rest() -> Result<(), Violation> {
    let fails = with_world(|world| {
        world.counts.rests += 1;
        world.resting = true;
        world.machine.resting = true;
        world.machine.say("no more is asked for");
        lock_environment(&world.machine.env).open_fails = None;
        std::mem::take(&mut world.outside.world().fails)
    });
    // A cancelled verb must not wait for storage.
    if with_world(|world| world.on(DisturbanceClass::Cancel) && world.work.one_in(2)) {
        with_world(|world| (0..world.jobs.len()).for_each(|at| world.hang_up(at)));
        step_until("cancelled verbs", |world| world.jobs.is_empty())?;
    }
    with_world(|world| (0..world.machine.paths.len()).for_each(|path| world.machine.restore_path(path)));
    // A suspend may wait for requests that a suspended lower device holds, so several rounds are
    // needed.
    for _ in 0..RESUMES_MAX {
        step_until("verbs", |world| world.is_over() || world.is_stuck())?;
        let suspended = with_world(|world| world.suspended());
        if suspended.is_empty() {
            break;
        }
        with_world(|world| {
            suspended.into_iter().for_each(|word| world.begin(ControlVerb::Resume { words: vec![word] }));
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
        world.look(LastRegistryActor::Other)?;
        world.check_rest()?;
        world.resting = false;
        world.machine.resting = false;
        world.outside.world().fails = fails;
        Ok(())
    })
}

/// Removes all devices, and checks that nothing of them is left.
fn remove_all_devices() -> Result<(), Violation> {
    with_world(|world| {
        world.resting = true;
        world.machine.resting = true;
        (0..world.clients.len()).rev().try_for_each(|at| world.go(at))
    })?;
    let unused = |world: &RegistryWorld| {
        let seen = world.model.view.0.iter().find(|seen| seen.open == 0);
        seen.map(|seen| format_device_number(seen.minor))
    };
    while let Some(word) = with_world(|world| unused(world)) {
        with_world(|world| world.begin(ControlVerb::Remove { word, how: RemoveOptions::default() }));
        step_until("removals", RegistryWorld::is_quiet)?;
    }
    // The removal of a device ends the waits for its events.
    step_until("waits", |world| world.jobs.is_empty())?;
    with_world(|world| {
        if let Some(left) = world.model.view.0.first() {
            return Err(format!("all devices were removed, and {left:?} is left"));
        }
        world.check_rest()?;
        world.machine.paths_are_closed()
    })
}
