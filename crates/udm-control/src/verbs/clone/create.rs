//! Creates a clone: its files, its table, its device.

use super::files::NewCloneFiles;
use super::list::describe_clone;
use super::record::{RecordedParts, record_new_clone};
use super::{clone_error, clone_report};
use crate::api;
use crate::error::VerbError;
use crate::registry::{BaseDir, DeviceRegistry};
use crate::verbs::change::{DeviceSpec, create_device};
use crate::verbs::{CancelToken, block_on_verb};
use std::sync::Arc;
use udm_core::errno::{EINVAL, ENXIO};
use udm_core::{SECTOR_SIZE, Sectors};
use udm_wire::boot_profile::BootProfile;
use udm_wire::clone_metadata::CloneMetadataLayout;
use udm_wire::table::parse_table;
use udm_wire::uri::{DeviceUri, FileUri, NbdAddress};
use udm_wire::words::escape_table_word;

/// The default region size in bytes: a cluster of qcow2.
const REGION_BYTES: u64 = 64 << 10;

/// The maximum number of regions, and of sectors of a region (kernel).
const REGIONS_MAX: u64 = 1 << 31;
const REGION_MAX: u64 = 1 << 21;

/// What the name of the metadata has after that of the destination.
const METADATA_SUFFIX: &str = ".clone";

/// Bytes that are copied at a time in the background, and in one batch: fast, and within the memory
/// of a core for copies.
const COPY_BYTES: u64 = 4 << 20;
const BATCH_BYTES: u64 = 1 << 20;

/// Bytes that are copied at a time from a source behind a network, whose answers take their time.
/// It is the memory of a core for copies.
const REMOTE_COPY_BYTES: u64 = 16 << 20;

/// The maximum number of regions that are copied at a time: far fewer than can be claimed.
const COPIED_REGIONS_MAX: u64 = 1024;

/// Creates a clone. Files that do not exist are made; what was made is removed if the clone cannot
/// be created. If the metadata belongs to a clone, that clone continues. May block when it opens
/// devices.
///
/// # Errors
/// The name is in use; the source cannot be opened; the destination has data (EEXIST), or the
/// metadata belongs to something else; otherwise the error of the table.
pub fn create_clone(
    registry: &Arc<DeviceRegistry>,
    new: &api::CreateCloneRequest,
    folder: &BaseDir,
    cancel_token: &CancelToken,
) -> Result<api::CloneDescription, VerbError> {
    let name = new.name.as_str();
    let mut files = NewCloneFiles { registry, name, folder, cancel_token, made: Vec::new() };
    // The name is taken before a file is made.
    let called = DeviceSpec { name, ..DeviceSpec::default() };
    let mut record = None;
    let table = |_: &_| {
        let (table, id) = prepare_table(&mut files, new)?;
        record = id;
        Ok(Some(table))
    };
    let created = block_on_verb(create_device(registry, called, table, folder, cancel_token));
    let created = created.map_err(|error| {
        // A clone that was not created must not return. Without a record there is none.
        if let (Some(folder), Some(id)) = (registry.state_folder(), &record) {
            let _ = folder.forget_clone(id);
        }
        // The position is one in a table that the user has not written.
        error.at(None)
    })?;
    files.keep();
    let report = created.table.and_then(|table| clone_report(&table));
    let report = report.ok_or_else(|| clone_error(name, ENXIO, "it has been changed meanwhile"))?;
    Ok(describe_clone(registry, &created.mapped, &report))
}

