//! The common part of `queue-length` and `service-time`: the path with the least load, ties to the
//! one not chosen for longest.
//!
//! The load of a path is one shared atomic on its own cache line: the sum of all cores' load in
//! flight. A lane knows its own part exactly. It reads the shared loads once per batch. Once per
//! poll it publishes the change of its part, with one atomic add per path in use. Bios that were
//! sent and completed in between are never published. So a core sees the load of other cores as of
//! their last poll. Relaxed order is enough, because a load is advice and publishes no other data.
//! A load is never below zero, because no lane's part is.
//!
//! The kernel keeps a list, scans it from the front and moves the winner to the back. Both
//! comparisons order paths by a key, so the same winner is found by the key and the time of its
//! last choice, and nothing is moved. For a batch the paths are sorted once; a chosen path moves
//! after the paths with no greater load. If it moves to the very end, because loads and bios are
//! equal, the paths take turns for the rest of the batch. Then the cost per choice does not depend
//! on the number of paths.

mod equal_loads;
mod path_load;

use super::rotation::{PathRotation, next_rotation_position};
use super::{BatchPathDispatch, PathSelectorLaneOps};
#[cfg(feature = "loom")]
use loom::sync::atomic::{AtomicU64, Ordering};
pub(super) use path_load::PathLoad;
use std::sync::Arc;
#[cfg(not(feature = "loom"))]
use std::sync::atomic::{AtomicU64, Ordering};
use udm_core::{Bio, Cx, Sectors};

/// The comparison of a selector by load.
pub(in crate::multipath) trait PathLoadComparison: Send + Sync + 'static {
    /// The load that `bio` adds to its path.
    fn weight(bio: &Bio) -> u64;

    /// The sum of [`PathLoadComparison::weight`] over `bios` bios of `sectors` in total.
    fn total(bios: usize, sectors: Sectors) -> u64;

    /// True if a bio of weight `n` should rather go to `a` than to `b`. This is a transitive order.
    /// For paths of the same throughput it is [`PathLoad::load_then_age`].
    fn better(a: &PathLoad, b: &PathLoad, n: u64) -> bool;
}

/// A path in the order of a batch.
#[derive(Clone, Copy)]
struct LoadRankedPath {
    load: u64,
    used: u64,
    path: u32,
}

/// The shared load of each path of a group, stored together because a choice reads them all.
#[derive(Debug, Default)]
pub(in crate::multipath) struct SharedPathLoads(Vec<AtomicU64>);

impl SharedPathLoads {
    pub(super) fn add_path(&mut self) {
        self.0.push(AtomicU64::new(0));
    }

    /// The loads of all paths.
    pub(super) fn all(&self) -> &[AtomicU64] {
        &self.0
    }

    pub(super) fn get(&self, path: usize) -> u64 {
        self.0[path].load(Ordering::Relaxed)
    }

    /// Adds `change`, modulo 2^64.
    pub(super) fn add(&self, path: usize, change: u64) {
        self.0[path].fetch_add(change, Ordering::Relaxed);
    }
}

/// A selector with shared loads.
pub(in crate::multipath) trait LoadBasedSelector: Send + Sync + 'static {
    type LoadRule: PathLoadComparison;
    fn loads(&self) -> &SharedPathLoads;
    fn throughput(&self, path: usize) -> u32;
}

/// The selector's state on one core.
pub(in crate::multipath) struct LoadBasedSelectorLane<S: LoadBasedSelector> {
    selector: Arc<S>,
    /// Indexed by path.
    slots: Vec<PathLoad>,
    clock: u64,
    /// All usable paths have the same throughput.
    same_throughput: bool,
    /// The usable paths, sorted as of the end of the last batch. The next batch mostly has the same
    /// order.
    ranking: Vec<LoadRankedPath>,
    /// The kernel's list, while `is_rotating`.
    rotation: PathRotation,
    /// Paths with the same load take turns; [`PathLoad::used`] is not up to date then.
    is_rotating: bool,
}

