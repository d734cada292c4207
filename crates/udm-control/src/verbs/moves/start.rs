//! The begin of a move.

use super::job::{MoveJob, MoveState};
use super::list::describe_job;
use super::move_error;
use super::places::{other_user, place_of};
use crate::api;
use crate::error::VerbError;
use crate::registry::{BaseDir, DeviceRegistry, RegisteredDevice};
use crate::state_folder::StateFolder;
use crate::state_folder::moves::{DiskPlace, MoveRecord, PlaceMatch};
use crate::verbs::clone::files::NewCloneFiles;
use crate::verbs::reload::reload_live_table;
use crate::verbs::{CancelToken, block_on_verb};
use std::io;
use std::sync::Arc;
use udm_core::errno::{EBUSY, EINVAL, EIO, ENOSPC, EOPNOTSUPP};
use udm_core::{Device, SECTOR_SIZE, Sector, Sectors};
use udm_dm::{EventKind, ResolvedDevice};
use udm_wire::mirror_log::MirrorLogLayout;
use udm_wire::words::escape_table_word;

/// The least region size in bytes, and the maximum number of regions.
const REGION_BYTES: u64 = 64 << 10;
const REGIONS_MAX: u64 = 1 << 31;

/// The least region size of a mirror, in sectors.
const REGION_MIN: u64 = 8;

/// The disk below a device that can be moved.
pub(super) struct MovableDisk {
    pub device: ResolvedDevice,
    pub start: Sector,
    pub len: Sectors,
    logical_block: u32,
}

/// Begins to move the device `name` to another place. The device is served from both until the copy
/// is complete, and then from the new one alone. A file that does not exist is made. May block.
///
/// # Errors
/// ENXIO if there is no such device. EOPNOTSUPP without a state folder. EINVAL if its table is not
/// one linear line; EBUSY if it is being moved, suspended, or has a table in its inactive slot.
/// ENOSPC if the destination is too small, EEXIST if it has data and `force` is not set; otherwise
/// the error of the destination. The device is as it was then.
pub fn start_move(
    registry: &Arc<DeviceRegistry>,
    name: &str,
    request: &api::StartMoveRequest,
    folder: &BaseDir,
    cancel_token: &CancelToken,
) -> Result<api::MoveDescription, VerbError> {
    let mapped = registry.find(name)?;
    let Some(state_folder) = registry.state_folder() else {
        let why = "the server has no state folder, so nothing would say after a crash where the disk is: start it with --state";
        return Err(move_error(name, EOPNOTSUPP, why));
    };
    let _alone = registry.moves.lock_start();
    if let Some(job) = registry.moves.of(&mapped).filter(|job| !job.facts().state.is_over()) {
        let why = format!("it is being moved to {}: wait, or \"udm move stop {name}\"", job.facts().to);
        return Err(move_error(name, EBUSY, why));
    }
    let disk = movable_disk(name, &mapped)?;
    let current = place_of(registry, &disk.device, disk.start);
    let current = current.ok_or_else(|| {
        move_error(name, EOPNOTSUPP, "its content ends with the server: no record can say where it is")
    })?;
    if let Some(other) = other_user(registry, &mapped, &current, disk.len) {
        let why = format!(
            "{other} uses {} too, or a disk below it, and would stay there: remove it first",
            current.word
        );
        return Err(move_error(name, EBUSY, why));
    }
    let record = record_of(state_folder, name, &current, disk.len)?;
    let mut files = NewCloneFiles { registry, name, folder, cancel_token, made: Vec::new() };
    let destination = prepare_destination(&mut files, request, &disk, &record)?;
    let log = Some(make_log(&mut files, state_folder, request, &disk, &record)?);
    let moving = MoveRecord {
        name: mapped.device.name(),
        destination: Some(destination),
        sectors: disk.len.0,
        log,
        ..record.clone()
    };
    let moving = put(state_folder, name, &moving)?;
    if let Err(error) = load_mirror(registry, &mapped, name, &moving, cancel_token) {
        // The record of a move that did not begin would continue it after a restart.
        put(state_folder, name, &record)?;
        return Err(error);
    }
    files.keep();
    let job = MoveJob::new(&mapped, moving, MoveState::Copying);
    job.set_paused(request.paused == Some(true));
    registry.moves.add(&job);
    mapped.publish(EventKind::MoveStarted, &format!("it is being moved to {}", job.facts().to));
    Ok(describe_job(&job))
}

