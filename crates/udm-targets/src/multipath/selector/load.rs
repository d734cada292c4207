//! What `queue-length` and `service-time` have in common: the path with the least load, ties to the
//! one not chosen for longest.
//!
//! The load of a path is one shared atomic on its own cache line: the sum of what the cores have
//! under way. A lane knows its own part to the bio; it reads the others' once a batch, and
//! publishes once a poll, with one add a path in use, how its part has changed since the last time.
//! What went down and came back in between is not published at all. So a core sees the others' load
//! as of their last poll. Relaxed: a load is advice, it publishes nothing else. It is never below
//! zero, because no lane's part ever is.
//!
//! The kernel keeps a list, scans it from the front and moves the winner to the back. Since both
//! comparisons order paths by a key, the same winner is found by key and time of last choice, and
//! nothing has to be moved. For a batch the paths are put in that order once: who is chosen goes
//! behind those with no more load. Where that is the very end, since loads are even, and bios are
//! equal, the paths take turns for the rest of the batch, which costs the same whatever their
//! number.

mod equal_loads;
mod path_load;

use super::rotation::{Rotation, next_position};
use super::{BioDispatch, PathChooser};
#[cfg(feature = "loom")]
use loom::sync::atomic::{AtomicU64, Ordering};
pub(super) use path_load::PathLoad;
use std::sync::Arc;
#[cfg(not(feature = "loom"))]
use std::sync::atomic::{AtomicU64, Ordering};
use udm_core::{Bio, Cx, Sectors};

/// What a selector by load compares.
pub(in crate::multipath) trait LoadRule: Send + Sync + 'static {
    /// What `bio` adds to the load of the path that gets it.
    fn weight(bio: &Bio) -> u64;

    /// The sum of [`LoadRule::weight`] over `bio_faults` bios of `sectors` in all.
    fn total(bios: usize, sectors: Sectors) -> u64;

    /// True when a bio of weight `n` should rather go to `a` than to `b`. An order: `a` over `b`
    /// and `b` over `c` means `a` over `c`. Between paths of the same throughput that is
    /// [`PathLoad::load_then_age`].
    fn better(a: &PathLoad, b: &PathLoad, n: u64) -> bool;
}

/// A path in the order of a batch.
#[derive(Clone, Copy)]
struct LoadRank {
    load: u64,
    used: u64,
    path: u32,
}

/// The shared load of each path of a group, side by side: who chooses reads them all.
#[derive(Debug, Default)]
pub(in crate::multipath) struct SharedLoads(Vec<AtomicU64>);

impl SharedLoads {
    pub(super) fn add_path(&mut self) {
        self.0.push(AtomicU64::new(0));
    }

    /// That of each path.
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

/// A selector with loads.
pub(in crate::multipath) trait LoadSelector: Send + Sync + 'static {
    type LoadRule: LoadRule;
    fn loads(&self) -> &SharedLoads;
    fn throughput(&self, path: usize) -> u32;
}

/// The core's half.
pub(in crate::multipath) struct LoadLane<S: LoadSelector> {
    selector: Arc<S>,
    /// By path.
    slots: Vec<PathLoad>,
    clock: u64,
    /// All paths that can be used have the same throughput.
    same_throughput: bool,
    /// The paths that can be used, in the order of the batch, as of its end: mostly that of the
    /// next batch too.
    ranking: Vec<LoadRank>,
    /// The kernel's list, while `is_rotating`.
    rotation: Rotation,
    /// Paths of the same load take turns: what the slots say of [`PathLoad::used`] is not so any more.
    is_rotating: bool,
}

impl<S: LoadSelector> LoadLane<S> {
    pub(super) fn new(selector: Arc<S>) -> LoadLane<S> {
        let paths = selector.loads().all().len();
        let slot = |path| PathLoad {
            used: path as u64 + 1,
            throughput: selector.throughput(path),
            ..PathLoad::default()
        };
        let slots = (0..paths).map(slot).collect();
        let mut lane = LoadLane {
            slots,
            clock: paths as u64,
            same_throughput: true,
            ranking: Vec::with_capacity(paths),
            rotation: Rotation::default(),
            is_rotating: false,
            selector,
        };
        lane.changed();
        lane
    }
}

impl<S: LoadSelector> LoadLane<S> {
    /// Reads what the other cores have under way on each path.
    #[inline(always)]
    fn look(&mut self) {
        for (slot, load) in self.slots.iter_mut().zip(self.selector.loads().all()) {
            slot.look(load);
        }
    }

    fn usable(&self) -> impl Iterator<Item = (usize, &PathLoad)> {
        self.slots.iter().enumerate().filter(|(_, slot)| slot.unusable_bit == 0)
    }

    /// `count` bios came back from `path`, `sectors` long in all.
    #[inline(always)]
    fn came_back(&mut self, path: usize, count: usize, sectors: Sectors) {
        let slot = &mut self.slots[path];
        slot.unpublished = slot.unpublished.wrapping_sub(S::LoadRule::total(count, sectors));
        if slot.unpublished != 0 {
            slot.publish(&self.selector.loads().all()[path]);
        }
    }

    /// Which paths can be used has changed.
    fn changed(&mut self) {
        let first = self.usable().next().map(|(_, slot)| slot.throughput);
        let same_throughput = self.usable().all(|(_, slot)| Some(slot.throughput) == first);
        self.same_throughput = same_throughput;
        let ranking =
            self.usable().map(|(path, _)| LoadRank { load: 0, used: 0, path: path as u32 }).collect();
        self.ranking = ranking;
    }

