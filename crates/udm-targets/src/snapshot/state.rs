//! The state of one snapshot, shared by all lanes of its own device and of its origin.
//!
//! The state outlives the table that created it: if a snapshot is reloaded or becomes a merge, the
//! next table takes this state over.

use super::copy_jobs::COPY_MEMORY;
use super::exception_map::{ChunkState, ExceptionMap};
use super::growth::StoreGrowth;
use super::readers::SnapshotReadTracker;
use super::record_commits::{ExceptionRecordWriter, ExceptionRun};
use super::settings::SnapshotSettings;
use super::store_allocator::StoreAllocator;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use udm_core::{Bio, Op, Sectors, WaitQueue};
use udm_dm::target::{ResolvedDevice, TargetHostServices};
use udm_dm::{DeviceEventDetails, EventKind, InvalidStoreMark};
use udm_wire::cow::{ChunkSize, ExceptionStoreLayout};

/// Whether a snapshot can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum SnapshotHealth {
    /// The snapshot has the content of its instant, and the writes to it.
    Valid,
    /// A copy was lost and a lane is marking the store: the origin must not change before that is
    /// done.
    Invalidating,
    /// A copy was lost: the snapshot can no longer be read.
    Invalid,
}

/// The contents of a store as read at load; empty for a transient store.
pub(super) struct StoreContents {
    /// The store can be used.
    pub valid: bool,
    /// The exceptions in the store.
    pub map: ExceptionMap,
    /// The free chunks of the store.
    pub space: StoreAllocator,
    /// The record writer; `None` for a transient store.
    pub commits: Option<ExceptionRecordWriter>,
}

/// The state of one snapshot.
pub(super) struct Snapshot {
    pub store: ResolvedDevice,
    pub chunk: ChunkSize,
    /// A chunk has 2^`shift` sectors.
    pub shift: u32,
    pub map: ExceptionMap,
    pub readers: SnapshotReadTracker,
    pub commits: Option<ExceptionRecordWriter>,
    pub settings: SnapshotSettings,
    /// Woken when a chunk was copied, readers have completed, or the snapshot became invalid.
    pub wait_queue: Arc<WaitQueue>,
    /// Woken only on invalidation; for lanes that wait only for their own copies.
    pub invalidated_wakeup: Arc<WaitQueue>,
    pub space: StoreAllocator,
    pub growth: StoreGrowth,
    /// Weak self-reference for callbacks.
    pub weak_self: Weak<Snapshot>,
    /// Length of the snapshot in sectors, from the start of the origin.
    len: AtomicU64,
    /// Size of the origin at the last resume, in sectors: the last chunk ends there.
    origin_size: AtomicU64,
    health: AtomicU8,
    /// A write found no room, and the table allows an overflow: the snapshot is read-only.
    overflowed: AtomicBool,
    /// The snapshot has been resumed: writes of the origin are copied.
    active: AtomicBool,
    notify: Mutex<Option<Arc<dyn TargetHostServices>>>,
    /// Marks the store as invalid outside of it, if its header cannot be written.
    mark: Option<Arc<dyn InvalidStoreMark>>,
}

impl Snapshot {
    pub(super) fn new(
        origin: &ResolvedDevice,
        store: ResolvedDevice,
        chunk: ChunkSize,
        loaded: StoreContents,
        mark: Option<Arc<dyn InvalidStoreMark>>,
    ) -> Arc<Snapshot> {
        let origin_size = origin.device.limits().size;
        let health = if loaded.valid { SnapshotHealth::Valid } else { SnapshotHealth::Invalid };
        Arc::new_cyclic(|weak_self| Snapshot {
            growth: StoreGrowth::new(store.device.growth()),
            weak_self: Weak::clone(weak_self),
            store,
            chunk,
            shift: chunk.sectors().trailing_zeros(),
            map: loaded.map,
            readers: SnapshotReadTracker::new(),
            commits: loaded.commits,
            settings: SnapshotSettings::new(COPY_MEMORY),
            wait_queue: Arc::new(WaitQueue::new()),
            invalidated_wakeup: Arc::new(WaitQueue::new()),
            space: loaded.space,
            len: AtomicU64::new(0),
            origin_size: AtomicU64::new(origin_size.0),
            health: AtomicU8::new(health as u8),
            overflowed: AtomicBool::new(false),
            active: AtomicBool::new(false),
            notify: Mutex::default(),
            mark,
        })
    }

    /// Whether the snapshot can be used. Acquire pairs with the release in
    /// [`Snapshot::invalidated`]: a core that sees `Invalid` knows that the store is marked.
    #[inline(always)]
    pub(super) fn health(&self) -> SnapshotHealth {
        match self.health.load(Ordering::Acquire) {
            0 => SnapshotHealth::Valid,
            1 => SnapshotHealth::Invalidating,
            _ => SnapshotHealth::Invalid,
        }
    }

