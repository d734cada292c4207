//! Drives a world: takes its steps, brings it to rest, and removes everything at the end.
//!
//! The world stands where the outside finds it: a load that asks what a name leads to has the
//! others go on meanwhile, from within.

use super::ask::{Job, Outcome, Verb, Waiting};
use super::look::number;
use super::model::Actor;
use super::world::World;
use crate::env::lock;
use crate::model::Wrong;
use crate::plan::{Class, Plan};
use std::cell::RefCell;
use std::convert::Infallible;
use std::task::Poll;
use udm_control::config::Wish;
use udm_control::verbs::Removal;

/// How often devices are resumed until none is suspended any more.
const RESUMES_MAX: usize = 20;

/// The most steps until all that must end has ended.
const STEPS_MAX: u64 = 50_000;

thread_local! {
    static WORLD: RefCell<Option<Box<World>>> = const { RefCell::new(None) };
}

/// The world of this thread, which is over.
pub(super) fn take() -> Option<Box<World>> {
    WORLD.take()
}

fn with<T>(f: impl FnOnce(&mut World) -> T) -> T {
    WORLD.with_borrow_mut(|world| f(world.as_mut().expect("it was built")))
}

/// The file is read by the reconfigure that goes on.
pub(super) fn read_file() -> Result<Wish, String> {
    with(World::read_file)
}

/// Takes all the steps of the plan, comes to rest now and then, and removes everything.
pub(super) fn run(plan: &Plan) -> Result<(), Wrong> {
    let world = World::new(plan);
    WORLD.set(Some(Box::new(world)));
    while with(|world| world.machine.step < world.machine.plan.steps) {
        step()?;
        if with(|world| world.machine.step >= world.rest_at) {
            rest()?;
            with(|world| world.rest_at = world.machine.step + 200 + world.work.span(800));
        }
    }
    rest()?;
    remove_all()
}

/// While a load asks the file system the others go on.
pub(super) fn go_on_meanwhile() {
    with(World::look_at_file);
    let steps = with(|world| match &world.loading {
        Some(_) if !world.beside && !world.resting => {
            world.beside = true;
            world.work.below(40)
        }
        _ => 0,
    });
    others_go_on(steps);
    with(|world| world.outside.world().actor = world.loading.as_ref().map_or(0, |(id, ..)| *id));
}

/// The others go on between the look of who waits for an event and his wait.
#[cfg(feature = "interleave")]
fn meet() {
    let steps = with(|world| match world.beside || world.resting || !world.work.one_in(4) {
        true => 0,
        false => {
            world.beside = true;
            world.work.below(20)
        }
    });
    others_go_on(steps);
}

/// Lets a verb go on.
fn poll(job: &mut Job) -> Poll<Outcome> {
    #[cfg(feature = "interleave")]
    udm_core::interleave::set(matches!(job.verb, Verb::Wait { .. }).then_some(meet as fn()));
    let polled = job.waiting.poll();
    #[cfg(feature = "interleave")]
    udm_core::interleave::set(None);
    polled
}

/// The others take so many steps beside a verb that goes on.
fn others_go_on(steps: u64) {
    for _ in 0..steps {
        let stepped = step();
        let wrong = stepped.is_err();
        with(|world| world.wrong = world.wrong.take().or(stepped.err()));
        if wrong {
            break;
        }
    }
    if steps > 0 {
        with(|world| {
            world.beside = false;
            // What the verb sends from here on is in order with what it sent before.
            world.machine.set_turn(None);
        });
    }
}

/// Who goes on outside of the world: what it does calls back into it.
pub(super) enum Turn {
    Job(Box<Job>),
    Deferred(Waiting<Infallible>),
}

fn step() -> Result<(), Wrong> {
    match with(World::step)? {
        None => Ok(()),
        Some(Turn::Job(mut job)) => {
            let polled = poll(&mut job);
            with(|world| world.went_on(*job, polled))
        }
        Some(Turn::Deferred(mut waiting)) => {
            let Poll::Pending = waiting.poll();
            with(|world| {
                world.deferred = Some(waiting);
                world.look(Actor::Deferred)
            })
        }
    }
}

fn go_on_until(what: &str, done: impl Fn(&World) -> bool) -> Result<(), Wrong> {
    let from = with(|world| world.machine.step);
    while !with(|world| done(world)) {
        if with(|world| world.machine.step) - from > STEPS_MAX {
            return Err(format!("{what} do not come to an end: {}", with(|world| world.waits())));
        }
        step()?;
    }
    Ok(())
}

fn rest() -> Result<(), Wrong> {
    let fails = with(|world| {
        world.counts.rests += 1;
        world.resting = true;
        world.machine.resting = true;
        world.machine.say("no more is asked for");
        lock(&world.machine.env).open_fails = None;
        std::mem::take(&mut world.outside.world().fails)
    });
    // Whoever is called off does not wait for storage.
    if with(|world| world.on(Class::Cancel) && world.work.one_in(2)) {
        with(|world| (0..world.jobs.len()).for_each(|at| world.hang_up(at)));
        go_on_until("verbs that were called off", |world| world.jobs.is_empty())?;
    }
    with(|world| (0..world.machine.paths.len()).for_each(|path| world.let_go(path)));
    // A suspend may wait for what a device holds that is suspended, and so on up the stack.
    for _ in 0..RESUMES_MAX {
        go_on_until("verbs", |world| world.is_over() || world.is_stuck())?;
        let suspended = with(|world| world.suspended());
        if suspended.is_empty() {
            break;
        }
        with(|world| suspended.into_iter().for_each(|word| world.begin(Verb::Resume { words: vec![word] })));
    }
    go_on_until("verbs", World::is_over)?;
    let quiet = |world: &World| {
        let lanes = world.machine.cores.iter().flat_map(|core| &core.open);
        world.model.view.0.iter().any(|seen| seen.suspended)
            || lanes.map(|open| open.in_flight).sum::<usize>() == 0
    };
    go_on_until("requests", quiet)?;
    go_on_until("removals that were deferred", World::is_quiet)?;
    with(|world| {
        world.look(Actor::Other)?;
        world.check_rest()?;
        world.resting = false;
        world.machine.resting = false;
        world.outside.world().fails = fails;
        Ok(())
    })
}

/// Removes all devices; nothing is left of them.
fn remove_all() -> Result<(), Wrong> {
    with(|world| {
        world.resting = true;
        world.machine.resting = true;
        (0..world.clients.len()).rev().try_for_each(|at| world.go(at))
    })?;
    let unused = |world: &World| {
        let seen = world.model.view.0.iter().find(|seen| seen.open == 0);
        seen.map(|seen| number(seen.minor))
    };
    while let Some(word) = with(|world| unused(world)) {
        with(|world| world.begin(Verb::Remove { word, how: Removal::default() }));
        go_on_until("removals", World::is_quiet)?;
    }
    // Whoever waited for an event has had one.
    go_on_until("waits", |world| world.jobs.is_empty())?;
    with(|world| {
        if let Some(left) = world.model.view.0.first() {
            return Err(format!("all devices were removed, and {left:?} is left"));
        }
        world.check_rest()?;
        world.machine.paths_are_closed()
    })
}
