//! Replies of the control socket about the NVMe/TCP target.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The subsystems of the NVMe/TCP target.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NvmeSubsystemList {
    /// The subsystem; empty if the server has no target.
    pub subsystems: Vec<NvmeSubsystem>,
    /// The namespaces of other controllers that tables of this server use, by URI.
    #[serde(default)]
    pub paths: Vec<NvmePath>,
}

/// A namespace of another controller that this server uses, with counters since it was opened.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NvmePath {
    /// URI without parameters.
    pub uri: String,
    /// `connecting` for the first time, `live` or `down`.
    pub state: String,
    /// Number of the controller; null unless it is live.
    pub cntlid: Option<u16>,
    /// ANA state.
    pub ana: String,
    /// Lanes that use it: one per core and table.
    pub lanes: u64,
    /// Associations that worked.
    pub associations: u64,
    /// Associations that were lost.
    pub losses: u64,
    /// Writes of lost associations that wait until their controller can no longer execute them.
    pub held_writes: u64,
    /// Writes of lost associations that were sent elsewhere after a Cross-Controller Reset.
    pub writes_after_reset: u64,
    /// Writes of lost associations that were sent elsewhere after the time of the controller.
    pub writes_after_time: u64,
    /// Lost controllers that were reset through this path.
    pub resets: u64,
    /// Resets that this path has refused, or that have failed.
    pub failed_resets: u64,
}

/// A subsystem with its ports, namespaces and controllers.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NvmeSubsystem {
    /// Name.
    pub nqn: String,
    /// Serial number.
    pub serial: String,
    /// Where it listens.
    pub ports: Vec<NvmePort>,
    /// The exported devices, by NSID.
    pub namespaces: Vec<NvmeNamespace>,
    /// The controllers, one for each connection of a host, by number.
    pub controllers: Vec<NvmeController>,
    /// The hosts since the start, by name. Beyond 256 hosts, further ones are counted together as
    /// `other`.
    #[serde(default)]
    pub hosts: Vec<NvmeHost>,
}

/// A host, and its answered requests since it first connected.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NvmeHost {
    /// Name of the host, as the host says it.
    pub host_nqn: String,
    /// Requests in flight.
    pub in_flight: u64,
    /// Requests.
    pub requests: u64,
    /// Bytes of successful requests.
    pub bytes: u64,
    /// Requests that failed.
    pub errors: u64,
    /// Requests of I/O queues, by number. Queues of several controllers with the same number are
    /// counted together.
    pub queues: Vec<NvmeQueueStats>,
}

/// An I/O queue of a host.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NvmeQueueStats {
    /// Number of the queue, from 1: it is on the core with the number before.
    pub queue: u16,
    /// Answered requests.
    pub requests: u64,
}

/// An address on which a subsystem listens.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NvmePort {
    /// Address with port.
    pub address: String,
}

/// How good a port is for a device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NvmeAnaState {
    /// Address of the port.
    pub port: String,
    /// `optimized`, `non-optimized`, `inaccessible` or `persistent-loss`.
    pub state: String,
}

/// Sets ANA states.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SetNvmeAnaStateRequest {
    /// The device; all devices if absent.
    #[serde(default)]
    pub device: Option<String>,
    /// Address of the port; all ports if absent.
    #[serde(default)]
    pub port: Option<String>,
    /// `optimized`, `non-optimized`, `inaccessible` or `persistent-loss`.
    pub state: String,
}

/// Ends a controller on behalf of its host, which has lost it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ResetNvmeControllerRequest {
    /// Name of the subsystem.
    pub subsystem: String,
    /// Number of the controller.
    pub cntlid: u16,
    /// Its uniquifier (CIU).
    pub uniquifier: u8,
    /// Its random number (CIRN), 16 hexadecimal digits.
    pub random: String,
    /// Name of the host that has lost it.
    pub host_nqn: String,
    /// Identifier of that host, 32 hexadecimal digits.
    pub host_id: String,
}

/// The outcome of a reset.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ResetNvmeControllerReply {
    /// `done`: no request of the controller can reach a disk any more. `refused`: nothing was
    /// reset. `late`: requests of it are still at a disk after the longest wait.
    pub outcome: String,
    /// Why it is not done, in one line.
    #[serde(default)]
    pub why: String,
}

/// A device as a namespace.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NvmeNamespace {
    /// Number.
    pub nsid: u32,
    /// NGUID, 32 hexadecimal digits.
    pub nguid: String,
    /// UUID: the same identifier.
    pub uuid: String,
    /// Name of the device.
    pub device: String,
    /// Size in bytes.
    pub size_bytes: u64,
    /// Block size in bytes.
    pub block_bytes: u32,
    /// True if hosts cannot write.
    pub read_only: bool,
    /// ANA states, by port.
    pub ana: Vec<NvmeAnaState>,
}

/// A controller, which exists for one host.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NvmeController {
    /// Number.
    pub cntlid: u16,
    /// Name of the host, as the host says it.
    pub host_nqn: String,
    /// Address of the host; null if the system does not know it.
    pub address: Option<String>,
    /// Address of the port to which the host has connected.
    pub port: String,
    /// True if it belongs to the discovery subsystem.
    pub discovery: bool,
    /// `live`, `disabled` by the host, or `ending`: the host is gone, and requests of it are still
    /// at a device.
    pub state: String,
    /// Number of connected I/O queues, and of those that wait for their requests.
    pub io_queues: u64,
}

/// Counters of connections of NVMe/TCP hosts.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NvmeConnectionStats {
    /// Connected hosts.
    pub hosts: u64,
    /// Controllers, one for each connection of a host to a subsystem.
    pub controllers: u64,
    /// Open connections, one per queue.
    pub connections: u64,
    /// Accepted connections.
    pub accepted: u64,
    /// Connections and queues that were refused, because there were too many.
    pub refused: u64,
    /// Queues of hosts that were gone, and whose requests stayed at a device for longer than the
    /// quiesce time.
    pub late_quiesces: u64,
}
