//! Worlds of the NBD client: lanes of exports, alone and as paths of multipath, run unchanged over
//! a ring and a network that are made up.
//!
//! One to three cores, with an export or two of one to three servers each, which share its disk.
//! Bytes are cut anywhere, in both directions; operations of the ring end late, in any order, fail
//! or are called off. Servers answer late, out of order and in pieces, with every error; they lie,
//! hang, are stopped, cut off, killed, say nothing, refuse, or come back as something else. What a
//! stopped server has received it does when it goes on, whether anybody still waits for it or not:
//! so a write that is tried again on another path before this one is known to be dead lands behind
//! newer ones, and is found.
//!
//! A connection is known to be dead when the server has closed it, or the network has broken it:
//! from then on its server does nothing more of what came over it.
//!
//! * `shared`, `model`: what was asked and may be answered. `front`: who asks.
//! * `disk`, `conn`, `reply`, `servers`: the servers. What their network is, the worlds of the NBD
//!   server say (`nbd::net`, `nbd::kernel`).
//! * `world`, `turn`, `acts`, `ends`: what happens. `counts`: how much.

mod acts;
mod conn;
mod counts;
mod disk;
mod ends;
mod front;
mod model;
mod reply;
mod servers;
mod shared;
mod turn;
mod world;

use crate::plan::Plan;
use crate::run::{Failure, guard};
pub use counts::Counts;
use world::World;

/// Runs the world of `plan`.
///
/// # Errors
/// The failure, with its trace. What is left of a failed run is not taken apart.
pub fn run(plan: &Plan) -> Result<Counts, Box<Failure>> {
    let mut world = None;
    let outcome = guard(|| {
        let world = world.insert(World::new(plan)?);
        world.run()
    });
    let Err(what) = outcome else { return Ok(world.map(|world| world.counts()).unwrap_or_default()) };
    let mut plan = plan.clone();
    let mut trace = Vec::new();
    if let Some(world) = world {
        plan.steps = world.step.min(plan.steps);
        trace.extend(shared::lock(&world.shared).trace.last().map(crate::trace::Event::line));
        Box::leak(Box::new(world));
    }
    Err(Box::new(Failure { plan, what, trace }))
}
