//! Worlds of the NVMe/TCP initiator: namespaces as devices, alone and as multipath paths, run
//! unchanged over a simulated ring and network.
//!
//! There are one to three cores, with one or two namespaces. Each namespace has one to three
//! targets that share its disk. Bytes are split anywhere in both directions. Ring operations
//! complete late, in any order, fail or are cancelled. Targets answer late, out of order, in
//! pieces, and with every error. They violate the protocol, hang, stop, are cut off, are killed,
//! refuse connections, change their ANA state, grow, or return with another namespace.
//!
//! **The danger.** A target executes commands of a controller until the controller has ended: when
//! it learns that a connection was closed, or when its keep-alive timer expires. After a lost RST
//! only the timer ends it. Commands at the disk then need up to the quiesce time. So a write that
//! is repeated on another path too early is undone by its first copy, and the model finds it. The
//! paths ask each other to reset lost controllers: udm's own target resets those of the same
//! target, so that writes go elsewhere before the time is over, and refuses those of others.
//!
//! * [`remote_disk`](crate::remote_disk): the front ends, the disks, and what reads may return. One
//!   namespace of three has targets that are udm's own (`own_target`): both ends run against each
//!   other, and the world cuts the wires between them, stops the target, and flips bits.
//!
//! * `description`, `target`: the other targets and their controllers. `conn`, `admin`, `io`,
//!   `pdus`: their end of a connection. `resets`: how they reset each other's controllers.
//! * `controllers`, `sent_writes`: checks of what the initiator makes of all this.
//! * `world`, `turn`, `actions`, `shutdown`: the run. `counts`: the counters. The network is that
//!   of the NBD worlds (`nbd::net`, `nbd::kernel`).

mod actions;
mod admin;
mod conn;
mod controllers;
mod counts;
mod description;
mod io;
mod own_target;
mod own_target_turn;
mod pdus;
mod resets;
mod sent_writes;
mod shutdown;
mod target;
mod turn;
mod world;

use crate::plan::RunPlan;
use crate::remote_disk::run::RemoteDiskWorld;
use crate::remote_disk::shared::lock_front_end_state;
use crate::run::{RunFailure, catch_panic, finish_run};
pub use counts::NvmeClientCounts;
use world::NvmeClientWorld;

/// Runs the NVMe initiator world of `plan`.
///
/// # Errors
/// The failure, with its trace. The world of a failed run is leaked.
pub fn run(plan: &RunPlan) -> Result<NvmeClientCounts, Box<RunFailure>> {
    let mut world = None;
    let outcome = catch_panic(|| world.insert(NvmeClientWorld::new(plan)?).run());
    let last_events = |world: &mut NvmeClientWorld| {
        (world.machine.step, lock_front_end_state(&world.machine.shared).trace.lines())
    };
    finish_run(plan, outcome, world, |world| world.counts(), last_events)
}
