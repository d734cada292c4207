//! Counters of the control socket: totals, for monitoring programs.

use super::clones::CloneDescription;
use super::devices::DeviceDescription;
use super::moves::MoveDescription;
use super::nvme::{NvmeConnectionStats, NvmePath, NvmeQueueStats};
use super::paths::MultipathPathReport;
use super::snapshots::SnapshotDescription;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The server with its devices and counters. Counters only grow: a rate is the difference of two
/// readings. They are summed over running cores, so they are recent, but not of one instant.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ServerStatsReport {
    /// Version of udm.
    pub version: String,
    /// Start of the server in milliseconds since 1970. If this differs, it is another server, whose
    /// counters started at 0.
    pub started_ms: u64,
    /// Time since the start of the server, by a monotonic clock. The difference of two readings is
    /// the time between them.
    pub up_ns: u64,
    /// Counters of client connections; null if nothing is exported.
    pub server: Option<NbdConnectionStats>,
    /// Counters of NVMe/TCP hosts; null if the server has no target for them.
    #[serde(default)]
    pub nvme: Option<NvmeConnectionStats>,
    /// The requests of NVMe/TCP hosts, by name of the host. Beyond 256 hosts, further ones are
    /// counted together as `other`.
    #[serde(default)]
    pub nvme_hosts: Vec<NvmeHostStats>,
    /// The namespaces of other controllers that tables use, by URI.
    #[serde(default)]
    pub nvme_paths: Vec<NvmePath>,
    /// Counters of cores; empty if nothing is exported.
    pub cores: Vec<CoreStats>,
    /// All mapped devices, by number.
    pub devices: Vec<DeviceStats>,
}

/// The requests of an NVMe/TCP host to all devices.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NvmeHostStats {
    /// Name of the host, as the host says it.
    pub host_nqn: String,
    /// Requests in flight.
    pub in_flight: u64,
    /// Requests since the host first connected, by operation, as of devices.
    pub served: BTreeMap<String, OperationStats>,
    /// I/O queues with their requests, by number. Queues of several controllers with the same
    /// number are counted together.
    pub queues: Vec<NvmeQueueStats>,
}

/// Counters of NBD connections.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NbdConnectionStats {
    /// Connected clients.
    pub connections: u64,
    /// Connected clients that use TLS.
    pub tls: u64,
    /// Accepted connections.
    pub accepted: u64,
    /// Connections that were closed or refused an export, because there were too many.
    pub refused: u64,
    /// Moves of connections to another core.
    pub moves: u64,
}

/// Counters of a core.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CoreStats {
    /// Number of the core, from 0.
    pub core: u64,
    /// Requests that the core has answered.
    pub requests: u64,
}

/// A device with the counters of its clients' requests.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DeviceStats {
    /// The device.
    pub device: DeviceDescription,
    /// The target types of the live table, each listed once, in the order of the table.
    pub target_types: Vec<String>,
    /// Requests of clients that are in flight; null if the device is not exported.
    pub in_flight: Option<u64>,
    /// Requests of clients since the device is exported, by operation: "read", "write", "flush",
    /// "discard" and "write-zeroes". Operations without requests are left out.
    pub served: BTreeMap<String, OperationStats>,
    /// The paths of multipath targets, with counters since the table was loaded.
    pub paths: Vec<MultipathPathReport>,
    /// The snapshot in this device, or the one that is merged into it.
    pub snapshot: Option<SnapshotDescription>,
    /// The clone in this device.
    #[serde(default)]
    pub clone: Option<CloneDescription>,
    /// The move of this device that is under way.
    #[serde(default)]
    pub moving: Option<MoveDescription>,
}

/// Counters of one operation.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct OperationStats {
    /// Requests in flight.
    #[serde(default)]
    pub in_flight: u64,
    /// Completed requests, errors included.
    pub requests: u64,
    /// Bytes of requests that succeeded.
    pub bytes: u64,
    /// Requests that were completed with an error.
    pub errors: u64,
    /// Total time of completed requests in the device.
    pub time_ns: u64,
    /// Latency histogram: pairs of a time in nanoseconds and a number of requests, by ascending
    /// time. The requests took less than the time and at least four fifths of it. The longest time,
    /// 34 s, also counts slower requests; the shortest, 1.3 µs, also faster ones. The times are the
    /// same in each reading, but pairs without requests are left out.
    pub latency: Vec<(u64, u64)>,
}
