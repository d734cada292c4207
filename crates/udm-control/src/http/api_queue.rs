//! What crosses the control socket about the queues in front of disks.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The queue in front of a device that a table uses.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Queue {
    /// The number of the device.
    pub number: String,
    /// Its URI, or @ and the name of a mapped device.
    pub uri: String,
    /// "none" or "mq-deadline".
    pub scheduler: String,
    /// What else it is told, by the names that a URI has for it, with what holds where nothing was
    /// said filled in; "max_hw_sectors_kb" is what the disk takes.
    pub settings: BTreeMap<String, u64>,
    /// Its hardware queues; one for all cores where one core has the order of all requests.
    pub hw_queues: Vec<HwQueue>,
}

/// A hardware queue, as of now.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct HwQueue {
    /// The cores that send through it.
    pub cores: Vec<u64>,
    /// Its tags: so many requests are with the disk at a time.
    pub tags: u64,
    /// Those that requests have.
    pub tags_in_use: u64,
    /// How many are in line for a tag: one a core for each device that has requests waiting here,
    /// and a change of settings.
    pub in_line: u64,
}

/// What is to hold for the queues in front of what a device's live table uses, and for its own.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ChangeQueue {
    /// "scheduler", "nr_requests", "nomerges", "max_sectors_kb", "read_expire", "write_expire",
    /// "writes_starved", "fifo_batch" and "front_merges", with their values as a URI has them.
    pub settings: BTreeMap<String, String>,
    /// The number or the URI (@ and the name for a mapped device) of the one that is meant; all of
    /// them without it.
    #[serde(default)]
    pub disk: Option<String>,
}
