//! A store that is made larger before it is full.
//!
//! Whoever takes room and leaves less than half a step asks for another step; the device makes
//! itself larger beside the cores and tells what came of it. A write that finds no room meanwhile
//! waits. What is done with full stores is done when growth has failed, tried once more when the
//! store was full, or has come to its maximum.
//!
//! ```text
//!          little is left              the store is full             failed
//!  Growing <------------- Idle ----------------------------> Last ----------> Full
//!     |                   ^  ^                                |  ^             |
//!     +-- done or failed -+  +------------- done -------------+  +--- retry ---+
//! ```
//!
//! Behind a failure the next attempt is made when the store is full, and not when little is left.
//! A step doubles the store at the most: a store that is small takes little from others.

use super::settings::OnFull;
use super::state::Snapshot;
use super::store_allocator::ChunkRange;
use std::sync::Weak;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use udm_core::bugs::{self, Bug};
use udm_core::{Growth as GrowthSettings, Nanos, OpenError, SECTOR_SIZE, Sectors};
use udm_dm::{EventKind, TargetError};
use udm_wire::size;

/// How long after an attempt that failed the next one comes, while writes wait or fail.
const RETRY: Nanos = Nanos(1_000_000_000);

/// A store that is smaller grows as one of this size does: 64 KiB.
const SMALL: Sectors = Sectors(128);

/// No maximum.
const UNBOUNDED: Sectors = Sectors(u64::MAX / SECTOR_SIZE);

/// How far growth has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum GrowthState {
    /// There is room, or nobody has asked.
    Idle,
    /// The device is at it.
    Growing,
    /// The device is at it, and the store is full.
    Last,
    /// It has failed, and the store is full.
    StoreFull,
    /// It is as large as it may become.
    AtMax,
}

impl GrowthState {
    fn of(word: u8) -> GrowthState {
        [
            GrowthState::Idle,
            GrowthState::Growing,
            GrowthState::Last,
            GrowthState::StoreFull,
            GrowthState::AtMax,
        ][usize::from(word)]
    }

    fn is_under_way(self) -> bool {
        matches!(self, GrowthState::Growing | GrowthState::Last)
    }
}

/// See the module's documentation.
pub(super) struct StoreGrowth {
    /// Sectors; 0 for a store that stays as it is. Relaxed, as `max`: each stands for itself.
    step: AtomicU64,
    max: AtomicU64,
    state: AtomicU8,
    /// The last attempt failed, and that was told.
    failed: AtomicBool,
    /// When it is tried again.
    again: AtomicU64,
}

impl StoreGrowth {
    /// As `wanted` says; `None` for a store that stays as it is.
    pub(super) fn new(wanted: Option<GrowthSettings>) -> StoreGrowth {
        StoreGrowth {
            step: AtomicU64::new(wanted.map_or(0, |wanted| wanted.step.0)),
            max: AtomicU64::new(wanted.map_or(UNBOUNDED.0, |wanted| wanted.max.0)),
            state: AtomicU8::new(GrowthState::Idle as u8),
            failed: AtomicBool::new(false),
            again: AtomicU64::new(0),
        }
    }

    /// True when the store is to grow.
    pub(super) fn is_on(&self) -> bool {
        self.step.load(Ordering::Relaxed) > 0
    }

    /// What is set; `None` for a store that stays as it is.
    pub(super) fn wanted(&self) -> Option<GrowthSettings> {
        let (step, max) = (self.step.load(Ordering::Relaxed), self.max.load(Ordering::Relaxed));
        (step > 0).then_some(GrowthSettings { step: Sectors(step), max: Sectors(max) })
    }

    /// Does `set grow SIZE`, 0 for not at all, or `set grow_max SIZE`.
    ///
    /// # Errors
    /// EINVAL for what is no size.
    pub(super) fn set(&self, key: &str, value: &str) -> Result<(), TargetError> {
        let bytes = size::parse(value).map_err(|why| {
            TargetError::new(format!("Invalid value for {key}: {value:?}")).because(why.to_string()).at(2)
        })?;
        match key {
            "grow" => self.step.store(bytes.div_ceil(SECTOR_SIZE), Ordering::Relaxed),
            _ => self.max.store(bytes / SECTOR_SIZE, Ordering::Relaxed),
        }
        Ok(())
    }

    /// Acquire pairs with the release in [`StoreGrowth::end`]: who sees that it failed sees how large
    /// the store is.
    pub(super) fn step(&self) -> GrowthState {
        GrowthState::of(self.state.load(Ordering::Acquire))
    }

