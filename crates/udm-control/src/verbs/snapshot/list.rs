//! Lists of snapshots.

use super::snapshot_report;
use crate::api;
use crate::error::VerbError;
use crate::registry::{DeviceRegistry, RegisteredDevice};
use crate::state_folder::StateFolder;
use crate::state_folder::records::{SnapshotRecord, SnapshotRecordState};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use udm_core::errno::EIO;
use udm_core::{DevNo, Device, SECTOR_SIZE};
use udm_dm::{SnapshotReport, TargetError};

/// All live snapshots, by number.
#[must_use]
pub fn list_live_snapshots(registry: &DeviceRegistry) -> Vec<api::SnapshotDescription> {
    let all = registry.all();
    let mut origins: HashMap<DevNo, String> = HashMap::new();
    let mut found = Vec::new();
    for mapped in &all {
        let Some(table) = mapped.device.live() else { continue };
        let [entry] = table.targets() else { continue };
        if let Some(report) = snapshot_report(&table) {
            if report.state.is_merge() {
                origins.entry(report.origin.number).or_insert_with(|| mapped.device.name());
            }
            found.push((mapped, report));
        } else if entry.target.type_name() == "snapshot-origin" {
            let disks = entry.target.devices();
            let name = || mapped.device.name();
            disks.first().map(|disk| origins.entry(disk.device.number).or_insert_with(name));
        }
    }
    // A clone is its own disk.
    let clone = |number| registry.uri_of(number).strip_prefix('@').map(String::from);
    let origin = |report: &SnapshotReport| {
        let number = report.origin.number;
        origins.get(&number).cloned().or_else(|| clone(number)).unwrap_or_default()
    };
    found
        .iter()
        .map(|(mapped, report)| build_snapshot_description(registry, mapped, origin(report), report))
        .collect()
}

/// The recorded persistent snapshots that no device of this server has, each with a reason. May
/// block.
///
/// # Errors
/// If the state folder can't be read.
pub fn list_unattached_snapshots(
    registry: &DeviceRegistry,
) -> Result<Vec<api::SnapshotDescription>, VerbError> {
    let Some(folder) = registry.state_folder() else { return Ok(Vec::new()) };
    let found = folder.unattached();
    let found = found.map_err(|why| VerbError::new("snapshots", TargetError::errno(EIO).because(why)))?;
    Ok(found.into_iter().map(|record| describe_snapshot_record(folder, record)).collect())
}

fn describe_snapshot_record(folder: &StateFolder, record: SnapshotRecord) -> api::SnapshotDescription {
    let stale = record.stale();
    let state = if stale.is_some() { "lost" } else { "not attached" };
    let (origin, store) = (record.origin.name(), record.store.name());
    let is_gone = store.starts_with('/') && !std::path::Path::new(store).exists();
    let why = match (&record.state, stale) {
        (_, Some(why)) => why,
        _ if folder.is_elsewhere(&record) => "another server has it".into(),
        _ if is_gone => format!("its store {store} does not exist"),
        (SnapshotRecordState::Released { .. }, _) => {
            format!("it was removed, and {origin} goes on without it")
        }
        _ if record.by_name => format!("nothing has opened {origin} for writing"),
        _ => "no table has it since the server was started".into(),
    };
    let age = SystemTime::now().duration_since(UNIX_EPOCH + Duration::from_secs(record.made));
    let mut words = record.table.split_whitespace().skip(5);
    let kind = words.next().unwrap_or_default().to_owned();
    let chunk = words.next().and_then(|chunk| chunk.parse().ok()).unwrap_or(0_u64);
    api::SnapshotDescription {
        name: record.name,
        disk: origin.to_owned(),
        store: store.to_owned(),
        kind,
        state: state.into(),
        why: Some(why),
        chunk_bytes: chunk * SECTOR_SIZE,
        age_ns: age.ok().and_then(|age| u64::try_from(age.as_nanos()).ok()),
        ..api::SnapshotDescription::default()
    }
}

/// One snapshot.
///
/// # Errors
/// ENXIO if there is no such device, EINVAL if it is not a snapshot.
pub fn describe_snapshot_by_name(
    registry: &DeviceRegistry,
    name: &str,
) -> Result<api::SnapshotDescription, VerbError> {
    describe_snapshot_device(registry, name, &registry.find(name)?)
}

/// The snapshot `mapped`. Errors call it `name`.
///
/// # Errors
/// As [`describe_snapshot_by_name`].
pub(super) fn describe_snapshot_device(
    registry: &DeviceRegistry,
    name: &str,
    mapped: &Arc<RegisteredDevice>,
) -> Result<api::SnapshotDescription, VerbError> {
    let report = super::current_snapshot_report(registry, name, mapped)?.1;
    let origin = match report.state.is_merge() {
        true => mapped.device.name(),
        false => {
            let mut origins = super::origin::origins_over(registry, report.origin.number).into_iter();
            // A clone is its own disk.
            let disk = || registry.uri_of(report.origin.number).strip_prefix('@').map(String::from);
            origins.next().map(|(name, _)| name).or_else(disk).unwrap_or_default()
        }
    };
    Ok(build_snapshot_description(registry, mapped, origin, &report))
}

fn build_snapshot_description(
    registry: &DeviceRegistry,
    mapped: &RegisteredDevice,
    origin: String,
    report: &SnapshotReport,
) -> api::SnapshotDescription {
    let made = mapped.snapshot_info().made;
    api::SnapshotDescription {
        name: mapped.device.name(),
        origin,
        disk: registry.uri_of(report.origin.number),
        store: registry.uri_of(report.store.number),
        kind: report.kind.into(),
        state: report.state.text().into(),
        why: None,
        size_bytes: mapped.device.limits().size.bytes(),
        chunk_bytes: report.chunk.bytes(),
        used_bytes: report.used.bytes(),
        total_bytes: report.total.bytes(),
        grow_bytes: report.growth.map(|growth| growth.step.0.saturating_mul(SECTOR_SIZE)),
        max_bytes: report.growth.map(|growth| growth.max.0.saturating_mul(SECTOR_SIZE)),
        metadata_bytes: report.metadata.bytes(),
        age_ns: made.map(|made| u64::try_from(made.elapsed().as_nanos()).unwrap_or(u64::MAX)),
    }
}
