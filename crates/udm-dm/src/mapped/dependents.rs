//! Selects the partners that are renewed in the change of other devices
//! ([`crate::Target::dependents`]).

use super::MappedDevice;
use crate::error::TargetError;
use crate::table::Table;
use std::collections::HashSet;
use std::sync::Arc;
use udm_core::{Device, DeviceId};

/// A partner, and the index of the device that requires its renewal.
pub(super) type IndexedDependentDevice = (usize, Arc<MappedDevice>);

pub(super) fn collect_resume_dependents(devices: &[Arc<MappedDevice>]) -> Vec<IndexedDependentDevice> {
    let tables = |device: &MappedDevice| match device.inactive() {
        Some(inactive) => [device.live(), Some(inactive)],
        None => [None, None],
    };
    collect_table_dependents(devices, tables)
}

pub(super) fn collect_removal_dependents(devices: &[Arc<MappedDevice>]) -> Vec<IndexedDependentDevice> {
    collect_table_dependents(devices, |device| [device.live(), None])
}

fn collect_table_dependents(
    devices: &[Arc<MappedDevice>],
    tables: impl Fn(&MappedDevice) -> [Option<Arc<Table>>; 2],
) -> Vec<IndexedDependentDevice> {
    let mut dependents = Vec::new();
    for (place, device) in devices.iter().enumerate() {
        let of_tables = tables(device).into_iter().flatten().flat_map(|table| table.dependents());
        let of_others = of_tables.filter(|dependent| dependent.id() != device.id());
        dependents.extend(of_others.map(|dependent| (place, dependent)));
    }
    dependents
}

/// The devices in `dependents` that are not in `devices`, each once.
pub(super) fn collect_dependents_outside_set(
    devices: &[Arc<MappedDevice>],
    dependents: Vec<IndexedDependentDevice>,
) -> Vec<Arc<MappedDevice>> {
    let mut known: HashSet<DeviceId> = devices.iter().map(|device| device.id()).collect();
    dependents
        .into_iter()
        .map(|(_, dependent)| dependent)
        .filter(|dependent| known.insert(dependent.id()))
        .collect()
}

/// Wraps an error of a partner that was not in the caller's list.
pub(super) fn wrap_dependent_error(device: &MappedDevice, error: TargetError) -> TargetError {
    let why = if error.reason.is_empty() { error.text } else { error.reason };
    let because = if why.is_empty() { why } else { format!(": {why}") };
    let reason = format!("{} has to be renewed with it{because}", device.name());
    TargetError::errno(error.errno).because(reason)
}
