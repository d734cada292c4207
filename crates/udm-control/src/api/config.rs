//! Replies of the control socket about the configuration file.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Query of a reconfigure.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ReconfigureQuery {
    /// Only report what would be done
    pub dry_run: Option<bool>,
}

/// The changes that the configuration file made, or would make.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ReconfigureReport {
    /// The changes, in the order in which they were made.
    pub changes: Vec<DeviceConfigChange>,
    /// Number of devices that the file declares as before.
    pub unchanged: u64,
    /// Differences between the devices and the file that were left as they are, one line each.
    pub notes: Vec<String>,
}

/// A change of one device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DeviceConfigChange {
    /// Name of the device.
    pub name: String,
    /// "create"; "remove"; "reload" (another table); "allow" (other clients may use it);
    /// "description" (another text for clients);
    /// "throttle" (other limits of requests and bytes per second);
    /// "take-over" (of a device that a verb created);
    /// "uuid" or "readonly" (the file changed them, which is refused).
    pub change: String,
    /// Why the change failed, which left the device as it was. Null if it was made, or would be
    /// tried.
    pub error: Option<String>,
}
