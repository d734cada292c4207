//! Limits of the requests and bytes per second of a device, or of several devices together.
//!
//! QEMU calls it throttling, the kernel blk-throttle, SPDK QoS. A [`Throttle`] has one meter for
//! each limit that is set ([`meter`]). The devices of a group share one `Throttle`. Each lane of a
//! device has a [`queue`] for the bios that must wait.
//!
//! **No lock, and no timer that refills.** A meter is one atomic number: the time up to which its
//! rate is used. A core that has bios *reserves* a place after that time for some of them, and
//! sends them when its clock has reached the end of the place. So in any time span no more passes
//! than the rate gives in that time, and one burst. A meter is touched once per batch as long as
//! nothing must wait.
//!
//! **Fair between cores and devices.** A lane reserves for at most [`QUANTUM`] of the rate, and
//! reserves again when that time has come. A bio that takes longer passes after several turns, as
//! in deficit round robin. So lanes that wait get equal parts of the rate, whatever the depth of
//! their queues and the size of their bios.
//!
//! **What counts**, as in blk-throttle: each bio is one request; all but reads count as writes; a
//! discard counts as one sector, a flush as no bytes. Bios are counted before a target splits them.
//! Reads do not wait for writes that must wait for a limit of writes, and the reverse. Bios with
//! NOWAIT wait too: nobody is blocked by that.
//!
//! A device without limits has no `ThrottleQueue`, and its data path is as short as before.

mod meter;
mod queue;

pub(crate) use queue::ThrottleQueue;

use meter::Meter;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use udm_core::{Bio, Nanos, Op};
use udm_wire::throttle::{ThrottleKey, ThrottleLimits};

/// The most that a lane reserves in advance, as time of the rate.
pub const QUANTUM: Nanos = Nanos::from_millis(1);

/// The least that a lane reserves of a bio, in bytes, so that a low rate does not wake it for each
/// byte.
const PART_MIN: u64 = 4096;

/// The most sectors that a bio counts as: the kernel's bios have a length of 32 bits, in bytes.
const SECTORS_MAX: u64 = 1 << 23;

/// Limits that one device or several share.
#[derive(Debug)]
pub struct Throttle {
    limits: ThrottleLimits,
    meters: Vec<(ThrottleKey, Meter)>,
    /// The same for the limits that followed each other of one device or group.
    lineage: u64,
}

/// Requests and bytes of one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ThrottledAmount {
    requests: u64,
    bytes: u64,
}

impl ThrottledAmount {
    /// What `bio` counts as.
    fn of(bio: &Bio) -> ThrottledAmount {
        let mut amount = ThrottledAmount::default();
        amount.add(bio);
        amount
    }

    /// Adds what `bio` counts as.
    fn add(&mut self, bio: &Bio) {
        self.requests += 1;
        self.bytes += match bio.op {
            // The kernel's blk_throttle counts a discard as one sector (`throtl_bio_data_size`).
            Op::Discard => 512,
            Op::Flush => 0,
            // A length beyond the device is refused later. It must not use the rate up for years.
            Op::Read | Op::Write | Op::WriteZeroes => bio.sectors.0.min(SECTORS_MAX) * 512,
        };
    }

    fn plus(self, other: ThrottledAmount) -> ThrottledAmount {
        ThrottledAmount { requests: self.requests + other.requests, bytes: self.bytes + other.bytes }
    }

    fn minus(self, other: ThrottledAmount) -> ThrottledAmount {
        ThrottledAmount { requests: self.requests - other.requests, bytes: self.bytes - other.bytes }
    }
}

/// The direction of a bio, as limits count it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Read,
    Write,
}

impl Direction {
    const ALL: [Direction; 2] = [Direction::Read, Direction::Write];

    fn of(bio: &Bio) -> Direction {
        if bio.op == Op::Read { Direction::Read } else { Direction::Write }
    }
}

