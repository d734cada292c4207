//! Records of clones in the state folder: written by the verb that creates a clone, and kept right
//! by the verbs that change or remove its device.

use super::{clone_error, clone_report};
use crate::error::VerbError;
use crate::registry::{DeviceRegistry, RegisteredDevice};
use crate::state_folder::clones::CloneRecord;
use crate::verbs::handover::table_with_uris;
use udm_backends::DiskIdentity;
use udm_core::errno::{EBUSY, EIO};
use udm_dm::{CloneReport, Table};
use udm_wire::clone_table::CloneTableLine;
use udm_wire::table::parse_table;

/// What a clone consists of, before its device exists.
pub(super) struct RecordedParts<'a> {
    /// The table, with URIs.
    pub table: &'a str,
    pub source: &'a udm_dm::ResolvedDevice,
    pub destination: &'a udm_dm::ResolvedDevice,
    pub metadata: &'a udm_dm::ResolvedDevice,
}

/// Writes the record of a clone that is about to be created. Returns its identifier; `None` without
/// a state folder that can be written, or if a part of the clone ends with the server. May block.
///
/// # Errors
/// EBUSY if another server has the clone; EIO if the records cannot be read.
pub(super) fn record_new_clone(
    registry: &DeviceRegistry,
    name: &str,
    parts: &RecordedParts<'_>,
) -> Result<Option<String>, VerbError> {
    let Some(folder) = registry.state_folder() else { return Ok(None) };
    let ids = (registry.disk_id(parts.destination), registry.disk_id(parts.metadata));
    let (Some(destination), Some(metadata)) = ids else { return Ok(None) };
    let source = registry.uri_of(parts.source.number);
    if registry.disk_id(parts.source).is_none() && !outlives_server(&source) {
        return Ok(None);
    }
    let id = CloneRecord::id_of(&destination);
    let known = folder.clones().map_err(|why| clone_error(name, EIO, why))?;
    if let Some(other) = known.iter().find(|one| one.id == id && folder.has_clone_elsewhere(one)) {
        let why = format!("another server has the clone {} on {}", other.name, destination.name());
        return Err(clone_error(name, EBUSY, why));
    }
    let size = parts.source.device.limits().size.0;
    let lines = parse_table(parts.table).map_err(|error| clone_error(name, EIO, error.to_string()))?;
    let objects = registry.opener().objects_in_use().into_iter();
    let record = CloneRecord {
        id: id.clone(),
        name: name.to_owned(),
        uuid: None,
        table: parts.table.to_owned(),
        sectors: lines.first().map_or(size, |line| line.len),
        source_sectors: size,
        destination,
        metadata: Some(metadata),
        object: objects.into_iter().find(|object| object.uri == source).map(Into::into),
        throttle: None,
        vhost_user: Vec::new(),
        ublk: None,
        server: String::new(),
    };
    registry.clones.forget(&id);
    if let Err(error) = put(registry, &record) {
        tracing::warn!("{error}: it will not return after a restart of the server");
        return Ok(None);
    }
    Ok(Some(id))
}

/// True for a source whose content does not end with the server, and which no file identifies.
fn outlives_server(uri: &str) -> bool {
    use udm_wire::uri::{DeviceUri, parse_device_uri};
    matches!(
        parse_device_uri(uri),
        Ok(DeviceUri::Object(_) | DeviceUri::Pattern { .. } | DeviceUri::Mapped(_))
    )
}

/// Writes a record durably.
fn put(registry: &DeviceRegistry, record: &CloneRecord) -> Result<(), VerbError> {
    let Some(folder) = registry.state_folder() else { return Ok(()) };
    folder.put_clone(record).map_err(|error| {
        clone_error(&record.name, EIO, format!("the record of the clone cannot be written: {error}"))
    })
}

/// The record of a device, if it is a clone of this server.
fn record_of(registry: &DeviceRegistry, mapped: &RegisteredDevice) -> Option<CloneRecord> {
    registry.state_folder()?.own_clone(&mapped.device.name())
}

