//! Requests and replies of the control socket about the queues and the power of disks.

use schemars::JsonSchema;
use serde::de::{Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// The queue in front of a disk that a table uses, or a device's own queue.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RequestQueueReport {
    /// Number of the device.
    pub number: String,
    /// URI of the device, or @ and the name of a mapped device.
    pub uri: String,
    /// "none" or "mq-deadline".
    pub scheduler: String,
    /// Other settings, by their names in a URI, with defaults filled in. "max_hw_sectors_kb" is the
    /// limit of the disk.
    pub settings: BTreeMap<String, u64>,
    /// The hardware queues. A single one serves all cores if all requests need one common order.
    pub hw_queues: Vec<HwQueue>,
}

/// Current state of a hardware queue.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct HwQueue {
    /// The cores that use it.
    pub cores: Vec<u64>,
    /// Number of tags: the maximum number of requests that the disk has at a time.
    pub tags: u64,
    /// Tags in use.
    pub tags_in_use: u64,
    /// Number of waiters for a tag: one per core and device with waiting requests, and a pending
    /// change of settings.
    pub in_line: u64,
    /// Shared tags, if the disk is in use and shares tags with others.
    #[serde(default)]
    pub shared: Option<SharedTagUsage>,
}

/// Tags that several disks share, as seen by one disk: each request also needs one of these.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SharedTagUsage {
    /// Shared tags that this disk holds.
    pub held: u64,
    /// Shared tags that this disk may hold now: its part, and at least four.
    pub most: u64,
    /// Number of shared tags.
    pub tags: u64,
    /// Disks that had requests in the last 5 s.
    pub disks: u64,
}

/// New settings for the queues of a device: its own, and those in front of the disks of its live
/// table.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ChangeQueueSettingsRequest {
    /// "scheduler", "nr_requests", "nomerges", "max_sectors_kb", "read_expire", "write_expire",
    /// "writes_starved", "fifo_batch" and "front_merges", with values as in a URI. At least one,
    /// and each only once.
    #[serde(deserialize_with = "unique_keys")]
    pub settings: BTreeMap<String, String>,
    /// Number or URI (@ and the name for a mapped device) of the one device whose queue changes;
    /// all queues if absent.
    #[serde(default)]
    pub disk: Option<String>,
}

/// A disk that a table uses, and whether its power is on.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DiskPowerState {
    /// Number of the disk.
    pub number: String,
    /// URI of the disk.
    pub uri: String,
    /// True if the power is on. While it is off, every request fails.
    pub on: bool,
}

/// Turns the power of the disks of a device's live table on or off.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SetDiskPowerRequest {
    /// True to turn on. Turning off loses data that is only in a volatile cache.
    pub on: bool,
    /// Number or URI of the one disk to switch; all disks with a switch if absent.
    #[serde(default)]
    pub disk: Option<String>,
}

/// Reads a map and refuses repeated names, because it would be unclear which value counts.
fn unique_keys<'de, D: Deserializer<'de>>(input: D) -> Result<BTreeMap<String, String>, D::Error> {
    struct Each;
    impl<'de> Visitor<'de> for Each {
        type Value = BTreeMap<String, String>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object of settings")
        }

        fn visit_map<M: MapAccess<'de>>(self, mut input: M) -> Result<Self::Value, M::Error> {
            let mut settings = BTreeMap::new();
            while let Some((name, value)) = input.next_entry::<String, String>()? {
                if settings.contains_key(&name) {
                    return Err(M::Error::custom(format!("{name:?} is given twice")));
                }
                settings.insert(name, value);
            }
            Ok(settings)
        }
    }
    input.deserialize_map(Each)
}
