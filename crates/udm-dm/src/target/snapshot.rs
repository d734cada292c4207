//! The interface of snapshot targets to the control half.

use crate::device_ref::ResolvedDevice;
use udm_core::{ChangeTrackingCheckpoint, GrowthPolicy, Sectors};

/// State of a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SnapshotState {
    /// The snapshot is readable and takes writes.
    Valid,
    /// The snapshot is readable, but its store is full, so it takes no writes.
    Overflowed,
    /// The snapshot cannot be read: a copy was lost, or another table uses the store.
    Invalid,
    /// The chunks of the snapshot are being copied into its origin.
    Merging,
    /// All chunks have been copied into the origin.
    Merged,
    /// The merge failed; it continues at the next resume.
    MergeFailed,
}

impl SnapshotState {
    /// The name of the state, for people and for JSON.
    #[must_use]
    pub const fn text(self) -> &'static str {
        match self {
            SnapshotState::Valid => "active",
            SnapshotState::Overflowed => "overflow",
            SnapshotState::Invalid => "invalid",
            SnapshotState::Merging => "merging",
            SnapshotState::Merged => "merged",
            SnapshotState::MergeFailed => "merge failed",
        }
    }

    /// True while the snapshot is being merged, and afterwards.
    #[must_use]
    pub const fn is_merge(self) -> bool {
        matches!(self, SnapshotState::Merging | SnapshotState::Merged | SnapshotState::MergeFailed)
    }
}

/// Devices, chunk size and fill level of a snapshot.
#[derive(Clone)]
pub struct SnapshotReport {
    /// The origin of the snapshot.
    pub origin: ResolvedDevice,
    /// The store with the copied chunks.
    pub store: ResolvedDevice,
    /// `P`, `PO` or `N`, as in the table.
    pub kind: &'static str,
    /// The chunk size, the unit of copies.
    pub chunk: Sectors,
    /// Space in use in the store; during a merge, the space that its records need.
    pub used: Sectors,
    /// Size of the store.
    pub total: Sectors,
    /// How the store grows; `None` if it does not grow.
    pub growth: Option<GrowthPolicy>,
    /// The part of `used` that holds metadata.
    pub metadata: Sectors,
    /// State of the snapshot.
    pub state: SnapshotState,
}

/// A target that holds an instant of another device.
pub trait SnapshotTargetQueries {
    /// Devices, chunk size and fill level of the snapshot.
    fn report(&self) -> SnapshotReport;

    /// The checkpoint of this instant. [`crate::ChangeTracker::changed`] takes it for the origin,
    /// for another snapshot of the origin, or for this snapshot. For this snapshot, the changes are
    /// the chunks in its store. `None` if the instant is not kept any more.
    fn checkpoint(&self) -> Option<ChangeTrackingCheckpoint>;
}
