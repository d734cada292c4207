//! The interface of mirror targets to the control half.

use crate::device_ref::ResolvedDevice;
use crate::error::TargetError;
use udm_core::{Sector, Sectors, Status};

/// What a mirror does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MirrorPhase {
    /// Regions are copied from the source to the destination.
    Copying,
    /// All regions are in both devices.
    InSync,
    /// All regions are in both devices, and a write needs both.
    Switching,
    /// The destination has failed, and gets nothing any more.
    Degraded,
}

/// A device of a mirror.
#[derive(Clone)]
pub struct MirrorLegReport {
    /// The device.
    pub device: ResolvedDevice,
    /// The sector of the device with the mirror's first sector.
    pub start: Sector,
}

/// A failure of a request that a mirror needs to have the same data on both devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MirrorFailure {
    /// The destination failed; otherwise the source.
    pub of_destination: bool,
    /// The status of the request.
    pub status: Status,
    /// The first sector of the copy; `None` for a write of a client.
    pub sector: Option<Sector>,
}

/// The write-intent log of a mirror.
#[derive(Clone)]
pub struct MirrorLogReport {
    /// The device of the log.
    pub device: ResolvedDevice,
    /// The number of regions that a mirror that continues from the log copies.
    pub dirty: u64,
    /// The status with which it failed: writes wait for [`MirrorTargetQueries::abandon_log`].
    pub failure: Option<Status>,
}

/// Devices, regions and state of a mirror.
#[derive(Clone)]
pub struct MirrorReport {
    /// The device that is complete at every moment.
    pub source: MirrorLegReport,
    /// The device that gets a copy of it.
    pub destination: MirrorLegReport,
    /// The size of the mirror.
    pub len: Sectors,
    /// The size of a region, the unit of copies.
    pub region: Sectors,
    /// The number of regions.
    pub regions: u64,
    /// The number of copied regions.
    pub copied: u64,
    /// What the mirror does.
    pub phase: MirrorPhase,
    /// True if regions are copied only by writes.
    pub is_paused: bool,
    /// The last failure, if no copy has succeeded since.
    pub failure: Option<MirrorFailure>,
    /// The `disk` log.
    pub log: Option<MirrorLogReport>,
}

/// A target that keeps the same data on two devices.
pub trait MirrorTargetQueries {
    /// Devices, regions and state of the mirror.
    fn report(&self) -> MirrorReport;

    /// Pauses the copies in the background, or starts them again.
    fn set_paused(&self, is_paused: bool);

    /// From now on a write needs both devices: either can take the place of the mirror, once the
    /// destination was flushed.
    ///
    /// # Errors
    /// EBUSY if regions are left, or if the destination has failed.
    fn begin_switch(&self) -> Result<(), TargetError>;

    /// Takes [`MirrorTargetQueries::begin_switch`] back.
    fn cancel_switch(&self);

    /// Writes no longer need the log. For a caller who has made sure that nobody continues from it.
    fn abandon_log(&self);
}
