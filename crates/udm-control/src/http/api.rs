//! Requests and replies of the control socket, as plain structs. Sizes are in bytes, times in
//! nanoseconds, names are stable.
//!
//! `/openapi.json` is generated from these structs ([`super::openapi`]), doc comments included, so
//! it always matches the server. Requests with unknown members are refused. Clients ignore unknown
//! members of replies, so an older client works with a newer server.

pub use super::api_config::*;
pub use super::api_events::*;
pub use super::api_queue::*;
pub use super::api_snapshots::*;
pub use super::api_stats::*;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A mapped device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Device {
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
    pub queues: Vec<Queue>,
    /// The disks of the live table that have a power switch, by device number.
    #[serde(default)]
    pub power: Vec<Power>,
}

/// All mapped devices, by number.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DeviceList {
    /// The devices.
    pub devices: Vec<Device>,
}

/// One line of a table or of a status.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Line {
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
pub struct Below {
    /// Number of the device, as in the table.
    pub number: String,
    /// URI of the device, or @ and the name of a mapped device.
    pub uri: String,
}

/// A table.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Table {
    /// Name of the device.
    pub name: String,
    /// Number of the device.
    pub number: String,
    /// The table as dmsetup prints it; empty without a table.
    pub text: String,
    /// The table, one entry per target.
    pub lines: Vec<Line>,
    /// The devices that the table uses, in the kernel's order: the last one in the table comes
    /// first.
    pub devices: Vec<Below>,
}

/// The tables of all devices, by device number.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TableList {
    /// The tables; the text is empty for a device without a table.
    pub tables: Vec<Table>,
}

/// A path of a multipath target, with counters since its table was loaded. Counters only grow: a
/// rate is the difference of two readings.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Path {
    /// Start of the target on the device.
    pub start_bytes: u64,
    /// Number of the path's device.
    pub number: String,
    /// The path's device as written in the table.
    pub name: String,
    /// Path group, from 1.
    pub group: u64,
    /// "active" or "failed".
    pub state: String,
    /// Time since the path is in this state.
    pub state_ns: u64,
    /// Total time in which the path was failed, including the current failure.
    pub failed_ns: u64,
    /// Number of times the path failed.
    pub failures: u64,
    /// Result of the last path check, in multipath-tools' words: "ready", "faulty", "i/o timeout",
    /// "delayed" (the path answers, but is not reinstated yet), "undef" (not checked yet).
    #[serde(default)]
    pub checker: String,
    /// Why path checks do not reinstate the path: "by command", a change of its device since the
    /// table was loaded, or for how long it is held back because it keeps failing. Null if checks
    /// may reinstate it.
    #[serde(default)]
    pub held: Option<String>,
    /// Priority of the path; null if unknown.
    #[serde(default)]
    pub priority: Option<u32>,
    /// Requests in flight on the path, as of the last update of each core.
    pub in_flight: u64,
    /// Requests that the path completed, with or without error, by operation: "read", "write",
    /// "flush", "discard" and "write-zeroes".
    pub served: BTreeMap<String, Moved>,
    /// Requests that the path completed with an error, by the kernel's name of the error. Errors
    /// that did not occur are left out.
    pub errors: BTreeMap<String, u64>,
    /// Requests that the path got after another path had failed them.
    pub retries: u64,
    /// True while the path is ejected: not used, because it is slow.
    #[serde(default)]
    pub ejected: bool,
    /// Number of times the path was ejected.
    #[serde(default)]
    pub ejections: u64,
    /// Counters of the path watch; null without one.
    pub watch: Option<PathWatch>,
}

/// Which paths of a device get requests: the paths that have not failed, except an ejected one
/// whose group has another usable path.
#[must_use]
pub fn usable(paths: &[Path]) -> Vec<bool> {
    let up = |path: &Path| path.state == "active";
    let group = |path: &Path| (path.start_bytes, path.group);
    let other = |path: &Path| paths.iter().any(|one| group(one) == group(path) && up(one) && !one.ejected);
    paths.iter().map(|path| up(path) && !(path.ejected && other(path))).collect()
}

/// How the paths of a multipath target are maintained, and their current state.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Upkeep {
    /// What happens to requests without a usable path, as in multipath.conf: "fail", "queue", or
    /// the number of checks for which they are queued. Null if table and messages decide.
    pub no_path_retry: Option<String>,
    /// True if requests without a usable path are queued at the moment, by whatever setting. For a
    /// suspended device: true if they will be queued after its resume.
    pub queueing: bool,
    /// Time until queued requests fail; null if there is a usable path or no limit.
    pub queueing_left_ns: Option<u64>,
    /// When the device goes back to the best group, as in multipath.conf: "manual", "immediate",
    /// "followover", or a number of seconds.
    pub failback: String,
    /// The group, from 1, to which a delayed failback will switch; null if none is pending.
    pub failback_group: Option<u64>,
    /// Time until that failback.
    pub failback_left_ns: Option<u64>,
    /// The group, from 1, that an administrator switched to. It is used until none of its paths
    /// works, even if another group is better. Null if there is none, or if it is the best group.
    #[serde(default)]
    pub group_by_hand: Option<u64>,
}

