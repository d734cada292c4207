//! Runs a world: executes its steps, lets it rest, and ends and replaces its server.
//!
//! The world is in a thread-local variable. A session that waits for its queues runs steps of the
//! world from within, and so does an interleaving point in the turn of a core.

use super::machine::RingGuest;
use super::turn::StepOutsideBorrow;
use super::world::{ServerState, VhostUserWorld};
use crate::environment::lock_environment;
use crate::log_capture;
use crate::model::Violation;
use crate::nbd::ring_core::SteppedRingCore;
use crate::plan::{DisturbanceClass, RunPlan};
use std::cell::RefCell;
use udm_core::Nanos;
use udm_frontends::vhost_user::SteppedVhostUserSession;
use udm_runtime::CoreStateAfterStep;

/// Maximum number of steps until an awaited event.
const STEPS_MAX: u64 = 100_000;

thread_local! {
    static WORLD: RefCell<Option<Box<VhostUserWorld>>> = const { RefCell::new(None) };
}

/// Removes and returns the world of this thread.
pub(super) fn take_world() -> Option<Box<VhostUserWorld>> {
    WORLD.take()
}

fn with_world<T>(f: impl FnOnce(&mut VhostUserWorld) -> T) -> T {
    WORLD.with_borrow_mut(|world| f(world.as_mut().expect("it was built")))
}

/// Runs all steps of the plan, and ends the server.
pub(super) fn run_world(plan: &RunPlan) -> Result<(), Violation> {
    let world = VhostUserWorld::new(plan)?;
    WORLD.set(Some(Box::new(world)));
    let _lines = log_capture::capture_log("udm_frontends::vhost_user");
    boot()?;
    while with_world(|world| world.step < world.plan.steps) {
        step_serving()?;
        if with_world(|world| world.step >= world.rest_at) {
            finish_and_verify()?;
            if with_world(|world| world.control.one_in(4)) {
                end_server()?;
                boot()?;
            }
            with_world(|world| world.rest_at = world.step + 200 + world.control.span(1500));
        } else if with_world(|world| world.control.one_in(4000)) {
            end_server()?;
            boot()?;
        }
    }
    finish_and_verify()?;
    end_server()
}

/// Runs a step. A server that was killed is replaced.
fn step_serving() -> Result<(), Violation> {
    step_world()?;
    if with_world(|world| world.state == ServerState::Killed) {
        replace_killed_server()?;
    }
    Ok(())
}

fn step_world() -> Result<(), Violation> {
    match with_world(VhostUserWorld::step)? {
        None => Ok(()),
        Some(StepOutsideBorrow::Core(c, core)) => run_core(c, *core),
        Some(StepOutsideBorrow::Session(m, session)) => run_session(m, session),
    }
}

/// Runs a step of the world while a session waits for its queues. False if the server was killed.
pub(super) fn run_world_during_wait() -> bool {
    if with_world(|world| world.state == ServerState::Killed || world.wrong.is_some()) {
        return false;
    }
    let stepped = step_world();
    with_world(|world| {
        let is_stuck = world.step > world.plan.steps + 20 * STEPS_MAX;
        let stuck = || format!("a session does not come to its end: {}", world.waiting());
        let wrong = stepped.err().or_else(|| is_stuck.then(stuck));
        world.wrong = world.wrong.take().or(wrong);
        world.set_turn(None);
        world.state != ServerState::Killed && world.wrong.is_none()
    })
}

/// A guest acts, or the server is killed, in the middle of a core's turn.
#[cfg(feature = "interleave")]
fn act_inside_core_turn() {
    with_world(VhostUserWorld::act_inside_core_turn);
}

fn run_core(c: usize, mut core: SteppedRingCore) -> Result<(), Violation> {
    #[cfg(feature = "interleave")]
    udm_core::interleave::set_interleave_hook(Some(act_inside_core_turn));
    let mut rest = core.core.step();
    for _ in 0..with_world(|world| world.schedule.below(4)) {
        if rest != CoreStateAfterStep::None {
            break;
        }
        with_world(|world| world.set_turn(Some(c)));
        rest = core.core.step();
    }
    #[cfg(feature = "interleave")]
    udm_core::interleave::set_interleave_hook(None);
    with_world(|world| world.end_core_turn(c, core, rest))
}

fn run_session(m: usize, mut session: Box<SteppedVhostUserSession>) -> Result<(), Violation> {
    let outcome = session.step();
    if matches!(outcome, Ok(true)) {
        return with_world(|world| {
            let machine = &mut world.machines[m];
            machine.is_in_step = false;
            machine.unread = machine.unread.saturating_sub(1);
            if world.state != ServerState::Killed {
                machine.session = Some(session);
            }
            Ok(())
        });
    }
    if with_world(|world| world.state != ServerState::Killed) {
        session.end();
    }
    with_world(|world| world.end_session(m, outcome))
}

