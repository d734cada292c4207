//! Where disks are: the words of tables, compared with the records of moves.

use super::move_error;
use crate::error::VerbError;
use crate::registry::{BaseDir, DeviceRegistry, RegisteredDevice, TableResolver};
use crate::state_folder::StableDiskId;
use crate::state_folder::moves::{DiskPiece, DiskPlace, MoveRecord, PlaceMatch};
use crate::verbs::tables::parse_table_or_device_word;
use std::sync::Arc;
use udm_core::errno::{EBUSY, EIO};
use udm_core::{Sector, Sectors};
use udm_dm::target::DeviceRange;
use udm_dm::{DeviceNameResolver as _, ResolvedDevice, Table};
use udm_wire::table::TableLine;
use udm_wire::uri::{self, DeviceUri};
use udm_wire::words::escape_table_word;

/// Maximum number of pieces of a place: a record has at most 256 KiB.
const PIECES_MAX: usize = 256;

/// The place of a range of `device`; `None` if the device ends with the server. May block.
pub(super) fn place_of(
    registry: &DeviceRegistry,
    device: &ResolvedDevice,
    start: Sector,
) -> Option<DiskPlace> {
    let disk = registry.disk_id(device)?;
    let mut beneath = Vec::new();
    add_pieces(registry, device, &mut beneath);
    Some(DiskPlace { word: registry.uri_of(device.number), disk, start: start.0, beneath })
}

/// Adds what the live table of a mapped device uses, and the tables below it.
fn add_pieces(registry: &DeviceRegistry, device: &ResolvedDevice, pieces: &mut Vec<DiskPiece>) {
    if device.device.stacked().is_none() || pieces.len() >= PIECES_MAX {
        return;
    }
    let live = registry.find(&device.number.to_string()).ok().and_then(|mapped| mapped.device.live());
    for range in live.iter().flat_map(|table| ranges_of(table)) {
        let disk = registry.disk_id(&range.device);
        pieces.extend(disk.map(|disk| DiskPiece { disk, start: range.start.0, sectors: range.len.0 }));
        add_pieces(registry, &range.device, pieces);
    }
}

/// The disk, first sector and length of a line of one linear target. The device need not exist.
fn linear_place(
    registry: &DeviceRegistry,
    lines: &[TableLine],
    folder: &BaseDir,
) -> Option<(StableDiskId, u64, u64)> {
    let [TableLine { start: 0, len, kind, args, .. }] = lines else { return None };
    let ([word, start], "linear") = (args.as_slice(), kind.as_str()) else { return None };
    let uri = match folder.resolve(word).ok()? {
        DeviceUri::Number { major, minor } => {
            let number = udm_core::DevNo { major, minor };
            uri::parse_device_uri(&registry.uri_of(number)).ok()?
        }
        uri => uri,
    };
    Some((StableDiskId::of_named_uri(&uri)?, start.parse().ok()?, *len))
}

/// The place and length of a table that is one linear line, or of a device that stands for one. The
/// device is opened. May block.
pub(super) fn place_of_table(
    registry: &DeviceRegistry,
    mapped: &Arc<RegisteredDevice>,
    name: &str,
    table: &str,
    folder: &BaseDir,
) -> Option<(DiskPlace, Sectors)> {
    // As it will be loaded: an old place leads to the current one.
    let lines = parse_table_or_device_word(name, table).ok()?;
    let moved = redirect_to_current_place(registry, name, &lines, folder).ok()?;
    let lines = match &moved {
        Some(table) => parse_table_or_device_word(name, table).ok()?,
        None => lines,
    };
    let [TableLine { start: 0, len, kind, args, .. }] = lines.as_slice() else { return None };
    let ([word, start], "linear") = (args.as_slice(), kind.as_str()) else { return None };
    let start = Sector(start.parse().ok()?);
    let device = TableResolver::new(registry, folder).of(mapped).get(word).ok()?;
    let len = match *len {
        0 => Sectors(device.device.limits().size.0.checked_sub(start.0)?),
        len => Sectors(len),
    };
    Some((place_of(registry, &device, start)?, len))
}

fn read_move_records(registry: &DeviceRegistry, name: &str) -> Result<Vec<MoveRecord>, VerbError> {
    let Some(folder) = registry.state_folder() else { return Ok(Vec::new()) };
    folder.moves().map_err(|why| move_error(name, EIO, why))
}

