//! Worlds of the registry and the verbs. Several control clients create, load, suspend, resume and
//! remove devices of a few names, send messages, wait for events and query, all at once. They also
//! disconnect in the middle.
//!
//! The verbs are the program's: futures that continue when they are woken, in the order of the
//! seed. The registry changes only while one of them runs. So it is compared before and after, and
//! each verb may make only its permitted changes. While a load resolves names, the others continue.
//! Below are cores and disks as in every world. Lanes fail to open, names fail or lead to other
//! disks, paths hang, and clients of the devices connect, read and disconnect.
//!
//! * `verb_jobs`: the verbs. `generator`: the choice of the next one. `clients`: the readers.
//! * `backends`: resolution of names, and helper threads. `observation`: the content of the
//!   registry.
//! * `model`: permitted changes. `expected_results`: permitted results. `event_waits`: clients that
//!   wait for an event. `multipath`: devices made from paths. `file`: the server's file and its
//!   rereading.
//! * `world`, `driver`: the run. `counts`: the counters.

mod backends;
mod clients;
mod counts;
mod driver;
mod event_waits;
mod expected_results;
mod file;
mod generator;
mod model;
mod multipath;
mod observation;
mod verb_jobs;
mod world;

use crate::plan::RunPlan;
use crate::run::{RunFailure, catch_panic, finish_run};
pub use counts::RegistryCounts;

/// Runs the registry world of `plan`.
///
/// # Errors
/// The failure, with its trace. The world of a failed run is leaked.
pub fn run(plan: &RunPlan) -> Result<RegistryCounts, Box<RunFailure>> {
    let outcome = catch_panic(|| driver::run_registry_steps(plan));
    let world = driver::take_world();
    finish_run(plan, outcome, world, |world| world.counts(), |world| world.machine.last_events())
}
