//! Worlds of the registry and the verbs: several control clients create, load, suspend, resume and
//! remove devices of a few names, send messages, wait for events and look at what there is, all at
//! once, and hang up in the middle.
//!
//! The verbs are the program's: futures, which go on here when they are woken, in an order that is
//! the seed's. What happens to the registry happens while one of them goes on, so each is held to
//! what it may change: the registry is looked at before and behind. A load asks the file system
//! what names lead to; the others go on meanwhile. Below are cores and disks as in every world;
//! lanes can't be opened, names can't be opened or lead elsewhere, paths hang, and clients of the
//! devices come, read and go.
//!
//! * `ask`: what is asked for. `draw`: what is asked for next. `clients`: who reads.
//! * `outside`: what names lead to, and the threads beside. `look`: what the registry holds.
//! * `model`: who may change what. `answers`: what they may be answered. `waits`: who waits for an
//!   event. `multipath`: who makes a device from its paths. `file`: what the server's file says,
//!   and what comes of reading it again.
//! * `world`, `drive`: what happens. `counts`: how much of it.

mod answers;
mod ask;
mod clients;
mod counts;
mod draw;
mod drive;
mod file;
mod look;
mod model;
mod multipath;
mod outside;
mod waits;
mod world;

use crate::env::lock;
use crate::plan::Plan;
use crate::run::{Failure, guard};
pub use counts::Counts;

/// Runs the world of `plan`.
///
/// # Errors
/// The failure, with its trace. What is left of a failed run is not taken apart.
pub fn run(plan: &Plan) -> Result<Counts, Box<Failure>> {
    let outcome = guard(|| drive::run(plan));
    let world = drive::take();
    let Err(what) = outcome else { return Ok(world.map(|world| world.counts()).unwrap_or_default()) };
    let mut plan = plan.clone();
    let mut trace = Vec::new();
    if let Some(world) = world {
        plan.steps = world.machine.step.min(plan.steps);
        trace.extend(lock(&world.machine.env).trace.last().map(crate::trace::Event::line));
        Box::leak(world);
    }
    Err(Box::new(Failure { plan, what, trace }))
}
