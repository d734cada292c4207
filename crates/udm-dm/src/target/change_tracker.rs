//! The interface of targets that know which sectors have changed since a checkpoint.

use udm_core::{ChangeTrackingCheckpoint, Extents, RangeChangeStatus, Sector, Sectors};

/// A target that knows which sectors have changed since a checkpoint.
pub trait ChangeTracker {
    /// The checkpoints for which the target knows what has changed since, as in
    /// [`udm_core::Device::checkpoints`].
    fn checkpoints(&self) -> Vec<ChangeTrackingCheckpoint>;

    /// Ranges that have changed since a checkpoint, as in [`udm_core::Device::changed`]; `from`
    /// counts from the target's start.
    fn changed(
        &self,
        since: &ChangeTrackingCheckpoint,
        from: Sector,
        len: Sectors,
        out: &mut Extents<RangeChangeStatus>,
    );
}
