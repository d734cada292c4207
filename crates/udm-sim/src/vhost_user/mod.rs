//! Worlds of disks of virtual machines: the queues and sessions of the vhost-user-blk back end run
//! unchanged over simulated disks and a simulated ring of the cores.
//!
//! One or two machines have one to three rings each, split or packed. Their memory, their rings
//! and the record of requests in flight are real shared memory. Orderly guests keep the rules and
//! check each result. A hostile guest does anything with its ring, and its front end sends
//! anything. Front ends stop and restart rings, change memory, switch the write cache, and
//! disconnect at any message. The server is killed at any moment, also between two accesses to the
//! memory of a machine: the memory is copied at that moment, and restored once the cores have
//! ended.
//!
//! * `memory`, `ring`, `packed_ring`: the memory of a machine, and the driver's side of a ring.
//! * `guest`, `hostile`, `hostile_packed`: the guests. `model`: the permitted results.
//! * `messages`, `machine`, `front_end`: the front ends.
//! * `world`, `turn`, `server`, `run`: the run. `counts`: the counters.

mod counts;
mod front_end;
mod guest;
mod hostile;
mod hostile_packed;
mod machine;
mod memory;
mod messages;
mod model;
mod packed_ring;
mod ring;
mod run;
mod server;
mod turn;
mod world;

use crate::environment::lock_environment;
use crate::plan::RunPlan;
use crate::run::{RunFailure, catch_panic, finish_run};
pub use counts::VhostUserCounts;
use world::VhostUserWorld;

/// Runs the world of `plan`.
///
/// # Errors
/// The failure, with its trace. The world of a failed run is leaked.
pub fn run(plan: &RunPlan) -> Result<VhostUserCounts, Box<RunFailure>> {
    let outcome = catch_panic(|| run::run_world(plan));
    #[cfg(feature = "interleave")]
    udm_core::interleave::set_interleave_hook(None);
    let world = run::take_world();
    let last_events =
        |world: &mut Box<VhostUserWorld>| (world.step, lock_environment(&world.env).trace.lines());
    finish_run(plan, outcome, world, |world| world.counts(), last_events)
}