/// Follows a message that a clone has executed: what it set is set again after a restart. May
/// block.
///
/// # Errors
/// EIO if the record cannot be written: the message holds until the server ends.
pub(crate) fn record_message(
    registry: &DeviceRegistry,
    mapped: &RegisteredDevice,
    words: &[String],
) -> Result<(), VerbError> {
    let Some(record) = record_of(registry, mapped).filter(|record| !record.is_finished()) else {
        return Ok(());
    };
    let Some(mut line) = parse_clone_line(&record.table) else { return Ok(()) };
    let value = words.get(1).and_then(|value| value.parse().ok());
    match words.first().map(|word| word.to_ascii_lowercase()).as_deref() {
        Some("enable_hydration") => line.no_hydration = false,
        Some("disable_hydration") => line.no_hydration = true,
        Some("hydration_threshold") => line.threshold = value,
        Some("hydration_batch_size") => line.batch = value,
        _ => return Ok(()),
    }
    let table = line.to_line().to_string();
    if table == record.table { Ok(()) } else { put(registry, &CloneRecord { table, ..record }) }
}

/// The clone in a table of one line.
pub(super) fn parse_clone_line(table: &str) -> Option<CloneTableLine> {
    CloneTableLine::of_table(&parse_table(table).ok()?)
}

/// Writes that the clone is its destination by now. Returns the record as it was, for
/// [`undo_finish`]. May block.
///
/// # Errors
/// EIO if the record cannot be written.
pub(super) fn record_finish(
    registry: &DeviceRegistry,
    mapped: &RegisteredDevice,
    report: &CloneReport,
) -> Result<Option<CloneRecord>, VerbError> {
    let Some(record) = record_of(registry, mapped) else { return Ok(None) };
    let uri = registry.uri_of(report.destination.number);
    let destination = udm_wire::words::escape_table_word(&uri).into_owned();
    let table = format!("0 {} linear {destination} 0", report.len.0);
    put(registry, &CloneRecord { table, metadata: None, object: None, ..record.clone() })?;
    Ok(Some(record))
}

/// Puts the record back: the clone was not finished. If that fails, the clone returns as its
/// destination, which is complete.
pub(super) fn undo_finish(registry: &DeviceRegistry, record: Option<CloneRecord>) {
    if let Some(Err(error)) = record.map(|record| put(registry, &record)) {
        tracing::warn!("{error}");
    }
}

/// Follows a change of the live table by a verb: another `clone` line over the same metadata is the
/// clone as before, with other words. Any other table ends the record, since the device is no
/// clone; those that snapshots and moves put over a finished clone do not. May block.
pub(crate) fn follow_live_table(registry: &DeviceRegistry, mapped: &RegisteredDevice) {
    let (Some(record), Some(live)) = (record_of(registry, mapped), mapped.device.live()) else { return };
    let kept = match clone_report(&live) {
        // A stand-in of the source is not the source.
        Some(_) if registry.clones.waits(&record.id) => return,
        Some(report) => follow_clone_table(registry, &record, &live, &report),
        None => record.is_finished() && follow_finished(registry, &record, &live),
    };
    if kept {
        return;
    }
    let name = &record.name;
    tracing::info!(
        "{name}: another table has taken the place of the clone, which does not return after a restart"
    );
    forget(registry, &record);
}

/// Records a changed table of the clone. Returns false if it is another clone.
fn follow_clone_table(
    registry: &DeviceRegistry,
    record: &CloneRecord,
    live: &Table,
    report: &CloneReport,
) -> bool {
    let disk = registry.disk_id(&report.destination);
    if record.is_finished() || disk.is_none_or(|disk| !disk.is(&record.destination)) {
        return false;
    }
    let table = table_with_uris(registry, live);
    let (was, is) = (parse_clone_line(&record.table), parse_clone_line(&table));
    if was != is {
        let source_sectors = report.source.device.limits().size.0;
        let objects = registry.opener().objects_in_use().into_iter();
        let uri = registry.uri_of(report.source.number);
        let object = objects.into_iter().find(|object| object.uri == uri).map(Into::into);
        let record = CloneRecord { table, source_sectors, object, ..record.clone() };
        if let Err(error) = put(registry, &record) {
            tracing::warn!("{error}");
        }
    }
    true
}

