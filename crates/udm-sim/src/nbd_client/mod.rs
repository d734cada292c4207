//! Worlds of the NBD client: lanes of exports, alone and as multipath paths, run unchanged over a
//! simulated ring and network.
//!
//! There are one to three cores, with one or two exports. Each export has one to three servers that
//! share a disk. Bytes are split anywhere in both directions. Ring operations complete late, in any
//! order, fail or are cancelled. Servers answer late, out of order and in pieces, with every error.
//! They send invalid data, hang, stop, are cut off, are killed, refuse connections, or return with
//! another export. A stopped server executes the requests that it received when it continues. So a
//! write that is retried on another path before this path is proved dead overwrites newer data, and
//! the model finds it.
//!
//! A connection is proved dead when the server has closed it or the network has broken it. From
//! then on its server executes nothing that came over it.
//!
//! * [`remote_disk`](crate::remote_disk): the front ends, the disks, and what reads may return.
//! * `conn`, `reply`, `servers`: the servers. Their network is that of the worlds of the
//!   NBD server (`nbd::net`, `nbd::kernel`).
//! * `world`, `turn`, `actions`, `shutdown`: the run. `counts`: the counters.

mod actions;
mod conn;
mod counts;

mod reply;
mod servers;

mod shutdown;
mod turn;
mod world;

use crate::plan::RunPlan;
use crate::remote_disk::run::RemoteDiskWorld;
use crate::remote_disk::shared::lock_front_end_state;
use crate::run::{RunFailure, catch_panic, finish_run};
pub use counts::NbdClientCounts;
use world::NbdClientWorld;

/// Runs the NBD client world of `plan`.
///
/// # Errors
/// The failure, with its trace. The world of a failed run is leaked.
pub fn run(plan: &RunPlan) -> Result<NbdClientCounts, Box<RunFailure>> {
    let mut world = None;
    let outcome = catch_panic(|| world.insert(NbdClientWorld::new(plan)?).run());
    let last_events = |world: &mut NbdClientWorld| {
        (world.machine.step, lock_front_end_state(&world.machine.shared).trace.lines())
    };
    finish_run(plan, outcome, world, |world| world.counts(), last_events)
}
