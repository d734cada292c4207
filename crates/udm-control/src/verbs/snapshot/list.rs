//! What snapshots there are.

use super::report;
use crate::error::VerbError;
use crate::http::api;
use crate::registry::{Mapped, Registry};
use std::collections::HashMap;
use std::sync::Arc;
use udm_core::{DevNo, Device, SECTOR_SIZE};
use udm_dm::SnapshotReport;

/// All snapshots, by number.
#[must_use]
pub fn list(registry: &Registry) -> Vec<api::Snapshot> {
    let all = registry.all();
    let mut origins: HashMap<DevNo, String> = HashMap::new();
    let mut found = Vec::new();
    for mapped in &all {
        let Some(table) = mapped.device.live() else { continue };
        let [entry] = table.targets() else { continue };
        if let Some(report) = report(&table) {
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
    let origin = |report: &SnapshotReport| origins.get(&report.origin.number).cloned().unwrap_or_default();
    found.iter().map(|(mapped, report)| describe(registry, mapped, origin(report), report)).collect()
}

/// One snapshot.
///
/// # Errors
/// ENXIO when there is no such device, EINVAL when it is no snapshot.
pub fn one(registry: &Registry, name: &str) -> Result<api::Snapshot, VerbError> {
    of(registry, name, &registry.find(name)?)
}

/// The snapshot `mapped`, called `name` in errors.
///
/// # Errors
/// As [`one`]'s.
pub(super) fn of(registry: &Registry, name: &str, mapped: &Arc<Mapped>) -> Result<api::Snapshot, VerbError> {
    let report = super::again(registry, name, mapped)?.1;
    let origin = match report.state.is_merge() {
        true => mapped.device.name(),
        false => {
            let mut origins = super::origin::over(registry, report.origin.number).into_iter();
            origins.next().map(|(name, _)| name).unwrap_or_default()
        }
    };
    Ok(describe(registry, mapped, origin, &report))
}

fn describe(registry: &Registry, mapped: &Mapped, origin: String, report: &SnapshotReport) -> api::Snapshot {
    let made = mapped.note().made;
    api::Snapshot {
        name: mapped.device.name(),
        origin,
        disk: registry.uri_of(report.origin.number),
        store: registry.uri_of(report.store.number),
        kind: report.kind.into(),
        state: report.state.text().into(),
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
