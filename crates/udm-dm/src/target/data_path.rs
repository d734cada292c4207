//! How the table handles the data path of a target.

use crate::device_ref::ResolvedDevice;
use crate::stripes::StripedTargetDescription;
use udm_core::Sector;

/// How the table handles the data path of a target.
#[derive(Clone)]
pub enum TargetDataPath {
    /// The table adds an offset to the sector on this device.
    Linear(ResolvedDevice, Sector),
    /// The table distributes chunks over several devices.
    Striped(StripedTargetDescription),
    /// The target has a lane of its own.
    OwnLane,
}

impl TargetDataPath {
    /// The device and offset of a linear target; `None` for others.
    #[must_use]
    pub fn into_linear(self) -> Option<(ResolvedDevice, Sector)> {
        match self {
            TargetDataPath::Linear(device, offset) => Some((device, offset)),
            TargetDataPath::Striped(_) | TargetDataPath::OwnLane => None,
        }
    }
}
