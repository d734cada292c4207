//! Worlds of the NBD server: the runtime's turns, its ring and the connections run unchanged over a
//! simulated ring and network.
//!
//! A few clients speak to a server of one to three cores, which serves mapped devices over
//! simulated disks. Bytes are cut anywhere. Operations end late and in any order, fail or are
//! cancelled. Connections are lost at any point. Clients use all of NBD at any byte, stop reading,
//! and disconnect in every way. Meanwhile they move between cores, devices are suspended, paths
//! hang, and power fails.
//!
//! * `clock`, `net`, `kernel`: the environment of the cores, here and in the worlds of the NBD
//!   client.
//! * `shake`, `client`: the clients. `model`: their permitted answers.
//! * `world`, `turn`, `acts`, `ends`: the run. `counts`: the counts.

mod acts;
mod client;
pub(crate) mod clock;
mod counts;
mod ends;
pub(crate) mod kernel;
mod model;
pub(crate) mod net;
mod shake;
mod turn;
mod world;

use crate::env::lock;
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
        trace.extend(lock(&world.env).trace.last().map(crate::trace::Event::line));
        Box::leak(Box::new(world));
    }
    Err(Box::new(Failure { plan, what, trace }))
}
