//! Growth of a store before it is full.
//!
//! If an allocation leaves less than half a step free, the lane asks the device for another step.
//! The device grows on a helper thread and reports the result. A write that finds no room waits in
//! the meantime. The policy for full stores applies if growth has failed and one more attempt with
//! a full store has failed too, or if the store has its maximum size.
//!
//! ```text
//!          little is left              the store is full             failed
//!  Growing <------------- Idle ----------------------------> Last ----------> StoreFull
//!     |                   ^  ^                                |  ^             |
//!     +-- done or failed -+  +------------- done -------------+  +--- retry ---+
//! ```
//!
//! After a failure, growth is retried only when the store is full, not when little is left. A step
//! at most doubles the store, so a small store takes little space from others.

use super::settings::FullStoreWritePolicy;
use super::state::Snapshot;
use super::store_allocator::AllocatedChunkRun;
use std::sync::Weak;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use udm_core::{DeviceControlError, GrowthPolicy, Nanos, SECTOR_SIZE, Sectors};
use udm_dm::{EventKind, TargetError};
use udm_wire::size;

/// Interval between attempts after a failure, while writes wait or fail.
const RETRY: Nanos = Nanos(1_000_000_000);

/// A smaller store grows as a store of this size (64 KiB).
const SMALL: Sectors = Sectors(128);

/// No maximum.
const UNBOUNDED: Sectors = Sectors(u64::MAX / SECTOR_SIZE);

/// The state of a store's growth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum StoreGrowthState {
    /// No growth is in progress.
    Idle,
    /// The device is growing.
    Growing,
    /// The device is growing, and the store is full.
    Last,
    /// Growth has failed, and the store is full.
    StoreFull,
    /// The store has its maximum size.
    AtMax,
}

impl StoreGrowthState {
    fn of(word: u8) -> StoreGrowthState {
        [
            StoreGrowthState::Idle,
            StoreGrowthState::Growing,
            StoreGrowthState::Last,
            StoreGrowthState::StoreFull,
            StoreGrowthState::AtMax,
        ][usize::from(word)]
    }

    fn is_under_way(self) -> bool {
        matches!(self, StoreGrowthState::Growing | StoreGrowthState::Last)
    }
}

/// The growth settings and the growth state of a store.
pub(super) struct StoreGrowth {
    /// Sectors per step; 0 for a store that does not grow. Relaxed, as `max`: the values are
    /// independent.
    step: AtomicU64,
    max: AtomicU64,
    state: AtomicU8,
    /// The last attempt failed, and the failure was logged.
    failed: AtomicBool,
    /// Time of the next attempt.
    again: AtomicU64,
}

impl StoreGrowth {
    /// Growth with the settings `wanted`; `None` for a store that does not grow.
    pub(super) fn new(wanted: Option<GrowthPolicy>) -> StoreGrowth {
        StoreGrowth {
            step: AtomicU64::new(wanted.map_or(0, |wanted| wanted.step.0)),
            max: AtomicU64::new(wanted.map_or(UNBOUNDED.0, |wanted| wanted.max.0)),
            state: AtomicU8::new(StoreGrowthState::Idle as u8),
            failed: AtomicBool::new(false),
            again: AtomicU64::new(0),
        }
    }

    /// True if growth is enabled.
    pub(super) fn is_on(&self) -> bool {
        self.step.load(Ordering::Relaxed) > 0
    }

    /// The settings; `None` for a store that does not grow.
    pub(super) fn wanted(&self) -> Option<GrowthPolicy> {
        let (step, max) = (self.step.load(Ordering::Relaxed), self.max.load(Ordering::Relaxed));
        (step > 0).then_some(GrowthPolicy { step: Sectors(step), max: Sectors(max) })
    }

    /// Handles `set grow SIZE`, 0 to disable growth, and `set grow_max SIZE`.
    ///
    /// # Errors
    /// EINVAL for an invalid size.
    pub(super) fn set(&self, key: &str, value: &str) -> Result<(), TargetError> {
        let bytes = size::parse_size_with_unit(value).map_err(|why| {
            TargetError::new(format!("Invalid value for {key}: {value:?}")).because(why.to_string()).at(2)
        })?;
        match key {
            "grow" => self.step.store(bytes.div_ceil(SECTOR_SIZE), Ordering::Relaxed),
            _ => self.max.store(bytes / SECTOR_SIZE, Ordering::Relaxed),
        }
        Ok(())
    }