/// The disk below a device whose live table is one linear line.
pub(super) fn movable_disk(name: &str, mapped: &Arc<RegisteredDevice>) -> Result<MovableDisk, VerbError> {
    let refuse = |why: String| Err(move_error(name, EINVAL, why));
    let Some(table) = mapped.device.live() else {
        return refuse("it has no table".into());
    };
    if table.is_set_read_only() {
        return refuse("its table was loaded read-only: load it for writing first".into());
    }
    let [entry] = table.targets() else {
        return refuse(format!(
            "its table has several lines, and a move needs one linear line: {}",
            way_of_replaceable_table(name, table.limits().size)
        ));
    };
    let kind = entry.target.type_name();
    let below = entry.target.data_path().into_linear().filter(|_| kind == "linear");
    match (below, kind) {
        (Some((device, start)), _) => {
            let logical_block = mapped.device.limits().logical_block;
            Ok(MovableDisk { device, start, len: table.limits().size, logical_block })
        }
        (None, "snapshot-origin" | "snapshot-merge") => {
            refuse("it has snapshots, which belong to the disk: remove or merge them first".into())
        }
        (None, "snapshot") => refuse("it is a snapshot, which belongs to its origin: merge it first".into()),
        (None, "clone") => refuse("it is a clone: finish it first (\"udm clone finish\")".into()),
        (None, kind) if table.immutable_type().is_some() => refuse(format!(
            "its table is {kind}, which no other table replaces while it is live: at the next start, put it into a device of its own, and a linear line over that"
        )),
        (None, kind) => refuse(format!(
            "its table is {kind}, and a move needs one linear line: {}",
            way_of_replaceable_table(name, table.limits().size)
        )),
    }
}

/// The commands that put a table into a device of its own, while clients use it.
fn way_of_replaceable_table(name: &str, len: Sectors) -> String {
    format!(
        "put it into a device of its own (udm create {name}-old --table \"$(udm table {name})\"), and a linear line over that (udm load {name} --table \"0 {len} linear @{name}-old 0\"; udm resume {name})"
    )
}

/// The record of the disk, or a new one.
fn record_of(
    folder: &StateFolder,
    name: &str,
    current: &DiskPlace,
    len: Sectors,
) -> Result<MoveRecord, VerbError> {
    let records = folder.moves().map_err(|why| move_error(name, EIO, why))?;
    let known = records.into_iter().find(|record| record.current.is(current));
    match known {
        Some(record) if folder.is_moved_elsewhere(&record) && record.destination.is_some() => {
            Err(move_error(name, EBUSY, "another server moves it"))
        }
        Some(record) => Ok(MoveRecord { destination: None, log: None, ..record }),
        None => Ok(MoveRecord::new(name, len.0, current.clone())),
    }
}

/// Makes or checks the destination.
fn prepare_destination(
    files: &mut NewCloneFiles<'_>,
    request: &api::StartMoveRequest,
    disk: &MovableDisk,
    record: &MoveRecord,
) -> Result<DiskPlace, VerbError> {
    let (registry, name) = (files.registry, files.name);
    let uri = files.folder.resolve(&request.destination);
    let uri = uri.map_err(|error| move_error(name, error.errno, error.reason))?;
    let is_made = files.make(&uri, disk.len)?;
    let device = files.open(&uri)?;
    let place = place_of(registry, &device, Sector(0))
        .ok_or_else(|| move_error(name, EOPNOTSUPP, format!("{uri}: its content ends with the server")))?;
    if place.compare(&record.current.disk) == PlaceMatch::Same {
        return Err(move_error(name, EINVAL, format!("it is on {uri} already")));
    }
    let limits = device.device.limits();
    if limits.read_only {
        return Err(move_error(name, EINVAL, format!("{uri} is read-only")));
    }
    if limits.size < disk.len {
        let (has, needs) = (limits.size.bytes(), disk.len.bytes());
        return Err(move_error(name, ENOSPC, format!("{uri} has {has} bytes, and the disk {needs}")));
    }
    if limits.logical_block > disk.logical_block {
        let why = format!(
            "{uri} has blocks of {} bytes, and the disk {}: its clients would have to know",
            limits.logical_block, disk.logical_block
        );
        return Err(move_error(name, EINVAL, why));
    }
    let was_there = record.old.iter().any(|old| old.is(&place));
    if !is_made && !was_there && request.force != Some(true) {
        let refused = files.check_zeroes(&uri);
        refused.map_err(|error| match error.error.errno.abs() {
            udm_core::errno::EEXIST => {
                let why = format!("{uri} has data, and is not overwritten without --force");
                move_error(name, udm_core::errno::EEXIST, why)
            }
            _ => error,
        })?;
    }
    Ok(place)
}