/// Opens the source, makes or checks the other devices, and writes the record of the clone. Returns
/// the table, and the identifier of the record.
fn prepare_table(
    files: &mut NewCloneFiles<'_>,
    new: &api::CreateCloneRequest,
) -> Result<(String, Option<String>), VerbError> {
    let name = files.name;
    let resolve = |word: &str| {
        let uri = files.folder.resolve(word);
        uri.map_err(|error| clone_error(name, error.errno, error.reason))
    };
    let (source, destination) = (read_only(resolve(&new.source)?), resolve(&new.destination)?);
    let metadata = match &new.metadata {
        Some(word) => resolve(word)?,
        None => default_metadata(&destination).ok_or_else(|| {
            clone_error(name, EINVAL, format!("{destination} is not a file: name the metadata"))
        })?,
    };
    let source_device = files.open(&source)?;
    let len = source_device.device.limits().size;
    if len == Sectors::ZERO {
        return Err(clone_error(name, EINVAL, format!("{source}: it is empty")));
    }
    let header = files.read_header(&metadata)?;
    let region = match new.region_bytes {
        Some(bytes) => parse_region_bytes(name, bytes)?,
        None => header.map_or_else(|| default_region(len), |header| header.region),
    };
    match header {
        Some(_) => files.check_continues(&metadata, &destination)?,
        None => {
            if !files.make(&destination, len)? {
                files.check_zeroes(&destination)?;
            }
            let layout = CloneMetadataLayout::new(len.0.div_ceil(region.0));
            files.make(&metadata, Sectors(layout.sectors()))?;
        }
    }
    let words =
        [&metadata, &destination, &source].map(|uri| escape_table_word(&uri.to_string()).into_owned());
    let features = if new.paused == Some(true) { "1 no_hydration" } else { "0" };
    let in_flight = |bytes: u64| (bytes / region.bytes()).clamp(1, COPIED_REGIONS_MAX);
    let copied = if is_remote(&source) { REMOTE_COPY_BYTES } else { COPY_BYTES };
    let table = format!(
        "0 {} clone {} {} {features} 4 hydration_threshold {} hydration_batch_size {}",
        len.0,
        words.join(" "),
        region.0,
        in_flight(copied),
        in_flight(BATCH_BYTES)
    );
    let table = match &new.hydrate_first {
        Some(text) => add_boot_profile(name, &table, text)?,
        None => table,
    };
    let parts = RecordedParts {
        table: &table,
        destination: &files.open(&destination)?,
        metadata: &files.open(&metadata)?,
        source: &source_device,
    };
    let id = record_new_clone(files.registry, name, &parts)?;
    Ok((table, id))
}

/// Adds the boot profile `text` to a table.
fn add_boot_profile(name: &str, table: &str, text: &str) -> Result<String, VerbError> {
    let profile = BootProfile::parse(text);
    let lines = parse_table(table).map_err(|error| clone_error(name, EINVAL, error.to_string()))?;
    let with_profile = profile.and_then(|profile| profile.add_to_table(&lines));
    with_profile.map(|line| line.to_string()).map_err(|error| clone_error(name, EINVAL, error.to_string()))
}

/// True for a source behind a network.
fn is_remote(source: &DeviceUri) -> bool {
    match source {
        DeviceUri::Object(_) | DeviceUri::Nvme(_) => true,
        DeviceUri::Nbd(uri) => matches!(uri.address, NbdAddress::Tcp { .. }),
        _ => false,
    }
}

/// A file as a source is opened for reading only.
fn read_only(uri: DeviceUri) -> DeviceUri {
    match uri {
        DeviceUri::File(file) => DeviceUri::File(FileUri { readonly: true, ..file }),
        uri => uri,
    }
}

fn default_metadata(destination: &DeviceUri) -> Option<DeviceUri> {
    let DeviceUri::File(file) = destination else { return None };
    if file.path.exists() && !file.path.is_file() {
        return None;
    }
    let mut path = file.path.clone().into_os_string();
    path.push(METADATA_SUFFIX);
    Some(DeviceUri::File(FileUri::new(path.into())))
}

fn parse_region_bytes(name: &str, bytes: u64) -> Result<Sectors, VerbError> {
    let sectors = Sectors(bytes / SECTOR_SIZE);
    if !bytes.is_power_of_two() || !(8..=REGION_MAX).contains(&sectors.0) {
        let why = format!("a region size of {bytes} bytes: expected a power of two, 4096 to 1073741824");
        return Err(clone_error(name, EINVAL, why));
    }
    Ok(sectors)
}

fn default_region(len: Sectors) -> Sectors {
    let least = len.0.div_ceil(REGIONS_MAX).next_power_of_two();
    Sectors(least.clamp(REGION_BYTES / SECTOR_SIZE, REGION_MAX))
}
