//! Worlds of the NBD server: the turns of the runtime, its ring and the connections run unchanged
//! over a simulated ring and network.
//!
//! A few clients use a server of one to three cores, which serves mapped devices over simulated
//! disks. Bytes are split anywhere. Operations complete late and in any order, fail or are
//! cancelled. Connections are lost at any point. Clients use all of NBD, stop reading, and
//! disconnect in every way. Meanwhile they move between cores, devices are suspended, paths hang,
//! and power fails.
//!
//! * `clock`, `net`, `kernel`, `ring_core`: the cores and their environment, here and in the worlds
//!   of the NBD client and of disks of virtual machines.
//! * `handshake`, `client`: the clients. `model`: their permitted replies.
//! * `world`, `turn`, `actions`, `shutdown`: the run. `counts`: the counters.

mod actions;
mod client;
pub(crate) mod clock;
mod counts;
mod handshake;
pub(crate) mod kernel;
mod model;
pub(crate) mod net;
mod reply_chunk;
pub(crate) mod ring_core;
mod shutdown;
mod turn;
mod world;

use crate::environment::lock_environment;
use crate::plan::RunPlan;
use crate::run::{RunFailure, catch_panic, finish_run};
pub use counts::NbdServerCounts;
use world::NbdServerWorld;

/// Runs the NBD server world of `plan`.
///
/// # Errors
/// The failure, with its trace. The world of a failed run is leaked.
pub fn run(plan: &RunPlan) -> Result<NbdServerCounts, Box<RunFailure>> {
    let mut world = None;
    let outcome = catch_panic(|| world.insert(NbdServerWorld::new(plan)?).run());
    let last_events = |world: &mut NbdServerWorld| (world.step, lock_environment(&world.env).trace.lines());
    finish_run(plan, outcome, world, |world| world.counts(), last_events)
}
