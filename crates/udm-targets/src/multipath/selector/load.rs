//! What `queue-length` and `service-time` have in common: the path with the least load, ties to the one not chosen for longest.
//!
//! The load of a path is one shared atomic on its own cache line: the sum of what the cores have under way. A lane knows its own part to the bio; it
//! reads the others' once a batch, and publishes once a poll, with one add a path in use, how its part has changed since the last time. What went down and
//! came back in between is not published at all. So a core sees the others' load as of their last poll. Relaxed: a load is
//! advice, it publishes nothing else. It is never below zero, because no lane's part ever is.
//!
//! The kernel keeps a list, scans it from the front and moves the winner to the back. Since both comparisons order paths by
//! a key, the same winner is found by key and time of last choice, and nothing has to be moved.

use super::Choose;
use crossbeam_utils::CachePadded;
#[cfg(feature = "loom")]
use loom::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
#[cfg(not(feature = "loom"))]
use std::sync::atomic::{AtomicU64, Ordering};
use udm_core::{Bio, Sectors};

/// What a selector by load compares.
pub(in crate::multipath) trait Rule: Send + Sync + 'static {
    /// What `bio` adds to the load of the path that gets it.
    fn weight(bio: &Bio) -> u64;

    /// The sum of [`Rule::weight`] over `bios` bios of `sectors` in all.
    fn total(bios: usize, sectors: Sectors) -> u64;

    /// True when a bio of weight `n` should rather go to `a` than to `b`. An order: `a` over `b` and `b` over `c` means `a` over `c`.
    fn better(a: &Slot, b: &Slot, n: u64) -> bool;
}

/// A path, as its core sees it.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::multipath) struct Slot {
    /// What the other cores have under way, as of the begin of the batch; [`Slot::UNUSABLE`] for a path that can't be used.
    others: u64,
    /// What this lane has under way.
    own: u64,
    /// What the other cores know of it.
    published: u64,
    /// When it was last chosen or reinstated, on the lane's count. No two are equal.
    pub(super) used: u64,
    /// Relative throughput, 0..=100 (service-time); 0 for a path that can't be used.
    pub(super) throughput: u32,
    usable: bool,
}

/// The shared load of each path of a group.
#[derive(Debug, Default)]
pub(in crate::multipath) struct Loads(Vec<CachePadded<AtomicU64>>);

impl Loads {
    pub(super) fn add_path(&mut self) {
        self.0.push(CachePadded::default());
    }

    pub(super) fn get(&self, path: usize) -> u64 {
        self.0[path].load(Ordering::Relaxed)
    }
}

/// A selector with loads.
pub(in crate::multipath) trait Loaded: Send + Sync + 'static {
    type Rule: Rule;
    fn loads(&self) -> &Loads;
    fn throughput(&self, path: usize) -> u32;
}

/// The core's half.
pub(in crate::multipath) struct LoadLane<S: Loaded> {
    selector: Arc<S>,
    /// By path.
    slots: Vec<Slot>,
    clock: u64,
}

impl<S: Loaded> LoadLane<S> {
    pub(super) fn new(selector: Arc<S>) -> LoadLane<S> {
        let paths = selector.loads().0.len();
        let mut lane = LoadLane { selector, slots: vec![Slot::default(); paths], clock: 0 };
        (0..paths).for_each(|p| lane.reinstate(p));
        lane
    }
}

impl<S: Loaded> Choose for LoadLane<S> {
    fn fail(&mut self, path: usize) {
        let slot = &mut self.slots[path];
        (slot.usable, slot.others, slot.throughput) = (false, Slot::UNUSABLE, 0);
    }

    fn reinstate(&mut self, path: usize) {
        self.clock += 1;
        let slot = &mut self.slots[path];
        (slot.usable, slot.used, slot.throughput) = (true, self.clock, self.selector.throughput(path));
    }

    #[inline]
    fn begin(&mut self) {
        for (slot, load) in self.slots.iter_mut().zip(&self.selector.loads().0).filter(|(s, _)| s.usable) {
            slot.others = load.load(Ordering::Relaxed) - slot.published;
        }
    }

    #[inline]
    fn choose(&mut self, bio: &Bio) -> usize {
        let n = S::Rule::weight(bio);
        let slots = &mut self.slots[..];
        let mut best = 0;
        for i in 1..slots.len() {
            if S::Rule::better(&slots[i], &slots[best], n) {
                best = i;
            }
        }
        self.clock += 1;
        let slot = &mut slots[best];
        debug_assert!(slot.usable, "one of the paths can be used");
        (slot.own, slot.used) = (slot.own + n, self.clock);
        best
    }

    #[inline]
    fn polled(&mut self, path: usize, count: usize, sectors: Sectors) {
        let slot = &mut self.slots[path];
        slot.own -= S::Rule::total(count, sectors);
        if slot.own != slot.published {
            slot.publish(&self.selector.loads().0[path]);
        }
    }
}

impl<S: Loaded> Drop for LoadLane<S> {
    /// What a lane that goes away had under way is no load any more.
    fn drop(&mut self) {
        for (slot, load) in self.slots.iter_mut().zip(&self.selector.loads().0) {
            slot.own = 0;
            slot.publish(load);
        }
    }
}

impl Slot {
    /// More than any load, and far from the end of the numbers.
    const UNUSABLE: u64 = 1 << 63;

    /// Adds to `load`, the path's, how this lane's part has changed since the last time.
    fn publish(&mut self, load: &AtomicU64) {
        // Wraps where it went down.
        load.fetch_add(self.own.wrapping_sub(self.published), Ordering::Relaxed);
        self.published = self.own;
    }

    /// The load of the path, this batch's choices included.
    #[inline]
    pub(super) fn load(&self) -> u64 {
        self.others + self.own
    }

    /// Orders by load, then by last use.
    #[inline]
    pub(super) fn load_then_age(&self) -> u128 {
        u128::from(self.load()) << 64 | u128::from(self.used)
    }
}

#[cfg(test)]
impl Slot {
    /// A slot for tests of comparisons.
    pub(super) fn of(load: u64, throughput: u32, used: u64) -> Slot {
        Slot { own: load, throughput, used, usable: true, ..Slot::default() }
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
        let choose = |lane: &mut LoadLane<Count>, bios| {
            lane.begin();
            (0..bios).for_each(|_| assert_eq!(lane.choose(&Bio::default()), 0));
        };
        choose(&mut lane, 2);
        lane.polled(0, 0, Sectors(0));
        lane.polled(0, 1, Sectors(0));
        choose(&mut lane, 1);
        let seen = lane.slots[0].load();
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
