//! The interface of clone targets to the control half.

use crate::device_ref::ResolvedDevice;
use udm_core::Sectors;

/// What a clone does with the regions that are still to be hydrated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CloneHydrationState {
    /// They are hydrated in the background.
    Hydrating,
    /// They are hydrated only by writes.
    Stopped,
    /// There are none.
    Done,
    /// They are not hydrated: the metadata cannot be written.
    ReadOnly,
    /// All requests fail: the metadata cannot be written or read.
    Fail,
}

impl CloneHydrationState {
    /// The name of the state, for people and for JSON.
    #[must_use]
    pub const fn text(self) -> &'static str {
        match self {
            CloneHydrationState::Hydrating => "hydrating",
            CloneHydrationState::Stopped => "stopped",
            CloneHydrationState::Done => "done",
            CloneHydrationState::ReadOnly => "ro",
            CloneHydrationState::Fail => "Fail",
        }
    }
}

/// Devices, regions and state of a clone.
#[derive(Clone)]
pub struct CloneReport {
    /// The device that is only read.
    pub source: ResolvedDevice,
    /// The device that the source is copied to.
    pub destination: ResolvedDevice,
    /// The device that holds the hydrated regions.
    pub metadata: ResolvedDevice,
    /// The size of the clone.
    pub len: Sectors,
    /// The size of a region, the unit of copies.
    pub region: Sectors,
    /// The number of regions.
    pub regions: u64,
    /// The number of hydrated regions.
    pub hydrated: u64,
    /// The number of regions that are being hydrated now.
    pub in_flight: u64,
    /// The number of reads of the source that failed a copy.
    pub source_errors: u64,
    /// The number of writes to the destination that failed a copy.
    pub destination_errors: u64,
    /// State of the clone.
    pub state: CloneHydrationState,
}

impl CloneReport {
    /// The number of regions that are still to be hydrated.
    #[must_use]
    pub fn unhydrated(&self) -> u64 {
        self.regions - self.hydrated
    }
}

/// A target that is copied from another device.
pub trait CloneTargetQueries {
    /// Devices, regions and state of the clone.
    fn report(&self) -> CloneReport;
    /// The regions that clients needed while they were not hydrated, in the order of the first
    /// read. At most 65536, since the clone was loaded first.
    fn first_reads(&self) -> Vec<u64>;
}
