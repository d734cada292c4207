//! Verbs that change a move: pause, start again, stop, and forget an old place.

use super::job::{MoveJob, MoveState};
use super::list::describe_job;
use super::move_error;
use super::step::{device_of, end, put_back_table};
use crate::api;
use crate::error::VerbError;
use crate::registry::{BaseDir, DeviceRegistry};
use crate::state_folder::StableDiskId;
use crate::state_folder::moves::{MoveRecord, PlaceMatch};
use std::sync::Arc;
use udm_core::errno::{EBUSY, EINVAL, EIO, ENOENT, EOPNOTSUPP};
use udm_dm::MirrorPhase;

/// The job of the device `name` that is not over.
fn find_running_job(registry: &DeviceRegistry, name: &str) -> Result<Arc<MoveJob>, VerbError> {
    let mapped = registry.find(name)?;
    let job = registry.moves.of(&mapped).filter(|job| !job.facts().state.is_over());
    job.ok_or_else(|| move_error(name, EINVAL, "it is not being moved"))
}

/// Pauses the copies of a move and its switch, or starts them again. Writes go to both places all
/// the same.
///
/// # Errors
/// ENXIO if there is no such device, EINVAL if it is not being moved.
pub fn pause_move(
    registry: &DeviceRegistry,
    name: &str,
    is_paused: bool,
) -> Result<api::MoveDescription, VerbError> {
    let job = find_running_job(registry, name)?;
    let _turn = job.turn();
    job.set_paused(is_paused);
    if !is_paused {
        job.facts().retry_now();
    }
    Ok(describe_job(&job))
}

/// Stops a move: the disk stays where it is, and the destination is not used any more. Requests
/// pause meanwhile, and none fails. May block.
///
/// # Errors
/// ENXIO if there is no such device, EINVAL if it is not being moved; EBUSY if the new place is the
/// disk already, or if the device is suspended or has a table in its inactive slot.
pub fn stop_move(registry: &DeviceRegistry, name: &str) -> Result<api::MoveDescription, VerbError> {
    let job = find_running_job(registry, name)?;
    let _turn = job.turn();
    let state = job.facts().state;
    let is_switching = job.mirror().is_some_and(|(_, report)| report.phase == MirrorPhase::Switching);
    if state.is_over() || state == MoveState::Switching || is_switching {
        let why = format!("its data is at {} by now: move it back instead", job.facts().to);
        return Err(move_error(name, EBUSY, why));
    }
    let mapped = device_of(&job)?;
    put_back_table(registry, &job, &mapped, name)?;
    end(registry, &job, &mapped, (MoveState::Stopped, "it was stopped".into()))?;
    Ok(describe_job(&job))
}

/// Forgets that a disk has left the place `device`: tables may use its old content. May block.
///
/// # Errors
/// EOPNOTSUPP without a state folder, ENOENT if no disk has left the place; the error of the
/// folder.
pub fn forget_old_place(registry: &DeviceRegistry, device: &str, base: &BaseDir) -> Result<(), VerbError> {
    let folder = registry.state_folder();
    let folder = folder.ok_or_else(|| move_error(device, EOPNOTSUPP, "the server has no state folder"))?;
    let uri = base.resolve(device).map_err(|error| move_error(device, error.errno, error.reason))?;
    let disk = StableDiskId::of_named_uri(&uri);
    let records = folder.moves().map_err(|why| move_error(device, EIO, why))?;
    let mut is_known = false;
    for record in records {
        let stays = |old: &&crate::state_folder::moves::DiskPlace| {
            old.word != device && disk.as_ref().is_none_or(|disk| old.compare(disk) == PlaceMatch::Other)
        };
        let old: Vec<_> = record.old.iter().filter(stays).cloned().collect();
        if old.len() == record.old.len() {
            continue;
        }
        is_known = true;
        let job = registry.moves.all().into_iter().find(|job| job.facts().record.id == record.id);
        if job.is_some_and(|job| !job.facts().state.is_over()) || folder.is_moved_elsewhere(&record) {
            let why = format!("{} is being moved: wait, or stop that", record.name);
            return Err(move_error(device, EBUSY, why));
        }
        let written = folder.put_move(&MoveRecord { old, ..record });
        written.map_err(|error| move_error(device, EIO, error.to_string()))?;
    }
    match is_known {
        true => Ok(()),
        false => Err(move_error(device, ENOENT, "no disk was moved away from it")),
    }
}
