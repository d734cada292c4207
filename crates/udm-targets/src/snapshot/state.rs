//! One snapshot, as all its lanes see it: those of its own device and those of its origin.
//!
//! It outlives the table that made it: a snapshot that is reloaded, or turned into a merge, hands
//! this on to its next table.

use super::copy_jobs::COPY_MEMORY;
use super::exception_map::{ChunkState, ExceptionMap};
use super::growth::StoreGrowth;
use super::readers::Readers;
use super::record_commits::{CopiedRun, RecordCommits};
use super::settings::SnapshotSettings;
use super::store_allocator::StoreAllocator;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use udm_core::bugs::{self, Bug};
use udm_core::{Bio, Op, Sectors, WaitQueue};
use udm_dm::target::{DeviceRef, TargetHost};
use udm_dm::{EventKind, InvalidStoreMark, StateChange};
use udm_wire::cow::{ChunkSize, StoreLayout};

/// Whether it can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum SnapshotHealth {
    /// It is the instant at which it was made, with what was written to it.
    Valid,
    /// A copy was lost, and a lane is marking the store: the origin must not change before.
    Invalidating,
    /// A copy was lost: nothing of it can be read any more.
    Invalid,
}

/// What was read from a store when its table was loaded, or nothing for a transient one.
pub(super) struct StoreContents {
    /// The store can be used.
    pub valid: bool,
    /// What is in the store.
    pub map: ExceptionMap,
    /// What is free in the store.
    pub space: StoreAllocator,
    /// Its records; `None` for a transient one.
    pub commits: Option<RecordCommits>,
}

/// See the module's documentation.
pub(super) struct Snapshot {
    pub store: DeviceRef,
    pub chunk: ChunkSize,
    /// A chunk is 2^`shift` sectors.
    pub shift: u32,
    pub map: ExceptionMap,
    pub readers: Readers,
    pub commits: Option<RecordCommits>,
    pub settings: SnapshotSettings,
    /// Rung when a chunk was copied, readers are over, or it has become invalid.
    pub bell: Arc<WaitQueue>,
    /// Rung when it has become invalid, and for nothing else: for those that wait for themselves.
    pub invalidated_wakeup: Arc<WaitQueue>,
    pub space: StoreAllocator,
    pub growth: StoreGrowth,
    /// For those who come back to it and do not keep it.
    pub weak_self: Weak<Snapshot>,
    /// The part of the origin that it is about.
    len: AtomicU64,
    /// The size of the origin at the last resume: the last chunk ends there.
    origin_size: AtomicU64,
    health: AtomicU8,
    /// A write found no room, and the table says that this makes it no worse than read-only.
    overflowed: AtomicBool,
    /// It has been resumed once: writes of the origin are copied.
    active: AtomicBool,
    notify: Mutex<Option<Arc<dyn TargetHost>>>,
    /// Where it is kept that the store must not be believed, when the store can't say so.
    mark: Option<Arc<dyn InvalidStoreMark>>,
}

