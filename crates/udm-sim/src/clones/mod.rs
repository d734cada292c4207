//! Worlds of a clone, and of a mirror.
//!
//! There is one clone over a simulated source, destination and metadata device. Cores read, write,
//! discard and flush it while it is hydrated, suspended, reloaded, removed and created again, and
//! while disks fail and the power is cut. The registers of the model begin with the content of the
//! source, whatever is in the destination. So a read must return the source or a later write at any
//! time, and after a power cut what was flushed. At the end the clone is hydrated, and a linear
//! table over the destination must return the same.
//!
//! In a world of a mirror, the device is a mirror of the source and the destination. It is begun
//! again by reloads, removals and power cuts. At the end it is switched as a move does it: a write
//! needs both devices, the destination is flushed, the world notes that the destination is the disk
//! from now on, and a linear table over it is loaded. A power cut before the note continues with
//! the source, and one after it with the destination. A mirror with a log continues from it, unless
//! the log has failed: the world notes this too, as the record of a move does.
//!
//! In a world of a clone of an object, the source is udm's client of objects against a server that
//! stalls, lies, refuses and disappears.
//!
//! * `world`: the world and its turns. `control`: operations on the device. `object_source`,
//!   `object_server`: the client and the server of an object. `power`: quiescence, power cuts, and
//!   the checks of the state. `counts`: the counters.

mod control;
mod counts;
mod object_server;
mod object_source;
mod power;
mod world;

pub use counts::CloneCounts;

use crate::counts::AccumulateRuns as _;
use crate::environment::{lock_environment, lock_mutex};
use crate::plan::{DisturbanceClass, RunPlan};
use crate::run::{RunFailure, catch_panic, finish_run};
use world::{CloneWorld, CopyTarget};

/// Runs `plan` in a world of a clone.
///
/// # Errors
/// The failure, with its trace.
pub fn run(plan: &RunPlan) -> Result<CloneCounts, Box<RunFailure>> {
    run_world(plan, CopyTarget::Clone)
}

/// Runs `plan` in a world of a clone of an object.
///
/// # Errors
/// The failure, with its trace.
pub fn run_clone_of_object(plan: &RunPlan) -> Result<CloneCounts, Box<RunFailure>> {
    run_world(plan, CopyTarget::CloneOfObject)
}

/// Runs `plan` in a world of a mirror.
///
/// # Errors
/// The failure, with its trace.
pub fn run_mirror(plan: &RunPlan) -> Result<CloneCounts, Box<RunFailure>> {
    run_world(plan, CopyTarget::Mirror)
}

/// Runs `plan` in a world of a mirror with a log.
///
/// # Errors
/// The failure, with its trace.
pub fn run_logged_mirror(plan: &RunPlan) -> Result<CloneCounts, Box<RunFailure>> {
    run_world(plan, CopyTarget::LoggedMirror)
}

fn run_world(plan: &RunPlan, target: CopyTarget) -> Result<CloneCounts, Box<RunFailure>> {
    let mut world = None;
    let outcome = catch_panic(|| world.insert(CloneWorld::new(plan, target)?).run_all());
    finish_run(plan, outcome, world, |world| world.counts(), |world| world.machine.last_events())
}

/// Runs `plan` without a power cut. Then repeats it once per start and completion of a write or
/// flush, with one power cut there.
///
/// # Errors
/// The first failure.
pub fn run_every_power_cut(plan: &RunPlan) -> Result<CloneCounts, Box<RunFailure>> {
    cut_everywhere(plan, run)
}

/// As [`run_every_power_cut`], in a world of a clone of an object.
///
/// # Errors
/// The first failure.
pub fn run_every_power_cut_of_clone_of_object(plan: &RunPlan) -> Result<CloneCounts, Box<RunFailure>> {
    cut_everywhere(plan, run_clone_of_object)
}

/// As [`run_every_power_cut`], in a world of a mirror.
///
/// # Errors
/// The first failure.
pub fn run_every_power_cut_of_mirror(plan: &RunPlan) -> Result<CloneCounts, Box<RunFailure>> {
    cut_everywhere(plan, run_mirror)
}

/// As [`run_every_power_cut`], in a world of a mirror with a log.
///
/// # Errors
/// The first failure.
pub fn run_every_power_cut_of_logged_mirror(plan: &RunPlan) -> Result<CloneCounts, Box<RunFailure>> {
    cut_everywhere(plan, run_logged_mirror)
}

fn cut_everywhere(
    plan: &RunPlan,
    run: fn(&RunPlan) -> Result<CloneCounts, Box<RunFailure>>,
) -> Result<CloneCounts, Box<RunFailure>> {
    let plan = RunPlan { without: plan.without.and(DisturbanceClass::Crash), cut: None, ..plan.clone() };
    let mut counts = run(&plan)?;
    for cut in 1..=counts.changes {
        counts.add(&run(&RunPlan { cut: Some(cut), ..plan.clone() })?);
    }
    Ok(counts)
}

impl CloneWorld {
    /// The counters of the run.
    fn counts(&mut self) -> CloneCounts {
        let object = self.object.as_ref().map(|object| lock_mutex(object));
        let of_object = object
            .as_ref()
            .map_or([0; 3], |object| [object.server.lies, object.server.replacements, object.hedges_sent]);
        let env = lock_environment(&self.machine.env);
        let totals = &self.machine.totals;
        CloneCounts {
            has_logs: self.has_log,
            has_objects: object.is_some(),
            lies: of_object[0],
            replaced: of_object[1],
            hedges: of_object[2],
            steps: totals.steps,
            requests: totals.requests,
            simulated: totals.simulated,
            sectors: self.machine.model.compared,
            changes: env.changes,
            faults: env.faults,
            troubles: totals.losses,
            rests: totals.rests,
            between: totals.between,
            hash: crate::counts::CombinedRunHash(env.trace.hash()),
            ..self.counts
        }
    }
}
