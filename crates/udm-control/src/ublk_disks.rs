//! Block devices of this machine (ublk), as the program that serves them offers them to the
//! registry.

use crate::api::{AddUblkDiskRequest, UblkDiskDescription};
use serde::{Deserialize, Serialize};
use udm_core::DeviceControlError;

/// Serves devices as block devices of this machine, which come and go while the server runs.
pub trait UblkDisks: Send + Sync {
    /// All block devices, also those of the options.
    fn list(&self) -> Vec<UblkDiskDescription>;

    /// Makes a block device from the export `device`. May block for as long as the kernel needs.
    ///
    /// # Errors
    /// One line for users: what is missing and what to do.
    fn add(
        &self,
        device: &str,
        request: &AddUblkDiskRequest,
    ) -> Result<UblkDiskDescription, DeviceControlError>;

    /// Removes the block device of `device`, which was added. With `force` also if it is in use.
    /// May block for as long as the kernel needs.
    ///
    /// # Errors
    /// ENOENT if there is none, EBUSY while it is in use, EPERM for one of the options.
    fn remove(&self, device: &str, force: bool) -> Result<(), DeviceControlError>;

    /// The device has a new name.
    fn rename(&self, device: &str, to: &str);

    /// What is recorded of the block device of `device`, if it has one that was added.
    fn recorded(&self, device: &str) -> Option<RecordedUblkDisk>;

    /// Makes the block device again that `device` had. Does not wait; an error is logged.
    fn restore(&self, device: &str, disk: RecordedUblkDisk);
}

/// A block device that comes back with its device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordedUblkDisk {
    /// The name that the device had when the block device was made. It is in the kernel's
    /// description of the block device.
    pub marked_as: String,
    /// The number that was asked for.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub number: Option<u32>,
    /// The number of queues that was asked for.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub queues: Option<u16>,
}