    /// The growth state. Acquire pairs with the release in [`StoreGrowth::end`]: a core that sees
    /// the end of an attempt also sees the size of the store.
    pub(super) fn step(&self) -> StoreGrowthState {
        StoreGrowthState::of(self.state.load(Ordering::Acquire))
    }

    /// The growth step of a store of `size`; 0 if growth is disabled.
    fn step_at(&self, size: Sectors) -> u64 {
        self.step.load(Ordering::Relaxed).min(size.max(SMALL).0)
    }

    /// True if `free` sectors, in chunks of `chunk`, are few for a store of `size`.
    pub(super) fn is_low(&self, free: Sectors, chunk: Sectors, size: Sectors) -> bool {
        let step = self.step_at(size);
        step > 0 && free.0 < (step / 2).max(2 * chunk.0)
    }

    /// Starts an attempt. Returns false if one is in progress. `full` marks it as the last one.
    pub(super) fn begin(&self, full: bool) -> bool {
        let next = if full { StoreGrowthState::Last } else { StoreGrowthState::Growing };
        let free = |word| (!StoreGrowthState::of(word).is_under_way()).then_some(next as u8);
        self.state.fetch_update(Ordering::AcqRel, Ordering::Acquire, free).is_ok()
    }

    /// The size to request for a store of `size`, at least `least`. `None` if the maximum does not
    /// allow it.
    pub(super) fn next(&self, size: Sectors, least: Sectors) -> Option<Sectors> {
        let wanted = self.wanted()?;
        let next = size.0.saturating_add(self.step_at(size)).max(least.0).min(wanted.max.0);
        (next >= least.0).then_some(Sectors(next))
    }

    /// True if the store may grow before it is full.
    pub(super) fn is_ready(&self) -> bool {
        self.step() == StoreGrowthState::Idle && !self.failed.load(Ordering::Relaxed)
    }

    /// Ends the attempt with the state `next`. Returns true if it is the first failure.
    pub(super) fn end(&self, next: StoreGrowthState, failed: bool) -> bool {
        let before = self.failed.swap(failed, Ordering::Relaxed);
        self.state.store(next as u8, Ordering::Release);
        failed && !before
    }

    /// Resets a failure whose cause may be gone.
    pub(super) fn reset(&self) {
        self.failed.store(false, Ordering::Relaxed);
        let idle =
            |word| (!StoreGrowthState::of(word).is_under_way()).then_some(StoreGrowthState::Idle as u8);
        let _ = self.state.fetch_update(Ordering::AcqRel, Ordering::Acquire, idle);
    }

    /// Time of the next attempt, if the last one failed.
    pub(super) fn retry_at(&self) -> Option<Nanos> {
        (self.step() == StoreGrowthState::StoreFull).then(|| Nanos(self.again.load(Ordering::Relaxed)))
    }

    /// True for the caller that must retry now.
    pub(super) fn retries(&self, now: Nanos) -> bool {
        let due = |at: u64| (at <= now.0).then_some(now.0 + RETRY.0);
        self.step() == StoreGrowthState::StoreFull
            && self.again.fetch_update(Ordering::Relaxed, Ordering::Relaxed, due).is_ok()
    }
}

/// The reason why a store has no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StoreFullReason {
    /// The store is growing: the wait queue is woken at the end.
    GrowthPending,
    /// No room is available.
    Permanent,
}

