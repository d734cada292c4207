//! The state of a clone that its cores share. It outlives the table that created it: a table that
//! is loaded over a live clone takes the state over.

use super::args::{CloneTableArgs, DiskIdentity};
use super::changes::ChangeCounter;
use super::first_reads::FirstReads;
use super::regions::{RegionClaim, RegionMap};
use super::zero_regions::{DestinationHoles, ZeroRegions};
use crossbeam_utils::CachePadded;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use udm_core::{SharedDiskState, Status, WaitQueue, interleave};
use udm_dm::target::{ResolvedDevice, TargetHostServices};
use udm_dm::{DeviceEventDetails, EventKind};
use udm_wire::clone_metadata::{MetadataCopy, SourceFingerprint};

/// Whether the metadata can be used, as `status` prints it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(super) enum MetadataMode {
    /// Regions can be hydrated.
    ReadWrite,
    /// The metadata could not be written: no region is hydrated any more.
    ReadOnly,
    /// The metadata can neither be written nor read: all requests fail.
    Fail,
}

impl MetadataMode {
    /// The word in `status`.
    pub(super) fn text(self) -> &'static str {
        match self {
            MetadataMode::ReadWrite => "rw",
            MetadataMode::ReadOnly => "ro",
            MetadataMode::Fail => "Fail",
        }
    }
}

/// A request of a copy that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CopyFailure {
    /// The device, by the engine's number.
    pub device: usize,
    pub status: Status,
    /// The first region of the copy.
    pub region: u64,
}

/// Bits of a [`LaneActivity`] for requests in flight.
const IN_FLIGHT_BITS: u32 = usize::BITS / 2;

/// The value of a [`LaneActivity`].
#[inline(always)]
pub(super) fn lane_activity(in_flight: usize, batches: usize) -> usize {
    in_flight | batches << IN_FLIGHT_BITS
}

/// The number of client requests in flight on one lane, for the task, and in the upper half a
/// counter of batches, which wraps. Only the lane writes it.
pub(super) type LaneActivity = Arc<CachePadded<AtomicUsize>>;

/// The shared state of a clone.
pub(super) struct CloneState {
    pub map: RegionMap,
    /// The regions that need no copy.
    pub zero_regions: ZeroRegions,
    /// Where zeroes need no write.
    pub destination_holes: DestinationHoles,
    /// The regions that clients needed from the source.
    pub first_reads: FirstReads,
    /// The destination and the source of the first table, and the fingerprint of that source.
    pub destination: DiskIdentity,
    pub source: DiskIdentity,
    pub fingerprint: Option<SourceFingerprint>,
    /// False for a mirror: nothing is committed, and copies begin again with each new state.
    has_metadata: bool,
    /// The last failure of a copy, until a later copy succeeds.
    copy_failure: Mutex<Option<CopyFailure>>,
    /// `copy_failure` has one.
    has_copy_failure: AtomicBool,
    mode: AtomicU8,
    /// The changes of the bitmap, and those that the metadata has.
    changes: ChangeCounter,
    /// A lane or the task is committing.
    committing: AtomicBool,
    /// Number of the last commit. Changed only by the holder of the commit.
    generation: AtomicU64,
    /// Per block of the bitmap, the copy that has its last durable state. Changed only by the
    /// holder of the commit.
    durable_copies: Box<[AtomicU8]>,
    /// Regions being hydrated.
    hydrating: AtomicU64,
    /// Copies of regions whose source, or destination, has failed.
    source_errors: AtomicU64,
    destination_errors: AtomicU64,
    /// The device is being suspended: the task begins nothing.
    suspending: AtomicBool,
    /// No table uses the state any more.
    ended: AtomicBool,
    /// The event of the end of the hydration was sent, or nothing was to be hydrated.
    announced: AtomicBool,
    /// Woken when a claim ends, a commit ends, or the mode changes.
    pub wait_queue: Arc<WaitQueue>,
    /// Woken when the task may have work: after a message, and after the first change since a
    /// commit.
    pub task_queue: Arc<WaitQueue>,
    lanes: Mutex<Vec<Weak<CachePadded<AtomicUsize>>>>,
    /// Kept alive so that other tables find this state.
    _owner: Arc<CloneOfMetadata>,
    notify: Mutex<Option<Arc<dyn TargetHostServices>>>,
}