/// Writes the record durably.
pub(super) fn put(folder: &StateFolder, name: &str, record: &MoveRecord) -> Result<MoveRecord, VerbError> {
    let failed = |error| move_error(name, EIO, format!("the record of the move cannot be written: {error}"));
    folder.put_move(record).map_err(failed)
}

/// Replaces the live table by a mirror of both places. May block.
pub(super) fn load_mirror(
    registry: &DeviceRegistry,
    mapped: &Arc<RegisteredDevice>,
    name: &str,
    record: &MoveRecord,
    cancel_token: &CancelToken,
) -> Result<(), VerbError> {
    let table = mirror_table(record);
    let folder = BaseDir::none();
    let reload = reload_live_table(registry, mapped, name, &table, &folder, cancel_token);
    block_on_verb(reload).map(drop).map_err(|error| error.at(None))
}

/// The size of the regions of a disk.
fn region_of(len: Sectors) -> Sectors {
    let least = (REGION_BYTES / SECTOR_SIZE).max(len.0.div_ceil(REGIONS_MAX).next_power_of_two());
    // As the kernel, a mirror has no region that is longer than itself.
    let most = len.0.checked_ilog2().map_or(REGION_MIN, |shift| (1 << shift).max(REGION_MIN));
    Sectors(least.min(most))
}

/// Makes the log of a move. Returns the word for it.
fn make_log(
    files: &mut NewCloneFiles<'_>,
    folder: &StateFolder,
    request: &api::StartMoveRequest,
    disk: &MovableDisk,
    record: &MoveRecord,
) -> Result<String, VerbError> {
    let Some(word) = &request.log else {
        let made = new_log(folder, &MoveRecord { sectors: disk.len.0, ..record.clone() });
        return made.map_err(|error| {
            move_error(files.name, EIO, format!("the log of the move cannot be made: {error}"))
        });
    };
    let name = files.name;
    let uri = files.folder.resolve(word).map_err(|error| move_error(name, error.errno, error.reason))?;
    if !files.make(&uri, log_size(disk.len))? {
        // An old log would say what was copied to another place, or at another time.
        files.check_zeroes(&uri).map_err(|error| match error.error.errno.abs() {
            udm_core::errno::EEXIST => {
                let why = format!("the log {uri} has data: remove it, or name another file");
                move_error(name, udm_core::errno::EEXIST, why)
            }
            _ => error,
        })?;
    }
    Ok(uri.to_string())
}

fn log_size(len: Sectors) -> Sectors {
    MirrorLogLayout::new(len.0.div_ceil(region_of(len).0)).sectors()
}

/// Makes a new log in the state folder, which says that nothing is copied. Returns the word for it.
pub(super) fn new_log(folder: &StateFolder, record: &MoveRecord) -> io::Result<String> {
    let made = folder.make_move_log(&record.id, log_size(Sectors(record.sectors)).bytes())?;
    Ok(made.display().to_string())
}

/// The table of a mirror of both places.
pub(super) fn mirror_table(record: &MoveRecord) -> String {
    let len = Sectors(record.sectors);
    let region = region_of(len);
    let leg = |place: &DiskPlace| format!("{} {}", escape_table_word(&place.word), place.start);
    let legs: Vec<String> =
        [Some(&record.current), record.destination.as_ref()].into_iter().flatten().map(leg).collect();
    let log = record.log.as_ref().map(|log| format!("disk 2 {}", escape_table_word(log)));
    let log = log.unwrap_or_else(|| "core 1".into());
    format!("0 {len} mirror {log} {region} 2 {} 1 handle_errors", legs.join(" "))
}
