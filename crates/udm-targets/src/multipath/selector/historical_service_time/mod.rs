//! `historical-service-time`: the path that should complete first, by its past service times.
//!
//! Each path has an average of the time between its completions; older times weigh less. The path
//! with the least (bios in flight + 1) × average is chosen. If an average is within *threshold*
//! times another, both count as equal and the bios in flight decide. If a path has had no
//! completion for long, it is *stale*: an idle stale path is tried again, and a chosen one gets at
//! most an equal share.
//!
//! All numbers are integers with 10 fractional bits, as in the kernel (module 0.1.1), and on one
//! core the sequence of choices is the kernel's. The time of a bio begins when its path is chosen
//! (`Bio::sent`), so this selector reads the clock in each turn.
//!
//! Each core has its own averages. A core that is alone writes them to the shared averages in each
//! poll. If several cores work, each writes once in [`SHARE_EVERY`] and continues from the value
//! that another core wrote; a shared write in each poll would cost more than all the rest. Of two
//! simultaneous writes one may be lost, because an average is advice. The bios in flight are exact
//! ([`SharedPathLoads`]).
//!
//! `lane`: the choices of one core, bio by bio as in the kernel's list. `batch_rounds`: choices for
//! a batch, if the kernel's comparisons form an order. That is not so with a threshold, if only
//! some paths are stale, or with an idle path after a busy one. `two_paths`: the same for two
//! paths, one comparison per bio without a branch. `equal_paths`: paths with equal averages take
//! turns. All three give the choices of `lane`.

mod batch_rounds;
mod equal_paths;
mod lane;
mod two_paths;

use super::load::SharedPathLoads;
use super::{CreatePathSelectorResult, PathArgError, SelectorLane, SelectorType, SharedPathSelector};
use crate::multipath::parse::parse_u32;
use crossbeam_utils::CachePadded;
pub(in crate::multipath) use lane::HistoricalServiceTimeLane;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use udm_core::{CoreId, Nanos};

pub(super) const TYPE: SelectorType =
    SelectorType { name: "historical-service-time", new: create_historical_service_time };

/// Number of fractional bits.
const POINT: u32 = 10;
/// The value 1.
const ONE: u64 = 1 << POINT;
/// Number of weights, indexed by service time in steps of 16.8 ms.
const WEIGHTS: usize = 64;
const STEP: u32 = 24;
/// The maximum service time, with fractional bits.
const TIME_MAX: u64 = (1 << 54) - 1;
/// Averages below this value fit into signed words when multiplied by twice [`MANY`].
const SHORT: u64 = 1 << 50;
/// From this many bios in flight on, averages are used without their fractional bits.
const MANY: u64 = 1024;
/// Default weight of the old average per completion, with [`POINT`] fractional bits.
const BASE: u32 = 972;

/// If several cores work, each publishes its histories at most once per interval. So the cost per
/// request is less than 0.1 ns, and paths with latencies of this order are still tracked.
const SHARE_EVERY: Nanos = Nanos(50_000);
/// A core that has seen no publication of another for this time counts as alone.
const ALONE_AFTER: Nanos = Nanos(4 * SHARE_EVERY.0);

pub(in crate::multipath) struct HistoricalServiceTime {
    base: u32,
    threshold: u32,
    weights: [u64; WEIGHTS],
    /// The published histories of the paths.
    paths: Vec<SharedPathHistory>,
    /// Changes with each publication; all cores read it once per batch.
    last_publication: CachePadded<AtomicU64>,
    /// Number of lanes created.
    lanes: AtomicU32,
    loads: SharedPathLoads,
}

/// The history of a path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct PathHistory {
    /// The average service time in ns, with [`POINT`] fractional bits.
    average: u64,
    /// Time from which the path is stale, in ns.
    stale_after: u64,
    /// Time of the last completion, in ns.
    last_finish: u64,
}

/// The history of a path shared by all cores. Each word is independent: a mix of words from two
/// cores is still valid.
struct SharedPathHistory {
    average: AtomicU64,
    stale_after: AtomicU64,
    last_finish: AtomicU64,
}

impl SharedPathHistory {
    #[inline(always)]
    fn get(&self) -> PathHistory {
        PathHistory {
            average: self.average.load(Relaxed),
            stale_after: self.stale_after.load(Relaxed),
            last_finish: self.last_finish.load(Relaxed),
        }
    }

    #[inline(always)]
    fn set(&self, history: &PathHistory) {
        self.average.store(history.average, Relaxed);
        self.stale_after.store(history.stale_after, Relaxed);
        self.last_finish.store(history.last_finish, Relaxed);
    }
}

