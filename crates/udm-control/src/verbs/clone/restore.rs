//! Clones that were created by name return when their server starts.
//!
//! Contract: a clone returns with its own destination and metadata, or not at all: another file
//! under the name of one of them is refused. If only the source cannot be used, because it is away
//! or is another one by now, the clone returns with a stand-in: the hydrated part can be read and
//! written, and the rest fails. Whatever is missing is tried again.

use super::record::{is_recorded_disk, parse_clone_line};
use super::stand_in::table_without_source;
use super::waiting::WaitingClone;
use super::{clone_error, clone_report};
use crate::error::VerbError;
use crate::registry::{BaseDir, DeviceRegistry, TableResolver};
use crate::state_folder::StableDiskId;
use crate::state_folder::clones::CloneRecord;
use crate::verbs::change::{DeviceSpec, create_device};
use crate::verbs::reload::reload_live_table;
use crate::verbs::snapshot::attach_snapshots_of_clones;
use crate::verbs::ublk::restore_ublk_disk;
use crate::verbs::vhost_user::restore_vhost_user_sockets;
use crate::verbs::{CancelToken, block_on_verb};
use futures_util::stream::{self, StreamExt};
use std::sync::Arc;
use udm_core::errno::{EBUSY, EINVAL, EIO, ENODEV, ENXIO};
use udm_dm::{DeviceNameResolver, ResolvedDevice};
use udm_wire::table::parse_table;

/// Number of clones that are restored at the same time: each may wait for a server.
const AT_ONCE: usize = 16;

/// Creates the devices of the clones in the state folder that no other server has. `declared` are
/// names of devices that are created by others. With `is_last`, no device is created afterwards, so
/// a clone of a mapped device that is missing gets a stand-in. A clone that cannot be created waits
/// and is tried again.
pub async fn restore_clones(registry: &Arc<DeviceRegistry>, declared: &[&str], is_last: bool) {
    let Some(folder) = registry.state_folder() else { return };
    let records = match folder.clones() {
        Ok(records) => records,
        Err(why) => return tracing::warn!("clones have not returned: {why}"),
    };
    let is_left = |record: &CloneRecord| {
        folder.own_clone(&record.name).is_none_or(|own| own.id != record.id)
            || registry.find(&record.name).is_err()
    };
    let is_here = |record: &&CloneRecord| {
        !folder.has_clone_elsewhere(record) && is_left(record) && !registry.clones.waits(&record.id)
    };
    let records: Vec<CloneRecord> = records
        .iter()
        .filter(is_here)
        .filter(|record| is_last || !declared.contains(&record.name.as_str()))
        .cloned()
        .collect();
    let known = records.iter().filter_map(|record| record.object.clone()).map(Into::into).collect();
    registry.opener().set_known_objects(known);
    let restored = records.into_iter().map(|record| {
        let registry = Arc::clone(registry);
        tokio::task::spawn_blocking(move || restore_clone(&registry, &record.id, is_last))
    });
    let _: Vec<_> = stream::iter(restored).buffer_unordered(AT_ONCE).collect().await;
    registry.opener().set_known_objects(Vec::new());
    if is_last {
        let registry = Arc::clone(registry);
        // A failure is a panic of that thread, which has said it.
        let _ = tokio::task::spawn_blocking(move || attach_snapshots_of_clones(&registry)).await;
    }
}

/// Tries once more to bring a clone back, or the source of one that is served without it. May
/// block.
pub(crate) fn retry_clone(registry: &Arc<DeviceRegistry>, waiting: &WaitingClone) {
    if registry.is_ending() {
        return;
    }
    let record = &waiting.record;
    if !waiting.is_served {
        restore_clone(registry, &record.id, true);
        return attach_snapshots_of_clones(registry);
    }
    // A message may have changed the record.
    let current = registry.state_folder().and_then(|folder| folder.own_clone(&record.name));
    let Some(record) = current.filter(|current| current.id == record.id) else {
        return registry.clones.forget(&record.id);
    };
    match put_source_back(registry, &record) {
        Ok(()) => {
            registry.clones.forget(&record.id);
            tracing::info!("{}: the source of the clone is back", record.name);
        }
        Err(error) => registry.clones.wait(&record, error_reason_without_name(&record, &error), true),
    }
}

fn put_source_back(registry: &DeviceRegistry, record: &CloneRecord) -> Result<(), VerbError> {
    let name = &record.name;
    let mapped = registry.find(name)?;
    let _source = open_source(registry, record)?;
    let (token, folder) = (CancelToken::default(), BaseDir::none());
    block_on_verb(reload_live_table(registry, &mapped, name, &record.table, &folder, &token)).map(drop)
}

/// Creates the device of a record, if no other server has it.
fn restore_clone(registry: &Arc<DeviceRegistry>, id: &str, is_last: bool) {
    let Some(folder) = registry.state_folder() else { return };
    let record = match folder.take_clone(id) {
        Ok(Some(record)) => record,
        Ok(None) => return registry.clones.forget(id),
        Err(error) => return tracing::warn!("a clone has not returned: its record cannot be taken: {error}"),
    };
    match create_clone_of_record(registry, &record, is_last) {
        Ok(None) => registry.clones.forget(id),
        Ok(Some(why)) => registry.clones.wait(&record, why, true),
        Err(error) => registry.clones.wait(&record, error_reason_without_name(&record, &error), false),
    }
}

/// The reason of an error, without the name of the clone.
fn error_reason_without_name(record: &CloneRecord, error: &VerbError) -> String {
    let text = error.to_string();
    text.strip_prefix(&format!("{}: ", record.name)).map_or(text.clone(), String::from)
}

