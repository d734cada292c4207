//! Requests and replies of the control socket about clones.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A new clone.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateCloneRequest {
    /// Name of the new device.
    pub name: String,
    /// The source: a device as in a table. It is only read, and its size is that of the clone.
    pub source: String,
    /// The destination: a device as in a table. A file that does not exist or is empty gets the
    /// size of the source. A device with data is refused, unless the metadata belongs to it.
    pub destination: String,
    /// The metadata: a device as in a table. A file that does not exist or is empty gets the size
    /// that is needed. By default, the path of the destination with `.clone` at its end.
    #[serde(default)]
    pub metadata: Option<String>,
    /// The region size: a power of two, 4096 to 2^30. By default, that of existing metadata, or
    /// 65536, or more if there would be too many regions.
    #[serde(default)]
    pub region_bytes: Option<u64>,
    /// True: regions are hydrated only by writes until the hydration is started.
    #[serde(default)]
    pub paused: Option<bool>,
    /// The text of a boot profile: its regions are hydrated before the others.
    #[serde(default)]
    pub hydrate_first: Option<String>,
    /// Folder that relative paths are based on; absolute. Without it relative paths are refused.
    #[serde(default)]
    pub folder: Option<String>,
}

/// A clone.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CloneDescription {
    /// Name of the clone's device.
    pub name: String,
    /// URI of the source, which is only read.
    pub source: String,
    /// URI of the destination, which the source is copied to.
    pub destination: String,
    /// URI of the metadata, which says which regions are in the destination.
    pub metadata: String,
    /// "hydrating", "stopped" (regions are hydrated only by writes), "done" (all of the source is
    /// in the destination), "ro" (the metadata cannot be written) or "Fail" (nor read); "waiting"
    /// (served without its source after a restart) or "absent" (not served after a restart).
    pub state: String,
    /// Why it is waiting or absent.
    #[serde(default)]
    pub error: Option<String>,
    /// Size of the clone.
    pub size_bytes: u64,
    /// Size of a region, the unit of copies.
    pub region_bytes: u64,
    /// Number of regions.
    pub regions: u64,
    /// Number of regions that are in the destination.
    pub hydrated_regions: u64,
    /// The bytes of these regions.
    pub hydrated_bytes: u64,
    /// Number of regions that are being copied now.
    pub hydrating_regions: u64,
    /// Number of reads of the source that failed a copy. It is tried again.
    pub source_errors: u64,
    /// Number of writes to the destination that failed a copy.
    pub destination_errors: u64,
}

/// The regions of a clone that its clients read while they were not hydrated.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CloneBootProfile {
    /// The profile as text: a line with first byte and length per range, in the order of the first
    /// reads since the server loaded the clone.
    pub profile: String,
    /// Number of ranges.
    pub ranges: u64,
}

/// The clones of a server.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CloneList {
    /// The clones, in the order of their device numbers.
    pub clones: Vec<CloneDescription>,
}