/// The constructor, with the arguments `[BASE [THRESHOLD]]`.
fn create_historical_service_time(args: &[String]) -> CreatePathSelectorResult {
    if args.len() > 2 {
        return Err(2);
    }
    let base = args.first().map_or(Some(BASE), |word| parse_u32(word)).filter(|base| u64::from(*base) < ONE);
    let threshold = args.get(1).map_or(Some(0), |word| parse_u32(word));
    Ok(Box::new(HistoricalServiceTime::new(base.ok_or(0_usize)?, threshold.ok_or(1_usize)?)))
}

/// `base` to the power `n`, by squaring; each product is rounded (kernel `fixed_power`).
fn fixed_power(mut base: u64, mut n: u32) -> u64 {
    let product = |a: u64, b: u64| (a * b + ONE / 2) >> POINT;
    let mut result = ONE;
    loop {
        if n & 1 == 1 {
            result = product(result, base);
        }
        n >>= 1;
        if n == 0 {
            return result;
        }
        base = product(base, base);
    }
}

impl SharedPathSelector for HistoricalServiceTime {
    fn name(&self) -> &'static str {
        TYPE.name
    }

    fn add_path(&mut self, args: &[String], _cores: usize) -> Result<(), PathArgError> {
        // The kernel parses the repeat count but does not use it.
        match args {
            [] => {}
            [word] if parse_u32(word).is_some() => {}
            [_] => return Err(PathArgError { text: "invalid repeat count", arg: 0 }),
            _ => return Err(PathArgError { text: "incorrect number of arguments", arg: 1 }),
        }
        let (stale_after, last_finish) = (AtomicU64::new(0), AtomicU64::new(0));
        self.paths.push(SharedPathHistory { average: AtomicU64::new(ONE), stale_after, last_finish });
        self.loads.add_path();
        Ok(())
    }

    fn args(&self) -> String {
        format!("2 {} {}", self.base, self.threshold)
    }

    fn path_arg_count(&self) -> usize {
        1
    }

    fn path_args(&self, _path: usize) -> String {
        "0".into()
    }

    fn path_info_count(&self) -> usize {
        3
    }

    fn path_info(&self, path: usize) -> String {
        let PathHistory { average, stale_after, .. } = self.paths[path].get();
        format!("{average} {} {stale_after}", self.loads.get(path))
    }

    fn lane(self: Arc<Self>, _core: CoreId) -> SelectorLane {
        SelectorLane::Historical(HistoricalServiceTimeLane::new(self))
    }
}

impl HistoricalServiceTime {
    /// A selector without paths.
    fn new(base: u32, threshold: u32) -> HistoricalServiceTime {
        let mut weights = [0; WEIGHTS];
        for (n, weight) in weights[..WEIGHTS - 1].iter_mut().enumerate() {
            *weight = fixed_power(base.into(), n as u32 + 1);
        }
        HistoricalServiceTime {
            base,
            threshold,
            weights,
            paths: Vec::new(),
            last_publication: CachePadded::default(),
            lanes: AtomicU32::new(0),
            loads: SharedPathLoads::default(),
        }
    }

    /// The average after a bio that took `time` ns.
    #[inline(always)]
    fn average(&self, before: u64, time: u64) -> u64 {
        let weight = self.weights[((time >> STEP) as usize).min(WEIGHTS - 1)];
        let time = if time > TIME_MAX >> POINT { TIME_MAX } else { time << POINT };
        // A mean of two values up to TIME_MAX: it does not overflow.
        (before * weight + time * (ONE - weight) + ONE / 2) >> POINT
    }

    /// The history of a path after `bios` of its bios completed, at least one. The first was sent
    /// at `sent`. The lane has `usable` paths.
    #[inline(always)]
    fn ended(
        &self,
        before: &PathHistory,
        sent: Nanos,
        bios: usize,
        usable: usize,
        now: Nanos,
    ) -> PathHistory {
        // Overlapping bios count as served one after the other.
        let start = sent.max(Nanos(before.last_finish));
        let mut average = self.average(before.average, now.since(start).0);
        // The other bios count with a time of 0, so only the weight remains of the formula.
        let weight = self.weights[0];
        for _ in 1..bios {
            average = (average * weight + ONE / 2) >> POINT;
        }
        PathHistory { average, last_finish: now.0, stale_after: now.0 + usable as u64 * (average >> POINT) }
    }
}

#[cfg(test)]
mod tests;
