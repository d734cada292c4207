//! Worlds of servers that follow each other: disks and a state folder outlive them.
//!
//! A life is a server: its file, the registry, verbs on snapshots, and records in the state folder,
//! which is a real one, are the program's. It is started with the lines of its file in an order of
//! the seed's, with stores there or away, and ends in order or is killed at any step. Clients of
//! the control socket ask for verbs, clients of the devices read and write.
//!
//! Files are real and empty: they have a name, an identity, a length and a time of change. What is
//! in them is on simulated disks, which take requests late and in any order. Verbs on snapshots
//! block: while one waits the others go on from within ([`udm_control::blocked`]), so of two such
//! verbs the second ends first.
//!
//! A server that is killed goes on in a copy of its files until nothing of it is left; its requests
//! change nothing any more.
//!
//! * `files`, `outside`: what outlives a server, and what the registry sees of it.
//! * `ask`, `draw`: verbs. `clients`: who reads and writes.
//! * `model`, `look`: what must hold: what each disk and each snapshot reads, and which snapshots a
//!   server may have lost. `counts`: how much was done.
//! * `world`, `drive`, `life`: what happens.

mod ask;
mod clients;
mod counts;
mod draw;
mod drive;
mod files;
mod life;
mod look;
mod model;
mod outside;
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
    udm_control::blocked::turn_instead(None);
    let world = drive::take();
    let Err(what) = outcome else { return Ok(world.map(|world| world.counts()).unwrap_or_default()) };
    let mut plan = plan.clone();
    let (mut what, mut trace) = (what, Vec::new());
    if let Some(mut world) = world {
        plan.steps = world.machine.step.min(plan.steps);
        what = world.wrong.take().unwrap_or(what).replace(&world.base, "");
        world.outside.files().remove();
        trace.extend(lock(&world.machine.env).trace.last().map(crate::trace::Event::line));
        Box::leak(world);
    }
    Err(Box::new(Failure { plan, what, trace }))
}
