//! `snapshot-merge`: copies a snapshot back into its origin while both are in use.
//!
//! ```text
//! snapshot-merge <origin> <store> <P|PO> <chunk> [<#features> <feature>...]
//! ```
//!
//! The device reads as the snapshot did. A [`task`] works in units of records, from the last record
//! backwards: it marks the chunks, waits for writes in flight by the epochs of [`super::readers`],
//! and copies the chunks into the origin. Then it flushes the origin and clears the records with
//! one write. A suspend waits for the current unit. A merge that is cut by a suspend or a crash
//! leaves a snapshot with fewer records, and continues at the next resume. Other snapshots of the
//! origin keep their data, because the copies are sent as writes of the origin.

mod lane;
mod task;

use super::binding::{SnapshotTableBinding, SnapshotTableRole};
use super::origin_lane::OriginLane;
use super::{origin_snapshots::OriginSnapshots, raw_device};
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};
use udm_core::{
    BioTaskFactory, ChangeTrackingCheckpoint, Cx, Device, DeviceControlError, DeviceId, Extents, Lane,
    Limits, Sector, Sectors,
};
use udm_dm::target::{
    DeviceRange, LowerLimits, ResolvedDevice, Target, TargetArgs, TargetFeatures, TargetHostServices,
};
use udm_dm::{MappedDevice, SnapshotReport, SnapshotState, SnapshotTargetQueries, TargetError};

/// A run of chunks, consecutive in the origin and in the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct MergeRun {
    old: u64,
    new: u64,
    len: u64,
}

/// The chunks that are merged together: those of the last records.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct MergeUnit {
    runs: Vec<MergeRun>,
}

impl MergeUnit {
    /// Number of chunks.
    fn len(&self) -> u64 {
        self.runs.iter().map(|run| run.len).sum()
    }

    /// True if the unit has chunk `old` of the origin.
    fn has(&self, old: u64) -> bool {
        self.runs.iter().any(|run| (run.old..run.old + run.len).contains(&old))
    }

    /// Adds the chunk of the preceding record.
    fn add(&mut self, old: u64, new: u64) {
        match self.runs.last_mut() {
            Some(run) if old + 1 == run.old && new + 1 == run.new => {
                *run = MergeRun { old, new, len: run.len + 1 }
            }
            _ => self.runs.push(MergeRun { old, new, len: 1 }),
        }
    }

    /// Each chunk of the origin, with its chunk in the store.
    fn chunks(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.runs.iter().flat_map(|run| (0..run.len).map(|at| (run.old + at, run.new + at)))
    }
}

/// Whether a unit may begin.
enum MergeUnitStartDecision {
    Go,
    /// The task from before a cancelled suspend has not completed its unit. The wait queue is woken
    /// when it has.
    Wait,
    /// The device is being suspended.
    Stop,
}

/// The state shared by the lanes and the task.
struct MergeShared {
    binding: Arc<SnapshotTableBinding>,
    /// A unit is in progress: a suspend waits for it.
    running: AtomicBool,
    /// The device is being suspended: no unit begins.
    stopping: AtomicBool,
    failed: AtomicBool,
    /// A unit that is in the origin, but whose records could not be cleared.
    uncommitted: Mutex<Option<MergeUnit>>,
}

impl MergeShared {
    /// Begins a unit, if one may begin.
    fn begin(&self) -> MergeUnitStartDecision {
        if self.running.swap(true, Ordering::SeqCst) {
            return MergeUnitStartDecision::Wait;
        }
        // Pairs with the fence in `stop`: either the suspend sees the unit, or the unit sees the
        // suspend.
        fence(Ordering::SeqCst);
        if self.stopping.load(Ordering::SeqCst) {
            self.end();
            self.give_up();
            return MergeUnitStartDecision::Stop;
        }
        MergeUnitStartDecision::Go
    }

