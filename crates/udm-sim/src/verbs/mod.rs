//! Worlds of the registry and the verbs. Several control clients create, load, suspend, resume and
//! remove devices of a few names, send messages, wait for events and query, all at once. They also
//! hang up in the middle.
//!
//! The verbs are the program's: futures that continue when they are woken, in the order of the
//! seed. The registry changes only while one of them runs, so it is compared before and after, and
//! each verb is held to its permitted changes. While a load resolves names, the others continue.
//! Below are cores and disks as in every world. Lanes fail to open, names fail or lead elsewhere,
//! paths hang, and clients of the devices come, read and go.
//!
//! * `ask`: the requests. `draw`: the choice of the next one. `clients`: the readers.
//! * `outside`: resolution of names, and helper threads. `look`: the content of the registry.
//! * `model`: permitted changes. `expected_results`: permitted answers. `event_waits`: clients that wait for an
//!   event. `multipath`: devices made from paths. `file`: the server's file and its rereading.
//! * `world`, `driver`: the run. `counts`: the counts.

mod ask;
mod clients;
mod counts;
mod draw;
mod driver;
mod event_waits;
mod expected_results;
mod file;
mod look;
mod model;
mod multipath;
mod outside;
mod world;

use crate::environment::lock;
use crate::plan::RunPlan;
use crate::run::{RunFailure, catch_panic};
pub use counts::RegistryCounts;

/// Runs the world of `plan`.
///
/// # Errors
/// The failure, with its trace. What is left of a failed run is not taken apart.
pub fn run(plan: &RunPlan) -> Result<RegistryCounts, Box<RunFailure>> {
    let outcome = catch_panic(|| driver::run(plan));
    let world = driver::take();
    let Err(what) = outcome else { return Ok(world.map(|world| world.counts()).unwrap_or_default()) };
    let mut plan = plan.clone();
    let mut trace = Vec::new();
    if let Some(world) = world {
        plan.steps = world.machine.step.min(plan.steps);
        trace.extend(lock(&world.machine.env).trace.last().map(crate::trace::TraceEvent::line));
        Box::leak(world);
    }
    Err(Box::new(RunFailure { plan, what, trace }))
}
