//! What crosses the control socket about snapshots.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A snapshot, or one that is being merged.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Snapshot {
    /// The device that has it; while it is merged, its origin.
    pub name: String,
    /// The device that is its origin; empty when none is.
    pub origin: String,
    /// The disk that it is an instant of.
    pub disk: String,
    /// The device that keeps what differs.
    pub store: String,
    /// P (persistent), PO (persistent, and read-only when it is full) or N (transient).
    #[serde(rename = "type")]
    pub kind: String,
    /// "active", "overflow", "invalid", "merging", "merged" or "merge failed"; if no device has it
    /// "not attached", or "lost" when it is not its instant any more.
    pub state: String,
    /// Why no device has it.
    pub why: Option<String>,
    /// Its size.
    pub size_bytes: u64,
    /// What is copied at once.
    pub chunk_bytes: u64,
    /// In use in the store.
    pub used_bytes: u64,
    /// The size of the store.
    pub total_bytes: u64,
    /// By how much the store grows at a time; nothing where it stays as it is.
    pub grow_bytes: Option<u64>,
    /// How large it becomes at the most.
    pub max_bytes: Option<u64>,
    /// What of `used_bytes` is no data.
    pub metadata_bytes: u64,
    /// How long ago it was made, when that is known.
    pub age_ns: Option<u64>,
}

/// All snapshots, in the order of their devices' numbers, then those that no device has.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SnapshotList {
    /// The snapshots.
    pub snapshots: Vec<Snapshot>,
}

/// A snapshot to make.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NewSnapshot {
    /// The name of its device.
    pub name: String,
    /// The device to keep an instant of: one line, linear or snapshot-origin.
    pub of: String,
}

/// Snapshots to make at one instant: all of them or none.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateSnapshots {
    /// Which, of which devices.
    pub snapshots: Vec<NewSnapshot>,
    /// The store, a path or a URI, or a folder in which NAME.cow is the store. Without it that is
    /// the folder of the origin's disk.
    pub store: Option<String>,
    /// How large a store that is made becomes; without it as large as the snapshot can need. A
    /// store that exists is not resized, and this is refused.
    pub size_bytes: Option<u64>,
    /// By how much it grows at a time, and how large it is at first; without it 16 chunks at
    /// first, and steps of its own size up to 64 MiB. 0: it is made in full length. For a store
    /// that exists: it grows so; without this it does not.
    pub grow_bytes: Option<u64>,
    /// What is copied at once; without it 4096, or the block of the disks.
    pub chunk_bytes: Option<u64>,
    /// The store means nothing when the snapshot is gone, and less is written to it.
    pub transient: Option<bool>,
    /// A store that is full makes the snapshot read-only instead of invalid.
    pub overflow: Option<bool>,
    /// The absolute path of the folder from which a relative path of a store counts. Without it
    /// they are refused.
    pub folder: Option<String>,
    /// Call it off when it takes longer than so many milliseconds: no snapshot is made then.
    pub timeout_ms: Option<u64>,
}

/// A range of a device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Range {
    /// Where it starts.
    pub start_bytes: u64,
    /// How long it is.
    pub length_bytes: u64,
}

/// What may differ, as a page of ranges.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Changes {
    /// The size of the snapshot.
    pub size_bytes: u64,
    /// What is told apart: ranges are whole multiples, but for the end.
    pub chunk_bytes: u64,
    /// The ranges, in order. What lies between is the same.
    pub ranges: Vec<Range>,
    /// Where the next page begins; none behind the last.
    pub next_bytes: Option<u64>,
}