/// Counters of the path watch since the table was loaded.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PathWatch {
    /// Writes and flushes that are past their deadline and still wait for the path.
    pub waiting: u64,
    /// Reads that passed their deadline and were sent to another path.
    pub given_up: u64,
    /// Answers that came after their request was completed otherwise.
    pub late: u64,
    /// Reads that were sent without a copy, because memory was short. Like writes, they must wait
    /// for the path.
    pub uncopied: u64,
    /// Hedged reads: reads of this path that were also sent to another path.
    pub hedges: u64,
    /// Hedged reads that the other path answered first.
    pub hedges_won: u64,
    /// Hedged reads that the other path did not answer first.
    pub hedges_wasted: u64,
    /// Reads that were not hedged, or hedged late, because the budget was used up.
    pub hedges_refused: u64,
    /// Hedged reads beyond the budget, for a path that did not answer anything.
    pub hedges_free: u64,
    /// Latency histogram of reads: each step counts reads faster than its limit and not faster than
    /// the limit of the step before.
    pub latency: Vec<LatencyStep>,
    /// Total time of all reads.
    #[serde(default)]
    pub latency_sum_ns: u64,
}

/// One step of a latency histogram.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LatencyStep {
    /// Upper limit of the time.
    pub below_ns: u64,
    /// Number of reads.
    pub reads: u64,
}

/// A number of requests and their bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Moved {
    /// Number of requests.
    pub requests: u64,
    /// Number of bytes.
    pub bytes: u64,
}

/// The status of a table.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Status {
    /// Name of the device.
    pub name: String,
    /// The status as dmsetup prints it; empty without a table.
    pub text: String,
    /// The status, one entry per target.
    pub lines: Vec<Line>,
    /// Number of events that the device has raised.
    pub event_nr: u32,
    /// The paths of multipath targets; empty for other targets.
    #[serde(default)]
    pub paths: Vec<Path>,
    /// How the paths are maintained; null if they are not, or if there are no paths.
    #[serde(default)]
    pub upkeep: Option<Upkeep>,
    /// Devices below that have requests which they can neither complete nor fail.
    #[serde(default)]
    pub waits: Vec<Waits>,
}

/// The status of the tables of all devices, by device number.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct StatusList {
    /// One status per device; the text is empty for a device without a table.
    pub statuses: Vec<Status>,
}

/// Why requests of a device wait.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Waits {
    /// URI of the device, or @ and the name of a mapped device above it.
    pub uri: String,
    /// Number of requests and the reason, in one line.
    pub why: String,
}

/// A device to create. With a table, the table is loaded and resumed, as by dmsetup create.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Create {
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
pub struct CreateMultipath {
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

/// A new name or a UUID for a device: exactly one of them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Rename {
    /// New name: 1 to 127 bytes, without a slash.
    pub name: Option<String>,
    /// UUID: at most 128 bytes. Refused if the device has one.
    pub uuid: Option<String>,
}

/// The event to wait for.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Wait {
    /// The event number that the caller last saw. The request completes once the device's number
    /// differs, which may be at once.
    pub event_nr: u32,
    /// Time limit in milliseconds; at most and by default one minute.
    pub timeout_ms: Option<u64>,
}

/// A table to load into the inactive slot.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Load {
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
pub struct Message {
    /// A sector (of 512 bytes) inside the target.
    pub sector: u64,
    /// The words of the message.
    pub message: String,
    /// Absolute path of the base directory of relative paths in the message. Without it, relative
    /// paths are refused.
    pub folder: Option<String>,
}

/// An administrator's command for a path. Unlike a multipath message, path checks do not reinstate
/// a path that it failed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CommandPath {
    /// The path's device: its number, major:minor, as in the status, or a word as in a table.
    pub path: String,
    /// "fail" or "reinstate".
    pub action: String,
    /// Absolute path of the base directory of a relative path. Without it, a relative path is
    /// refused.
    #[serde(default)]
    pub folder: Option<String>,
}

/// Answer of a target to a message.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Answer {
    /// The answer; empty for most messages.
    pub answer: String,
}

/// Options of a suspend.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Suspend {
    /// If true, do not wait for requests that targets hold back. They wait for the resume, which
    /// may bring another table.
    pub noflush: Option<bool>,
    /// Cancel after this many milliseconds; the device is active then.
    pub timeout_ms: Option<u64>,
}

/// Options of a resume.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Resume {
    /// Cancel after this many milliseconds; the old live table stays live and runs then.
    pub timeout_ms: Option<u64>,
}

/// Devices to suspend together: all of them or none.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SuspendTogether {
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
pub struct ResumeTogether {
    /// Names of the devices.
    pub names: Vec<String>,
    /// Cancel after this many milliseconds; the old live tables stay live and run then.
    pub timeout_ms: Option<u64>,
}

/// An export and its addresses.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Export {
    /// Name of the export, which is the device's name.
    pub name: String,
    /// Size of the export.
    pub size_bytes: u64,
    /// True if writes are refused.
    pub read_only: bool,
    /// The NBD URIs of the export.
    pub uris: Vec<String>,
}

/// All exports.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ExportList {
    /// The exports.
    pub exports: Vec<Export>,
}

/// A type of target.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TargetVersion {
    /// Name of the type, as in tables.
    pub name: String,
    /// Version of the target, as in the kernel.
    pub version: String,
}

/// Versions of the server.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Version {
    /// Version of udm.
    pub version: String,
    /// Version of the kernel's device mapper whose behaviour the server follows.
    pub driver_version: String,
    /// The types of target that the server has.
    pub targets: Vec<TargetVersion>,
}

/// Why a request was refused.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Error {
    /// The complete error in one line.
    pub error: String,
    /// The errno.
    pub errno: u32,
    /// The kernel's text, if the kernel has one.
    pub text: String,
    /// The precise reason, if the kernel's text does not give it.
    pub reason: String,
    /// Line of the fault in the table, from 1.
    pub line: Option<u64>,
    /// First character of the fault in that line, from 1.
    pub column: Option<u64>,
    /// Number of characters of the fault.
    pub width: Option<u64>,
}
