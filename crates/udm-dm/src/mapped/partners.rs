//! Which devices are renewed with others: see [`crate::Target::partners`].

use super::MappedDevice;
use crate::error::TargetError;
use crate::table::Table;
use std::collections::HashSet;
use std::sync::Arc;
use udm_core::{Device, DeviceId};

/// A device that is renewed, and the place of one whose partner it is.
pub(super) type Partner = (usize, Arc<MappedDevice>);

pub(super) fn by_resume(devices: &[Arc<MappedDevice>]) -> Vec<Partner> {
    let tables = |device: &MappedDevice| match device.inactive() {
        Some(inactive) => [device.live(), Some(inactive)],
        None => [None, None],
    };
    partners(devices, tables)
}

pub(super) fn by_leaving(devices: &[Arc<MappedDevice>]) -> Vec<Partner> {
    partners(devices, |device| [device.live(), None])
}

fn partners(
    devices: &[Arc<MappedDevice>],
    tables: impl Fn(&MappedDevice) -> [Option<Arc<Table>>; 2],
) -> Vec<Partner> {
    let mut partners = Vec::new();
    for (place, device) in devices.iter().enumerate() {
        let of_tables = tables(device).into_iter().flatten().flat_map(|table| table.partners());
        let of_others = of_tables.filter(|partner| partner.id() != device.id());
        partners.extend(of_others.map(|partner| (place, partner)));
    }
    partners
}

/// Those of `partners` that are not among `devices`, each once.
pub(super) fn others(devices: &[Arc<MappedDevice>], partners: Vec<Partner>) -> Vec<Arc<MappedDevice>> {
    let mut known: HashSet<DeviceId> = devices.iter().map(|device| device.id()).collect();
    partners.into_iter().map(|(_, partner)| partner).filter(|partner| known.insert(partner.id())).collect()
}

/// Of a device that was not given.
pub(super) fn besides(device: &MappedDevice, error: TargetError) -> TargetError {
    let why = if error.reason.is_empty() { error.text } else { error.reason };
    let because = if why.is_empty() { why } else { format!(": {why}") };
    let reason = format!("{} has to be renewed with it{because}", device.name());
    TargetError::errno(error.errno).because(reason)
}
