//! The power of the disks that tables use: state and switch.

use super::queue::used_devices;
use crate::api;
use crate::error::VerbError;
use crate::registry::{DeviceRegistry, RegisteredDevice};
use std::collections::BTreeMap;
use std::sync::Arc;
use udm_core::errno::EINVAL;
use udm_core::{DevNo, Device};
use udm_dm::TargetError;

/// The disks of the live table that have a power switch, by number.
pub(super) fn disk_power_states(
    registry: &DeviceRegistry,
    mapped: &RegisteredDevice,
) -> Vec<api::DiskPowerState> {
    let power = |(number, device): (DevNo, Arc<dyn Device>)| {
        let on = device.power()?.is_on();
        Some(api::DiskPowerState { number: number.to_string(), uri: registry.uri_of(number), on })
    };
    disks_with_power_switch(mapped).into_iter().filter_map(power).collect()
}

fn disks_with_power_switch(mapped: &RegisteredDevice) -> BTreeMap<DevNo, Arc<dyn Device>> {
    used_devices(mapped).filter(|(_, device)| device.power().is_some()).collect()
}

/// Turns the power of disks on or off: of all that the live table of the device `word` uses, or of
/// one `disk`, given by its number or URI. May wait until memory is freed.
///
/// # Errors
/// ENXIO if there is no such device; EINVAL if its table uses no such disk with a power switch.
pub fn set_disk_power(
    registry: &DeviceRegistry,
    word: &str,
    disk: Option<&str>,
    on: bool,
) -> Result<(), VerbError> {
    let mut all = disks_with_power_switch(&*registry.find(word)?);
    if let Some(disk) = disk {
        all.retain(|number, _| number.to_string() == disk || registry.uri_of(*number) == disk);
    }
    if all.is_empty() {
        let what = disk.map_or("no disk".to_owned(), |disk| format!("no {disk:?}"));
        let why = format!("its table uses {what} with a power switch, as a null device with cache_size has");
        return Err(VerbError::new(word, TargetError::errno(EINVAL).because(why)));
    }
    all.values().filter_map(|device| device.power()).for_each(|power| power.turn(on));
    Ok(())
}
