//! Requests and replies of the control socket about snapshots.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A snapshot, or one that is being merged.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SnapshotDescription {
    /// Name of the snapshot's device; during a merge, of the origin's device.
    pub name: String,
    /// Name of the origin's device; empty if there is none.
    pub origin: String,
    /// URI of the origin's disk.
    pub disk: String,
    /// URI of the store, which holds copied and changed chunks.
    pub store: String,
    /// P (persistent), PO (persistent, and read-only when it is full) or N (transient).
    #[serde(rename = "type")]
    pub kind: String,
    /// "active", "overflow", "invalid", "merging", "merged" or "merge failed". If no device has the
    /// snapshot: "not attached", or "lost" if it is not valid any more.
    pub state: String,
    /// Why no device has the snapshot.
    pub why: Option<String>,
    /// Size of the snapshot.
    pub size_bytes: u64,
    /// Chunk size: the unit of copies.
    pub chunk_bytes: u64,
    /// Space in use in the store.
    pub used_bytes: u64,
    /// Size of the store.
    pub total_bytes: u64,
    /// Growth step of the store; null if it does not grow.
    pub grow_bytes: Option<u64>,
    /// Maximum size of a growing store.
    pub max_bytes: Option<u64>,
    /// The part of `used_bytes` that is metadata.
    pub metadata_bytes: u64,
    /// Time since the snapshot was created, if known.
    pub age_ns: Option<u64>,
}

/// All snapshots: first those of devices, by device number, then those that no device has.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SnapshotList {
    /// The snapshots.
    pub snapshots: Vec<SnapshotDescription>,
}

/// A snapshot to create.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NewSnapshot {
    /// Name of the new device.
    pub name: String,
    /// Name of the device to snapshot. Its table must be one line: linear or snapshot-origin.
    pub of: String,
}

/// Snapshots to create at one instant: all of them or none.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateSnapshotsRequest {
    /// The snapshots and their origins.
    pub snapshots: Vec<NewSnapshot>,
    /// The store: a path, a URI, or a folder in which NAME.cow is created. By default the folder of
    /// the origin's disk.
    pub store: Option<String>,
    /// Maximum size of a new store; by default what the snapshot can need. An existing store is not
    /// resized, so a size is refused for it.
    pub size_bytes: Option<u64>,
    /// Growth step and initial size of a new store. By default it starts with 16 chunks and grows
    /// by its own size, at most by 64 MiB. 0 creates it with its full size. An existing store grows
    /// only if this is given.
    pub grow_bytes: Option<u64>,
    /// Chunk size: the unit of copies. By default 4096, or the block size of the disk if that is
    /// larger.
    pub chunk_bytes: Option<u64>,
    /// If true, the store is useless after the snapshot is removed, and less is written to it.
    pub transient: Option<bool>,
    /// If true, a full store makes the snapshot read-only instead of invalid.
    pub overflow: Option<bool>,
    /// Absolute path of the base directory of a relative store path. Without it, relative paths are
    /// refused.
    pub folder: Option<String>,
    /// Cancel after this many milliseconds; no snapshot is created then.
    pub timeout_ms: Option<u64>,
}

/// Query of the removal of a snapshot.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RemoveSnapshotQuery {
    /// Keep the store that was created for it
    pub keep_store: Option<bool>,
    /// Cancel after this many milliseconds; nothing is removed then
    pub timeout_ms: Option<u64>,
}

/// Query of a page of changed ranges.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ChangedRangesQuery {
    /// Another snapshot; by default the origin
    pub against: Option<String>,
    /// The byte at which the page begins, by default 0
    pub from: Option<u64>,
    /// Maximum number of ranges, up to 16384
    pub max: Option<usize>,
}

/// A range of a device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ChangedByteRange {
    /// Start of the range.
    pub start_bytes: u64,
    /// Length of the range.
    pub length_bytes: u64,
}

/// A page of ranges that may differ.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ChangedRangesPage {
    /// Size of the snapshot.
    pub size_bytes: u64,
    /// Granularity: ranges are multiples of this, except at the end of the device.
    pub chunk_bytes: u64,
    /// The ranges, in order. Everything between them is the same.
    pub ranges: Vec<ChangedByteRange>,
    /// Start of the next page; null after the last page.
    pub next_bytes: Option<u64>,
}
