//! Requests and replies of the control socket about disks that move to another device.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A move of a device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct StartMoveRequest {
    /// The destination: a device as in a table. A file that does not exist or is empty gets the
    /// size of the disk.
    pub destination: String,
    /// True: a destination that has data is overwritten.
    #[serde(default)]
    pub force: Option<bool>,
    /// True: regions are copied only by writes, and no switch begins, until the move is started.
    #[serde(default)]
    pub paused: Option<bool>,
    /// The device of the log, as in a table; a file that does not exist or is empty is made.
    /// Without it, the log is in the state folder.
    #[serde(default)]
    pub log: Option<String>,
    /// Folder that relative paths are based on; absolute. Without it relative paths are refused.
    #[serde(default)]
    pub folder: Option<String>,
}

/// A change of a move that is under way.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PauseMoveRequest {
    /// True: regions are copied only by writes, and no switch begins. False: both go on.
    pub paused: bool,
}

/// A place that a disk has left.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ForgetOldPlaceRequest {
    /// The device, as in a table.
    pub device: String,
    /// Folder that relative paths are based on; absolute. Without it relative paths are refused.
    #[serde(default)]
    pub folder: Option<String>,
}

/// A move of a device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct MoveDescription {
    /// Name of the device.
    pub name: String,
    /// "copying", "paused", "waiting" (the destination cannot be used, and is tried again),
    /// "switching" (the destination is the disk, and the table is about to be replaced), "done",
    /// "stopped" or "failed" (the disk is at the source).
    pub state: String,
    /// URI of the place that the disk leaves.
    pub source: String,
    /// URI of the place to which it moves.
    pub destination: String,
    /// Size of the disk.
    pub size_bytes: u64,
    /// Bytes that are in both places.
    pub copied_bytes: u64,
    /// Bytes copied per second since the copy began; absent unless it is being copied.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<u64>,
    /// Estimated seconds until the switch; absent if there is no estimate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seconds_left: Option<u64>,
    /// Bytes that the next server would copy, if this one ended now; absent without a log.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unlogged_bytes: Option<u64>,
    /// Why it waits, or why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// The places that the disk has left, which have old data.
    #[serde(default)]
    pub old_places: Vec<String>,
}

/// The moves of a server.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct MoveList {
    /// The moves, in the order of their begin, and the disks that earlier servers moved.
    pub moves: Vec<MoveDescription>,
}
