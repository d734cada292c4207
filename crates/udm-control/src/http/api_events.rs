//! What crosses the control socket about changes of state.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A change of state.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Event {
    /// Its number. Each change has the next one; those of a server that begins later are greater.
    pub id: u64,
    /// When it was, in milliseconds since 1970.
    pub time_ms: u64,
    /// What has changed: "created", "loaded", "cleared", "suspended", "resumed", "renamed",
    /// "removed", "event" (the device's event counter), "path-failed", "path-held", "path-refused",
    /// "path-reinstated", "path-ejected", "path-admitted", "path-checked", "path-group",
    /// "failback", "no-path", "stripe-failed", "snapshot-filling", "snapshot-overflow",
    /// "snapshot-invalid", "merge-done", "merge-failed"; "lost" stands where changes are missing.
    pub kind: String,
    /// The name of the device, as of then; its number while the name changes. Empty where changes
    /// are lost.
    pub device: String,
    /// Its uuid, when it has one.
    pub uuid: Option<String>,
    /// Its number, major:minor.
    pub number: String,
    /// How many events it has raised.
    pub event_nr: u32,
    /// The number of the path that it is about.
    pub path: Option<String>,
    /// The group, from 1, that it is about.
    pub group: Option<u64>,
    /// How many changes are missing, where some are lost and that is known.
    pub lost: Option<u64>,
    /// For a person, in one line without the device's name; control characters are escaped.
    pub line: String,
}
