//! Lists of moves.

use super::job::{MoveJob, MoveState};
use super::move_error;
use crate::api;
use crate::error::VerbError;
use crate::registry::DeviceRegistry;
use std::sync::Arc;
use std::time::Duration;
use udm_core::Sectors;
use udm_core::errno::EINVAL;

/// The moves of this server, by the order of their begin, and the disks that earlier servers moved.
#[must_use]
pub fn list_moves(registry: &DeviceRegistry) -> Vec<api::MoveDescription> {
    let jobs = registry.moves.all();
    let mut all: Vec<_> = jobs.iter().map(describe_job).collect();
    let known: Vec<String> = jobs.iter().map(|job| job.facts().record.id.clone()).collect();
    // Without records nothing more is known; a table that needs them is refused.
    let records = registry.state_folder().map(|folder| folder.moves().unwrap_or_default());
    for record in records.into_iter().flatten().filter(|record| !known.contains(&record.id)) {
        let is_done = record.destination.is_none();
        let to = record.destination.as_ref().unwrap_or(&record.current);
        let from = if is_done { record.old.last().unwrap_or(&record.current) } else { &record.current };
        all.push(api::MoveDescription {
            name: record.name.clone(),
            state: if is_done { MoveState::Done } else { MoveState::Waiting }.text().into(),
            source: from.word.clone(),
            destination: to.word.clone(),
            size_bytes: Sectors(record.sectors).bytes(),
            copied_bytes: if is_done { Sectors(record.sectors).bytes() } else { 0 },
            error: (!is_done).then(|| "its device is not served".into()),
            old_places: record.old.iter().map(|old| old.word.clone()).collect(),
            ..api::MoveDescription::default()
        });
    }
    all
}

/// The moves of this server that are under way.
pub(crate) fn list_running_moves(registry: &DeviceRegistry) -> Vec<api::MoveDescription> {
    let jobs = registry.moves.all().into_iter();
    jobs.filter(|job| !job.facts().state.is_over()).map(|job| describe_job(&job)).collect()
}

/// The last move of a device.
///
/// # Errors
/// ENXIO if there is no such device, EINVAL if it was not moved since the start of the server.
pub fn describe_move_by_name(
    registry: &DeviceRegistry,
    name: &str,
) -> Result<api::MoveDescription, VerbError> {
    let mapped = registry.find(name)?;
    let job = registry.moves.of(&mapped);
    let job = job.ok_or_else(|| move_error(name, EINVAL, "it is not being moved"))?;
    Ok(describe_job(&job))
}

/// One move.
pub(super) fn describe_job(job: &Arc<MoveJob>) -> api::MoveDescription {
    let (name, mirror) = (job.name(), job.mirror().map(|(_, report)| report));
    let facts = job.facts();
    let size = Sectors(facts.record.sectors).bytes();
    let copied = match (facts.state, &mirror) {
        (MoveState::Done | MoveState::Switching, _) => size,
        (_, Some(report)) => Sectors((report.copied * report.region.0).min(report.len.0)).bytes(),
        (_, None) => 0,
    };
    let is_copying = facts.state == MoveState::Copying;
    let state = if is_copying && job.is_paused() { "paused" } else { facts.state.text() };
    let elapsed = facts.began.elapsed().max(Duration::from_millis(1));
    let rate = (copied as f64 / elapsed.as_secs_f64()) as u64;
    let rate = (is_copying && !job.is_paused()).then_some(rate);
    api::MoveDescription {
        name,
        state: state.into(),
        source: facts.from.clone(),
        destination: facts.to.clone(),
        size_bytes: size,
        copied_bytes: copied,
        bytes_per_second: rate,
        seconds_left: rate.filter(|rate| *rate > 0).map(|rate| (size - copied).div_ceil(rate)),
        unlogged_bytes: mirror.as_ref().and_then(|report| {
            let dirty = report.log.as_ref().filter(|_| facts.record.log.is_some())?.dirty;
            Some(Sectors((dirty * report.region.0).min(report.len.0)).bytes())
        }),
        error: facts.error.clone(),
        old_places: facts.record.old.iter().map(|old| old.word.clone()).collect(),
    }
}
