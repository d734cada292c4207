//! What crosses the control socket, as plain structs. Sizes are in bytes, times in nanoseconds,
//! names are stable.
//!
//! `/openapi.json` is made from these ([`super::openapi`]), doc comments included, so it cannot
//! drift from what the server takes and gives. Requests refuse members that they do not know;
//! replies are read leniently, so that an older client understands a newer server.

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
    /// Its name.
    pub name: String,
    /// Its uuid, when it has one.
    pub uuid: Option<String>,
    /// Its number, major:minor, in udm's own numbering.
    pub number: String,
    /// The size of its live table; 0 without one.
    pub size_bytes: u64,
    /// "active" or "suspended".
    pub state: String,
    /// It has a live table.
    pub live_table: bool,
    /// It has a loaded table that waits for a resume.
    pub inactive_table: bool,
    /// Connections of clients, and tables of other devices that use it.
    pub open_count: u64,
    /// How many events it has raised.
    pub event_nr: u32,
    /// Targets in the live table.
    pub targets: u64,
    /// Writes fail.
    pub read_only: bool,
    /// It is removed as soon as nobody has it open.
    pub deferred_remove: bool,
    /// The queues in front of what its live table uses, and its own, in the order of their numbers.
    #[serde(default)]
    pub queues: Vec<Queue>,
    /// The disks of its live table whose power has a switch, in the order of their numbers.
    #[serde(default)]
    pub power: Vec<Power>,
}

/// All mapped devices, in the order of their numbers.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DeviceList {
    /// The devices.
    pub devices: Vec<Device>,
}

/// One line of a table or of a status.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Line {
    /// Where the target starts on the device.
    pub start_bytes: u64,
    /// How long it is.
    pub length_bytes: u64,
    /// The type of the target.
    pub target: String,
    /// The rest of the line, byte for byte as the kernel prints it.
    pub params: String,
}

/// A device that a table uses.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Below {
    /// Its number, as it stands in the table.
    pub number: String,
    /// Its URI, or @ and the name of a mapped device.
    pub uri: String,
}

/// A table.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Table {
    /// The name of the device.
    pub name: String,
    /// Its number.
    pub number: String,
    /// The table as dmsetup prints it; empty without one.
    pub text: String,
    /// The same, a target a line.
    pub lines: Vec<Line>,
    /// The devices that it uses, in the kernel's order: what it names last comes first.
    pub devices: Vec<Below>,
}

/// The tables of all devices, in the order of their numbers.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TableList {
    /// The tables; one without text for a device that has none.
    pub tables: Vec<Table>,
}

/// A path of a multipath target, and what it has served since its table was loaded. All are totals:
/// a rate is the difference of two looks.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Path {
    /// Where the target starts on the device.
    pub start_bytes: u64,
    /// The number of the path's device.
    pub number: String,
    /// The word that the table used for it.
    pub name: String,
    /// Its group, from 1.
    pub group: u64,
    /// "active" or "failed".
    pub state: String,
    /// How long it has been in that state.
    pub state_ns: u64,
    /// How long it was failed in all, this time included.
    pub failed_ns: u64,
    /// How often it failed.
    pub failures: u64,
    /// What its last check found, in multipath-tools' words: "ready", "faulty", "i/o timeout",
    /// "delayed" where it answers and is held back, "undef" where nothing has been found yet.
    #[serde(default)]
    pub checker: String,
    /// Why no check reinstates it: "by command", what has become of it since the table was loaded,
    /// or for how long it is held back as it keeps failing; null where one may.
    #[serde(default)]
    pub held: Option<String>,
    /// What it is worth; null where nothing says so.
    #[serde(default)]
    pub priority: Option<u32>,
    /// Requests that it has, as of the last time that each core looked.
    pub in_flight: u64,
    /// What came back from it, well or not, by operation: "read", "write", "flush", "discard" and
    /// "write-zeroes".
    pub served: BTreeMap<String, Moved>,
    /// What came back with an error, by the kernel's name for it; those that none had are left out.
    pub errors: BTreeMap<String, u64>,
    /// Requests that it was given after another path had failed them.
    pub retries: u64,
    /// Out of use for being slow.
    #[serde(default)]
    pub ejected: bool,
    /// How often it was.
    #[serde(default)]
    pub ejections: u64,
    /// What the watch over it has counted, where there is one.
    pub watch: Option<PathWatch>,
}

/// Which of a device's paths requests are given to: those that have not failed, but for one that is
/// out of use for being slow while its group has another.
#[must_use]
pub fn usable(paths: &[Path]) -> Vec<bool> {
    let up = |path: &Path| path.state == "active";
    let group = |path: &Path| (path.start_bytes, path.group);
    let other = |path: &Path| paths.iter().any(|one| group(one) == group(path) && up(one) && !one.ejected);
    paths.iter().map(|path| up(path) && !(path.ejected && other(path))).collect()
}

