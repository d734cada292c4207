//! `historical-service-time`: the path that would be through first, by how long it has taken so
//! far.
//!
//! Each path has an average of the time between its completions, in which what is older counts for
//! less. The path with the least (bios in flight + 1) times that average is chosen; one whose
//! average is no more than the *threshold* times another's is as good as it, and then the bios in
//! flight decide. A path that has not been heard of for long is *stale*: an idle one is tried
//! again, and one that is chosen gets no more than an equal share.
//!
//! All is in whole numbers, with 10 bits behind the point, as in the kernel (module 0.1.1), and so
//! on one core is the sequence of choices. A core reads averages and loads once a batch, and writes
//! what has come back once a poll. Of two cores that write at the same time one may be lost: an
//! average is advice. A bio's own time begins when its path was chosen (`Bio::sent`).

use super::load::Loads;
use super::{ArgFault, Bios, Choose, Selector, SelectorLane, SelectorType};
use crate::multipath::parse::number;
use crossbeam_utils::CachePadded;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use udm_core::{Bio, CoreId, Cx, Nanos, Sectors};

pub(super) const TYPE: SelectorType = SelectorType { name: "historical-service-time", new };

/// Bits behind the point.
const POINT: u32 = 10;
/// 1.
const ONE: u64 = 1 << POINT;
/// Weights by the service time, in steps of 16.8 ms.
const WEIGHTS: usize = 64;
const STEP: u32 = 24;
/// The longest service time, with its bits behind the point.
const TIME_MAX: u64 = (1 << 54) - 1;
/// From so many bios in flight on averages count without their bits behind the point.
const MANY: u64 = 1024;
/// What counts of an average when another bio has come back, without arguments.
const BASE: u32 = 972;

pub(in crate::multipath) struct HistoricalServiceTime {
    base: u32,
    threshold: u32,
    weights: [u64; WEIGHTS],
    paths: Vec<CachePadded<History>>,
    loads: Loads,
}

/// What is known of a path.
struct History {
    /// The average service time in ns, with [`POINT`] bits behind the point.
    average: AtomicU64,
    /// When it is stale, in ns.
    stale_after: AtomicU64,
    /// When a bio of its came back last, in ns.
    last_finish: AtomicU64,
}

/// From the arguments `[BASE [THRESHOLD]]`.
fn new(args: &[String]) -> Option<Box<dyn Selector>> {
    if args.len() > 2 {
        return None;
    }
    let base = args.first().map_or(Some(BASE), |word| number(word)).filter(|base| u64::from(*base) < ONE)?;
    let threshold = args.get(1).map_or(Some(0), |word| number(word))?;
    let mut weights = [0; WEIGHTS];
    for (n, weight) in weights[..WEIGHTS - 1].iter_mut().enumerate() {
        *weight = power(base.into(), n as u32 + 1);
    }
    let (paths, loads) = (Vec::new(), Loads::default());
    Some(Box::new(HistoricalServiceTime { base, threshold, weights, paths, loads }))
}

/// `base` to the `n`th, by squaring; each product is rounded (kernel `fixed_power`).
fn power(mut base: u64, mut n: u32) -> u64 {
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

impl Selector for HistoricalServiceTime {
    fn name(&self) -> &'static str {
        TYPE.name
    }

    fn add_path(&mut self, args: &[String], _cores: usize) -> Result<(), ArgFault> {
        // The kernel reads the repeat count, and forgets it.
        match args {
            [] => {}
            [word] if number(word).is_some() => {}
            [_] => return Err(ArgFault { text: "invalid repeat count", arg: 0 }),
            _ => return Err(ArgFault { text: "incorrect number of arguments", arg: 1 }),
        }
        let (stale_after, last_finish) = (AtomicU64::new(0), AtomicU64::new(0));
        self.paths.push(History { average: AtomicU64::new(ONE), stale_after, last_finish }.into());
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
        let History { average, stale_after, .. } = &*self.paths[path];
        format!("{} {} {}", average.load(Relaxed), self.loads.get(path), stale_after.load(Relaxed))
    }

    fn lane(self: Arc<Self>, _core: CoreId) -> SelectorLane {
        let paths = self.paths.len();
        SelectorLane::Historical(HistoricalLane {
            order: (0..paths).collect(),
            slots: vec![Slot::default(); paths],
            selector: self,
            now: Nanos(0),
        })
    }
}

/// A path as its core sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Slot {
    /// As of the begin of the batch.
    average: u64,
    stale_after: u64,
    /// Bios in flight, this batch's choices included.
    load: u64,
    /// How this lane's part of those has changed since it was last published, modulo 2^64.
    fresh: u64,
    /// This lane's part as it was published.
    published: u64,
}

/// The core's half.
pub(in crate::multipath) struct HistoricalLane {
    selector: Arc<HistoricalServiceTime>,
    /// The usable paths, the one that was chosen last behind all others.
    order: Vec<usize>,
    slots: Vec<Slot>,
    /// The time of the batch.
    now: Nanos,
}

