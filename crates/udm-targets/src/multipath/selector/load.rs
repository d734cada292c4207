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

mod level;
mod slot;

use super::ring::{Ring, behind};
use super::{Bios, Choose};
#[cfg(feature = "loom")]
use loom::sync::atomic::{AtomicU64, Ordering};
pub(super) use slot::Slot;
use std::sync::Arc;
#[cfg(not(feature = "loom"))]
use std::sync::atomic::{AtomicU64, Ordering};
use udm_core::{Bio, Cx, Sectors};

/// What a selector by load compares.
pub(in crate::multipath) trait Rule: Send + Sync + 'static {
    /// What `bio` adds to the load of the path that gets it.
    fn weight(bio: &Bio) -> u64;

    /// The sum of [`Rule::weight`] over `bios` bios of `sectors` in all.
    fn total(bios: usize, sectors: Sectors) -> u64;

    /// True when a bio of weight `n` should rather go to `a` than to `b`. An order: `a` over `b`
    /// and `b` over `c` means `a` over `c`. Between paths of the same throughput that is
    /// [`Slot::load_then_age`].
    fn better(a: &Slot, b: &Slot, n: u64) -> bool;
}

/// A path in the order of a batch.
#[derive(Clone, Copy)]
struct Turn {
    load: u64,
    used: u64,
    path: u32,
}

/// The shared load of each path of a group, side by side: who chooses reads them all.
#[derive(Debug, Default)]
pub(in crate::multipath) struct Loads(Vec<AtomicU64>);

impl Loads {
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
    /// All paths that can be used have the same throughput.
    even: bool,
    /// The paths that can be used, in the order of the batch, as of its end: mostly that of the
    /// next batch too.
    turns: Vec<Turn>,
    /// The kernel's list, while `is_ring`.
    ring: Ring,
    /// Paths of the same load take turns: what the slots say of [`Slot::used`] is not so any more.
    is_ring: bool,
}

impl<S: Loaded> LoadLane<S> {
    pub(super) fn new(selector: Arc<S>) -> LoadLane<S> {
        let paths = selector.loads().all().len();
        let slot =
            |path| Slot { used: path as u64 + 1, throughput: selector.throughput(path), ..Slot::default() };
        let slots = (0..paths).map(slot).collect();
        let mut lane = LoadLane {
            slots,
            clock: paths as u64,
            even: true,
            turns: Vec::with_capacity(paths),
            ring: Ring::default(),
            is_ring: false,
            selector,
        };
        lane.changed();
        lane
    }
}

impl<S: Loaded> LoadLane<S> {
    /// Reads what the other cores have under way on each path.
    #[inline(always)]
    fn look(&mut self) {
        for (slot, load) in self.slots.iter_mut().zip(self.selector.loads().all()) {
            slot.look(load);
        }
    }

    fn usable(&self) -> impl Iterator<Item = (usize, &Slot)> {
        self.slots.iter().enumerate().filter(|(_, slot)| slot.bar == 0)
    }

    /// `count` bios came back from `path`, `sectors` long in all.
    #[inline(always)]
    fn came_back(&mut self, path: usize, count: usize, sectors: Sectors) {
        let slot = &mut self.slots[path];
        slot.fresh = slot.fresh.wrapping_sub(S::Rule::total(count, sectors));
        if slot.fresh != 0 {
            slot.publish(&self.selector.loads().all()[path]);
        }
    }

    /// Which paths can be used has changed.
    fn changed(&mut self) {
        let first = self.usable().next().map(|(_, slot)| slot.throughput);
        let even = self.usable().all(|(_, slot)| Some(slot.throughput) == first);
        self.even = even;
        let turns = self.usable().map(|(path, _)| Turn { load: 0, used: 0, path: path as u32 }).collect();
        self.turns = turns;
    }

    /// Reads what the other cores have under way on the paths that can be used, and puts those in
    /// the order of [`Slot::load_then_age`].
    #[inline(always)]
    fn order(&mut self) {
        self.end_ring();
        let (slots, loads) = (&mut self.slots[..], self.selector.loads().all());
        for turn in &mut self.turns {
            let slot = &mut slots[turn.path as usize];
            slot.look(&loads[turn.path as usize]);
            (turn.load, turn.used) = (slot.load(), slot.used);
        }
        let key = |turn: &Turn| (turn.load, turn.used);
        if !self.turns.is_sorted_by(|a, b| key(a) < key(b)) {
            self.turns.sort_unstable_by_key(key);
        }
    }

    /// The choices for a batch on paths of the same throughput.
    #[inline(always)]
    fn choose_many(&mut self, bios: &mut impl Bios) {
        let next = if self.is_ring && self.is_level() || self.begin_ring() {
            self.choose_round(bios)
        } else {
            bios.take()
        };
        if next.is_some() {
            self.choose_in_order(next, bios);
        }
    }

