//! Where disks are: the words of tables, compared with the records of moves.

use super::move_error;
use crate::error::VerbError;
use crate::registry::{BaseDir, DeviceRegistry};
use crate::state_folder::StableDiskId;
use crate::state_folder::moves::{DiskPlace, MoveRecord, PlaceMatch};
use udm_core::Sector;
use udm_core::errno::{EBUSY, EIO};
use udm_dm::{DeviceRange, ResolvedDevice, Table};
use udm_wire::table::TableLine;
use udm_wire::uri::{self, DeviceUri};
use udm_wire::words::escape_table_word;

/// The place of a range of `device`; `None` if the device ends with the server. May block.
pub(super) fn place_of(
    registry: &DeviceRegistry,
    device: &ResolvedDevice,
    start: Sector,
) -> Option<DiskPlace> {
    let disk = registry.disk_id(device)?;
    Some(DiskPlace { word: registry.uri_of(device.number), disk, start: start.0 })
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

fn records(registry: &DeviceRegistry, name: &str) -> Result<Vec<MoveRecord>, VerbError> {
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
    let records = records(registry, name)?;
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

/// Refuses a table over a place that a disk has left, or over one to which a disk is being moved. The
/// mirror of that move may use it. May read the state folder.
///
/// # Errors
/// EBUSY with the way out; EIO if the records can't be read.
pub(crate) fn check_old_places(
    registry: &DeviceRegistry,
    name: &str,
    table: &Table,
) -> Result<(), VerbError> {
    let records = records(registry, name)?;
    if records.is_empty() {
        return Ok(());
    }
    let is_mirror = table.targets().iter().any(|entry| entry.target.as_mirror().is_some());
    let ranges = table.targets().iter().flat_map(|entry| entry.target.devices());
    for DeviceRange { device, start, len, .. } in ranges {
        let Some(disk) = registry.disk_id_cached(device.number) else { continue };
        for record in &records {
            let overlaps = |place: &&DiskPlace| {
                place.compare(&disk) == PlaceMatch::Same
                    && start.0 < place.start + record.sectors
                    && place.start < start.0 + len.0
            };
            let is_destination = record.destination.iter().any(|place| overlaps(&place));
            if is_destination && is_mirror {
                continue;
            }
            let (is, name_of_disk) = (&record.current.word, &record.name);
            if let Some(old) = record.old.iter().find(overlaps) {
                let was = &old.word;
                let why = format!(
                    "{was} has old data: {name_of_disk} was moved from there to {is}; if the old data is wanted, \"udm move forget {was}\""
                );
                return Err(move_error(name, EBUSY, why));
            }
            if let (true, Some(to)) = (is_destination, &record.destination) {
                let why = format!(
                    "{} is not complete: {name_of_disk} is being moved there from {is}; see \"udm move list\"",
                    to.word
                );
                return Err(move_error(name, EBUSY, why));
            }
        }
    }
    Ok(())
}
