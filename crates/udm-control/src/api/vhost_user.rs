//! Requests and replies of the control socket about sockets of virtual machines.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A socket for a device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AddVhostUserSocketRequest {
    /// Path of the Unix socket, absolute. Its folder exists; the socket is created with mode 0600.
    pub path: String,
}

/// Which socket of a device to remove.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RemoveVhostUserSocketQuery {
    /// Path of the socket, absolute.
    pub path: String,
    /// 1: also while a machine is connected; its disk is gone then.
    #[serde(default)]
    pub force: Option<u8>,
}

/// A socket on which a device is served to a virtual machine.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct VhostUserSocketDescription {
    /// Name of the device.
    pub device: String,
    /// Path of the socket.
    pub path: String,
    /// True while a machine is connected.
    pub connected: bool,
    /// True if it was added while the server runs. Such a socket ends with its device.
    pub added: bool,
}

/// All sockets of virtual machines.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct VhostUserSocketList {
    /// The sockets, in the order in which they were added.
    pub sockets: Vec<VhostUserSocketDescription>,
}