/// Runs steps until `done`. A server that is killed meanwhile is replaced.
fn step_until(what: &str, done: impl Fn(&VhostUserWorld) -> bool) -> Result<(), Violation> {
    let from = with_world(|world| world.step);
    while !with_world(|world| done(world)) {
        if with_world(|world| world.step) - from > STEPS_MAX {
            return Err(format!("{what} does not come, and {} waits", with_world(|world| world.waiting())));
        }
        step_world().map_err(|e| format!("{e}, before {what}"))?;
    }
    Ok(())
}

fn boot() -> Result<(), Violation> {
    with_world(VhostUserWorld::start_server)?;
    step_until("a device that is resumed", |world| {
        world.changes.is_empty() || world.state == ServerState::Killed
    })?;
    if with_world(|world| world.state == ServerState::Killed) {
        replace_killed_server()?;
    }
    Ok(())
}

fn replace_killed_server() -> Result<(), Violation> {
    with_world(|world| {
        world.machines.iter_mut().for_each(super::machine::Machine::forget_connection);
        world.stop_cores();
    });
    step_until("the end of the cores", VhostUserWorld::is_stopped)?;
    with_world(|world| {
        world.drop_server()?;
        world.forget_killed_server();
        Ok::<_, Violation>(())
    })?;
    boot()
}

/// Ends the server in order: the sessions complete their requests, and nothing is left.
fn end_server() -> Result<(), Violation> {
    with_world(|world| {
        world.say("the server ends");
        world.counts.ends += 1;
        (world.state, world.is_resting) = (ServerState::Ending, true);
        world.restores.clear();
        (0..world.paths.len()).for_each(|p| world.restore(p));
    });
    for m in 0..with_world(|world| world.machines.len()) {
        if let Some(session) = with_world(|world| world.machines[m].session.take()) {
            session.end();
            with_world(|world| world.end_session(m, Ok(false)))?;
        }
    }
    with_world(VhostUserWorld::stop_cores);
    step_until("the end of the cores", VhostUserWorld::is_stopped)?;
    with_world(|world| {
        world.is_resting = false;
        world.drop_server()
    })
}

/// Lets all requests complete, looks at the hostile guest, and reads all data back.
fn finish_and_verify() -> Result<(), Violation> {
    with_world(|world| {
        world.say("a rest");
        world.counts.rests += 1;
        world.is_resting = true;
        lock_environment(&world.env).calm = true;
        world.restores.clear();
        (0..world.paths.len()).for_each(|p| world.restore(p));
    });
    quiesce()?;
    check_hostile_ring()?;
    with_world(|world| {
        for machine in &mut world.machines {
            let reader = machine.guests.iter_mut().rev().find_map(|guest| match guest {
                RingGuest::Orderly(guest) => Some(guest),
                RingGuest::Hostile(_) => None,
            });
            if let Some(reader) = reader {
                reader.check = Some(0);
            }
        }
    });
    quiesce()?;
    with_world(|world| {
        world.is_resting = false;
        lock_environment(&world.env).calm = false;
        let now = lock_environment(&world.env).now;
        world.machines.iter_mut().for_each(|machine| machine.next = now);
    });
    Ok(())
}

/// Runs until all machines are up, nothing is in flight, and all cores sleep.
fn quiesce() -> Result<(), Violation> {
    step_until("a rest", |world| {
        let is_through = |guest: &RingGuest| match guest {
            RingGuest::Orderly(guest) => guest.is_through(),
            RingGuest::Hostile(_) => true,
        };
        let inside = lock_environment(&world.env).paths.iter().any(|path| path.in_flight > 0);
        let guests = world.machines.iter().flat_map(|machine| &machine.guests);
        !inside
            && world.machines.iter().all(|machine| machine.is_up() && !machine.is_rebooting)
            && guests.into_iter().all(is_through)
            && world.cores.iter().all(|core| core.as_ref().is_some_and(|core| core.reason() == Nanos::NEVER))
    })
}

/// Starts the ring of the hostile guest again, and breaks it: it is stopped with one line in the
/// log.
fn check_hostile_ring() -> Result<(), Violation> {
    let is_in = |world: &VhostUserWorld| !world.plan.without.has(DisturbanceClass::Wild);
    let Some(m) = with_world(|world| world.machines.iter().position(|m| m.is_hostile && is_in(world))) else {
        return Ok(());
    };
    with_world(|world| {
        let steps = world.restart_ring(m, 0);
        if let Some(connection) = &mut world.machines[m].connection {
            connection.script.extend(steps);
        }
    });
    quiesce()?;
    let before = with_world(|world| {
        let machine = &mut world.machines[m];
        if let RingGuest::Hostile(guest) = &mut machine.guests[0] {
            guest.break_ring(&machine.memory);
        }
        world.hostile_lines
    });
    for acts in 0..2 {
        step_until("a core that sees a broken ring", |world| world.hostile_lines > before)?;
        quiesce()?;
        with_world(|world| {
            let machine = &mut world.machines[m];
            if let RingGuest::Hostile(guest) = &mut machine.guests[0]
                && acts == 0
            {
                guest.break_ring(&machine.memory);
            }
        });
    }
    let lines = with_world(|world| world.hostile_lines) - before;
    if lines != 1 { Err(format!("a broken ring caused {lines} lines in the log")) } else { Ok(()) }
}
