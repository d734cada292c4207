//! Events of devices.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A change of state of a device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DeviceEventDescription {
    /// Number of the event. Each event has the next number; a server that starts later has greater
    /// numbers.
    pub id: u64,
    /// Time in milliseconds since 1970.
    pub time_ms: u64,
    /// Kind of the change: "created", "loaded", "cleared", "suspended", "resumed", "renamed",
    /// "removed", "event" (the device's event counter), "path-failed", "path-held", "path-refused",
    /// "path-reinstated", "path-ejected", "path-admitted", "path-checked", "path-group",
    /// "failback", "no-path", "stripe-failed", "snapshot-filling", "snapshot-overflow",
    /// "snapshot-invalid", "merge-done", "merge-failed", "clone-hydrated", "clone-metadata-failed",
    /// "move-started", "moved", "move-failed"; "lost" if events are missing.
    pub kind: String,
    /// Name of the device at that time, or its number while the name changes. Empty if events are
    /// lost.
    pub device: String,
    /// UUID of the device, if it has one.
    pub uuid: Option<String>,
    /// Number of the device, major:minor.
    pub number: String,
    /// Number of events that the device has raised.
    pub event_nr: u32,
    /// Number of the path, if the event concerns one.
    pub path: Option<String>,
    /// The path group, from 1, if the event concerns one.
    pub group: Option<u64>,
    /// Number of lost events, if known.
    pub lost: Option<u64>,
    /// Text for people, in one line without the device's name; control characters are escaped.
    pub line: String,
}