impl CloneState {
    /// The state of a clone of `line` with these regions. `generation` is the number of its last
    /// commit, and `owner` belongs to its metadata.
    pub(super) fn new(
        line: &CloneTableArgs,
        map: RegionMap,
        fingerprint: Option<SourceFingerprint>,
        generation: u64,
        owner: &Arc<CloneOfMetadata>,
    ) -> CloneState {
        let devices = (DiskIdentity::of(&line.destination), DiskIdentity::of(&line.source));
        CloneState {
            fingerprint,
            has_metadata: true,
            zero_regions: ZeroRegions::find(&map, &*line.source.device, &*line.destination.device),
            destination_holes: DestinationHoles::find(&map, &*line.destination.device),
            // Nothing of a complete clone is read from the source.
            first_reads: FirstReads::new(if map.is_complete() { 0 } else { map.count() }),
            ..CloneState::with_map(devices, map, generation, owner)
        }
    }

    /// The state of a mirror: regions are copied from `source` to `destination`, and no metadata
    /// says which.
    pub(super) fn without_metadata(
        destination: DiskIdentity,
        source: DiskIdentity,
        map: RegionMap,
    ) -> CloneState {
        CloneState::with_map((destination, source), map, 0, &Arc::default())
    }

    fn with_map(
        (destination, source): (DiskIdentity, DiskIdentity),
        map: RegionMap,
        generation: u64,
        owner: &Arc<CloneOfMetadata>,
    ) -> CloneState {
        let blocks = map.layout().bitmap_blocks();
        CloneState {
            destination,
            source,
            fingerprint: None,
            has_metadata: false,
            copy_failure: Mutex::default(),
            has_copy_failure: AtomicBool::new(false),
            mode: AtomicU8::new(MetadataMode::ReadWrite as u8),
            changes: ChangeCounter::new(),
            committing: AtomicBool::new(false),
            generation: AtomicU64::new(generation),
            durable_copies: (0..blocks).map(|_| AtomicU8::new(MetadataCopy::Second as u8)).collect(),
            hydrating: AtomicU64::new(0),
            source_errors: AtomicU64::new(0),
            destination_errors: AtomicU64::new(0),
            suspending: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            announced: AtomicBool::new(map.is_complete()),
            wait_queue: Arc::new(WaitQueue::new()),
            task_queue: Arc::new(WaitQueue::new()),
            lanes: Mutex::default(),
            _owner: Arc::clone(owner),
            notify: Mutex::default(),
            zero_regions: ZeroRegions::default(),
            destination_holes: DestinationHoles::default(),
            first_reads: FirstReads::new(0),
            map,
        }
    }

    /// Whether the metadata can be used. Acquire pairs with the release in `fail_metadata`.
    #[inline(always)]
    pub(super) fn mode(&self) -> MetadataMode {
        match self.mode.load(Ordering::Acquire) {
            0 => MetadataMode::ReadWrite,
            1 => MetadataMode::ReadOnly,
            _ => MetadataMode::Fail,
        }
    }

    /// Changes the mode, with an event and a log line if it is another one. A failed mode is never
    /// left, except by a new table.
    pub(super) fn set_mode(&self, mode: MetadataMode) {
        let before = self.mode.fetch_max(mode as u8, Ordering::AcqRel);
        if before < mode as u8 {
            let name = if mode == MetadataMode::Fail { "fail" } else { "read-only" };
            tracing::warn!("{}: Switching to {name} mode", self.name());
            self.emit(EventKind::CloneMetadataFailed, &format!("the metadata is in {name} mode"));
            self.event();
            self.wait_queue.wake_up();
        }
    }

    /// Regions are no longer copied. For mirrors, which report it themselves.
    pub(super) fn stop_copies(&self) {
        self.mode.store(MetadataMode::ReadOnly as u8, Ordering::Release);
        self.wait_queue.wake_up();
    }

    /// A request of a copy failed.
    pub(super) fn set_copy_failure(&self, failure: CopyFailure) {
        *self.copy_failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(failure);
        self.has_copy_failure.store(true, Ordering::Release);
    }