/// How the paths of a multipath target are looked after, as of now.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Upkeep {
    /// What becomes of requests without a path, as in multipath.conf: "fail", "queue", or for how
    /// many checks they wait; null where table and messages say it.
    pub no_path_retry: Option<String>,
    /// Whether requests without a path wait at the moment, whoever said so; of a suspended device,
    /// from its resume on.
    pub queueing: bool,
    /// How long they wait yet; null where it is not counted: there is a path, or no bound.
    pub queueing_left_ns: Option<u64>,
    /// When the best group is gone back to, as in multipath.conf: "manual", "immediate",
    /// "followover", or after how many seconds.
    pub failback: String,
    /// The group, from 1, that is gone back to when its time has come; null where none is.
    pub failback_group: Option<u64>,
    /// How long until then.
    pub failback_left_ns: Option<u64>,
    /// The group, from 1, that a person has switched to: it is used until none of its paths works,
    /// whichever is better. Null where nobody has, or it is the best.
    #[serde(default)]
    pub group_by_hand: Option<u64>,
}

/// What the watch over a path has counted since its table was loaded.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PathWatch {
    /// Writes and flushes that are past their deadline and still wait for the path.
    pub waiting: u64,
    /// Reads that were past their deadline and went elsewhere.
    pub given_up: u64,
    /// Answers that came when nobody waited for them any more.
    pub late: u64,
    /// Reads that went down without a copy, for want of memory: they have to wait as writes do.
    pub uncopied: u64,
    /// Reads of the path that were sent to another one too.
    pub hedges: u64,
    /// Those that were answered there first.
    pub hedges_won: u64,
    /// Those that were not.
    pub hedges_wasted: u64,
    /// Reads that would have been sent to another one and were not, or only later, since the budget
    /// was used up.
    pub hedges_refused: u64,
    /// Hedges past the budget, for a path that answered nothing at all.
    pub hedges_free: u64,
    /// How long reads took: those that took less than so long, and no less than the step before.
    pub latency: Vec<LatencyStep>,
    /// How long they took together.
    #[serde(default)]
    pub latency_sum_ns: u64,
}

/// Reads that took about as long.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LatencyStep {
    /// They took less.
    pub below_ns: u64,
    /// How many there were.
    pub reads: u64,
}

/// Requests and how long they were in all.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Moved {
    /// How many.
    pub requests: u64,
    /// How long.
    pub bytes: u64,
}

/// The status of a table.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Status {
    /// The name of the device.
    pub name: String,
    /// The status as dmsetup prints it; empty without a table.
    pub text: String,
    /// The same, a target a line.
    pub lines: Vec<Line>,
    /// How many events the device has raised.
    pub event_nr: u32,
    /// The paths of its multipath targets; none for other targets.
    #[serde(default)]
    pub paths: Vec<Path>,
    /// How its paths are looked after; null where they are not, or there are none.
    #[serde(default)]
    pub upkeep: Option<Upkeep>,
    /// Devices below that have requests which they can neither serve nor give up.
    #[serde(default)]
    pub waits: Vec<Waits>,
}

/// The status of the tables of all devices, in the order of their numbers.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct StatusList {
    /// One a device; without text for a device that has no table.
    pub statuses: Vec<Status>,
}

/// Why requests of a device wait.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Waits {
    /// The URI of the device, or @ and the name of a mapped device above it.
    pub uri: String,
    /// How many, and what for, in one line.
    pub why: String,
}

/// A device to make. With a table it is loaded and resumed, as dmsetup create does; without one the
/// device has none.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Create {
    /// Its name: 1 to 127 bytes, without a slash.
    pub name: String,
    /// Its uuid: at most 128 bytes.
    pub uuid: Option<String>,
    /// The table, a target a line, at most 1 MiB.
    pub table: Option<String>,
    /// The absolute path of the folder from which relative paths in the table count. Without it
    /// they are refused.
    pub folder: Option<String>,
    /// Its minor number; without one it is the lowest that is free.
    #[serde(default)]
    pub minor: Option<u32>,
    /// With this or the next, a request-based multipath device has a queue: its tags. 0 for 2048,
    /// at most 10240.
    #[serde(default)]
    pub dm_mq_queue_depth: Option<u32>,
    /// Its hardware queues: 0 for 1, at most 32 and as many as there are cores.
    #[serde(default)]
    pub dm_mq_nr_hw_queues: Option<u32>,
}

