//! Requests and replies of the control socket about block devices of this machine (ublk).

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A block device for a device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AddUblkDiskRequest {
    /// N of /dev/ublkbN; null for any.
    #[serde(default)]
    pub number: Option<u32>,
    /// Number of queues, at most one per core of the server; null for one per core. The kernel
    /// makes at most one per CPU.
    #[serde(default)]
    pub queues: Option<u16>,
}

/// How to remove the block device of a device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RemoveUblkDiskQuery {
    /// 1: also while it is in use; its users get errors then.
    #[serde(default)]
    pub force: Option<u8>,
}

/// A device as a block device of this machine.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct UblkDiskDescription {
    /// Name of the device.
    pub device: String,
    /// Path of the block device, /dev/ublkbN.
    pub path: String,
    /// Path of the link to it; null if it could not be made.
    pub link: Option<String>,
    /// Number of queues.
    pub queues: u16,
    /// True if it was added while the server runs.
    pub added: bool,
}

/// All block devices of this machine that the server serves.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct UblkDiskList {
    /// The block devices, in the order in which they were added.
    pub disks: Vec<UblkDiskDescription>,
}
