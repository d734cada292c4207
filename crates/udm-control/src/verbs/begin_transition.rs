//! How a verb begins the change of its devices, once they are locked.

use super::change::busy_error;
use super::device_locks::DeviceChangeLocks;
use crate::registry::RegisteredDevice;
use std::sync::Arc;
use udm_dm::{DeviceSetTransition, IndexedDeviceError, MappedDevice, Table, TargetError, TransitionWakeFn};

/// [`DeviceSetTransition::resume_filtered`] for the locked devices.
pub(super) fn begin_resume_transition(
    devices: &[Arc<MappedDevice>],
    turns: &DeviceChangeLocks<'_>,
    wake: &TransitionWakeFn,
) -> Result<DeviceSetTransition, IndexedDeviceError> {
    DeviceSetTransition::resume_filtered(devices, true, wake, |device| turns.has(device))
}

/// A table that a verb has loaded and will make live.
pub(super) struct LoadedTable<'a> {
    /// Index of its device in the list of devices to change.
    pub place: usize,
    /// The device.
    pub mapped: &'a RegisteredDevice,
    /// The loaded table.
    pub table: &'a Arc<Table>,
}

impl LoadedTable<'_> {
    /// Fails if another verb has suspended the device or changed its inactive slot.
    fn is_as_it_was(&self) -> Result<(), TargetError> {
        let device = &self.mapped.device;
        let is_own = |table: Option<Arc<Table>>| table.is_some_and(|table| Arc::ptr_eq(&table, self.table));
        if device.is_suspended() {
            return Err(busy_error("it is suspended: resume it first"));
        }
        // Another verb may have resumed the device, so the table may be live already.
        match is_own(device.inactive().or_else(|| device.live())) {
            true => Ok(()),
            false => Err(busy_error("somebody else has loaded or cleared a table meanwhile")),
        }
    }
}

/// As [`begin_resume_transition`], if all `loaded` tables are still in their slots. The caller
/// holds the registry's `linking` lock, so that nothing is loaded meanwhile.
pub(super) fn begin_resume_if_still_loaded(
    loaded: &[LoadedTable<'_>],
    devices: &[Arc<MappedDevice>],
    turns: &DeviceChangeLocks<'_>,
    wake: &TransitionWakeFn,
) -> Result<DeviceSetTransition, IndexedDeviceError> {
    for one in loaded {
        one.is_as_it_was().map_err(|why| (one.place, why))?;
    }
    begin_resume_transition(devices, turns, wake)
}

/// [`DeviceSetTransition::remove_filtered`] for the locked devices.
pub(super) fn begin_removal_transition(
    devices: &[Arc<MappedDevice>],
    turns: &DeviceChangeLocks<'_>,
    wake: &TransitionWakeFn,
) -> Result<DeviceSetTransition, IndexedDeviceError> {
    DeviceSetTransition::remove_filtered(devices, wake, |device| turns.has(device))
}
