//! Requests and replies about devices: create, rename, suspend, resume, wait.

use super::queue::{DiskPowerState, RequestQueueReport};
use super::throttle::DeviceThrottle;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A mapped device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DeviceDescription {
    /// Name of the device.
    pub name: String,
    /// UUID of the device, if it has one.
    pub uuid: Option<String>,
    /// Number of the device, major:minor, in udm's own numbering.
    pub number: String,
    /// Size of the live table; 0 without one.
    pub size_bytes: u64,
    /// "active" or "suspended".
    pub state: String,
    /// True if the device has a live table.
    pub live_table: bool,
    /// True if a table is loaded in the inactive slot and waits for a resume.
    pub inactive_table: bool,
    /// Number of client connections, and of other devices' tables, that use the device.
    pub open_count: u64,
    /// Number of events that the device has raised.
    pub event_nr: u32,
    /// Number of targets in the live table.
    pub targets: u64,
    /// True if writes fail.
    pub read_only: bool,
    /// True if the device is removed after its last close.
    pub deferred_remove: bool,
    /// The queues in front of the disks of the live table, and the device's own, by device number.
    #[serde(default)]
    pub queues: Vec<RequestQueueReport>,
    /// The disks of the live table that have a power switch, by device number.
    #[serde(default)]
    pub power: Vec<DiskPowerState>,
    /// Limits of requests and bytes per second; absent if there are none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub throttle: Option<DeviceThrottle>,
}

/// All mapped devices, by number.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DeviceList {
    /// The devices.
    pub devices: Vec<DeviceDescription>,
}

/// A device to create. With a table, the table is loaded and resumed, as by dmsetup create.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateDeviceRequest {
    /// Name of the device: 1 to 127 bytes, without a slash.
    pub name: String,
    /// UUID of the device: at most 128 bytes.
    pub uuid: Option<String>,
    /// The table, one target per line, at most 1 MiB.
    pub table: Option<String>,
    /// Absolute path of the base directory of relative paths in the table. Without it, relative
    /// paths are refused.
    pub folder: Option<String>,
    /// Minor number of the device; the lowest free one if absent.
    #[serde(default)]
    pub minor: Option<u32>,
    /// Number of tags of the device's own queue: 0 means 2048, at most 10240. A request-based
    /// multipath device has such a queue if this or `dm_mq_nr_hw_queues` is given.
    #[serde(default)]
    pub dm_mq_queue_depth: Option<u32>,
    /// Number of hardware queues of the device's own queue: 0 means 1, at most 32 and at most the
    /// number of cores.
    #[serde(default)]
    pub dm_mq_nr_hw_queues: Option<u32>,
}

/// A multipath device to create from its paths. Defaults come from the server's multipath.conf or
/// from multipath-tools.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateMultipathRequest {
    /// Name of the device: 1 to 127 bytes, without a slash.
    pub name: String,
    /// UUID of the device: at most 128 bytes.
    pub uuid: Option<String>,
    /// The paths, as words of a table. All must have the same size.
    pub paths: Vec<String>,
    /// How paths are grouped: "failover", "multibus" or "group_by_prio".
    pub policy: Option<String>,
    /// How priorities are set: "const", "weightedpath", or "path_latency" (not with
    /// "group_by_prio"). If the server checks paths, this stays in effect for the device.
    pub prio: Option<String>,
    /// Arguments of `prio`, as in multipath.conf.
    pub prio_args: Option<String>,
    /// Absolute path of the base directory of relative paths. Without it, relative paths are
    /// refused.
    pub folder: Option<String>,
}

/// Query of the removal of a device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RemoveDeviceQuery {
    /// First replace its table by one that fails all requests, even if the removal fails then
    pub force: Option<bool>,
    /// If it is open, remove it after its last close
    pub deferred: Option<bool>,
    /// Cancel after this many milliseconds; nothing is removed then
    pub timeout_ms: Option<u64>,
}

/// A new name or a UUID for a device: exactly one of them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RenameDeviceRequest {
    /// New name: 1 to 127 bytes, without a slash.
    pub name: Option<String>,
    /// UUID: at most 128 bytes. Refused if the device has one.
    pub uuid: Option<String>,
}

/// The event to wait for.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WaitDeviceEventRequest {
    /// The event number that the caller last saw. The request completes once the device's number
    /// differs, which may be at once.
    pub event_nr: u32,
    /// Time limit in milliseconds; at most and by default one minute.
    pub timeout_ms: Option<u64>,
}

/// Options of a suspend.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SuspendDeviceRequest {
    /// If true, do not wait for requests that targets hold back. They wait for the resume, which
    /// may bring another table.
    pub noflush: Option<bool>,
    /// Cancel after this many milliseconds; the device is active then.
    pub timeout_ms: Option<u64>,
}

/// Options of a resume.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ResumeDeviceRequest {
    /// Cancel after this many milliseconds; the old live table stays live and runs then.
    pub timeout_ms: Option<u64>,
}

/// Devices to suspend together: all of them or none.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SuspendDevicesRequest {
    /// Names of the devices.
    pub names: Vec<String>,
    /// If true, do not wait for requests that targets hold back. They wait for the resume, which
    /// may bring another table.
    pub noflush: Option<bool>,
    /// Cancel after this many milliseconds; the devices are active then.
    pub timeout_ms: Option<u64>,
}

/// Devices to resume together: all of them or none.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ResumeDevicesRequest {
    /// Names of the devices.
    pub names: Vec<String>,
    /// Cancel after this many milliseconds; the old live tables stay live and run then.
    pub timeout_ms: Option<u64>,
}