impl<S: LoadBasedSelector> LoadBasedSelectorLane<S> {
    pub(super) fn new(selector: Arc<S>) -> LoadBasedSelectorLane<S> {
        let paths = selector.loads().all().len();
        let slot = |path| PathLoad {
            used: path as u64 + 1,
            throughput: selector.throughput(path),
            ..PathLoad::default()
        };
        let slots = (0..paths).map(slot).collect();
        let mut lane = LoadBasedSelectorLane {
            slots,
            clock: paths as u64,
            same_throughput: true,
            ranking: Vec::with_capacity(paths),
            rotation: PathRotation::default(),
            is_rotating: false,
            selector,
        };
        lane.changed();
        lane
    }
}

impl<S: LoadBasedSelector> LoadBasedSelectorLane<S> {
    /// Reads the shared load of each path.
    #[inline(always)]
    fn look(&mut self) {
        for (slot, load) in self.slots.iter_mut().zip(self.selector.loads().all()) {
            slot.look(load);
        }
    }

    fn usable(&self) -> impl Iterator<Item = (usize, &PathLoad)> {
        self.slots.iter().enumerate().filter(|(_, slot)| slot.unusable_bit == 0)
    }

    /// Accounts for `count` completed bios of `path`, with `sectors` in total.
    #[inline(always)]
    fn came_back(&mut self, path: usize, count: usize, sectors: Sectors) {
        let slot = &mut self.slots[path];
        slot.unpublished = slot.unpublished.wrapping_sub(S::LoadRule::total(count, sectors));
        if slot.unpublished != 0 {
            slot.publish(&self.selector.loads().all()[path]);
        }
    }

    /// Called when the set of usable paths has changed.
    fn changed(&mut self) {
        let first = self.usable().next().map(|(_, slot)| slot.throughput);
        let same_throughput = self.usable().all(|(_, slot)| Some(slot.throughput) == first);
        self.same_throughput = same_throughput;
        let ranking =
            self.usable().map(|(path, _)| LoadRankedPath { load: 0, used: 0, path: path as u32 }).collect();
        self.ranking = ranking;
    }

    /// Reads the shared loads of the usable paths and sorts the paths by
    /// [`PathLoad::load_then_age`].
    #[inline(always)]
    fn order(&mut self) {
        self.end_rotation();
        let (slots, loads) = (&mut self.slots[..], self.selector.loads().all());
        for turn in &mut self.ranking {
            let slot = &mut slots[turn.path as usize];
            slot.look(&loads[turn.path as usize]);
            (turn.load, turn.used) = (slot.load(), slot.used);
        }
        let key = |turn: &LoadRankedPath| (turn.load, turn.used);
        if !self.ranking.is_sorted_by(|a, b| key(a) < key(b)) {
            self.ranking.sort_unstable_by_key(key);
        }
    }

    /// The choices for a batch on paths of the same throughput.
    #[inline(always)]
    fn choose_many(&mut self, bios: &mut impl BatchPathDispatch) {
        let next = if self.is_rotating && self.has_equal_loads() || self.begin_rotation() {
            self.choose_in_rotation(bios)
        } else {
            bios.take()
        };
        if next.is_some() {
            self.choose_in_order(next, bios);
        }
    }

    /// The choices for `next` and the bios after it, by the order of the batch.
    #[inline(never)]
    fn choose_in_order(&mut self, mut next: Option<Box<Bio>>, bios: &mut impl BatchPathDispatch) {
        if self.end_rotation() {
            self.order();
        }
        let ranking = &mut self.ranking[..];
        while let Some(bio) = next {
            let n = S::LoadRule::weight(&bio);
            if can_choose_paths_in_rotation(ranking, n) {
                let count;
                (count, next) = choose_paths_in_rotation::<S::LoadRule>(ranking, n, self.clock, bio, bios);
                self.clock += count;
            } else {
                self.clock += 1;
                bios.put(choose_least_loaded_path(ranking, n, self.clock), bio);
                next = bios.take();
            }
        }
        for turn in &self.ranking {
            let slot = &mut self.slots[turn.path as usize];
            (slot.unpublished, slot.used) = (turn.load.wrapping_sub(slot.shared), turn.used);
        }
    }

