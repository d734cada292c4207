//! What `queue-length` and `service-time` have in common: the path with the least load, ties to the one not chosen for longest.
//!
//! The load of a path is one shared atomic on its own cache line: the sum of what the cores have under way. A lane knows its own part to the bio; it
//! reads the others' once a batch, and publishes once a poll, with one add a path, how its part has changed since the last time. What went down and
//! came back in between is not published at all. So a core sees the others' load as of their last poll. Relaxed: a load is
//! advice, it publishes nothing else. It is never below zero, because no lane's part ever is.
//!
//! The kernel keeps a list, scans it from the front and moves the winner to the back. Since both comparisons order paths by
//! a key, the same winner is found by key and time of last choice, and nothing has to be moved.

use super::SelectorLane;
use crossbeam_utils::CachePadded;
#[cfg(feature = "loom")]
use loom::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
#[cfg(not(feature = "loom"))]
use std::sync::atomic::{AtomicU64, Ordering};
use udm_core::{Batch, Bio, Nanos, Sectors};
use udm_dm::bugs::{self, Bug};

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
    /// By path: what this lane has under way.
    parts: Vec<Part>,
    /// A part differs from what is published.
    changed: bool,
}

/// A lane's part of a path's load.
#[derive(Clone, Copy, Debug, Default)]
struct Part {
    now: u64,
    published: u64,
}

impl<S: Loaded> LoadLane<S> {
    pub(super) fn new(selector: Arc<S>) -> LoadLane<S> {
        let paths = selector.loads().0.len();
        let parts = vec![Part::default(); paths];
        let mut lane =
            LoadLane { selector, slots: Vec::with_capacity(paths), clock: 0, parts, changed: false };
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
            let part = self.parts[slot.path as usize];
            slot.before = loads[slot.path as usize].load(Ordering::Relaxed) - part.published + part.now;
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
            self.parts[slot.path as usize].now += slot.load - slot.before;
        }
        self.changed = true;
    }

    fn end_io(&mut self, path: usize, done: &[Box<Bio>], sectors: Sectors, _now: Nanos) {
        if bugs::on(Bug::LoadKeptOnError) && done.iter().any(|bio| !bio.status.is_ok()) {
            return;
        }
        self.parts[path].now -= S::Rule::total(done.len(), sectors);
        self.changed = true;
    }

    fn publish(&mut self) {
        if !std::mem::take(&mut self.changed) {
            return;
        }
        for (part, load) in self.parts.iter_mut().zip(&self.selector.loads().0) {
            if part.now != part.published {
                // Wraps where it went down.
                load.fetch_add(part.now.wrapping_sub(part.published), Ordering::Relaxed);
                part.published = part.now;
            }
        }
    }
}

impl<S: Loaded> Drop for LoadLane<S> {
    /// What a lane that goes away had under way is no load any more.
    fn drop(&mut self) {
        self.parts.iter_mut().for_each(|part| part.now = 0);
        self.changed = true;
        self.publish();
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

#[cfg(all(test, feature = "loom"))]
mod loom_tests {
    use super::*;
    use loom::thread;

    #[derive(Default)]
    struct Count(Loads);

    impl Rule for Count {
        fn weight(_: &Bio) -> u64 {
            1
        }

        fn total(bios: usize, _: Sectors) -> u64 {
            bios as u64
        }

        fn better(a: &Slot, b: &Slot, _: u64) -> bool {
            a.load_then_age() < b.load_then_age()
        }
    }

    impl Loaded for Count {
        type Rule = Count;

        fn loads(&self) -> &Loads {
            &self.0
        }

        fn throughput(&self, _: usize) -> u32 {
            1
        }
    }

    /// Two bios down and one back, a poll later one more down. Its part is 2 when the lane goes away.
    fn core(selector: &Arc<Count>) {
        let mut lane = LoadLane::new(Arc::clone(selector));
        let (mut outs, mut chosen) = (vec![Batch::new()], Vec::new());
        let mut batch: Batch = vec![Bio::new(), Bio::new()];
        lane.select(&mut batch, &mut outs, &mut chosen, Nanos(0));
        lane.publish();
        lane.end_io(0, &outs[0][..1], Sectors(0), Nanos(0));
        lane.publish();
        batch.push(outs[0].pop().expect("a bio"));
        outs[0].clear();
        lane.select(&mut batch, &mut outs, &mut chosen, Nanos(0));
        let seen = lane.slots[0].load;
        assert!((2..=4).contains(&seen), "two of its own and up to two of the other's, not {seen}");
    }

    /// No change of a load is lost, and none is seen that would take it below zero.
    #[test]
    fn loads_of_two_cores_add_up() {
        loom::model(|| {
            let mut count = Count::default();
            count.0.add_path();
            let count = Arc::new(count);
            let other = {
                let count = Arc::clone(&count);
                thread::spawn(move || core(&count))
            };
            core(&count);
            other.join().unwrap();
            assert_eq!(count.0.get(0), 0);
        });
    }
}