impl Snapshot {
    pub(super) fn new(
        origin: &DeviceRef,
        store: DeviceRef,
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
            readers: Readers::new(),
            commits: loaded.commits,
            settings: SnapshotSettings::new(COPY_MEMORY),
            bell: Arc::new(WaitQueue::new()),
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

    /// Whether it can be used. Acquire pairs with the release in [`Snapshot::set_health`]: who sees
    /// that it is invalid sees that the store says so.
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

    /// It is of no use any more. True for the one that has to mark the store so and call
    /// [`Snapshot::invalidated`] then.
    pub(super) fn invalidate(&self, why: &str) -> bool {
        let (valid, next) = (SnapshotHealth::Valid as u8, SnapshotHealth::Invalidating as u8);
        let first = self.health.compare_exchange(valid, next, Ordering::AcqRel, Ordering::Acquire).is_ok();
        if first {
            tracing::error!("{}: Invalidating snapshot: {why}.", self.name());
        }
        first
    }

    /// The store says that it is invalid, or can't be made to say so.
    pub(super) fn invalidated(&self) {
        self.health.store(SnapshotHealth::Invalid as u8, Ordering::Release);
        self.tell(EventKind::SnapshotInvalid, "the snapshot is invalid");
        self.event();
        self.bell.wake_up();
        self.invalidated_wakeup.wake_up();
    }

    /// The store can't be made to say that it is invalid, since its header can't be written: this
    /// is why. The mark is kept elsewhere, and the origin waits for that too.
    pub(super) fn mark_elsewhere(self: &Arc<Self>, why: &str) {
        tracing::error!("{}: write header failed: {why}", self.store.current_name());
        let mark = self.mark.as_ref().filter(|_| !bugs::on(Bug::MarkNotKept));
        let Some(mark) = mark else { return self.invalidated() };
        let snapshot = Arc::clone(self);
        let done = move |kept: Result<(), String>| {
            if let Err(why) = kept {
                let store = snapshot.store.current_name();
                tracing::error!("{store}: nothing says that it is invalid any more, do not use it: {why}");
            }
            snapshot.invalidated();
        };
        mark.set(why, Box::new(done));
    }

    /// A write found no room.
    pub(super) fn overflow(&self) {
        // Relaxed: a write that sees it late finds no room either.
        if !self.overflowed.swap(true, Ordering::Relaxed) {
            tracing::error!("{}: Snapshot overflowed: Unable to allocate exception.", self.name());
            self.tell(EventKind::SnapshotOverflow, "the store is full");
            self.event();
        }
    }

    /// True until its store has grown.
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

    /// True when writes of the origin have to be copied. Relaxed: it changes while nothing is in
    /// flight to the origin.
    #[inline(always)]
    pub(super) fn is_active(&self) -> bool {
        self.active.load(Ordering::Relaxed)
    }

    pub(super) fn set_active(&self, active: bool) {
        self.active.store(active, Ordering::Relaxed);
    }

    /// The sectors of the origin that it is about: those before.
    #[inline(always)]
    pub(super) fn len(&self) -> u64 {
        self.len.load(Ordering::Relaxed)
    }

    /// It is about so much of an origin of `origin_size`, with nothing in flight.
    pub(super) fn set_len(&self, len: Sectors, origin_size: Sectors) {
        self.len.store(len.0, Ordering::Relaxed);
        self.origin_size.store(origin_size.0, Ordering::Relaxed);
        self.map.grow(self.chunks_in(len));
    }

    /// The chunks of `len` sectors, the last of which may be a part.
    pub(super) fn chunks_in(&self, len: Sectors) -> u64 {
        len.0.div_ceil(u64::from(self.chunk.sectors()))
    }

    /// The size of the origin in sectors at the last resume.
    #[inline]
    pub(super) fn origin_size(&self) -> u64 {
        self.origin_size.load(Ordering::Relaxed)
    }

    /// Whom to tell of events from now on.
    pub(super) fn attach(&self, notify: Arc<dyn TargetHost>) {
        *self.notify.lock().unwrap_or_else(PoisonError::into_inner) = Some(notify);
    }

    /// Raises an event of the device that it belongs to.
    pub(super) fn event(&self) {
        let notify = self.notify.lock().unwrap_or_else(PoisonError::into_inner).clone();
        notify.iter().for_each(|notify| notify.event());
    }

    /// Has who listens told of a change of the device that it belongs to.
    pub(super) fn tell(&self, kind: EventKind, line: &str) {
        let notify = self.notify.lock().unwrap_or_else(PoisonError::into_inner).clone();
        notify.iter().for_each(|notify| notify.tell(&|| StateChange::new(kind, line)));
    }

    /// What the log calls it.
    pub(super) fn name(&self) -> String {
        let notify = self.notify.lock().unwrap_or_else(PoisonError::into_inner).clone();
        notify.map_or_else(|| self.store.number.to_string(), |notify| notify.device())
    }

    /// The chunk of `sector`.
    #[inline(always)]
    pub(super) fn chunk_of(&self, sector: u64) -> u64 {
        sector >> self.shift
    }

    /// The sector at which `chunk` begins.
    #[inline]
    pub(super) fn start_of(&self, chunk: u64) -> u64 {
        chunk << self.shift
    }

    /// The first and last chunk that a request touches.
    #[inline(always)]
    pub(super) fn chunks_of(&self, bio: &Bio) -> (u64, u64) {
        (self.chunk_of(bio.sector.0), self.chunk_of(bio.end().0 - 1))
    }

    /// The chunks that a write of the origin touches, when it has to be copied for it: it is in use
    /// and about them.
    #[inline(always)]
    pub(super) fn to_copy(&self, bio: &Bio) -> Option<(u64, u64)> {
        if !self.is_active() || self.health() == SnapshotHealth::Invalid || bio.sector.0 >= self.len() {
            return None;
        }
        let (first, last) = self.chunks_of(bio);
        // A snapshot shorter than its origin ends with a whole chunk: what begins in it is copied.
        Some((first, last.min(self.chunk_of(self.len() - 1))))
    }

    /// True when a write of the origin may go.
    #[inline(never)]
    pub(super) fn lets_pass(&self, bio: &Bio) -> bool {
        self.to_copy(bio).is_none_or(|(first, last)| self.map.are_settled(first, last))
    }

    /// True when any request of the origin may go.
    #[inline(always)]
    pub(super) fn lets_anything_pass(&self) -> bool {
        !self.is_active() || self.health() == SnapshotHealth::Invalid || self.map.are_all_settled()
    }

    /// True when all of these requests of the origin may go: what holds for all is looked at once.
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
            // Mostly it is of one chunk.
            match (at ^ (at + bio.sectors.0 - 1)) >> shift {
                0 => self.map.is_settled(at >> shift),
                _ => self.lets_pass(bio),
            }
        })
    }

    /// These are in the store. A transient one has nothing else to do but to have its bell rung,
    /// and says so; a persistent one writes their records first, by whichever lane comes to it.
    #[must_use]
    pub(super) fn copied(&self, copied: CopiedRun) -> bool {
        match &self.commits {
            Some(commits) => commits.copied(copied),
            None => self.publish(&copied),
        }
        self.commits.is_none()
    }

    /// They are there for good. The bell is rung behind all that are published together.
    pub(super) fn publish(&self, copied: &CopiedRun) {
        for at in (0..copied.len).filter(|_| copied.kept) {
            self.map.publish(copied.old + at, copied.new + at);
        }
    }

    /// Where a sector of the snapshot is in the store, when its chunk is in chunk `new` there.
    #[inline]
    pub(super) fn in_store(&self, sector: u64, new: u64) -> u64 {
        self.start_of(new) | sector & (u64::from(self.chunk.sectors()) - 1)
    }

    /// What `status` says: sectors in use, of how many, of them metadata.
    pub(super) fn usage(&self) -> (u64, u64, u64) {
        let sectors = u64::from(self.chunk.sectors());
        let areas = |commits: &RecordCommits| commits.records() / StoreLayout::new(self.chunk).records();
        let metadata = self.commits.as_ref().map_or(0, |commits| (areas(commits) + 2) * sectors);
        (self.space.end() * sectors, self.store.device.limits().size.0, metadata)
    }

    /// The same while it is merged: what the records that are left need (kernel).
    pub(super) fn usage_from_records(&self) -> (u64, u64, u64) {
        let (sectors, layout) = (u64::from(self.chunk.sectors()), StoreLayout::new(self.chunk));
        let records = self.commits.as_ref().map_or(0, RecordCommits::records);
        let area = records.saturating_sub(1) / layout.records();
        let used = layout.area(area) + (records - area * layout.records()) + 1;
        (used * sectors, self.store.device.limits().size.0, (area + 2) * sectors)
    }

    /// How far `chunk` has come.
    #[inline]
    pub(super) fn place(&self, chunk: u64) -> ChunkState {
        self.map.get(chunk)
    }
}
