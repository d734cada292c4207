//! The `snapshot-origin` target: `snapshot-origin <origin>`, a device whose old data its snapshots
//! keep.
//!
//! Without snapshots it is linear and costs as much as linear. With snapshots, its lanes copy the
//! data that a write is about to change ([`super::origin_lane`]).

use super::origin_lane::OriginLane;
use super::origin_snapshots::OriginSnapshots;
use std::sync::Arc;
use udm_core::{
    ChangeTrackingCheckpoint, Cx, DeviceControlError, Extents, Lane, Limits, RangeChangeStatus, Sector,
    Sectors,
};
use udm_dm::TargetError;
use udm_dm::target::{
    ChangeTracker, DeviceRange, LowerLimits, ResolvedDevice, Target, TargetArgs, TargetDataPath,
    TargetHostServices,
};

struct OriginTarget {
    device: ResolvedDevice,
    len: Sectors,
    origin_snapshots: Arc<OriginSnapshots>,
}

/// Creates a snapshot-origin target.
///
/// # Errors
/// The kernel's: `incorrect number of arguments`, `Cannot get target device`. A target that does
/// not begin at sector 0 is refused: the kernel would use the sectors of the mapped device.
pub fn create_snapshot_origin_target(args: &mut TargetArgs<'_>) -> Result<Arc<dyn Target>, TargetError> {
    let [device] = args.args else {
        return Err(TargetError::new("origin: incorrect number of arguments").at(args.args.len().min(1)));
    };
    let device = args.resolver.get(device).map_err(|e| {
        TargetError::new("Cannot get target device").with_errno(e.errno).because(e.reason).at(0)
    })?;
    if args.start.0 != 0 {
        return Err(TargetError::new("an origin begins at sector 0"));
    }
    let origin_snapshots = OriginSnapshots::of(&device);
    Ok(Arc::new(OriginTarget { device, len: args.len, origin_snapshots }))
}

impl Target for OriginTarget {
    fn type_name(&self) -> &'static str {
        "snapshot-origin"
    }

    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        Ok(Box::new(OriginLane::open(&self.device, &self.origin_snapshots.listed(), cx)?))
    }

    fn table(&self) -> String {
        self.device.number.to_string()
    }

    /// Discards and write-zeroes would not be copied, so they are not offered (as in the kernel).
    fn limits(&self, below: LowerLimits<'_>) -> Limits {
        let limits = Limits::new(self.len).stack(&below.limits(&self.device));
        let none = Sectors::ZERO;
        Limits { request_stackable: false, max_discard: none, max_write_zeroes: none, ..limits }
    }

    fn extents(&self, from: Sector, len: Sectors, out: &mut Extents) {
        self.device.device.extents(from, len, out);
    }

    fn as_change_tracker(&self) -> Option<&dyn ChangeTracker> {
        Some(self)
    }

    fn devices(&self) -> Vec<DeviceRange> {
        vec![DeviceRange::new(&self.device, Sector(0), self.len)]
    }

    fn extra_devices(&self) -> Vec<ResolvedDevice> {
        self.origin_snapshots.stores()
    }

    fn data_path(&self) -> TargetDataPath {
        if self.origin_snapshots.is_empty() {
            TargetDataPath::Linear(self.device.clone(), Sector(0))
        } else {
            TargetDataPath::OwnLane
        }
    }

    fn attach(&self, notify: Arc<dyn TargetHostServices>) {
        self.origin_snapshots.add_origin_device(&notify);
    }
}

impl ChangeTracker for OriginTarget {
    fn checkpoints(&self) -> Vec<ChangeTrackingCheckpoint> {
        self.origin_snapshots.checkpoints(None)
    }

    fn changed(
        &self,
        since: &ChangeTrackingCheckpoint,
        from: Sector,
        len: Sectors,
        out: &mut Extents<RangeChangeStatus>,
    ) {
        self.origin_snapshots.changed(None, since, (from, len), out);
    }
}