/// The table over the place to which a disk was moved, if `lines` are one linear line over a place
/// that the disk has left. The length 0 stands for the whole device. May block.
///
/// # Errors
/// EBUSY if another disk has the name of the old place by now; EIO if the records can't be read.
pub(crate) fn redirect_to_current_place(
    registry: &DeviceRegistry,
    name: &str,
    lines: &[TableLine],
    folder: &BaseDir,
) -> Result<Option<String>, VerbError> {
    let records = read_move_records(registry, name)?;
    if records.is_empty() {
        return Ok(None);
    }
    let Some((disk, start, len)) = linear_place(registry, lines, folder) else { return Ok(None) };
    let found = records.iter().find_map(|record| {
        let old =
            record.old.iter().find(|old| old.start == start && old.compare(&disk) != PlaceMatch::Other)?;
        Some((record, old))
    });
    let Some((record, old)) = found else { return Ok(None) };
    let (was, is) = (&old.word, &record.current.word);
    if old.compare(&disk) == PlaceMatch::Replaced {
        let why = format!(
            "{was} was moved to {is}, and another disk has its name now: name {is} in the table, or \"udm move forget {was}\""
        );
        return Err(move_error(name, EBUSY, why));
    }
    if len != 0 && len != record.sectors {
        let why = format!(
            "{was} was moved to {is} with {} sectors, and the table has {len}: name {is} in the table",
            record.sectors
        );
        return Err(move_error(name, EBUSY, why));
    }
    tracing::warn!("{name}: {was} was moved to {is}, which is served: name {is} in the table");
    Ok(Some(linear_table(record.sectors, &record.current)))
}

/// The table of a disk at `place`.
pub(super) fn linear_table(sectors: u64, place: &DiskPlace) -> String {
    format!("0 {sectors} linear {} {}", escape_table_word(&place.word), place.start)
}

/// A device other than `mapped` with a table that uses a part of `place`: the writes of that device
/// would not reach the new place of a move.
pub(super) fn other_user(
    registry: &DeviceRegistry,
    mapped: &Arc<RegisteredDevice>,
    place: &DiskPlace,
    len: Sectors,
) -> Option<String> {
    let others = registry.all().into_iter().filter(|other| !Arc::ptr_eq(other, mapped));
    let uses = |other: &Arc<RegisteredDevice>| {
        let tables = [other.device.live(), other.device.inactive()];
        tables.iter().flatten().any(|table| {
            ranges_of(table).any(|range| {
                let disk = registry.disk_id_cached(range.device.number);
                disk.is_some_and(|disk| place.overlaps(len.0, &disk, range.start.0, range.len.0))
            })
        })
    };
    // The device of the place uses what is below it.
    let is_part = |other: &Arc<RegisteredDevice>| place.is_part(&StableDiskId::mapped(&other.device.name()));
    others.into_iter().filter(|other| !is_part(other)).find(uses).map(|other| other.device.name())
}

fn ranges_of(table: &Table) -> impl Iterator<Item = DeviceRange> {
    table.targets().iter().flat_map(|entry| entry.target.devices())
}

/// Refuses a table over a place that a disk has left, or over one to which a disk is being moved;
/// the mirror of that move may use it. Refuses a table of another device over the place of a disk
/// that this server moves. May read the state folder.
///
/// # Errors
/// EBUSY with the way out; EIO if the records can't be read.
pub(crate) fn check_old_places(
    registry: &DeviceRegistry,
    mapped: &Arc<RegisteredDevice>,
    name: &str,
    table: &Table,
) -> Result<(), VerbError> {
    let records = read_move_records(registry, name)?;
    if records.is_empty() {
        return Ok(());
    }
    // A device below a place is a part of it, whatever its table.
    let own = StableDiskId::mapped(name);
    let mirrors = || table.targets().iter().filter_map(|entry| entry.target.as_mirror());
    let is_mirror = mirrors().next().is_some();
    let is_logged = mirrors().any(|mirror| mirror.report().log.is_some());
    for range in ranges_of(table) {
        let Some(disk) = registry.disk_id_cached(range.device.number) else { continue };
        for record in &records {
            let overlaps = |place: &&DiskPlace| {
                place.overlaps(record.sectors, &disk, range.start.0, range.len.0) && !place.is_part(&own)
            };
            let (is, moved) = (&record.current.word, &record.name);
            let refuse = |why: String| Err(move_error(name, EBUSY, why));
            match record.destination.as_ref().filter(overlaps) {
                Some(_) if is_mirror => continue,
                Some(to) => {
                    let to = &to.word;
                    return refuse(format!(
                        "{to} is not complete: {moved} is being moved there from {is}; see \"udm move list\""
                    ));
                }
                None => {}
            }
            if let Some(was) = record.old.iter().find(overlaps).map(|old| &old.word) {
                return refuse(format!(
                    "{was} has old data: {moved} was moved from there to {is}; if the old data is wanted, \"udm move forget {was}\""
                ));
            }
            if !is_logged && record.log.is_some() && overlaps(&&record.current) {
                forget_log(registry, name, record)?;
            }
            let is_moving = registry.moves.all().iter().any(|job| {
                let facts = job.facts();
                facts.record.id == record.id && !facts.state.is_over() && !job.is_of(mapped)
            });
            if is_moving && overlaps(&&record.current) {
                return refuse(format!("{is} is the disk of {moved}, which is being moved"));
            }
        }
    }
    Ok(())
}

/// The table of a device writes to the place of a disk without the mirror of its move: nobody may
/// continue from the log.
fn forget_log(registry: &DeviceRegistry, name: &str, record: &MoveRecord) -> Result<(), VerbError> {
    let Some(folder) = registry.state_folder() else { return Ok(()) };
    let without = MoveRecord { log: None, ..record.clone() };
    let failed = |error| move_error(name, EIO, format!("the record of a move cannot be written: {error}"));
    folder.put_move(&without).map(drop).map_err(failed)
}
