//! Paths with the same load take turns.
//!
//! A batch finds all paths with the same load if whole batches complete at once. Then each choice
//! is the front of the kernel's list, which only rotates. So a choice needs neither the loads nor
//! the times of the last choices. The rotation ends with a batch that finds different loads, a bio
//! of another weight, a single bio, or a path that fails or returns.

use super::super::BatchPathDispatch;
use super::{LoadBasedSelector, LoadBasedSelectorLane, Ordering, PathLoadComparison};
use udm_core::Bio;

impl<S: LoadBasedSelector> LoadBasedSelectorLane<S> {
    /// True if all usable paths have the same load as the next path of the rotation.
    #[inline(always)]
    pub(super) fn has_equal_loads(&self) -> bool {
        let loads = self.selector.loads().all();
        let load =
            |path: usize| loads[path].load(Ordering::Relaxed).wrapping_add(self.slots[path].unpublished);
        let first = load(self.rotation.first());
        let uneven = self.slots.iter().zip(loads).fold(0, |uneven, (slot, load)| {
            let load = load.load(Ordering::Relaxed).wrapping_add(slot.unpublished);
            uneven | ((load ^ first) & slot.if_usable())
        });
        uneven == 0
    }

    /// Sorts the paths for the batch. If all have the same load, begins a rotation and returns
    /// true.
    #[inline(never)]
    pub(super) fn begin_rotation(&mut self) -> bool {
        self.order();
        let [first, .., last] = &self.ranking[..] else { return false };
        self.is_rotating = first.load == last.load;
        if self.is_rotating {
            self.rotation.begin(self.ranking.iter().map(|turn| turn.path));
        }
        self.is_rotating
    }

    /// The choices for bios of the same weight. Returns the first bio with another weight.
    #[inline(always)]
    pub(super) fn choose_in_rotation(&mut self, bios: &mut impl BatchPathDispatch) -> Option<Box<Bio>> {
        let (all, place, mut weight) = (bios.left(), self.rotation.place(), None);
        let rest = self.rotation.deal(bios, |bio| {
            let n = S::LoadRule::weight(bio);
            *weight.get_or_insert(n) == n
        });
        let (count, n) = (all - bios.left() - usize::from(rest.is_some()), weight.unwrap_or_default());
        let (rounds, more) = ((count / self.ranking.len()) as u64, count % self.ranking.len());
        for slot in &mut self.slots {
            slot.unpublished = slot.unpublished.wrapping_add((rounds * n) & slot.if_usable());
        }
        for path in self.rotation.from(place).take(more) {
            self.slots[path].unpublished = self.slots[path].unpublished.wrapping_add(n);
        }
        rest
    }

    /// Ends a rotation, if there is one, and restores [`PathLoad::used`](super::PathLoad::used).
    /// Returns true if there was one.
    #[inline(always)]
    pub(super) fn end_rotation(&mut self) -> bool {
        let was = self.is_rotating;
        if was {
            self.list();
        }
        was
    }

    #[cold]
    fn list(&mut self) {
        self.is_rotating = false;
        for path in self.rotation.from(self.rotation.place()).take(self.ranking.len()) {
            self.clock += 1;
            self.slots[path].used = self.clock;
        }
    }
}