/// Creates the device of a record. The text says why it has a stand-in of its source.
fn create_clone_of_record(
    registry: &Arc<DeviceRegistry>,
    record: &CloneRecord,
    is_last: bool,
) -> Result<Option<String>, VerbError> {
    let name = &record.name;
    if registry.find(name).is_ok_and(|found| found.device.name() == *name) {
        let why = "another device has its name: remove or rename that, or \"udm clone forget\"";
        return Err(clone_error(name, EBUSY, why));
    }
    let [metadata, destination, source] = match parse_clone_line(&record.table) {
        Some(line) => line.devices.map(Some),
        None => [None, linear_device(&record.table), None],
    };
    check_disk(registry, record, destination, &record.destination)?;
    let (Some(recorded), Some(source)) = (&record.metadata, source) else {
        create_with(registry, record, &record.table)?;
        tracing::info!("{name}: returned, a clone that was finished");
        return Ok(None);
    };
    check_disk(registry, record, metadata, recorded)?;
    let error = match open_source(registry, record) {
        Err(error) if source.starts_with('@') && !is_last => return Err(error),
        Err(error) => error,
        Ok(_open) => match create_with(registry, record, &record.table) {
            Err(error) => error,
            Ok(()) => {
                log_return(registry, record);
                return Ok(None);
            }
        },
    };
    // If something else is wrong than the source, that is the error.
    let table = table_without_source(record).unwrap_or_else(|| record.table.clone());
    create_with(registry, record, &table)?;
    Ok(Some(error_reason_without_name(record, &error)))
}

fn linear_device(table: &str) -> Option<String> {
    parse_table(table).ok()?.first()?.args.first().cloned()
}

fn log_return(registry: &DeviceRegistry, record: &CloneRecord) {
    let live = registry.find(&record.name).ok().and_then(|mapped| mapped.device.live());
    if let Some(report) = live.and_then(|live| clone_report(&live)) {
        let (name, hydrated, regions) = (&record.name, report.hydrated, report.regions);
        tracing::info!("{name}: the clone has returned, with {hydrated} of {regions} regions hydrated");
    }
}

/// Checks that a word leads to the disk of the record.
fn check_disk(
    registry: &DeviceRegistry,
    record: &CloneRecord,
    word: Option<String>,
    recorded: &StableDiskId,
) -> Result<(), VerbError> {
    let name = &record.name;
    let word = word.ok_or_else(|| clone_error(name, EIO, "its record has no usable table"))?;
    match is_recorded_disk(registry, &word, recorded) {
        Ok(true) => Ok(()),
        Ok(false) => {
            let why = format!(
                "{word} is another file than that of the clone, whose metadata does not fit it: put the file back, or \"udm clone forget {name}\""
            );
            Err(clone_error(name, ENODEV, why))
        }
        Err(why) => {
            Err(clone_error(name, ENODEV, format!("{why}; it is needed for what was copied until now")))
        }
    }
}

/// Opens the source of a record.
///
/// # Errors
/// It is away, or has another size than when the clone was created.
fn open_source(registry: &DeviceRegistry, record: &CloneRecord) -> Result<ResolvedDevice, VerbError> {
    let name = &record.name;
    let line = parse_clone_line(&record.table);
    let [_, _, source] =
        line.ok_or_else(|| clone_error(name, EIO, "its record has no usable table"))?.devices;
    let opened = TableResolver::new(registry, &BaseDir::none()).get(&source);
    let opened = opened.map_err(|error| clone_error(name, error.errno, error.reason))?;
    let size = opened.device.limits().size.0;
    if size == record.source_sectors {
        return Ok(opened);
    }
    let why = format!(
        "the source {source} has {size} sectors, and had {} when the clone was created: put the old one back",
        record.source_sectors
    );
    Err(clone_error(name, EINVAL, why))
}

fn create_with(registry: &Arc<DeviceRegistry>, record: &CloneRecord, table: &str) -> Result<(), VerbError> {
    let (name, uuid, throttle) = (&*record.name, record.uuid.as_deref(), record.throttle.as_ref());
    let spec = DeviceSpec { name, uuid, throttle, ..DeviceSpec::default() };
    let table = |_: &_| Ok(Some(table.to_owned()));
    let (folder, token) = (BaseDir::none(), CancelToken::default());
    let created = create_device(registry, spec, table, &folder, &token);
    // The position is one in a table that no user has written.
    block_on_verb(created).map_err(|error| error.at(None))?;
    restore_vhost_user_sockets(registry, name, &record.vhost_user);
    restore_ublk_disk(registry, name, record.ublk.as_ref());
    Ok(())
}

/// Forgets a clone that has not returned: no later server tries it. Its files stay. May block.
///
/// # Errors
/// EBUSY if its device is served, or if another server has it; ENXIO if no clone of that name
/// waits; EIO if the record stays.
pub fn forget_absent_clone(registry: &DeviceRegistry, name: &str) -> Result<(), VerbError> {
    let waiting = registry.clones.all().into_iter().find(|one| one.record.name == name && !one.is_served);
    let Some(waiting) = waiting else {
        if registry.find(name).is_ok() {
            return Err(clone_error(
                name,
                EBUSY,
                "it is served: \"udm remove\" removes its device and its record",
            ));
        }
        let why = "no clone of that name waits; if another server has it, that one must end first";
        return Err(clone_error(name, ENXIO, why));
    };
    registry.clones.forget(&waiting.record.id);
    let forgotten = registry.state_folder().map_or(Ok(()), |folder| folder.forget_clone(&waiting.record.id));
    forgotten.map_err(|error| clone_error(name, EIO, format!("its record cannot be removed: {error}")))
}
