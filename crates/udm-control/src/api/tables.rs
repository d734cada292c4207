//! Requests and replies about tables, their status, and messages to targets.

use super::paths::{MultipathPathReport, PathMaintenanceStatus};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// One line of a table or of a status.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TableOrStatusLine {
    /// Start of the target on the device.
    pub start_bytes: u64,
    /// Length of the target.
    pub length_bytes: u64,
    /// Type of the target.
    pub target: String,
    /// The rest of the line, byte for byte as the kernel prints it.
    pub params: String,
}

/// A device that a table uses.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct UnderlyingDevice {
    /// Number of the device, as in the table.
    pub number: String,
    /// URI of the device, or @ and the name of a mapped device.
    pub uri: String,
}

/// A table.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TableDescription {
    /// Name of the device.
    pub name: String,
    /// Number of the device.
    pub number: String,
    /// The table as dmsetup prints it; empty without a table.
    pub text: String,
    /// The table, one entry per target.
    pub lines: Vec<TableOrStatusLine>,
    /// The devices that the table uses, in the kernel's order: the last one in the table comes
    /// first.
    pub devices: Vec<UnderlyingDevice>,
}

/// The tables of all devices, by device number.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TableList {
    /// The tables; the text is empty for a device without a table.
    pub tables: Vec<TableDescription>,
}

/// The status of a table.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TableStatus {
    /// Name of the device.
    pub name: String,
    /// The status as dmsetup prints it; empty without a table.
    pub text: String,
    /// The status, one entry per target.
    pub lines: Vec<TableOrStatusLine>,
    /// Number of events that the device has raised.
    pub event_nr: u32,
    /// The paths of multipath targets; empty for other targets.
    #[serde(default)]
    pub paths: Vec<MultipathPathReport>,
    /// The state of path maintenance; null without maintenance or without paths.
    #[serde(default)]
    pub path_maintenance: Option<PathMaintenanceStatus>,
    /// Devices below that have requests which they can neither complete nor fail.
    #[serde(default)]
    pub stalls: Vec<DeviceStallReason>,
}

/// The status of the tables of all devices, by device number.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TableStatusList {
    /// One status per device; the text is empty for a device without a table.
    pub statuses: Vec<TableStatus>,
}

/// Why requests of a device wait.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DeviceStallReason {
    /// URI of the device, or @ and the name of a mapped device above it.
    pub uri: String,
    /// Number of requests and the reason, in one line.
    pub why: String,
}

/// Query of a request about a table.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TableSlotQuery {
    /// 1 for the table in the inactive slot
    pub inactive: Option<u8>,
}

impl TableSlotQuery {
    /// The query for the inactive slot, or for the live table.
    #[must_use]
    pub fn of(inactive: bool) -> TableSlotQuery {
        TableSlotQuery { inactive: inactive.then_some(1) }
    }
}

/// A table to load into the inactive slot.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LoadTableRequest {
    /// The table, one target per line, at most 1 MiB.
    pub table: String,
    /// Absolute path of the base directory of relative paths in the table. Without it, relative
    /// paths are refused.
    pub folder: Option<String>,
    /// If true, the device can't be written while it has this table.
    #[serde(default)]
    pub read_only: Option<bool>,
}

/// A message to a target.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TargetMessageRequest {
    /// A sector (of 512 bytes) inside the target.
    pub sector: u64,
    /// The words of the message.
    pub message: String,
    /// Absolute path of the base directory of relative paths in the message. Without it, relative
    /// paths are refused.
    pub folder: Option<String>,
}

/// Answer of a target to a message.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TargetMessageReply {
    /// The answer; empty for most messages.
    pub answer: String,
}
