//! Lists of clones.

use super::record::parse_clone_line;
use super::{clone_report, find_clone};
use crate::api;
use crate::error::VerbError;
use crate::registry::{DeviceRegistry, RegisteredDevice};
use crate::state_folder::clones::CloneRecord;
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

/// All clones, by device number, and then those of the state folder that have not returned.
#[must_use]
pub fn list_all_clones(registry: &DeviceRegistry) -> Vec<api::CloneDescription> {
    let mut all = list_clones(registry);
    let waiting = registry.clones.all();
    all.extend(
        waiting.iter().filter(|one| !one.is_served).map(|one| describe_absent(&one.record, one.why.clone())),
    );
    let Some(folder) = registry.state_folder() else { return all };
    // Without records nothing more is known; the start of the server has said so.
    for record in folder.clones().unwrap_or_default() {
        if folder.has_clone_elsewhere(&record) {
            all.push(describe_absent(&record, "another server has it".into()));
        }
    }
    all
}

/// A clone without a device.
fn describe_absent(record: &CloneRecord, why: String) -> api::CloneDescription {
    let [metadata, destination, source] = match parse_clone_line(&record.table) {
        Some(line) => line.devices,
        None => [String::new(), record.destination.name().to_owned(), String::new()],
    };
    api::CloneDescription {
        name: record.name.clone(),
        source,
        destination,
        metadata,
        state: "absent".into(),
        size_bytes: Sectors(record.sectors).bytes(),
        error: Some(why),
        ..api::CloneDescription::default()
    }
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
    let name = mapped.device.name();
    let waiting = registry.clones.all().into_iter().find(|one| one.is_served && one.record.name == name);
    let (state, error, source) = match waiting {
        Some(one) => {
            let source = parse_clone_line(&one.record.table).map(|line| line.devices[2].clone());
            ("waiting", Some(one.why), source.unwrap_or_default())
        }
        None => (report.state.text(), None, registry.uri_of(report.source.number)),
    };
    // The last region may be shorter.
    let hydrated = Sectors((report.hydrated * report.region.0).min(report.len.0));
    api::CloneDescription {
        name,
        source,
        destination: registry.uri_of(report.destination.number),
        metadata: registry.uri_of(report.metadata.number),
        state: state.into(),
        error,
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