    #[inline]
    pub(super) fn is_valid(&self) -> bool {
        self.health() == SnapshotHealth::Valid
    }

    /// Makes the snapshot invalid. Returns true for the caller that must mark the store and then
    /// call [`Snapshot::invalidated`].
    pub(super) fn invalidate(&self, why: &str) -> bool {
        let (valid, next) = (SnapshotHealth::Valid as u8, SnapshotHealth::Invalidating as u8);
        let first = self.health.compare_exchange(valid, next, Ordering::AcqRel, Ordering::Acquire).is_ok();
        if first {
            tracing::error!("{}: Invalidating snapshot: {why}.", self.name());
        }
        first
    }

    /// Called when the store is marked as invalid, or cannot be marked.
    pub(super) fn invalidated(&self) {
        self.health.store(SnapshotHealth::Invalid as u8, Ordering::Release);
        self.emit(EventKind::SnapshotInvalid, "the snapshot is invalid");
        self.event();
        self.wait_queue.wake_up();
        self.invalidated_wakeup.wake_up();
    }

    /// Called when the store's header cannot be written, for the reason `why`. The mark is kept
    /// outside of the store, and writes of the origin wait for it too.
    pub(super) fn mark_elsewhere(self: &Arc<Self>, why: &str) {
        tracing::error!("{}: write header failed: {why}", self.store.current_name());
        let Some(mark) = &self.mark else { return self.invalidated() };
        let snapshot = Arc::clone(self);
        let done = move |kept: Result<(), String>| {
            if let Err(why) = kept {
                let store = snapshot.store.current_name();
                tracing::error!("{store}: it could not be marked invalid, do not use it: {why}");
            }
            snapshot.invalidated();
        };
        mark.set(why, Box::new(done));
    }

    /// Sets the overflow state: a write found no room.
    pub(super) fn overflow(&self) {
        // Relaxed: a write that sees it late finds no room either.
        if !self.overflowed.swap(true, Ordering::Relaxed) {
            tracing::error!("{}: Snapshot overflowed: Unable to allocate exception.", self.name());
            self.emit(EventKind::SnapshotOverflow, "the store is full");
            self.event();
        }
    }

    /// True if the snapshot overflowed and the store has not grown since.
    pub(super) fn is_overflowed(&self) -> bool {
        self.overflowed.load(Ordering::Relaxed) && !self.has_grown()
    }

    #[cold]
    fn has_grown(&self) -> bool {
        let room = self.space.has_room(self.store.device.limits().size);
        if room {
            self.overflowed.store(false, Ordering::Relaxed);
        }
        room
    }

    /// True if writes of the origin must be copied. Relaxed: it changes only while nothing is in
    /// flight to the origin.
    #[inline(always)]
    pub(super) fn is_active(&self) -> bool {
        self.active.load(Ordering::Relaxed)
    }

    pub(super) fn set_active(&self, active: bool) {
        self.active.store(active, Ordering::Relaxed);
    }

    /// Length of the snapshot in sectors, from the start of the origin.
    #[inline(always)]
    pub(super) fn len(&self) -> u64 {
        self.len.load(Ordering::Relaxed)
    }

    /// Sets the length of the snapshot and the size of its origin, while nothing is in flight.
    pub(super) fn set_len(&self, len: Sectors, origin_size: Sectors) {
        self.len.store(len.0, Ordering::Relaxed);
        self.origin_size.store(origin_size.0, Ordering::Relaxed);
        self.map.grow(self.chunks_in(len));
    }

    /// Number of chunks of `len` sectors; the last one may be partial.
    pub(super) fn chunks_in(&self, len: Sectors) -> u64 {
        len.0.div_ceil(u64::from(self.chunk.sectors()))
    }

    /// Size of the origin in sectors at the last resume.
    #[inline]
    pub(super) fn origin_size(&self) -> u64 {
        self.origin_size.load(Ordering::Relaxed)
    }

    /// Sets the device that receives events.
    pub(super) fn attach(&self, notify: Arc<dyn TargetHostServices>) {
        *self.notify.lock().unwrap_or_else(PoisonError::into_inner) = Some(notify);
    }

    /// Raises the event counter of the snapshot's device.
    pub(super) fn event(&self) {
        let notify = self.notify.lock().unwrap_or_else(PoisonError::into_inner).clone();
        notify.iter().for_each(|notify| notify.event());
    }

    /// Sends an event with the text `line` about the snapshot's device.
    pub(super) fn emit(&self, kind: EventKind, line: &str) {
        let notify = self.notify.lock().unwrap_or_else(PoisonError::into_inner).clone();
        notify.iter().for_each(|notify| notify.emit(&|| DeviceEventDetails::new(kind, line)));
    }