/// Below 0 when `c` is better than `b`, above when it is not (kernel `hst_compare`).
fn compare(c: &Slot, b: &Slot, now: u64, threshold: u32) -> i128 {
    let by_load = i128::from(c.load) - i128::from(b.load);
    let (high, low) = (c.average.max(b.average), c.average.min(b.average));
    if u128::from(high) <= u128::from(low) * u128::from(threshold) {
        return by_load;
    }
    let (c_idle, b_idle) = (c.load == 0, b.load == 0);
    let (c_stale, b_stale) = (c.stale_after < now, b.stale_after < now);
    if c_idle && c_stale || b_idle && b_stale || c_idle && b_idle {
        let stale = |slot: &Slot, other_idle| if other_idle { i128::from(slot.stale_after) } else { 0 };
        return stale(c, b_idle) - stale(b, c_idle);
    }
    let b_better = if c.load == b.load {
        c.average > b.average
    } else {
        let many = c.load >= MANY || b.load >= MANY;
        let cost = |slot: &Slot| {
            let average = if many { slot.average >> POINT } else { slot.average };
            u128::from(average) * (u128::from(slot.load) + 1)
        };
        cost(c) > cost(b)
    };
    match b_better {
        true if b_stale => by_load,
        false if c_stale => by_load,
        true => 1,
        false => -1,
    }
}

impl HistoricalServiceTime {
    /// The average behind a bio that took `time` ns.
    fn average(&self, before: u64, time: u64) -> u64 {
        let weight = self.weights[((time >> STEP) as usize).min(WEIGHTS - 1)];
        let time = time.checked_mul(ONE).map_or(TIME_MAX, |time| time.min(TIME_MAX));
        let sum = u128::from(before) * u128::from(weight) + u128::from(time) * u128::from(ONE - weight);
        ((sum + u128::from(ONE / 2)) >> POINT) as u64
    }

    /// `bios` came back from `path`, of which the lane has `usable`.
    fn ended(&self, path: usize, bios: &[Box<Bio>], usable: usize, now: u64) {
        let history = &*self.paths[path];
        let (mut average, mut last) = (history.average.load(Relaxed), history.last_finish.load(Relaxed));
        for bio in bios {
            // Bios that overlap are served one after the other.
            let start = bio.sent.0.max(last);
            average = self.average(average, now.saturating_sub(start));
            last = now;
        }
        history.average.store(average, Relaxed);
        history.last_finish.store(last, Relaxed);
        history.stale_after.store(now + usable as u64 * (average >> POINT), Relaxed);
    }
}

impl HistoricalLane {
    fn choose_one(&mut self, bio: &mut Bio) -> usize {
        let mut best = 0;
        for i in 1..self.order.len() {
            let (c, b) = (&self.slots[self.order[i]], &self.slots[self.order[best]]);
            if compare(c, b, self.now.0, self.selector.threshold) < 0 {
                best = i;
            }
        }
        let path = self.order.remove(best);
        self.order.push(path);
        let slot = &mut self.slots[path];
        (slot.load, slot.fresh) = (slot.load + 1, slot.fresh.wrapping_add(1));
        bio.sent = self.now;
        path
    }

    fn publish(&mut self, path: usize) {
        let slot = &mut self.slots[path];
        self.selector.loads.add(path, slot.fresh);
        slot.published = slot.published.wrapping_add(std::mem::take(&mut slot.fresh));
    }
}

impl Choose for HistoricalLane {
    fn fail(&mut self, path: usize) {
        self.order.retain(|other| *other != path);
    }

    fn reinstate(&mut self, path: usize) {
        self.order.push(path);
    }

    fn look(&mut self, cx: &Cx<'_>) {
        self.now = cx.now();
        for (path, slot) in self.slots.iter_mut().enumerate() {
            let History { average, stale_after, .. } = &*self.selector.paths[path];
            (slot.average, slot.stale_after) = (average.load(Relaxed), stale_after.load(Relaxed));
            slot.load = self.selector.loads.get(path).wrapping_add(slot.fresh);
        }
    }

    fn choose(&mut self, bio: &mut Bio) -> usize {
        self.choose_one(bio)
    }

    fn choose_all(&mut self, bios: &mut impl Bios) {
        let _ = bios.each(|bio| Some(self.choose_one(bio)));
    }

    fn polled(&mut self, path: usize, back: &[Box<Bio>], _sectors: Sectors, cx: &Cx<'_>) {
        if !back.is_empty() {
            self.selector.ended(path, back, self.order.len(), cx.now().0);
            self.slots[path].fresh = self.slots[path].fresh.wrapping_sub(back.len() as u64);
        }
        if self.slots[path].fresh != 0 {
            self.publish(path);
        }
    }
}

impl Drop for HistoricalLane {
    /// What a lane that goes away had under way is no load any more.
    fn drop(&mut self) {
        for path in 0..self.slots.len() {
            self.slots[path].fresh = self.slots[path].published.wrapping_neg();
            self.publish(path);
        }
    }
}

#[cfg(test)]
#[path = "historical_tests.rs"]
mod tests;