/// A multipath device to make from its paths. What is not given is as the server's multipath.conf
/// says, or multipath-tools' default.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateMultipath {
    /// Its name: 1 to 127 bytes, without a slash.
    pub name: String,
    /// Its uuid: at most 128 bytes.
    pub uuid: Option<String>,
    /// Its paths, as words of a table, all of one size.
    pub paths: Vec<String>,
    /// How they become groups: "failover", "multibus" or "group_by_prio".
    pub policy: Option<String>,
    /// What they are worth: "const", "weightedpath" or, where they are not grouped by it,
    /// "path_latency". It holds for the device from then on
    /// where the server checks paths.
    pub prio: Option<String>,
    /// The arguments of that, as in multipath.conf.
    pub prio_args: Option<String>,
    /// The absolute path of the folder from which relative paths count. Without it they are
    /// refused.
    pub folder: Option<String>,
}

/// What a device is to be called, or the uuid that it is to have: one of the two.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Rename {
    /// Its new name: 1 to 127 bytes, without a slash.
    pub name: Option<String>,
    /// Its uuid: at most 128 bytes. A device that has one keeps it.
    pub uuid: Option<String>,
}

/// Which event to wait for.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Wait {
    /// The number of events that the caller knows of: it waits until there is another number, and
    /// not at all where there is already.
    pub event_nr: u32,
    /// Call it off after so many milliseconds; after a minute in any case.
    pub timeout_ms: Option<u64>,
}

/// A table to load into the inactive slot.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Load {
    /// The table, a target a line, at most 1 MiB.
    pub table: String,
    /// The absolute path of the folder from which relative paths in the table count. Without it
    /// they are refused.
    pub folder: Option<String>,
    /// The device can't be written to while it has this table.
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
    /// The absolute path of the folder from which relative paths in the message count. Without it
    /// they are refused.
    pub folder: Option<String>,
}

/// What an administrator does to a path: a multipath target's message, but that no check reinstates
/// what it failed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CommandPath {
    /// The path's device: its number, major:minor, as the status has it, or a word as in a table.
    pub path: String,
    /// "fail" or "reinstate".
    pub action: String,
    /// The absolute path of the folder from which a relative path counts. Without it that is
    /// refused.
    #[serde(default)]
    pub folder: Option<String>,
}

/// What a target answered.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Answer {
    /// The answer; empty for most messages.
    pub answer: String,
}

/// How to suspend.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Suspend {
    /// Do not wait for requests that targets hold back: they wait for the resume, perhaps through
    /// another table.
    pub noflush: Option<bool>,
    /// Call it off when it takes longer than so many milliseconds: the device is active then.
    pub timeout_ms: Option<u64>,
}

/// How to resume.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Resume {
    /// Call it off when it takes longer than so many milliseconds: the table that was live is live
    /// and running then.
    pub timeout_ms: Option<u64>,
}

/// Which devices to suspend together: all of them or none.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SuspendTogether {
    /// Their names.
    pub names: Vec<String>,
    /// Do not wait for requests that targets hold back: they wait for the resume, perhaps through
    /// another table.
    pub noflush: Option<bool>,
    /// Call it off when it takes longer than so many milliseconds: the devices are active then.
    pub timeout_ms: Option<u64>,
}

/// Which devices to resume together: all of them or none.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ResumeTogether {
    /// Their names.
    pub names: Vec<String>,
    /// Call it off when it takes longer than so many milliseconds: the tables that were live are
    /// live and running then.
    pub timeout_ms: Option<u64>,
}

/// Where an export can be reached.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Export {
    /// Its name, which is the device's.
    pub name: String,
    /// Its size.
    pub size_bytes: u64,
    /// Writes are refused.
    pub read_only: bool,
    /// The NBD URIs under which clients reach it.
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
    /// Its name, as tables spell it.
    pub name: String,
    /// Its version, as the kernel counts it.
    pub version: String,
}

/// What this server is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Version {
    /// The version of udm.
    pub version: String,
    /// The version of the kernel's device mapper whose behaviour it follows.
    pub driver_version: String,
    /// The types of target that it has.
    pub targets: Vec<TargetVersion>,
}

/// Why a request was refused.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Error {
    /// The whole story in one line.
    pub error: String,
    /// The errno.
    pub errno: u32,
    /// The kernel's text, where the kernel has one.
    pub text: String,
    /// The precise reason, where the kernel's text hides it.
    pub reason: String,
    /// The line of the table to blame, from 1.
    pub line: Option<u64>,
    /// The first character to blame in that line, from 1.
    pub column: Option<u64>,
    /// How many characters to blame.
    pub width: Option<u64>,
}
