//! References to the devices that a table names, and the limits of these devices.

use std::any::Any;
use std::collections::HashMap;
use std::sync::Arc;
use udm_core::{ClaimSharingPolicy, DevNo, Device, DeviceId, Limits, Sector, Sectors};

/// A device that a table line names, after lookup.
#[derive(Clone)]
pub struct ResolvedDevice {
    /// Number of the device, printed in `table` and `status`.
    pub number: DevNo,
    /// The word in the table, or the name that the mapped device had at that time. Used in errors
    /// of the load.
    pub name: String,
    /// The device.
    pub device: Arc<dyn Device>,
    /// A value of the resolver that is dropped when the table releases the device. The resolver
    /// counts the uses of mapped devices with it.
    pub hold: Option<Arc<dyn Any + Send + Sync>>,
}

impl ResolvedDevice {
    /// The current name, for the log: a mapped device may have been renamed since.
    #[must_use]
    pub fn current_name(&self) -> String {
        self.device.stacked().map_or_else(|| self.name.clone(), |device| device.name())
    }
}

/// The reason why a device could not be opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceLookupError {
    /// The errno, positive.
    pub errno: i32,
    /// The precise reason, for a person; empty if the errno says everything.
    pub reason: String,
}

/// A device below a target and the range used of it.
#[derive(Clone)]
pub struct DeviceRange {
    /// The device.
    pub device: ResolvedDevice,
    /// First sector used.
    pub start: Sector,
    /// Number of sectors used.
    pub len: Sectors,
    /// Exclusive use of the disk, because its content makes sense only to its writer. Devices with
    /// the same key may share it. The disk is claimed while the table is loaded, under any name. A
    /// mapped device is claimed as itself, not the disks below it.
    pub alone: Option<ClaimSharingPolicy>,
}

impl DeviceRange {
    /// `len` sectors from `start`, which other devices may use too.
    #[must_use]
    pub fn new(device: &ResolvedDevice, start: Sector, len: Sectors) -> DeviceRange {
        DeviceRange { device: device.clone(), start, len, alone: None }
    }
}

/// The limits of the devices below a table, as the table must see them.
#[derive(Clone, Copy)]
pub struct LowerLimits<'a>(pub(crate) Option<&'a HashMap<DeviceId, Limits>>);

impl LowerLimits<'_> {
    /// The current limits.
    pub const NOW: LowerLimits<'static> = LowerLimits(None);

    /// The limits of `device`: the coming ones, if it gets a new table in the same change, else the
    /// current ones.
    #[must_use]
    pub fn limits(&self, device: &ResolvedDevice) -> Limits {
        let coming = self.0.and_then(|coming| coming.get(&device.device.id()));
        coming.cloned().unwrap_or_else(|| device.device.limits())
    }
}
