//! Worlds of origins and their snapshots.
//!
//! One or two origins over simulated disks, up to three snapshots of them, persistent on disks with
//! a volatile cache or transient, made, reloaded, merged and removed while cores send requests to
//! all of them. What a device holds is a list of registers ([`crate::cells`]); when a snapshot
//! becomes live its registers are those of its origin at that instant, and from then on each goes
//! its own way. So a read of a snapshot must be its instant with what was written to it, or fail,
//! with a cause; and a read of the origin must be what was written there, whatever its snapshots
//! are up to.
//!
//! * `world`, `turn`: cores and their turns. `model`: what must hold. `control`: what is done to
//!   devices. `power`: rests, power cuts, and what comes back after them.

mod control;
mod model;
mod power;
mod turn;
mod world;

use crate::env::lock;
use crate::plan::Plan;
use crate::run::{Failure, guard};
pub use world::Counts;
use world::World;

/// Runs the snapshot world of `plan`, with the power cut behind turn `cut`, where one is given,
/// besides the cuts that the seed draws.
///
/// # Errors
/// The failure, with its trace. What is left of a failed run is not taken apart.
pub fn run(plan: &Plan, cut: Option<u64>) -> Result<Counts, Box<Failure>> {
    let mut world = None;
    let outcome = guard(|| {
        let world = world.insert(World::new(plan, cut)?);
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
