//! What crosses the control socket about the file of a server.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What of a server's file was applied, or would be.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Reconfigured {
    /// The changes, in the order in which they were made.
    pub changes: Vec<Change>,
    /// How many devices are wanted as they were.
    pub unchanged: u64,
    /// What is different and left so, a line each.
    pub notes: Vec<String>,
}

/// A change of one device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Change {
    /// Its name.
    pub name: String,
    /// "create", "remove", "reload" for another table, "take-over" of a device that a verb made;
    /// "uuid" or "readonly" where that has changed, which is refused.
    pub change: String,
    /// Why it could not be made, and nothing of it was; null where it was made, or would be tried.
    pub error: Option<String>,
}
