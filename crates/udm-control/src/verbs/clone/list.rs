//! Lists of clones.

use super::{clone_report, find_clone};
use crate::api;
use crate::error::VerbError;
use crate::registry::{DeviceRegistry, RegisteredDevice};
use udm_core::Sectors;
use udm_dm::{CloneReport, CloneTargetQueries};
use udm_wire::boot_profile::BootProfile;

/// All clones, by device number.
#[must_use]
pub fn list_clones(registry: &DeviceRegistry) -> Vec<api::CloneDescription> {
    let describe = |mapped: &std::sync::Arc<RegisteredDevice>| {
        let report = clone_report(&*mapped.device.live()?)?;
        Some(describe_clone(registry, mapped, &report))
    };
    registry.all().iter().filter_map(describe).collect()
}

/// One clone.
///
/// # Errors
/// ENXIO if there is no such device, EINVAL if it is not a clone.
pub fn describe_clone_by_name(
    registry: &DeviceRegistry,
    name: &str,
) -> Result<api::CloneDescription, VerbError> {
    let (mapped, _, report) = find_clone(registry, name)?;
    Ok(describe_clone(registry, &mapped, &report))
}

/// The boot profile of a clone: what its clients read while it was not hydrated, since its first
/// load in this server.
///
/// # Errors
/// ENXIO if there is no such device, EINVAL if it is not a clone.
pub fn clone_boot_profile(registry: &DeviceRegistry, name: &str) -> Result<api::CloneBootProfile, VerbError> {
    let (_, table, report) = find_clone(registry, name)?;
    let reads = table.targets().iter().filter_map(|entry| entry.target.as_clone());
    let regions = reads.flat_map(CloneTargetQueries::first_reads);
    let profile = BootProfile::of_regions(report.len.bytes(), report.region.bytes(), regions);
    Ok(api::CloneBootProfile { ranges: profile.ranges.len() as u64, profile: profile.to_string() })
}

pub(super) fn describe_clone(
    registry: &DeviceRegistry,
    mapped: &RegisteredDevice,
    report: &CloneReport,
) -> api::CloneDescription {
    // The last region may be shorter.
    let hydrated = Sectors((report.hydrated * report.region.0).min(report.len.0));
    api::CloneDescription {
        name: mapped.device.name(),
        source: registry.uri_of(report.source.number),
        destination: registry.uri_of(report.destination.number),
        metadata: registry.uri_of(report.metadata.number),
        state: report.state.text().into(),
        size_bytes: report.len.bytes(),
        region_bytes: report.region.bytes(),
        regions: report.regions,
        hydrated_regions: report.hydrated,
        hydrated_bytes: hydrated.bytes(),
        hydrating_regions: report.in_flight,
        source_errors: report.source_errors,
        destination_errors: report.destination_errors,
    }
}
