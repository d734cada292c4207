//! Worlds of servers that run one after another over the same disks and state folder.
//!
//! A life is one server. Its configuration file, registry, snapshot verbs and state folder are the
//! program's own; the folder is a real one. A server starts with the lines of its file in a random
//! order, with stores present or missing. It ends in order or is killed at any step. Clients of the
//! control socket run verbs; clients of the devices read and write.
//!
//! Files are real and empty: they have a name, an identity, a length and a modification time. Their
//! content is on simulated disks, which complete requests late and in any order. Snapshot verbs
//! block. While one waits, the world continues from within it ([`udm_control::wait_hook`]), so of
//! two such verbs the second ends first.
//!
//! A killed server continues in a copy of its files until it has ended, and its requests change
//! nothing.
//!
//! * `files`, `backends`: the state that outlives a server, and the backends of the registry.
//! * `verb_jobs`, `generator`: verbs. `clients`: readers and writers.
//! * `model`, `observation`: the rules: the content of each disk and snapshot, and the snapshots
//!   that a server may lose. `counts`: the counters.
//! * `world`, `driver`, `server_life`: the run.

mod backends;
mod clients;
mod counts;
mod driver;
mod files;
mod generator;
mod model;
mod observation;
mod server_life;
mod verb_jobs;
mod world;

use crate::plan::RunPlan;
use crate::run::{RunFailure, catch_panic, finish_run};
pub use counts::LifecycleCounts;

/// Runs the lifecycle world of `plan`.
///
/// # Errors
/// The failure, with its trace. The world of a failed run is leaked.
pub fn run(plan: &RunPlan) -> Result<LifecycleCounts, Box<RunFailure>> {
    let outcome = catch_panic(|| driver::run_servers_in_sequence(plan));
    udm_control::wait_hook::set_wait_hook(None);
    let mut world = driver::take_world();
    let outcome = outcome.map_err(|what| match &mut world {
        Some(world) => {
            world.outside.files().remove();
            world.wrong.take().unwrap_or(what).replace(&world.base, "")
        }
        None => what,
    });
    finish_run(plan, outcome, world, |world| world.counts(), |world| world.machine.last_events())
}