    /// Reads what the other cores have under way on the paths that can be used, and puts those in
    /// the order of [`PathLoad::load_then_age`].
    #[inline(always)]
    fn order(&mut self) {
        self.end_rotation();
        let (slots, loads) = (&mut self.slots[..], self.selector.loads().all());
        for turn in &mut self.ranking {
            let slot = &mut slots[turn.path as usize];
            slot.look(&loads[turn.path as usize]);
            (turn.load, turn.used) = (slot.load(), slot.used);
        }
        let key = |turn: &LoadRank| (turn.load, turn.used);
        if !self.ranking.is_sorted_by(|a, b| key(a) < key(b)) {
            self.ranking.sort_unstable_by_key(key);
        }
    }

    /// The choices for a batch on paths of the same throughput.
    #[inline(always)]
    fn choose_many(&mut self, bios: &mut impl BioDispatch) {
        let next = if self.is_rotating && self.has_equal_loads() || self.begin_rotation() {
            self.choose_in_rotation(bios)
        } else {
            bios.take()
        };
        if next.is_some() {
            self.choose_in_order(next, bios);
        }
    }

    /// The choices for `next` and those behind it, by the order of the batch.
    #[inline(never)]
    fn choose_in_order(&mut self, mut next: Option<Box<Bio>>, bios: &mut impl BioDispatch) {
        if self.end_rotation() {
            self.order();
        }
        let ranking = &mut self.ranking[..];
        while let Some(bio) = next {
            let n = S::LoadRule::weight(&bio);
            if can_rotate(ranking, n) {
                let count;
                (count, next) = choose_rotating::<S::LoadRule>(ranking, n, self.clock, bio, bios);
                self.clock += count;
            } else {
                self.clock += 1;
                bios.put(choose_first(ranking, n, self.clock), bio);
                next = bios.take();
            }
        }
        for turn in &self.ranking {
            let slot = &mut self.slots[turn.path as usize];
            (slot.unpublished, slot.used) = (turn.load.wrapping_sub(slot.shared), turn.used);
        }
    }

    /// The choice for a bio.
    #[inline(always)]
    fn choose_one(&mut self, bio: &Bio) -> usize {
        let n = S::LoadRule::weight(bio);
        if self.same_throughput {
            self.choose_by(n, |a, b| a.load_then_age() < b.load_then_age())
        } else {
            self.choose_by(n, |a, b| S::LoadRule::better(a, b, n))
        }
    }

    /// The same, where `better` compares two. The shared loads are read on the way.
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

    /// The choice for a bio of weight `n` of a batch. By index, and not by a reference to the best:
    /// so the compiler makes no branch of each comparison, and there is no saying which way they
    /// go.
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

/// Chooses the first for a bio of weight `n`: it goes behind those with no more load than it has
/// then.
#[inline(never)]
fn choose_first(order: &mut [LoadRank], n: u64, clock: u64) -> usize {
    let first = LoadRank { load: order[0].load + n, used: clock, ..order[0] };
    let place = order[1..].iter().take_while(|turn| turn.load <= first.load).count();
    order.copy_within(1..=place, 0);
    order[place] = first;
    first.path as usize
}

/// True when the first will be the last once it is chosen for a bio of weight `n`. Then so will
/// each be after it, for bios of the same weight.
fn can_rotate(order: &[LoadRank], n: u64) -> bool {
    order.last().is_some_and(|last| order[0].load + n >= last.load)
}

/// Chooses for `bio` and those behind it, as long as they are of weight `n` too, from paths that
/// [`can_rotate`] is true of, and stays so. Says how many they were, and the next.
#[inline(always)]
fn choose_rotating<R: LoadRule>(
    order: &mut [LoadRank],
    n: u64,
    clock: u64,
    bio: Box<Bio>,
    bios: &mut impl BioDispatch,
) -> (u64, Option<Box<Bio>>) {
    let (mut count, length, mut place) = (1, order.len(), next_position(0, order.len()));
    bios.put(order[0].path as usize, bio);
    let next = bios.each(|bio| {
        (R::weight(bio) == n).then(|| {
            let path = order[place].path;
            (count, place) = (count + 1, next_position(place, length));
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

impl<S: LoadSelector> PathChooser for LoadLane<S> {
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
    fn choose_all(&mut self, mut bios: impl BioDispatch) {
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

impl<S: LoadSelector> Drop for LoadLane<S> {
    /// What a lane that goes away had under way is no load any more.
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
    use super::super::choose_all;
    use super::*;
    use loom::thread;

    #[derive(Default)]
    struct CountRule(SharedLoads);

    impl LoadRule for CountRule {
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

    impl LoadSelector for CountRule {
        type LoadRule = CountRule;

        fn loads(&self) -> &SharedLoads {
            &self.0
        }

        fn throughput(&self, _: usize) -> u32 {
            1
        }
    }

    /// Two bios down and one back, a poll later one more down. Its part is 2 when the lane goes
    /// away.
    fn run_core(selector: &Arc<CountRule>) {
        let mut lane = LoadLane::new(Arc::clone(selector));
        let choose = |lane: &mut LoadLane<CountRule>, bios| {
            let batch: Vec<_> = (0..bios).map(|_| Bio::new()).collect();
            assert!(choose_all(lane, batch).iter().all(|(path, _)| *path == 0));
        };
        choose(&mut lane, 2);
        lane.came_back(0, 0, Sectors(0));
        lane.came_back(0, 1, Sectors(0));
        choose(&mut lane, 1);
        let seen = lane.slots[0].load();
        assert!((2..=4).contains(&seen), "two of its own and up to two of the other's, not {seen}");
    }

    /// No change of a load is lost, and none is seen that would take it below zero.
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
