//! Selects the partners that are renewed in the change of other devices
//! ([`crate::Target::partners`]).

use super::MappedDevice;
use crate::error::TargetError;
use crate::table::Table;
use std::collections::HashSet;
use std::sync::Arc;
use udm_core::{Device, DeviceId};

/// A partner, and the index of the device that requires its renewal.
pub(super) type IndexedPartner = (usize, Arc<MappedDevice>);

pub(super) fn collect_resume_partners(devices: &[Arc<MappedDevice>]) -> Vec<IndexedPartner> {
    let tables = |device: &MappedDevice| match device.inactive() {
        Some(inactive) => [device.live(), Some(inactive)],
        None => [None, None],
    };
    collect_table_partners(devices, tables)
}

pub(super) fn collect_removal_partners(devices: &[Arc<MappedDevice>]) -> Vec<IndexedPartner> {
    collect_table_partners(devices, |device| [device.live(), None])
}

fn collect_table_partners(
    devices: &[Arc<MappedDevice>],
    tables: impl Fn(&MappedDevice) -> [Option<Arc<Table>>; 2],
) -> Vec<IndexedPartner> {
    let mut partners = Vec::new();
    for (place, device) in devices.iter().enumerate() {
        let of_tables = tables(device).into_iter().flatten().flat_map(|table| table.partners());
        let of_others = of_tables.filter(|partner| partner.id() != device.id());
        partners.extend(of_others.map(|partner| (place, partner)));
    }
    partners
}

/// The devices in `partners` that are not in `devices`, each once.
pub(super) fn collect_partners_outside_set(
    devices: &[Arc<MappedDevice>],
    partners: Vec<IndexedPartner>,
) -> Vec<Arc<MappedDevice>> {
    let mut known: HashSet<DeviceId> = devices.iter().map(|device| device.id()).collect();
    partners.into_iter().map(|(_, partner)| partner).filter(|partner| known.insert(partner.id())).collect()
}

/// Wraps an error of a partner that was not in the caller's list.
pub(super) fn wrap_partner_error(device: &MappedDevice, error: TargetError) -> TargetError {
    let why = if error.reason.is_empty() { error.text } else { error.reason };
    let because = if why.is_empty() { why } else { format!(": {why}") };
    let reason = format!("{} has to be renewed with it{because}", device.name());
    TargetError::errno(error.errno).because(reason)
}