/// Follows a finished clone to the place to which it has moved. Returns false for a table that is
/// neither the clone, nor an origin of snapshots over it, nor the mirror of a move.
fn follow_finished(registry: &DeviceRegistry, record: &CloneRecord, live: &Table) -> bool {
    let [entry] = live.targets() else { return false };
    let kind = entry.target.type_name();
    if kind != "linear" {
        return matches!(kind, "snapshot-origin" | "snapshot-merge" | "mirror");
    }
    let place = entry.target.data_path().into_linear();
    let Some(disk) = place.and_then(|(disk, _)| registry.disk_id(&disk)) else { return false };
    if !disk.is_exactly(&record.destination) {
        let table = table_with_uris(registry, live);
        if let Err(error) = put(registry, &CloneRecord { table, destination: disk, ..record.clone() }) {
            tracing::warn!("{error}");
        }
    }
    true
}

/// Forgets the clone of a device that a verb has removed. May block.
///
/// # Errors
/// EIO if the record stays: the clone would return.
pub(crate) fn forget_removed_clone(registry: &DeviceRegistry, name: &str) -> Result<(), VerbError> {
    let Some(folder) = registry.state_folder().filter(|_| !registry.is_ending()) else { return Ok(()) };
    let Some(record) = folder.own_clone(name) else { return Ok(()) };
    registry.clones.forget(&record.id);
    folder.forget_clone(&record.id).map_err(|error| {
        let why = format!(
            "the device is removed, but its record is not, and it may return after a restart: {error}"
        );
        clone_error(name, EIO, why)
    })
}

/// Forgets a record. A failure is logged.
pub(super) fn forget(registry: &DeviceRegistry, record: &CloneRecord) {
    registry.clones.forget(&record.id);
    let forgotten = registry.state_folder().map(|folder| folder.forget_clone(&record.id));
    if let Some(Err(error)) = forgotten {
        tracing::warn!("{}: the record of the clone stays: {error}", record.name);
    }
}

/// Takes the records of the clones among the devices that another process has handed over. May
/// block.
pub(crate) fn take_over_clones(registry: &DeviceRegistry) {
    let Some(folder) = registry.state_folder() else { return };
    let records = folder.clones().unwrap_or_else(|why| {
        tracing::warn!("clones may not return after a restart: {why}");
        Vec::new()
    });
    for record in records.into_iter().filter(|record| !folder.has_clone_elsewhere(record)) {
        let Ok(mapped) = registry.find(&record.name) else { continue };
        let report = mapped.device.live().and_then(|live| clone_report(&live));
        let is_it = match &report {
            Some(report) => {
                registry.disk_id(&report.destination).is_some_and(|disk| disk.is(&record.destination))
            }
            None => record.is_finished(),
        };
        if !is_it || mapped.device.name() != record.name {
            continue;
        }
        match folder.take_clone(&record.id) {
            Ok(Some(taken)) => {
                let source = report.map(|report| registry.uri_of(report.source.number));
                if source.is_some_and(|uri| super::stand_in::is_stand_in(&uri, &taken)) {
                    registry.clones.wait(
                        &taken,
                        "its source was away when the server was upgraded".into(),
                        true,
                    );
                }
            }
            Ok(None) => {}
            Err(error) => {
                tracing::warn!("{}: the clone may not return after a restart: {error}", record.name);
            }
        }
    }
}

/// True if `identity` and the recorded disk may be one disk. (A disk without a file is its name.)
pub(super) fn is_recorded_disk(
    registry: &DeviceRegistry,
    word: &str,
    recorded: &crate::state_folder::StableDiskId,
) -> Result<bool, String> {
    let uri = udm_wire::uri::parse_device_uri(word).map_err(|error| error.to_string())?;
    let identity = registry.opener().identify(&uri).map_err(|error| error.text)?;
    let found = match identity {
        DiskIdentity::Virtual => crate::state_folder::StableDiskId::of_named_uri(&uri),
        identity => crate::state_folder::StableDiskId::of_uri(&uri.to_string(), identity),
    };
    Ok(found.is_none_or(|found| found.is_exactly(recorded)))
}