    fn end(&self) {
        self.running.store(false, Ordering::Release);
        self.binding.snapshot.wait_queue.wake_up();
    }

    fn is_running(&self) -> bool {
        self.running.load(Ordering::Acquire)
    }

    fn stop(&self, stopping: bool) {
        self.stopping.store(stopping, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Fails the merge if an uncommitted unit is left: no unit begins before the next resume, so
    /// lanes that wait for the unit would wait for nothing.
    fn give_up(&self) {
        let left = || self.uncommitted.lock().unwrap_or_else(PoisonError::into_inner).is_some();
        if !self.is_running() && left() && !self.failed.swap(true, Ordering::AcqRel) {
            self.binding.snapshot.wait_queue.wake_up();
        }
    }

    /// Settles the copied chunks of a snapshot that was taken over, because its readers have
    /// completed. Then writes may go to the store. A chunk that is not settled belongs to a unit.
    /// Called by a resume.
    fn settle(&self) {
        // A suspend was cancelled, and a unit is in progress.
        if self.is_running() {
            return;
        }
        let unit = self.uncommitted.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let is_in = |chunk| unit.as_ref().is_some_and(|unit| unit.has(chunk));
        let (map, mut from) = (&self.binding.snapshot.map, 0);
        while let Some((chunk, _)) = map.next_in_store(from, map.chunks()) {
            if !is_in(chunk) {
                map.settle(chunk, chunk);
            }
            from = chunk + 1;
        }
    }

    fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// Number of records left.
    fn left(&self) -> u64 {
        self.binding.snapshot.commits.as_ref().map_or(0, |commits| commits.records())
    }
}

struct MergeTarget(Arc<MergeShared>);

/// Creates a snapshot-merge target.
///
/// # Errors
/// As for a snapshot; `Snapshot exception store does not support snapshot-merge.` for a transient
/// store, `A snapshot is already merging.` for a second merge of an origin.
pub fn create_snapshot_merge_target(args: &mut TargetArgs<'_>) -> Result<Arc<dyn Target>, TargetError> {
    let binding = SnapshotTableBinding::take(SnapshotTableRole::Merge, args)?;
    Ok(Arc::new(MergeTarget(Arc::new(MergeShared {
        binding,
        running: AtomicBool::new(false),
        stopping: AtomicBool::new(true),
        failed: AtomicBool::new(false),
        uncommitted: Mutex::default(),
    }))))
}

impl Target for MergeTarget {
    fn type_name(&self) -> &'static str {
        "snapshot-merge"
    }

    fn state_outside_table(&self) -> Option<String> {
        Some("a merge, which its server finishes".into())
    }

    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        Ok(Box::new(lane::MergeLane::open(&self.0, cx)?))
    }

    fn table(&self) -> String {
        self.0.binding.table()
    }

    fn status(&self) -> String {
        let snapshot = &self.0.binding.snapshot;
        if self.0.binding.is_lost() {
            return "Invalid".into();
        }
        if self.0.has_failed() {
            return "Merge failed".into();
        }
        let (used, total, metadata) = snapshot.usage_from_records();
        format!("{used}/{total} {metadata}")
    }

    fn limits(&self, below: LowerLimits<'_>) -> Limits {
        let (origin, store) =
            (below.limits(&self.0.binding.line.origin), below.limits(&self.0.binding.line.store));
        let chunk = Sectors(u64::from(self.0.binding.snapshot.chunk.sectors()));
        let discards = self.0.binding.line.features.discard_zeroes_cow;
        Limits {
            max_discard: if discards { chunk } else { Sectors::ZERO },
            max_write_zeroes: Sectors::ZERO,
            request_stackable: false,
            ..Limits::new(self.0.binding.len).stack(&origin).stack(&store)
        }
    }

    fn max_io_len(&self) -> Option<Sectors> {
        Some(Sectors(u64::from(self.0.binding.snapshot.chunk.sectors())))
    }