    /// The name of the snapshot in log lines.
    pub(super) fn name(&self) -> String {
        let notify = self.notify.lock().unwrap_or_else(PoisonError::into_inner).clone();
        notify.map_or_else(|| self.store.number.to_string(), |notify| notify.device())
    }

    /// The chunk of `sector`.
    #[inline(always)]
    pub(super) fn chunk_of(&self, sector: u64) -> u64 {
        sector >> self.shift
    }

    /// The first sector of `chunk`.
    #[inline]
    pub(super) fn start_of(&self, chunk: u64) -> u64 {
        chunk << self.shift
    }

    /// The first and last chunk that a request touches.
    #[inline(always)]
    pub(super) fn chunks_of(&self, bio: &Bio) -> (u64, u64) {
        (self.chunk_of(bio.sector.0), self.chunk_of(bio.end().0 - 1))
    }

    /// The first and last chunk that must be copied for a write of the origin; `None` if there is
    /// nothing to copy.
    #[inline(always)]
    pub(super) fn to_copy(&self, bio: &Bio) -> Option<(u64, u64)> {
        if !self.is_active() || self.health() == SnapshotHealth::Invalid || bio.sector.0 >= self.len() {
            return None;
        }
        let (first, last) = self.chunks_of(bio);
        // A snapshot shorter than its origin ends with a whole chunk: a write that begins in the
        // chunk is copied.
        Some((first, last.min(self.chunk_of(self.len() - 1))))
    }

    /// True if a write of the origin may pass.
    #[inline(never)]
    pub(super) fn lets_pass(&self, bio: &Bio) -> bool {
        self.to_copy(bio).is_none_or(|(first, last)| self.map.are_settled(first, last))
    }

    /// True if every request of the origin may pass.
    #[inline(always)]
    pub(super) fn lets_anything_pass(&self) -> bool {
        !self.is_active() || self.health() == SnapshotHealth::Invalid || self.map.are_all_settled()
    }

    /// True if all of these requests of the origin may pass. Conditions that hold for all are
    /// checked once.
    #[inline]
    pub(super) fn lets_all_pass(&self, bios: &[Box<Bio>]) -> bool {
        if self.lets_anything_pass() {
            return true;
        }
        let (len, shift) = (self.len(), self.shift);
        bios.iter().all(|bio| {
            let at = bio.sector.0;
            if bio.op != Op::Write || at >= len {
                return true;
            }
            // Usually a write is within one chunk.
            match (at ^ (at + bio.sectors.0 - 1)) >> shift {
                0 => self.map.is_settled(at >> shift),
                _ => self.lets_pass(bio),
            }
        })
    }

    /// Called for a run that was copied to the store. If the store is transient, the run is
    /// published and true is returned: the caller must wake waiters. If it is persistent, some lane
    /// writes the records first.
    #[must_use]
    pub(super) fn copied(&self, copied: ExceptionRun) -> bool {
        match &self.commits {
            Some(commits) => commits.copied(copied),
            None => self.publish(&copied),
        }
        self.commits.is_none()
    }

    /// Marks a run as copied in the map. The caller wakes waiters after all runs that are published
    /// together.
    pub(super) fn publish(&self, copied: &ExceptionRun) {
        for at in (0..copied.len).filter(|_| copied.is_valid) {
            self.map.publish(copied.old + at, copied.new + at);
        }
    }

    /// The sector in the store of a sector of the snapshot, if its chunk is in chunk `new` of the
    /// store.
    #[inline]
    pub(super) fn in_store(&self, sector: u64, new: u64) -> u64 {
        self.start_of(new) | sector & (u64::from(self.chunk.sectors()) - 1)
    }

    /// The numbers of `status`: used, total and metadata sectors.
    pub(super) fn usage(&self) -> (u64, u64, u64) {
        let sectors = u64::from(self.chunk.sectors());
        let areas = |commits: &ExceptionRecordWriter| {
            commits.records() / ExceptionStoreLayout::new(self.chunk).records()
        };
        let metadata = self.commits.as_ref().map_or(0, |commits| (areas(commits) + 2) * sectors);
        (self.space.end() * sectors, self.store.device.limits().size.0, metadata)
    }

    /// The numbers of `status` during a merge: those needed by the remaining records (kernel).
    pub(super) fn usage_from_records(&self) -> (u64, u64, u64) {
        let (sectors, layout) = (u64::from(self.chunk.sectors()), ExceptionStoreLayout::new(self.chunk));
        let records = self.commits.as_ref().map_or(0, ExceptionRecordWriter::records);
        let area = records.saturating_sub(1) / layout.records();
        let used = layout.area(area) + (records - area * layout.records()) + 1;
        (used * sectors, self.store.device.limits().size.0, (area + 2) * sectors)
    }

    /// The state of `chunk`.
    #[inline]
    pub(super) fn place(&self, chunk: u64) -> ChunkState {
        self.map.get(chunk)
    }
}
