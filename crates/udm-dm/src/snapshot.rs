//! What the control side asks of a target that keeps an instant of another device.

use crate::target::DeviceRef;
use udm_core::{Checkpoint, Growth, Sectors};

/// How a snapshot is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SnapshotState {
    /// It is the instant at which it was made, with what was written to it.
    Valid,
    /// The same, and its store is full: it takes no writes.
    Overflowed,
    /// A copy was lost, or another table has it: nothing of it can be read.
    Invalid,
    /// What it holds is being brought back into its origin.
    Merging,
    /// All of it is back.
    Merged,
    /// Bringing it back has failed, and goes on at the next resume.
    MergeFailed,
}

impl SnapshotState {
    /// In words, for a person and for JSON.
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

    /// True while it is on its way into its origin, or there.
    #[must_use]
    pub const fn is_merge(self) -> bool {
        matches!(self, SnapshotState::Merging | SnapshotState::Merged | SnapshotState::MergeFailed)
    }
}

/// What a snapshot is made of, and how full it is.
#[derive(Clone)]
pub struct SnapshotReport {
    /// The disk that it is an instant of.
    pub origin: DeviceRef,
    /// Where what differs is kept.
    pub store: DeviceRef,
    /// `P`, `PO` or `N`, as its table has it.
    pub kind: &'static str,
    /// What is copied at once.
    pub chunk: Sectors,
    /// In use in the store; while it is merged, what its records need.
    pub used: Sectors,
    /// The size of the store.
    pub total: Sectors,
    /// How the store grows; `None` where it stays as it is.
    pub growth: Option<Growth>,
    /// What of `used` is no data.
    pub metadata: Sectors,
    /// How it is.
    pub state: SnapshotState,
}

/// A target that keeps an instant of another device.
pub trait SnapshotInfo {
    /// What it is made of, and how full it is.
    fn report(&self) -> SnapshotReport;

    /// The instant, for [`crate::Target::changed`] of its origin, of another snapshot of that, or
    /// of itself: then it is what it keeps. `None` when it is kept no more.
    fn checkpoint(&self) -> Option<Checkpoint>;
}
