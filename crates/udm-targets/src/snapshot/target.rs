//! The `snapshot` target: the control half.

use super::binding::{SnapshotTableBinding, SnapshotTableRole};
use super::lane::SnapshotLane;
use std::sync::Arc;
use udm_core::{
    ChangeTrackingCheckpoint, Cx, DeviceControlError, DeviceId, Extents, Lane, Limits, RangeChangeStatus,
    Sector, Sectors,
};
use udm_dm::target::{
    DeviceNameResolver, DeviceRange, LowerLimits, Target, TargetArgs, TargetFeatures, TargetHostServices,
};
use udm_dm::{
    ChangeTracker, MappedDevice, SnapshotReport, SnapshotState, SnapshotTargetQueries, TargetError,
};

struct SnapshotTarget(Arc<SnapshotTableBinding>);

/// Creates a snapshot target.
///
/// # Errors
/// The kernel's, in its order. If the kernel hides the reason behind a general text, the reason
/// follows.
pub fn create_snapshot_target(args: &mut TargetArgs<'_>) -> Result<Arc<dyn Target>, TargetError> {
    Ok(Arc::new(SnapshotTarget(SnapshotTableBinding::take(SnapshotTableRole::Keep, args)?)))
}

impl Target for SnapshotTarget {
    fn type_name(&self) -> &'static str {
        "snapshot"
    }

    fn state_outside_table(&self) -> Option<String> {
        let is_transient = !self.0.line.persistent;
        is_transient.then(|| "a snapshot without a persistent store (N)".into())
    }

    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        Ok(Box::new(SnapshotLane::open(&self.0, cx)?))
    }

    fn table(&self) -> String {
        self.0.table()
    }

    fn status(&self) -> String {
        let snapshot = &self.0.snapshot;
        if self.0.is_lost() {
            return "Invalid".into();
        }
        if snapshot.is_overflowed() {
            return "Overflow".into();
        }
        let (used, total, metadata) = snapshot.usage();
        format!("{used}/{total} {metadata}")
    }

    /// Flushes and FUA concern only the store, because the origin is only read.
    fn limits(&self, below: LowerLimits<'_>) -> Limits {
        let (origin, store) = (below.limits(&self.0.line.origin), below.limits(&self.0.line.store));
        let chunk = Sectors(u64::from(self.0.snapshot.chunk.sectors()));
        let discards = self.0.line.features.discard_zeroes_cow;
        Limits {
            max_discard: if discards { chunk } else { Sectors::ZERO },
            max_write_zeroes: Sectors::ZERO,
            write_cache: store.write_cache,
            fua: true,
            read_only: store.read_only,
            request_stackable: false,
            ..Limits::new(self.0.len).stack(&origin).stack(&store)
        }
    }

    fn max_io_len(&self) -> Option<Sectors> {
        Some(Sectors(u64::from(self.0.snapshot.chunk.sectors())))
    }

    fn features(&self) -> TargetFeatures {
        TargetFeatures { cuts_discards: true, ..TargetFeatures::default() }
    }

    fn extents(&self, from: Sector, len: Sectors, out: &mut Extents) {
        self.0.extents(from, len, out);
    }

    fn devices(&self) -> Vec<DeviceRange> {
        self.0.devices()
    }

    fn as_change_tracker(&self) -> Option<&dyn ChangeTracker> {
        Some(self)
    }

    fn as_snapshot(&self) -> Option<&dyn SnapshotTargetQueries> {
        Some(self)
    }

    fn message(&self, words: &[String], _: &mut dyn DeviceNameResolver) -> Result<String, TargetError> {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        match &words[..] {
            ["set", key @ ("grow" | "grow_max"), value] => self.0.snapshot.growth.set(key, value)?,
            ["set", key, value] => self.0.snapshot.settings.set(key, value)?,
            ["grown"] => self.0.line.store.device.refresh_size(),
            _ => {
                let error = TargetError::new("Unrecognised snapshot target message received");
                return Err(error.because("set KEY VALUE, or grown"));
            }
        }
        self.0.snapshot.look_again();
        Ok(String::new())
    }

    fn attach(&self, notify: Arc<dyn TargetHostServices>) {
        self.0.attach(notify);
    }

    fn partners(&self) -> Vec<Arc<MappedDevice>> {
        self.0.partners()
    }

    fn preresume(&self, device: DeviceId) -> Result<(), TargetError> {
        self.0.preresume(device)
    }

    fn resume(&self) {
        self.0.resume();
    }

    fn retired(&self) {
        self.0.retired();
    }

    fn removed(&self) {
        self.0.removed();
    }
}

impl ChangeTracker for SnapshotTarget {
    fn checkpoints(&self) -> Vec<ChangeTrackingCheckpoint> {
        self.0.origin_snapshots.checkpoints(Some(&self.0.snapshot))
    }

    fn changed(
        &self,
        since: &ChangeTrackingCheckpoint,
        from: Sector,
        len: Sectors,
        out: &mut Extents<RangeChangeStatus>,
    ) {
        self.0.origin_snapshots.changed(Some(&self.0.snapshot), since, (from, len), out);
    }
}

impl SnapshotTargetQueries for SnapshotTarget {
    fn report(&self) -> SnapshotReport {
        let full = self.0.snapshot.is_overflowed();
        let state = if full { SnapshotState::Overflowed } else { SnapshotState::Valid };
        self.0.report(state, self.0.snapshot.usage())
    }

    fn checkpoint(&self) -> Option<ChangeTrackingCheckpoint> {
        self.0.checkpoint()
    }
}