impl Snapshot {
    /// Allocates `want` consecutive chunks, or fewer. `size` is the size of the store as the caller
    /// knows it; it is updated if it is too small.
    ///
    /// # Errors
    /// The store is full.
    pub(super) fn take(&self, want: u64, size: &mut Sectors) -> Result<AllocatedChunkRun, StoreFullReason> {
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

    /// Handles a full store.
    #[cold]
    fn allocate_when_full(
        &self,
        want: u64,
        size: &mut Sectors,
    ) -> Result<AllocatedChunkRun, StoreFullReason> {
        if !self.growth.is_on() {
            return Err(StoreFullReason::Permanent);
        }
        match self.growth.step() {
            StoreGrowthState::Growing | StoreGrowthState::Last => Err(StoreFullReason::GrowthPending),
            StoreGrowthState::Idle => {
                self.grow(true);
                Err(StoreFullReason::GrowthPending)
            }
            // A failed attempt may have grown the store partly.
            StoreGrowthState::StoreFull | StoreGrowthState::AtMax => {
                *size = self.store_size();
                self.space.take(want, *size).ok_or(StoreFullReason::Permanent)
            }
        }
    }

    /// Reports a crossed watermark, and starts growth if little is left.
    fn after_allocation(&self, grant: &AllocatedChunkRun, size: &mut Sectors) {
        let [before, now] = [grant.new, grant.new + grant.len].map(|chunk| self.start_of(chunk));
        let full = match self.growth.wanted().filter(|_| self.growth.step() != StoreGrowthState::StoreFull) {
            // An unbounded store has no fill level.
            Some(wanted) if wanted.max == UNBOUNDED => Sectors::ZERO,
            Some(wanted) => wanted.max.max(*size),
            None => *size,
        };
        if self.settings.crosses(before, now, full.0) {
            let line = format!("the store is filled to {now} of {} sectors", full.0);
            tracing::warn!("{}: {line}", self.name());
            self.emit(EventKind::SnapshotFilling, &line);
            self.event();
        }
        if self.is_low(grant.end, *size) {
            *size = self.store_size();
            if self.growth.is_ready() && self.is_low(grant.end, *size) {
                self.grow(false);
            }
        }
    }

    /// True if a store of `size`, filled up to chunk `end`, must grow.
    #[inline]
    fn is_low(&self, end: u64, size: Sectors) -> bool {
        let free = size.0.saturating_sub(self.start_of(end));
        !self.space.keeps_holes()
            && self.growth.is_low(Sectors(free), Sectors(u64::from(self.chunk.sectors())), size)
    }

    /// Asks the device to grow, unless it is growing. `full` means that there is no room and this
    /// is the last attempt.
    #[cold]
    fn grow(&self, full: bool) {
        if !self.growth.begin(full) {
            return;
        }
        let size = self.store_size();
        if !self.is_low(self.space.end(), size) {
            // Another core has grown the store already.
            return self.growth_done(Ok(()));
        }
        match self.growth.next(size, self.space.next_size(size)) {
            Some(next) => {
                let weak_self = Weak::clone(&self.weak_self);
                let on_result = move |outcome| {
                    if let Some(weak_self) = weak_self.upgrade() {
                        weak_self.growth_done(outcome);
                    }
                };
                self.store.device.grow(next, Box::new(on_result));
            }
            None => {
                self.growth.end(StoreGrowthState::AtMax, false);
                self.wait_queue.wake_up();
            }
        }
    }

    /// Called when the device has grown or failed to.
    fn growth_done(&self, outcome: Result<(), DeviceControlError>) {
        let last = self.growth.step() == StoreGrowthState::Last;
        match outcome {
            Ok(()) => {
                self.growth.end(StoreGrowthState::Idle, false);
                // The new room may be used already.
                if self.is_low(self.space.end(), self.store_size()) {
                    self.grow(false);
                }
            }
            Err(why) => {
                if self
                    .growth
                    .end(if last { StoreGrowthState::StoreFull } else { StoreGrowthState::Idle }, true)
                {
                    let size = self.store_size().0;
                    let line = format!("the store stays at {size} sectors: {why}");
                    tracing::warn!("{}: {line}", self.name());
                    self.emit(EventKind::SnapshotFilling, &line);
                    self.event();
                }
            }
        }
        self.wait_queue.wake_up();
    }

    /// Retries failed growth at intervals while writes need room.
    pub(super) fn retry(&self, now: Nanos) {
        if self.growth.retries(now) {
            self.grow(true);
        }
    }

    /// Time at which waiting writes must retry without a wakeup.
    pub(super) fn retry_at(&self) -> Option<Nanos> {
        self.growth.retry_at().filter(|_| self.settings.on_full() == FullStoreWritePolicy::Pause)
    }

    /// The policy for a write that found no room.
    pub(super) fn on_full(&self, full: StoreFullReason) -> FullStoreWritePolicy {
        match full {
            StoreFullReason::GrowthPending => FullStoreWritePolicy::Pause,
            StoreFullReason::Permanent => self.settings.on_full(),
        }
    }

    /// Wakes other lanes after a write failed for lack of room. Its chunk is free again, and
    /// another core may wait for it.
    pub(super) fn notify_without_room(&self) {
        self.wait_queue.wake_up();
    }

    /// Called after a setting changed, or after the owner reported a larger store. Resets failed
    /// growth and wakes the lanes that wait for room.
    pub(super) fn look_again(&self) {
        self.growth.reset();
        if self.is_low(self.space.end(), self.store_size()) {
            self.grow(false);
        }
        self.wait_queue.wake_up();
    }
}
