//! What crosses the control socket about the queues in front of disks, and their power.

use schemars::JsonSchema;
use serde::de::{Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use std::collections::BTreeMap;
use std::fmt;

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
    /// Where the disk shares tags with others, and somebody uses it.
    #[serde(default)]
    pub shared: Option<SharedTags>,
}

/// Tags that several disks share, as one of them sees them: a request needs one of these besides.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SharedTags {
    /// Those that the disk holds.
    pub held: u64,
    /// What it may hold now: its part, and at least four.
    pub most: u64,
    /// All of them.
    pub tags: u64,
    /// Disks that had requests in the last 5 s.
    pub disks: u64,
}

/// What is to hold for the queues in front of what a device's live table uses, and for its own.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ChangeQueue {
    /// "scheduler", "nr_requests", "nomerges", "max_sectors_kb", "read_expire", "write_expire",
    /// "writes_starved", "fifo_batch" and "front_merges", with their values as a URI has them: one
    /// at least, and none twice.
    #[serde(deserialize_with = "each_once")]
    pub settings: BTreeMap<String, String>,
    /// The number or the URI (@ and the name for a mapped device) of the one that is meant; all of
    /// them without it.
    #[serde(default)]
    pub disk: Option<String>,
}

/// The power of a disk that a table uses.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Power {
    /// The number of the disk.
    pub number: String,
    /// Its URI.
    pub uri: String,
    /// It is on. Without it every request fails.
    pub on: bool,
}

/// Which way to turn the power of the disks that a device's live table uses.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TurnPower {
    /// On; off loses what is in a volatile cache alone.
    pub on: bool,
    /// The number or the URI of the one that is meant; all that have a switch without it.
    #[serde(default)]
    pub disk: Option<String>,
}

/// A map in which no name is twice: it would not be seen which of the values holds.
fn each_once<'de, D: Deserializer<'de>>(input: D) -> Result<BTreeMap<String, String>, D::Error> {
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
