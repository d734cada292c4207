//! What `queue-length` and `service-time` have in common: the path with the least load, ties to the one not chosen for longest.
//!
//! The load of a path is one shared atomic on its own cache line: the sum of what the cores have under way. A lane reads each once a
//! batch, adds what it chooses to its own copy, and publishes one sum a path and batch; a finished batch takes off one sum a path. So a core
//! sees the others' load as of their last batch. Relaxed: a load is advice, it publishes nothing. It is never
//! below zero, because each core adds before it takes off.
//!
//! The kernel keeps a list, scans it from the front and moves the winner to the back. Since both comparisons order paths by
//! a key, the same winner is found by key and time of last choice, and nothing has to be moved.

use crate::bugs::{self, Bug};
use super::SelectorLane;
use crossbeam_utils::CachePadded;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use udm_core::{Batch, Bio, Nanos, Sectors};

/// What a selector by load compares.
pub(super) trait Rule: Send + Sync + 'static {
    /// What `bio` adds to the load of the path that gets it.
    fn weight(bio: &Bio) -> u64;

    /// The sum of [`Rule::weight`] over `bios` bios of `sectors` in all.
    fn total(bios: usize, sectors: Sectors) -> u64;

    /// True when a bio of weight `n` should rather go to `a` than to `b`. An order: `a` over `b` and `b` over `c` means `a` over `c`.
    fn better(a: &Slot, b: &Slot, n: u64) -> bool;
}

/// A usable path, as its core sees it while it chooses.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Slot {
    /// Load, this batch's choices included.
    pub(super) load: u64,
    /// Load when the batch began.
    before: u64,
    /// When it was last chosen or reinstated, on the lane's count. No two are equal.
    pub(super) used: u64,
    /// Relative throughput, 0..=100 (service-time).
    pub(super) throughput: u32,
    path: u32,
}

/// The shared load of each path of a group.
#[derive(Debug, Default)]
pub(super) struct Loads(Vec<CachePadded<AtomicU64>>);

impl Loads {
    pub(super) fn add_path(&mut self) {
        self.0.push(CachePadded::default());
    }

    pub(super) fn get(&self, path: usize) -> u64 {
        self.0[path].load(Ordering::Relaxed)
    }
}

/// A selector with loads.
pub(super) trait Loaded: Send + Sync + 'static {
    type Rule: Rule;
    fn loads(&self) -> &Loads;
    fn throughput(&self, path: usize) -> u32;
}

/// The core's half.
pub(super) struct LoadLane<S: Loaded> {
    selector: Arc<S>,
    slots: Vec<Slot>,
    clock: u64,
}

impl<S: Loaded> LoadLane<S> {
    pub(super) fn new(selector: Arc<S>) -> LoadLane<S> {
        let paths = selector.loads().0.len();
        let mut lane = LoadLane { selector, slots: Vec::with_capacity(paths), clock: 0 };
        (0..paths).for_each(|p| lane.reinstate(p));
        lane
    }
}

impl<S: Loaded> SelectorLane for LoadLane<S> {
    fn fail(&mut self, path: usize) {
        self.slots.retain(|s| s.path as usize != path);
    }

    fn reinstate(&mut self, path: usize) {
        self.clock += 1;
        let throughput = self.selector.throughput(path);
        self.slots.push(Slot { used: self.clock, throughput, path: path as u32, ..Slot::default() });
    }

    fn select(&mut self, batch: &mut Batch, outs: &mut [Batch], chosen: &mut Vec<u32>, _now: Nanos) {
        let loads = &self.selector.loads().0;
        for slot in &mut self.slots {
            slot.before = loads[slot.path as usize].load(Ordering::Relaxed);
            slot.load = slot.before;
        }
        let (slots, mut clock) = (&mut self.slots[..], self.clock);
        for bio in batch.drain(..) {
            let n = S::Rule::weight(&bio);
            let mut best = 0;
            for i in 1..slots.len() {
                // No branch: paths take turns, and a branch would be guessed wrong every other time.
                best = if S::Rule::better(&slots[i], &slots[best], n) { i } else { best };
            }
            let slot = &mut slots[best];
            slot.load += n;
            clock += 1;
            slot.used = clock;
            outs[slot.path as usize].push(bio);
        }
        self.clock = clock;
        for slot in &self.slots {
            if outs[slot.path as usize].is_empty() {
                continue;
            }
            chosen.push(slot.path);
            loads[slot.path as usize].fetch_add(slot.load - slot.before, Ordering::Relaxed);
        }
    }

    fn end_io(&mut self, path: usize, done: &[Box<Bio>], sectors: Sectors, _now: Nanos) {
        if bugs::on(Bug::LoadKeptOnError) && done.iter().any(|bio| !bio.status.is_ok()) {
            return;
        }
        let total = S::Rule::total(done.len(), sectors);
        self.selector.loads().0[path].fetch_sub(total, Ordering::Relaxed);
    }
}

impl Slot {
    /// Orders by load, then by last use; one number, so that comparing it needs no branch.
    pub(super) fn load_then_age(&self) -> u128 {
        u128::from(self.load) << 64 | u128::from(self.used)
    }
}

#[cfg(test)]
impl Slot {
    /// A slot for tests of comparisons.
    pub(super) fn of(load: u64, throughput: u32, used: u64) -> Slot {
        Slot { load, throughput, used, ..Slot::default() }
    }
}
