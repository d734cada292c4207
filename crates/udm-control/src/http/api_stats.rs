//! What crosses the control socket about how much is done: totals, for programs that draw.

use super::api::{Device, Path};
use super::api_snapshots::Snapshot;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What there is and what it has done. Counts are totals that only grow: a rate is the difference
/// of two looks. They are added up over the cores while those go on, so they are recent and not of
/// one instant.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Stats {
    /// The version of udm.
    pub version: String,
    /// When the server began, in milliseconds since 1970. One that began at another time has
    /// counts of its own, from 0.
    pub started_ms: u64,
    /// For how long it has run, by a clock that only goes on: between two looks lies the
    /// difference.
    pub up_ns: u64,
    /// Of its clients; null where nothing is exported.
    pub server: Option<ServerStats>,
    /// Its cores; none where nothing is exported.
    pub cores: Vec<CoreStats>,
    /// All mapped devices, in the order of their numbers.
    pub devices: Vec<DeviceStats>,
}

/// Connections over NBD.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ServerStats {
    /// Clients that are connected.
    pub connections: u64,
    /// Connections that were accepted.
    pub accepted: u64,
    /// Connections that were closed, or refused an export, because there were too many.
    pub refused: u64,
    /// How often a connection went on on another core.
    pub moves: u64,
}

/// A core.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CoreStats {
    /// Its number, from 0.
    pub core: u64,
    /// Requests that it has answered.
    pub requests: u64,
}

/// A device, and what its clients have asked for and got.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DeviceStats {
    /// The device.
    pub device: Device,
    /// The types of target in its live table, each once, in the order of the table.
    pub target_types: Vec<String>,
    /// Requests of clients that it has; null where nobody can connect to it.
    pub in_flight: Option<u64>,
    /// What clients have asked for and got since it has an export, by operation: "read", "write",
    /// "flush", "discard" and "write-zeroes". What nobody has asked for is left out.
    pub served: BTreeMap<String, Served>,
    /// The paths of its multipath targets, each with what it has served since the table was loaded.
    pub paths: Vec<Path>,
    /// The snapshot that it is, or that is merged into it.
    pub snapshot: Option<Snapshot>,
}

/// What one operation has come to.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Served {
    /// Requests that the device has.
    #[serde(default)]
    pub in_flight: u64,
    /// Requests that were answered, errors included.
    pub requests: u64,
    /// What of them went well.
    pub bytes: u64,
    /// Those that were answered with an error.
    pub errors: u64,
    /// How long the device had requests, in all.
    pub time_ns: u64,
    /// For how many it was how long: pairs of a time and a count, in the order of the times. So
    /// many took less than that time, and no less than four fifths of it. The longest time, 34 s,
    /// has those that took longer too; the shortest, 1.3 µs, those that took nothing. The same
    /// times each time, but pairs without a request are left out.
    pub latency: Vec<(u64, u64)>,
}
