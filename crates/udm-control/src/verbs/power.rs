//! The power of the disks that tables use: state and switch.

use super::queue::used_devices;
use crate::api;
use crate::error::VerbError;
use crate::registry::{RegisteredDevice, Registry};
use std::collections::BTreeMap;
use std::sync::Arc;
use udm_core::errno::EINVAL;
use udm_core::{DevNo, Device};
use udm_dm::TargetError;

/// The disks of the live table that have a power switch, by number.
pub(super) fn power(registry: &Registry, mapped: &RegisteredDevice) -> Vec<api::Power> {
    let power = |(number, device): (DevNo, Arc<dyn Device>)| {
        let on = device.power()?.is_on();
        Some(api::Power { number: number.to_string(), uri: registry.uri_of(number), on })
    };
    switchable_disks(mapped).into_iter().filter_map(power).collect()
}

fn switchable_disks(mapped: &RegisteredDevice) -> BTreeMap<DevNo, Arc<dyn Device>> {
    used_devices(mapped).filter(|(_, device)| device.power().is_some()).collect()
}

/// Turns the power of disks on or off: of all that the live table of the device `word` uses, or of
/// one `disk`, given by its number or URI. May wait until memory is freed.
///
/// # Errors
/// ENXIO if there is no such device; EINVAL if it uses no such disk with a switch.
pub fn turn_power(registry: &Registry, word: &str, disk: Option<&str>, on: bool) -> Result<(), VerbError> {
    let mut all = switchable_disks(&*registry.find(word)?);
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