    fn features(&self) -> TargetFeatures {
        TargetFeatures { cuts_discards: true, needs_own_lane: true, ..TargetFeatures::default() }
    }

    fn extents(&self, from: Sector, len: Sectors, out: &mut Extents) {
        self.0.binding.extents(from, len, out);
    }

    fn devices(&self) -> Vec<DeviceRange> {
        self.0.binding.devices()
    }

    fn extra_devices(&self) -> Vec<ResolvedDevice> {
        self.0.binding.origin_snapshots.stores()
    }

    fn as_snapshot(&self) -> Option<&dyn SnapshotTargetQueries> {
        Some(self)
    }

    fn attach(&self, notify: Arc<dyn TargetHostServices>) {
        self.0.binding.origin_snapshots.add_origin_device(&notify);
        self.0.binding.attach(notify);
    }

    fn tasks(&self) -> Vec<BioTaskFactory> {
        let shared = Arc::clone(&self.0);
        if shared.binding.is_released() || !shared.binding.snapshot.is_valid() {
            tracing::error!("Snapshot is invalid: can't merge");
            return Vec::new();
        }
        vec![Box::new(move || Box::new(task::MergeTask::new(shared)))]
    }

    fn partners(&self) -> Vec<Arc<MappedDevice>> {
        self.0.binding.partners()
    }

    fn preresume(&self, device: DeviceId) -> Result<(), TargetError> {
        self.0.binding.preresume(device)
    }

    fn presuspend(&self, _noflush: bool) {
        self.0.stop(true);
        self.0.give_up();
    }

    fn resume(&self) {
        self.0.binding.resume();
        self.0.settle();
        self.0.failed.store(false, Ordering::Release);
        self.0.stop(false);
    }

    fn retired(&self) {
        self.0.binding.retired();
    }

    fn removed(&self) {
        self.0.binding.removed();
    }
}

impl SnapshotTargetQueries for MergeTarget {
    fn report(&self) -> SnapshotReport {
        let state = match (self.0.has_failed(), self.0.left()) {
            (true, _) => SnapshotState::MergeFailed,
            (false, 0) if !self.0.is_running() => SnapshotState::Merged,
            _ => SnapshotState::Merging,
        };
        self.0.binding.report(state, self.0.binding.snapshot.usage_from_records())
    }

    fn checkpoint(&self) -> Option<ChangeTrackingCheckpoint> {
        None
    }
}

/// The origin as written by the merge: other snapshots keep their data.
struct MergeOriginCowDevice {
    id: DeviceId,
    origin: ResolvedDevice,
    origin_snapshots: Arc<OriginSnapshots>,
}

impl MergeOriginCowDevice {
    fn device(binding: &SnapshotTableBinding) -> Arc<dyn Device> {
        Arc::new(MergeOriginCowDevice {
            id: DeviceId::new(),
            origin: binding.line.origin.clone(),
            origin_snapshots: Arc::clone(&binding.origin_snapshots),
        })
    }
}

impl Device for MergeOriginCowDevice {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        let others = self.origin_snapshots.listed();
        let mut lane = OriginLane::open(&self.origin, &others, cx)?;
        // A task opens the device, after the table has become live.
        Ok(lane.begin(cx).unwrap_or_else(|| Box::new(lane)))
    }

    fn limits(&self) -> Limits {
        self.origin.device.limits()
    }
}

/// The store, with flushes around writes if it needs them.
struct MergeStoreFlushDevice {
    id: DeviceId,
    store: ResolvedDevice,
}

impl MergeStoreFlushDevice {
    fn device(binding: &SnapshotTableBinding) -> Arc<dyn Device> {
        Arc::new(MergeStoreFlushDevice { id: DeviceId::new(), store: binding.line.store.clone() })
    }
}

impl Device for MergeStoreFlushDevice {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        raw_device::open_lane_through_table(&self.store, cx)
    }

    fn limits(&self) -> Limits {
        self.store.device.limits()
    }
}
