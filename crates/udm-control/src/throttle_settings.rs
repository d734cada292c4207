//! What limits a device, as text that outlives a server.

use serde::{Deserialize, Serialize};

/// The limits of a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ThrottleSettings {
    /// The limits, of the group if there is one, in the form of [`udm_wire::throttle`].
    pub limits: String,
    /// The group.
    pub group: Option<String>,
}