    /// The choice for a single bio.
    #[inline(always)]
    fn choose_one(&mut self, bio: &Bio) -> usize {
        let n = S::LoadRule::weight(bio);
        if self.same_throughput {
            self.choose_by(n, |a, b| a.load_then_age() < b.load_then_age())
        } else {
            self.choose_by(n, |a, b| S::LoadRule::better(a, b, n))
        }
    }

    /// The choice for a single bio by the comparison `better`. Reads the shared loads.
    #[inline(always)]
    fn choose_by(&mut self, n: u64, better: impl Fn(&PathLoad, &PathLoad) -> bool) -> usize {
        let mut paths = self.slots.iter_mut().zip(self.selector.loads().all()).enumerate();
        let (mut path, (mut best, load)) = paths.next().expect("a group has paths");
        best.look(load);
        for (other, (slot, load)) in paths {
            slot.look(load);
            if better(slot, best) {
                (path, best) = (other, slot);
            }
        }
        self.clock += 1;
        best.choose(n, self.clock);
        path
    }

    /// The choice for a bio of weight `n` of a batch. The loop keeps an index instead of a
    /// reference, so that the compiler emits no branch per comparison; their results are
    /// unpredictable.
    #[inline(always)]
    fn best(&self, n: u64) -> usize {
        let (slots, mut best) = (&self.slots[..], 0);
        for i in 1..slots.len() {
            if S::LoadRule::better(&slots[i], &slots[best], n) {
                best = i;
            }
        }
        best
    }
}

/// Chooses the first path for a bio of weight `n` and moves it after the paths with no greater
/// load.
#[inline(never)]
fn choose_least_loaded_path(order: &mut [LoadRankedPath], n: u64, clock: u64) -> usize {
    let first = LoadRankedPath { load: order[0].load + n, used: clock, ..order[0] };
    let place = order[1..].iter().take_while(|turn| turn.load <= first.load).count();
    order.copy_within(1..=place, 0);
    order[place] = first;
    first.path as usize
}

/// True if the first path becomes the last once it is chosen for a bio of weight `n`. The same then
/// holds for each following path and bios of the same weight.
fn can_choose_paths_in_rotation(order: &[LoadRankedPath], n: u64) -> bool {
    order.last().is_some_and(|last| order[0].load + n >= last.load)
}

/// Chooses for `bio` and the bios after it, as long as they have weight `n`.
/// [`can_choose_paths_in_rotation`] must be true for the paths. Returns the number of bios, and the
/// first bio with another weight.
#[inline(always)]
fn choose_paths_in_rotation<R: PathLoadComparison>(
    order: &mut [LoadRankedPath],
    n: u64,
    clock: u64,
    bio: Box<Bio>,
    bios: &mut impl BatchPathDispatch,
) -> (u64, Option<Box<Bio>>) {
    let (mut count, length, mut place) = (1, order.len(), next_rotation_position(0, order.len()));
    bios.put(order[0].path as usize, bio);
    let next = bios.each(|bio| {
        (R::weight(bio) == n).then(|| {
            let path = order[place].path;
            (count, place) = (count + 1, next_rotation_position(place, length));
            path as usize
        })
    });
    let (rows, more) = (count / length, count % length);
    for (i, turn) in order.iter_mut().enumerate().take(count) {
        let times = (rows + usize::from(i < more)) as u64;
        turn.load += times * n;
        turn.used = clock + 1 + i as u64 + (times - 1) * length as u64;
    }
    order.rotate_left(place);
    (count as u64, next)
}