    /// The choices for `next` and those behind it, by the order of the batch.
    #[inline(never)]
    fn choose_in_order(&mut self, mut next: Option<Box<Bio>>, bios: &mut impl Bios) {
        if self.end_ring() {
            self.order();
        }
        let turns = &mut self.turns[..];
        while let Some(bio) = next {
            let n = S::Rule::weight(&bio);
            if takes_turns(turns, n) {
                let count;
                (count, next) = take_turns::<S::Rule>(turns, n, self.clock, bio, bios);
                self.clock += count;
            } else {
                self.clock += 1;
                bios.put(take_first(turns, n, self.clock), bio);
                next = bios.take();
            }
        }
        for turn in &self.turns {
            let slot = &mut self.slots[turn.path as usize];
            (slot.fresh, slot.used) = (turn.load.wrapping_sub(slot.shared), turn.used);
        }
    }

    /// The choice for a bio.
    #[inline(always)]
    fn choose_one(&mut self, bio: &Bio) -> usize {
        let n = S::Rule::weight(bio);
        if self.even {
            self.choose_by(n, |a, b| a.load_then_age() < b.load_then_age())
        } else {
            self.choose_by(n, |a, b| S::Rule::better(a, b, n))
        }
    }

    /// The same, where `better` compares two. The shared loads are read on the way.
    #[inline(always)]
    fn choose_by(&mut self, n: u64, better: impl Fn(&Slot, &Slot) -> bool) -> usize {
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
            if S::Rule::better(&slots[i], &slots[best], n) {
                best = i;
            }
        }
        best
    }
}

/// Chooses the first for a bio of weight `n`: it goes behind those with no more load than it has
/// then.
#[inline(never)]
fn take_first(order: &mut [Turn], n: u64, clock: u64) -> usize {
    let first = Turn { load: order[0].load + n, used: clock, ..order[0] };
    let place = order[1..].iter().take_while(|turn| turn.load <= first.load).count();
    order.copy_within(1..=place, 0);
    order[place] = first;
    first.path as usize
}

/// True when the first will be the last once it is chosen for a bio of weight `n`. Then so will
/// each be after it, for bios of the same weight.
fn takes_turns(order: &[Turn], n: u64) -> bool {
    order.last().is_some_and(|last| order[0].load + n >= last.load)
}

/// Chooses for `bio` and those behind it, as long as they are of weight `n` too, from paths that
/// [`takes_turns`] is true of, and stays so. Says how many they were, and the next.
#[inline(always)]
fn take_turns<R: Rule>(
    order: &mut [Turn],
    n: u64,
    clock: u64,
    bio: Box<Bio>,
    bios: &mut impl Bios,
) -> (u64, Option<Box<Bio>>) {
    let (mut count, length, mut place) = (1, order.len(), behind(0, order.len()));
    bios.put(order[0].path as usize, bio);
    let next = bios.each(|bio| {
        (R::weight(bio) == n).then(|| {
            let path = order[place].path;
            (count, place) = (count + 1, behind(place, length));
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

impl<S: Loaded> Choose for LoadLane<S> {
    fn fail(&mut self, path: usize) {
        self.end_ring();
        let slot = &mut self.slots[path];
        (slot.bar, slot.throughput) = (Slot::UNUSABLE, 0);
        self.changed();
    }

    fn reinstate(&mut self, path: usize) {
        self.end_ring();
        self.clock += 1;
        let slot = &mut self.slots[path];
        (slot.bar, slot.used, slot.throughput) = (0, self.clock, self.selector.throughput(path));
        self.changed();
    }

    #[inline]
    fn choose(&mut self, bio: &mut Bio) -> usize {
        self.end_ring();
        self.choose_one(bio)
    }

    #[inline]
    fn choose_all(&mut self, mut bios: impl Bios) {
        if self.even {
            return self.choose_many(&mut bios);
        }
        self.look();
        let _ = bios.each(|bio| {
            let n = S::Rule::weight(bio);
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

impl<S: Loaded> Drop for LoadLane<S> {
    /// What a lane that goes away had under way is no load any more.
    fn drop(&mut self) {
        for (slot, load) in self.slots.iter_mut().zip(self.selector.loads().all()) {
            slot.fresh = slot.published.wrapping_neg();
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

    /// Two bios down and one back, a poll later one more down. Its part is 2 when the lane goes
    /// away.
    fn core(selector: &Arc<Count>) {
        let mut lane = LoadLane::new(Arc::clone(selector));
        let choose = |lane: &mut LoadLane<Count>, bios| {
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
