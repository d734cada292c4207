//! A device wrapped in a table of one line. The table splits requests by the device's limits, and
//! handles flushes and FUA for devices that do not support them.

use std::sync::Arc;
use udm_core::{Cx, Device, DeviceControlError, DeviceId, Lane, Limits, Sector, Sectors};
use udm_dm::target::{DeviceRange, LowerLimits, ResolvedDevice, Target, TargetDataPath, TargetFeatures};
use udm_dm::{Table, TargetError, WholeDeviceLane};

/// The size of the largest possible device, in whole blocks of any size.
const END: Sectors = Sectors((1 << 54) - (1 << 20));

/// A target with the maximum size, from a sector of the device on. The device itself refuses
/// sectors beyond its end, and a device that grows can be used at once.
struct UnboundedDeviceTarget(ResolvedDevice, Sector);

/// Opens a lane of `device` through a table of one line.
pub(crate) fn open_lane_through_table(
    device: &ResolvedDevice,
    cx: &mut Cx<'_>,
) -> Result<Box<dyn Lane>, DeviceControlError> {
    open_lane_at(device, Sector(0), cx)
}

/// As [`open_lane_through_table`], with sectors that count from `start` of the device.
pub(crate) fn open_lane_at(
    device: &ResolvedDevice,
    start: Sector,
    cx: &mut Cx<'_>,
) -> Result<Box<dyn Lane>, DeviceControlError> {
    Ok(open_whole_device_lane(device, start, cx)?)
}

/// As [`open_lane_at`], for a caller that knows which bios need no check.
pub(crate) fn open_whole_device_lane(
    device: &ResolvedDevice,
    start: Sector,
    cx: &mut Cx<'_>,
) -> Result<Box<WholeDeviceLane>, DeviceControlError> {
    let refuse = |error: TargetError| DeviceControlError::new(error.errno, error.to_string());
    let target = Arc::new(UnboundedDeviceTarget(device.clone(), start));
    let table = Table::single_target(target, END).map_err(refuse)?;
    WholeDeviceLane::open(&table, cx).map(Box::new)
}

/// `device` from `start` on as a device of its own, with requests cut and flushed as it needs it.
pub(crate) fn raw_device(device: &ResolvedDevice, start: Sector) -> Arc<dyn Device> {
    Arc::new(RawDevice { id: DeviceId::new(), device: device.clone(), start })
}

struct RawDevice {
    id: DeviceId,
    device: ResolvedDevice,
    start: Sector,
}

impl Device for RawDevice {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        open_lane_at(&self.device, self.start, cx)
    }

    fn limits(&self) -> Limits {
        self.device.device.limits()
    }
}

impl Target for UnboundedDeviceTarget {
    fn type_name(&self) -> &'static str {
        "linear"
    }

    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        self.0.device.open(cx)
    }

    fn table(&self) -> String {
        format!("{} {}", self.0.number, self.1)
    }

    fn limits(&self, below: LowerLimits<'_>) -> Limits {
        Limits::new(END).stack(&below.limits(&self.0))
    }

    fn devices(&self) -> Vec<DeviceRange> {
        vec![DeviceRange::new(&self.0, Sector(0), Sectors(0))]
    }

    fn data_path(&self) -> TargetDataPath {
        TargetDataPath::Linear(self.0.clone(), self.1)
    }

    fn features(&self) -> TargetFeatures {
        TargetFeatures { flush_bypasses_map: true, ..TargetFeatures::default() }
    }
}