impl Throttle {
    /// Limits with full bursts.
    #[must_use]
    pub fn new(limits: ThrottleLimits) -> Arc<Throttle> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Throttle::in_lineage(limits, NEXT.fetch_add(1, Ordering::Relaxed))
    }

    /// Other limits for the same device or group. They give no new burst.
    #[must_use]
    pub fn followed_by(&self, limits: ThrottleLimits) -> Arc<Throttle> {
        Throttle::in_lineage(limits, self.lineage)
    }

    fn in_lineage(limits: ThrottleLimits, lineage: u64) -> Arc<Throttle> {
        let meters = limits.rates().map(|(key, rate)| (key, Meter::new(rate))).collect();
        Arc::new(Throttle { limits, meters, lineage })
    }

    /// Counts what `old` has used, if these limits follow it. Each lane of the devices calls this
    /// when it changes its limits.
    fn continue_from(&self, old: &Throttle, now: Nanos) {
        if self.lineage != old.lineage {
            return;
        }
        for (key, meter) in &self.meters {
            if let Some((_, old)) = old.meters.iter().find(|(old, _)| old == key) {
                meter.continue_from(old, now);
            }
        }
    }

    /// The limits.
    #[must_use]
    pub fn limits(&self) -> &ThrottleLimits {
        &self.limits
    }

    /// The meters that count `direction`.
    fn meters(&self, direction: Direction) -> impl Iterator<Item = (&Meter, bool)> + Clone {
        self.meters.iter().filter_map(move |(key, meter)| {
            let counts = match direction {
                Direction::Read => key.counts_reads(),
                Direction::Write => key.counts_writes(),
            };
            counts.then_some((meter, key.counts_bytes()))
        })
    }

    /// True if `amount` of `direction` takes at most [`QUANTUM`] of each limit.
    fn is_within_quantum(&self, direction: Direction, amount: ThrottledAmount) -> bool {
        self.meters(direction).all(|(meter, bytes)| meter.cost(units(amount, bytes)) <= QUANTUM.0)
    }

    /// The part of `amount` that takes at most [`QUANTUM`] of each limit of bytes, but not less
    /// than [`PART_MIN`]. It has all the requests, because a request cannot be divided.
    fn part_within_quantum(&self, direction: Direction, amount: ThrottledAmount) -> ThrottledAmount {
        let of_bytes = self.meters(direction).filter(|(_, counts_bytes)| *counts_bytes);
        let most = of_bytes.map(|(meter, _)| meter.units_in(QUANTUM)).min().unwrap_or(u64::MAX);
        ThrottledAmount { bytes: amount.bytes.min(most.max(PART_MIN)), ..amount }
    }

    /// Reserves for `amount` if it may pass now.
    fn try_take_one(&self, direction: Direction, amount: ThrottledAmount, now: Nanos) -> bool {
        let mut amounts = [ThrottledAmount::default(); 2];
        amounts[direction as usize] = amount;
        self.try_take(&amounts, now)
    }

    /// Reserves for `amount`, and returns the time at which it may pass.
    fn reserve(&self, direction: Direction, amount: ThrottledAmount, now: Nanos) -> Nanos {
        let places = self.meters(direction).map(|(meter, bytes)| meter.reserve(units(amount, bytes), now));
        places.max().unwrap_or(now)
    }

    /// Reserves for both directions, in the order of [`Direction::ALL`], if all may pass now.
    /// Otherwise takes nothing, so that nobody else has to wait for what does not pass.
    fn try_take(&self, amounts: &[ThrottledAmount; 2], now: Nanos) -> bool {
        let wanted = Direction::ALL
            .into_iter()
            .filter(|&direction| amounts[direction as usize] != ThrottledAmount::default());
        let mut meters = wanted.flat_map(|direction| {
            let amount = amounts[direction as usize];
            self.meters(direction).map(move |(meter, bytes)| (meter, units(amount, bytes)))
        });
        let taken = meters.clone();
        let Some(refused) = meters.position(|(meter, units)| !meter.try_take(units, now)) else {
            return true;
        };
        taken.take(refused).for_each(|(meter, units)| meter.cancel(units));
        false
    }

    /// Takes back a reservation whose bios do not pass.
    fn cancel(&self, direction: Direction, amount: ThrottledAmount) {
        self.meters(direction).for_each(|(meter, bytes)| meter.cancel(units(amount, bytes)));
    }
}

fn units(amount: ThrottledAmount, counts_bytes: bool) -> u64 {
    if counts_bytes { amount.bytes } else { amount.requests }
}

/// The limits of a device now, and what waits because of them. The lanes of the device and its
/// control half share it.
#[derive(Debug, Default)]
pub(crate) struct DeviceThrottle {
    now: Mutex<Option<Arc<Throttle>>>,
    /// True while the limits do not hold.
    is_lifted: AtomicBool,
    /// Bios that wait.
    waiting: AtomicU64,
    /// Bios that have waited or wait.
    delayed: AtomicU64,
}

/// Bios that limits delay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ThrottleCounters {
    /// Bios that wait now.
    pub waiting: u64,
    /// Bios that had to wait since the device was created, including those that wait now.
    pub delayed: u64,
}

impl DeviceThrottle {
    /// The limits; `None` for none.
    pub fn get(&self) -> Option<Arc<Throttle>> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The limits for a lane: none while they are lifted.
    pub fn for_lane(&self) -> Option<Arc<Throttle>> {
        self.get().filter(|_| !self.is_lifted.load(Ordering::Acquire))
    }

    /// Lifts the limits, or puts them back. Lanes see this in their next poll after a kick.
    pub fn lift(&self, is_lifted: bool) {
        self.is_lifted.store(is_lifted, Ordering::Release);
    }

    /// Sets the limits. Lanes see them in their next poll after a kick.
    pub fn set(&self, throttle: Option<Arc<Throttle>>) {
        let before =
            std::mem::replace(&mut *self.now.lock().unwrap_or_else(PoisonError::into_inner), throttle);
        drop(before);
    }

    /// The counters.
    pub fn counters(&self) -> ThrottleCounters {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ThrottleCounters { waiting: read(&self.waiting), delayed: read(&self.delayed) }
    }

    fn begin_waiting(&self, bios: usize) {
        self.waiting.fetch_add(bios as u64, Ordering::Relaxed);
        self.delayed.fetch_add(bios as u64, Ordering::Relaxed);
    }

    fn end_waiting(&self, bios: usize) {
        self.waiting.fetch_sub(bios as u64, Ordering::Relaxed);
    }
}