impl<S: LoadBasedSelector> PathSelectorLaneOps for LoadBasedSelectorLane<S> {
    fn fail(&mut self, path: usize) {
        self.end_rotation();
        let slot = &mut self.slots[path];
        (slot.unusable_bit, slot.throughput) = (PathLoad::UNUSABLE, 0);
        self.changed();
    }

    fn reinstate(&mut self, path: usize) {
        self.end_rotation();
        self.clock += 1;
        let slot = &mut self.slots[path];
        (slot.unusable_bit, slot.used, slot.throughput) = (0, self.clock, self.selector.throughput(path));
        self.changed();
    }

    #[inline]
    fn choose(&mut self, bio: &mut Bio) -> usize {
        self.end_rotation();
        self.choose_one(bio)
    }

    #[inline]
    fn choose_all(&mut self, mut bios: impl BatchPathDispatch) {
        if self.same_throughput {
            return self.choose_many(&mut bios);
        }
        self.look();
        let _ = bios.each(|bio| {
            let n = S::LoadRule::weight(bio);
            let best = self.best(n);
            self.clock += 1;
            self.slots[best].choose(n, self.clock);
            Some(best)
        });
    }

    #[inline]
    fn polled(&mut self, path: usize, back: &[Box<Bio>], sectors: Sectors, _cx: &Cx<'_>) {
        self.came_back(path, back.len(), sectors);
    }
}

impl<S: LoadBasedSelector> Drop for LoadBasedSelectorLane<S> {
    /// Removes the lane's part from the shared loads.
    fn drop(&mut self) {
        for (slot, load) in self.slots.iter_mut().zip(self.selector.loads().all()) {
            slot.unpublished = slot.published.wrapping_neg();
            slot.publish(load);
        }
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests;

#[cfg(all(test, feature = "loom"))]
mod loom_tests {
    use super::super::record_path_choices;
    use super::*;
    use loom::thread;

    #[derive(Default)]
    struct CountRule(SharedPathLoads);

    impl PathLoadComparison for CountRule {
        fn weight(_: &Bio) -> u64 {
            1
        }

        fn total(bios: usize, _: Sectors) -> u64 {
            bios as u64
        }

        fn better(a: &PathLoad, b: &PathLoad, _: u64) -> bool {
            a.load_then_age() < b.load_then_age()
        }
    }

    impl LoadBasedSelector for CountRule {
        type LoadRule = CountRule;

        fn loads(&self) -> &SharedPathLoads {
            &self.0
        }

        fn throughput(&self, _: usize) -> u32 {
            1
        }
    }

    /// Two bios are sent and one completes; after another poll one more is sent. The lane's part is
    /// 2 when it is dropped.
    fn run_core(selector: &Arc<CountRule>) {
        let mut lane = LoadBasedSelectorLane::new(Arc::clone(selector));
        let choose = |lane: &mut LoadBasedSelectorLane<CountRule>, bios| {
            let batch: Vec<_> = (0..bios).map(|_| Bio::new()).collect();
            assert!(record_path_choices(lane, batch).iter().all(|(path, _)| *path == 0));
        };
        choose(&mut lane, 2);
        lane.came_back(0, 0, Sectors(0));
        lane.came_back(0, 1, Sectors(0));
        choose(&mut lane, 1);
        let seen = lane.slots[0].load();
        assert!((2..=4).contains(&seen), "two of its own and up to two of the other's, not {seen}");
    }

    /// No change of a load is lost, and no load is seen below zero.
    #[test]
    fn loads_of_two_cores_add_up() {
        loom::model(|| {
            let mut count = CountRule::default();
            count.0.add_path();
            let count = Arc::new(count);
            let other = {
                let count = Arc::clone(&count);
                thread::spawn(move || run_core(&count))
            };
            run_core(&count);
            other.join().unwrap();
            assert_eq!(count.0.get(0), 0);
        });
    }
}