    /// By how much a store of `size` grows at once; 0 for one that stays as it is.
    fn step_at(&self, size: Sectors) -> u64 {
        self.step.load(Ordering::Relaxed).min(size.max(SMALL).0)
    }

    /// True when so many sectors that are free in chunks of `chunk` are few for a store of `size`.
    pub(super) fn is_low(&self, free: Sectors, chunk: Sectors, size: Sectors) -> bool {
        let step = self.step_at(size);
        step > 0 && free.0 < (step / 2).max(2 * chunk.0)
    }

    /// Takes the attempt on; false when somebody has it. With `full` it is the last one.
    pub(super) fn begin(&self, full: bool) -> bool {
        let next = if full { GrowthState::Last } else { GrowthState::Growing };
        let free = |word| (!GrowthState::of(word).is_under_way()).then_some(next as u8);
        self.state.fetch_update(Ordering::AcqRel, Ordering::Acquire, free).is_ok()
    }

    /// The size to ask for, where a store of `size` can become larger; at the least `least`, which
    /// is of use.
    pub(super) fn next(&self, size: Sectors, least: Sectors) -> Option<Sectors> {
        let wanted = self.wanted()?;
        let next = size.0.saturating_add(self.step_at(size)).max(least.0).min(wanted.max.0);
        (next >= least.0).then_some(Sectors(next))
    }

    /// True when it is to grow before it is full.
    pub(super) fn is_ready(&self) -> bool {
        self.step() == GrowthState::Idle && !self.failed.load(Ordering::Relaxed)
    }

    /// The attempt has ended, and growth comes to `next`: whether it is the first that failed.
    pub(super) fn end(&self, next: GrowthState, failed: bool) -> bool {
        let before = self.failed.swap(failed, Ordering::Relaxed);
        self.state.store(next as u8, Ordering::Release);
        failed && !before
    }

    /// What it failed for may be over.
    pub(super) fn reset(&self) {
        self.failed.store(false, Ordering::Relaxed);
        let idle = |word| (!GrowthState::of(word).is_under_way()).then_some(GrowthState::Idle as u8);
        let _ = self.state.fetch_update(Ordering::AcqRel, Ordering::Acquire, idle);
    }

    /// When it is to be tried again, if it failed.
    pub(super) fn retry_at(&self) -> Option<Nanos> {
        (self.step() == GrowthState::StoreFull).then(|| Nanos(self.again.load(Ordering::Relaxed)))
    }

    /// True for the one that is to try again now.
    pub(super) fn retries(&self, now: Nanos) -> bool {
        let due = |at: u64| (at <= now.0).then_some(now.0 + RETRY.0);
        self.step() == GrowthState::StoreFull
            && self.again.fetch_update(Ordering::Relaxed, Ordering::Relaxed, due).is_ok()
    }
}

/// A store without room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StoreFull {
    /// It is being made larger: the bell is rung when that has ended.
    GrowthPending,
    /// There is none to be had.
    Permanent,
}

impl Snapshot {
    /// Room for `want` chunks behind each other, or fewer. `size` is that of the store, as the
    /// caller knows it: it is looked at again when that is too little.
    ///
    /// # Errors
    /// The store is full.
    pub(super) fn take(&self, want: u64, size: &mut Sectors) -> Result<ChunkRange, StoreFull> {
        let grant = self.space.take(want, *size).or_else(|| {
            *size = self.store_size();
            self.space.take(want, *size)
        });
        let grant = match grant {
            Some(grant) => grant,
            None => self.allocate_when_full(want, size)?,
        };
        self.after_allocation(&grant, size);
        Ok(grant)
    }

    fn store_size(&self) -> Sectors {
        self.store.device.limits().size
    }

    /// The store is full.
    #[cold]
    fn allocate_when_full(&self, want: u64, size: &mut Sectors) -> Result<ChunkRange, StoreFull> {
        if !self.growth.is_on() {
            return Err(StoreFull::Permanent);
        }
        match self.growth.step() {
            GrowthState::Growing | GrowthState::Last if bugs::on(Bug::FullWhileGrowing) => {
                Err(StoreFull::Permanent)
            }
            GrowthState::Growing | GrowthState::Last => Err(StoreFull::GrowthPending),
            GrowthState::Idle => {
                self.grow(true);
                Err(StoreFull::GrowthPending)
            }
            // What an attempt had before it failed is of use.
            GrowthState::StoreFull | GrowthState::AtMax => {
                *size = self.store_size();
                self.space.take(want, *size).ok_or(StoreFull::Permanent)
            }
        }
    }