    /// The last failure of a copy, if no later copy succeeded.
    pub(super) fn copy_failure(&self) -> Option<CopyFailure> {
        *self.copy_failure.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A copy succeeded. Relaxed: a failure that is forgotten late is harmless.
    pub(super) fn clear_copy_failure(&self) {
        if self.has_copy_failure.load(Ordering::Relaxed) {
            let mut failure = self.copy_failure.lock().unwrap_or_else(PoisonError::into_inner);
            self.has_copy_failure.store(false, Ordering::Relaxed);
            *failure = None;
        }
    }

    /// A new table begins with writable metadata. Called while nothing is in flight.
    pub(super) fn reset_mode(&self) {
        self.mode.store(MetadataMode::ReadWrite as u8, Ordering::Release);
    }

    /// Claims `region` for its hydration.
    pub(super) fn claim(&self, region: u64) -> RegionClaim {
        self.map.claim(region, || self.wait_queue.wake_up())
    }

    /// Marks a claimed region as hydrated. The first change since a commit wakes the task, which
    /// commits at intervals.
    pub(super) fn set_hydrated(&self, region: u64) {
        let is_first = self.changes.begin();
        interleave::mark_interleave_point();
        self.map.set(region);
        interleave::mark_interleave_point();
        self.changes.end();
        if is_first || self.map.is_complete() {
            self.task_queue.wake_up();
        }
    }

    /// Marks a block of the bitmap to be written by the next commit.
    pub(super) fn rewrite_block(&self, block: usize) {
        self.changes.begin();
        self.map.mark_dirty(block);
        self.changes.end();
    }

    /// Number of changes of the bitmap so far.
    #[inline(always)]
    pub(super) fn changes(&self) -> u64 {
        self.changes.started()
    }

    /// True if the metadata has the first `changes` changes, or there is no metadata.
    #[inline(always)]
    pub(super) fn is_committed(&self, changes: u64) -> bool {
        !self.has_metadata || self.changes.is_committed(changes)
    }

    /// True if the metadata lacks changes and can be written.
    pub(super) fn needs_commit(&self) -> bool {
        self.mode() == MetadataMode::ReadWrite && !self.is_committed(self.changes())
    }

    /// Takes the right to commit. Returns the number of changes that the commit will have; `None`
    /// if another lane has the right. `None` too while another core is setting a bit: that core
    /// wakes the wait queue.
    pub(super) fn begin_commit(&self) -> Option<u64> {
        interleave::mark_interleave_point();
        if self.committing.swap(true, Ordering::SeqCst) {
            return None;
        }
        let changes = self.changes.begin_commit();
        if changes.is_none() {
            self.end_commit();
        }
        changes
    }

    /// Gives the right to commit back, and wakes those who wait for it.
    pub(super) fn end_commit(&self) {
        self.committing.store(false, Ordering::Release);
        self.wait_queue.wake_up();
    }

    /// The number of the next commit. Called by the holder of the commit.
    pub(super) fn next_generation(&self) -> u64 {
        self.generation.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// The copy of a block that has its last durable state. Called by the holder of the commit.
    pub(super) fn durable_copy(&self, block: usize) -> MetadataCopy {
        let second = self.durable_copies[block].load(Ordering::Relaxed) == MetadataCopy::Second as u8;
        if second { MetadataCopy::Second } else { MetadataCopy::First }
    }

    /// The last state of a block is durable in `copy`. Called by the holder of the commit, or at
    /// load.
    pub(super) fn set_durable_copy(&self, block: usize, copy: MetadataCopy) {
        self.durable_copies[block].store(copy as u8, Ordering::Relaxed);
    }

    /// The metadata has the first `changes` changes. Sends the event of the end, once.
    pub(super) fn set_committed(&self, changes: u64) {
        self.changes.set_committed(changes);
        if self.map.is_complete() && self.is_committed(self.changes()) {
            self.announce();
        }
        self.wait_queue.wake_up();
    }

    fn announce(&self) {
        if !self.announced.swap(true, Ordering::Relaxed) {
            self.emit(EventKind::CloneHydrated, "all of the source is in the destination");
            self.event();
        }
    }

    /// Number of regions being hydrated.
    pub(super) fn hydrating(&self) -> u64 {
        self.hydrating.load(Ordering::SeqCst)
    }

    /// Counts regions that are about to be hydrated.
    pub(super) fn add_hydrating(&self, regions: u64) {
        self.hydrating.fetch_add(regions, Ordering::SeqCst);
    }

    /// Counts regions whose hydration ended.
    pub(super) fn sub_hydrating(&self, regions: u64) {
        self.hydrating.fetch_sub(regions, Ordering::SeqCst);
    }

    /// Counts a request of a copy that failed. Relaxed: a number for display.
    pub(super) fn add_copy_error(&self, is_of_source: bool) {
        let errors = if is_of_source { &self.source_errors } else { &self.destination_errors };
        errors.fetch_add(1, Ordering::Relaxed);
    }

    /// Number of reads of the source, and of writes to the destination, that failed copies.
    pub(super) fn copy_errors(&self) -> (u64, u64) {
        (self.source_errors.load(Ordering::Relaxed), self.destination_errors.load(Ordering::Relaxed))
    }

    /// As [`CloneState::add_hydrating`], for the task. Returns false, and counts nothing, if the
    /// device is being suspended. SeqCst: either the task sees the suspend, or the lanes that are
    /// suspended see its regions.
    pub(super) fn begin_in_background(&self, regions: u64) -> bool {
        self.add_hydrating(regions);
        let begins = !self.is_suspending();
        if !begins {
            self.give_up_in_background(regions);
        }
        begins
    }

    /// The task hydrates regions not after all that it has counted. A suspend may wait for them.
    pub(super) fn give_up_in_background(&self, regions: u64) {
        self.sub_hydrating(regions);
        if self.is_suspending() {
            self.wait_queue.wake_up();
        }
    }

    /// True from the begin of a suspend to the next resume.
    pub(super) fn is_suspending(&self) -> bool {
        self.suspending.load(Ordering::SeqCst)
    }

    /// A suspend begins, or the device is resumed.
    pub(super) fn set_suspending(&self, suspending: bool) {
        self.suspending.store(suspending, Ordering::SeqCst);
        self.task_queue.wake_up();
        self.wait_queue.wake_up();
    }

    /// True if a suspend must still wait: for regions in flight, or for a commit. A commit ends
    /// after its last write, so no write reaches the metadata after the suspend.
    pub(super) fn has_unfinished_work(&self) -> bool {
        self.hydrating() > 0 || self.committing.load(Ordering::SeqCst) || self.needs_commit()
    }

    /// Sets whether a table uses the state.
    pub(super) fn set_ended(&self, ended: bool) {
        self.ended.store(ended, Ordering::Relaxed);
    }

    fn is_ended(&self) -> bool {
        self.ended.load(Ordering::Relaxed)
    }

    /// Adds a lane. The task reads its number of requests in flight.
    pub(super) fn add_lane(&self) -> LaneActivity {
        let activity = LaneActivity::default();
        let mut lanes = self.lanes.lock().unwrap_or_else(PoisonError::into_inner);
        lanes.retain(|lane| lane.strong_count() > 0);
        lanes.push(Arc::downgrade(&activity));
        activity
    }

    /// True if a client request is in flight. Relaxed: a value that is late delays one batch.
    pub(super) fn is_busy(&self) -> bool {
        let in_flight = lane_activity(usize::MAX >> IN_FLIGHT_BITS, 0);
        self.fold_activity(|sum, activity| sum | activity & in_flight) > 0
    }

    /// Changes when clients have sent requests. Relaxed: a value that is late delays a commit.
    pub(super) fn client_batches(&self) -> usize {
        self.fold_activity(|sum, activity| sum.wrapping_add(activity >> IN_FLIGHT_BITS))
    }

    fn fold_activity(&self, add: impl Fn(usize, usize) -> usize) -> usize {
        let lanes = self.lanes.lock().unwrap_or_else(PoisonError::into_inner);
        let lanes = lanes.iter().filter_map(Weak::upgrade);
        lanes.map(|lane| lane.load(Ordering::Relaxed)).fold(0, add)
    }

    /// Sets the device that receives events.
    pub(super) fn attach(&self, notify: Arc<dyn TargetHostServices>) {
        *self.notify() = Some(notify);
    }

    fn notify(&self) -> MutexGuard<'_, Option<Arc<dyn TargetHostServices>>> {
        self.notify.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends the event of the device.
    pub(super) fn event(&self) {
        let notify = self.notify().clone();
        notify.iter().for_each(|notify| notify.event());
    }

    fn emit(&self, kind: EventKind, line: &str) {
        let notify = self.notify().clone();
        notify.iter().for_each(|notify| notify.emit(&|| DeviceEventDetails::new(kind, line)));
    }

    /// The name of the device in log lines.
    pub(super) fn name(&self) -> String {
        let notify = self.notify().clone();
        notify.map_or_else(|| self.destination.name.clone(), |notify| notify.device())
    }
}

/// The clone on a metadata device, shared by all names of the device.
#[derive(Default)]
pub(super) struct CloneOfMetadata(Mutex<Weak<CloneState>>);

impl CloneOfMetadata {
    /// The clone on `metadata`.
    pub(super) fn of(metadata: &ResolvedDevice) -> Arc<CloneOfMetadata> {
        metadata.device.shared_disk_state().map(SharedDiskState::get_or_default).unwrap_or_default()
    }

    /// The state in use, if a table uses it or can use it.
    pub(super) fn state(&self) -> Option<Arc<CloneState>> {
        let state = self.0.lock().unwrap_or_else(PoisonError::into_inner).upgrade();
        state.filter(|state| !state.is_ended())
    }

    /// Sets the state that the next tables take over.
    pub(super) fn set_state(&self, state: &Arc<CloneState>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Arc::downgrade(state);
    }
}
