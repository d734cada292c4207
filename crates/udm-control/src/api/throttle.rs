//! Requests and replies of the control socket about limits of requests and bytes per second.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Limits for a device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ThrottleDeviceRequest {
    /// KEY=RATE or KEY=RATE:BURST, separated by spaces, with the keys iops, riops, wiops, bps, rbps
    /// and wbps; "none" for no limits. With `group`, the limits of the group; they may be absent if
    /// the group exists.
    #[serde(default)]
    pub limits: Option<String>,
    /// Name of the group whose limits the device shares: 1 to 127 bytes. Without it, the device
    /// has limits of its own, and leaves its group.
    #[serde(default)]
    pub group: Option<String>,
}

/// The limits of a device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DeviceThrottle {
    /// The limits, as in a request.
    pub limits: String,
    /// The group that shares the limits; absent if the device has them alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// The limits by their keys.
    pub rates: BTreeMap<String, DeviceThrottleRate>,
    /// Requests that wait now.
    pub waiting: u64,
    /// Requests that had to wait since the device was created.
    pub delayed: u64,
}

/// One limit, in requests or bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DeviceThrottleRate {
    /// Requests or bytes per second.
    pub per_second: u64,
    /// Requests or bytes that may pass at once after a pause.
    pub burst: u64,
}