    /// Tells of a watermark, and asks for more where little is left.
    fn after_allocation(&self, grant: &ChunkRange, size: &mut Sectors) {
        let [before, now] = [grant.new, grant.new + grant.len].map(|chunk| self.start_of(chunk));
        let full = match self.growth.wanted().filter(|_| self.growth.step() != GrowthState::StoreFull) {
            // What has no end fills no part of it.
            Some(wanted) if wanted.max == UNBOUNDED => Sectors::ZERO,
            Some(wanted) => wanted.max.max(*size),
            None => *size,
        };
        if self.settings.crosses(before, now, full.0) {
            let line = format!("the store is filled to {now} of {} sectors", full.0);
            tracing::warn!("{}: {line}", self.name());
            self.tell(EventKind::SnapshotFilling, &line);
            self.event();
        }
        if self.is_low(grant.end, *size) {
            *size = self.store_size();
            if self.growth.is_ready() && self.is_low(grant.end, *size) {
                self.grow(false);
            }
        }
    }

    /// True when a store of `size` that is filled to chunk `end` is to grow.
    #[inline]
    fn is_low(&self, end: u64, size: Sectors) -> bool {
        let free = size.0.saturating_sub(self.start_of(end));
        !self.space.keeps_holes()
            && self.growth.is_low(Sectors(free), Sectors(u64::from(self.chunk.sectors())), size)
    }

    /// Has the device make itself larger, unless it is at that. With `full` there is no room, and
    /// it is the last attempt.
    #[cold]
    fn grow(&self, full: bool) {
        if !self.growth.begin(full) {
            return;
        }
        let size = self.store_size();
        if !self.is_low(self.space.end(), size) {
            // Somebody was faster.
            return self.growth_done(Ok(()));
        }
        match self.growth.next(size, self.space.next_size(size)) {
            Some(next) => {
                let weak_self = Weak::clone(&self.weak_self);
                let told = move |outcome| {
                    if let Some(weak_self) = weak_self.upgrade() {
                        weak_self.growth_done(outcome);
                    }
                };
                self.store.device.grow(next, Box::new(told));
            }
            None => {
                self.growth.end(GrowthState::AtMax, false);
                self.bell.wake_up();
            }
        }
    }

    /// The device has become larger, or could not.
    fn growth_done(&self, outcome: Result<(), OpenError>) {
        let last = self.growth.step() == GrowthState::Last;
        match outcome {
            Ok(()) => {
                self.growth.end(GrowthState::Idle, false);
                // It may have been filled meanwhile.
                if self.is_low(self.space.end(), self.store_size()) {
                    self.grow(false);
                }
            }
            Err(why) => {
                if self.growth.end(if last { GrowthState::StoreFull } else { GrowthState::Idle }, true) {
                    let size = self.store_size().0;
                    let line = format!("the store stays at {size} sectors: {why}");
                    tracing::warn!("{}: {line}", self.name());
                    self.tell(EventKind::SnapshotFilling, &line);
                    self.event();
                }
            }
        }
        if !bugs::on(Bug::GrownNotRung) {
            self.bell.wake_up();
        }
    }

    /// Tries again, now and then, where growth has failed and writes want it.
    pub(super) fn retry(&self, now: Nanos) {
        if self.growth.retries(now) {
            self.grow(true);
        }
    }

    /// When writes that wait are to look again by themselves.
    pub(super) fn retry_at(&self) -> Option<Nanos> {
        self.growth.retry_at().filter(|_| self.settings.on_full() == OnFull::Pause)
    }

    /// What becomes of a write that found no room.
    pub(super) fn on_full(&self, full: StoreFull) -> OnFull {
        match full {
            StoreFull::GrowthPending => OnFull::Pause,
            StoreFull::Permanent => self.settings.on_full(),
        }
    }

    /// A write ends for want of room, and its chunk is free again: another core may have seen it
    /// claimed, and waits.
    pub(super) fn notify_without_room(&self) {
        if !bugs::on(Bug::GivenUpUnheard) {
            self.bell.wake_up();
        }
    }

    /// Something was set, or the owner says that the store has changed: what growth failed for may
    /// be over, and whoever waits for room looks again.
    pub(super) fn look_again(&self) {
        self.growth.reset();
        if self.is_low(self.space.end(), self.store_size()) {
            self.grow(false);
        }
        self.bell.wake_up();
    }
}
