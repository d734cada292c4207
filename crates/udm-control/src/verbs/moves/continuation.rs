//! A move that an earlier server began goes on.
//!
//! If the record names a log, every write of the old place went through the mirror. The next server
//! creates the device with the mirror at once, which copies only what the log says. If the mirror
//! cannot be loaded (the destination does not answer, the log is damaged), the device is served
//! from the old place alone: before that, the record forgets the log, and all is copied again.

use super::job::{MoveJob, MoveState};
use super::move_error;
use super::places::place_of_table;
use super::start::{mirror_table, movable_disk};
use crate::error::VerbError;
use crate::registry::{BaseDir, DeviceRegistry, RegisteredDevice};
use crate::state_folder::StateFolder;
use crate::state_folder::moves::{MoveRecord, PlaceMatch};
use crate::verbs::CancelToken;
use crate::verbs::moves::places::place_of;
use crate::verbs::tables;
use std::sync::Arc;
use udm_core::Sector;
use udm_core::errno::EIO;
use udm_dm::MirrorReport;

/// Loads the table of a new device, whose words are `table`: the mirror of its move, if a log says
/// what is to be copied. May block.
///
/// # Errors
/// As [`tables::load_into`].
pub(crate) fn load_first_table(
    registry: &DeviceRegistry,
    mapped: &Arc<RegisteredDevice>,
    name: &str,
    table: &str,
    folder: &BaseDir,
    cancel_token: &CancelToken,
) -> Result<(), VerbError> {
    if let Some((state_folder, record)) = logged_move_of(registry, mapped, name, table, folder) {
        let mirror = mirror_table(&record);
        match load_mirror_of(registry, mapped, name, &record, &mirror, cancel_token) {
            Ok(()) => return Ok(()),
            Err(error) => {
                tracing::warn!("{name}: its move does not continue from its log, and begins again: {error}");
                let failed = |error| move_error(name, EIO, format!("the record of its move: {error}"));
                state_folder.put_move(&MoveRecord { log: None, ..record }).map_err(failed)?;
            }
        }
    }
    tables::load_into(registry, mapped, name, table, folder, cancel_token).map(drop)
}

/// The record of a move with a log, if `table` is over the place that the disk leaves.
fn logged_move_of<'a>(
    registry: &'a DeviceRegistry,
    mapped: &Arc<RegisteredDevice>,
    name: &str,
    table: &str,
    folder: &BaseDir,
) -> Option<(&'a StateFolder, MoveRecord)> {
    let state_folder: &StateFolder = registry.state_folder()?;
    // Whoever cannot read the records refuses the table.
    let records = state_folder.moves().ok()?;
    if !records.iter().any(|record| record.log.is_some()) {
        return None;
    }
    let (place, len) = place_of_table(registry, mapped, name, table, folder)?;
    let is_it = |record: &&MoveRecord| {
        record.log.is_some()
            && record.destination.is_some()
            && record.current.is(&place)
            && record.sectors == len.0
            && !state_folder.is_moved_elsewhere(record)
    };
    records.iter().find(is_it).map(|record| (state_folder, record.clone()))
}

/// Loads the mirror into the inactive slot. The destination must be the disk that it was.
fn load_mirror_of(
    registry: &DeviceRegistry,
    mapped: &Arc<RegisteredDevice>,
    name: &str,
    record: &MoveRecord,
    mirror: &str,
    cancel_token: &CancelToken,
) -> Result<(), VerbError> {
    let none = BaseDir::none();
    let table = tables::load_into(registry, mapped, name, mirror, &none, cancel_token)?;
    let report =
        table.targets().first().and_then(|entry| entry.target.as_mirror()).map(|mirror| mirror.report());
    let found = report.and_then(|report| place_of(registry, &report.destination.device, Sector(0)));
    let is_same = record.destination.as_ref().zip(found.as_ref());
    if is_same.is_some_and(|(was, is)| was.compare(&is.disk) == PlaceMatch::Same) {
        return Ok(());
    }
    mapped.device.clear();
    Err(move_error(name, EIO, "the destination is another disk by now"))
}

/// Continues the move of a device that was just created, if an earlier server did not end it.
pub(crate) fn continue_move(registry: &DeviceRegistry, mapped: &Arc<RegisteredDevice>) {
    let Some(folder) = registry.state_folder() else { return };
    let name = mapped.device.name();
    // Whoever could not read the records has refused the table.
    let Ok(records) = folder.moves() else { return };
    if !records.iter().any(|record| record.destination.is_some()) {
        return;
    }
    let report = live_mirror(mapped);
    let (device, start, len) = match &report {
        Some(report) => (report.source.device.clone(), report.source.start, report.len),
        None => {
            let Ok(disk) = movable_disk(&name, mapped) else { return };
            (disk.device, disk.start, disk.len)
        }
    };
    let Some(place) = place_of(registry, &device, start) else { return };
    let is_it = |record: &&MoveRecord| {
        record.destination.is_some() && record.current.is(&place) && record.sectors == len.0
    };
    let Some(record) = records.iter().find(is_it) else { return };
    let to = record.destination.as_ref().map(|place| place.word.clone()).unwrap_or_default();
    if folder.is_moved_elsewhere(record) {
        tracing::warn!("{name}: another server moves it to {to}");
        return;
    }
    match folder.put_move(&MoveRecord { name: name.clone(), ..record.clone() }) {
        Ok(record) => {
            let state = match &report {
                Some(report) => {
                    let (copied, all) = (report.copied, report.regions);
                    tracing::info!("{name}: its move to {to} continues: {copied} of {all} regions are there");
                    MoveState::Copying
                }
                None => {
                    tracing::info!("{name}: its move to {to} begins again");
                    MoveState::Waiting
                }
            };
            registry.moves.add(&MoveJob::new(mapped, record, state));
        }
        Err(error) => tracing::warn!("{name}: its move to {to} does not continue: {error}"),
    }
}

/// The report of a device whose live table is a mirror.
fn live_mirror(mapped: &RegisteredDevice) -> Option<MirrorReport> {
    let table = mapped.device.live()?;
    let [entry] = table.targets() else { return None };
    entry.target.as_mirror().map(|mirror| mirror.report())
}
