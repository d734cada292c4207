//! Paths with equal averages take turns.
//!
//! If all paths get part of each batch and complete their bios in one poll, their averages soon
//! become exactly equal. If then a batch consists of full rounds over all paths, its choices are
//! those of [`super::batch_rounds`]: along the list, then back along it (of two paths with equal
//! cost the last chosen is next), and so on. If the paths are stale, each round goes along the
//! list. The only check per batch is that nothing is in flight.

use super::super::BatchPathDispatch;
use super::MANY;
use super::lane::{HistoricalServiceTimeLane, LanePathHistoryAndLoad};
use std::sync::atomic::Ordering::Relaxed;

impl HistoricalServiceTimeLane {
    /// True if the equal paths have no bio in flight and `count` bios are full rounds of all paths.
    #[inline(always)]
    pub(super) fn can_rotate(&self, count: usize) -> bool {
        let in_flight = self
            .slots
            .iter()
            .zip(self.selector.loads.all())
            .fold(0, |sum, (slot, load)| sum | load.load(Relaxed).wrapping_add(slot.unpublished));
        let all = LanePathHistoryAndLoad { load: count as u64, ..self.slots[0] };
        (in_flight == 0)
            & all.is_plain(MANY)
            & (self.selector.threshold == 0)
            & count.is_multiple_of(self.slots.len())
    }

    /// The choices for a batch for which [`HistoricalServiceTimeLane::can_rotate`] is true.
    #[inline(always)]
    pub(super) fn choose_in_rotation(&mut self, mut bios: impl BatchPathDispatch) {
        let (now, stale, paths) = (self.now, self.slots[0].is_stale(self.now), self.slots.len());
        if self.rotation_is_stale != Some(stale) {
            self.begin_rotation(stale);
        }
        let rounds = (bios.left() / paths) as u64;
        let _ = self.rotation.deal(&mut bios, |bio| {
            bio.sent = now;
            true
        });
        if !stale {
            // The list is the order of the last round, which is also the next one.
            self.rotation.set_next(if self.rotation.place() == 0 { paths } else { 0 });
        }
        for slot in &mut self.slots {
            slot.unpublished = slot.unpublished.wrapping_add(rounds);
        }
    }

    #[cold]
    fn begin_rotation(&mut self, stale: bool) {
        self.list();
        let back = if stale { &[] } else { &self.order[..] };
        self.rotation.begin(self.order.iter().chain(back.iter().rev()).copied());
        self.rotation_is_stale = Some(stale);
    }

    /// Ends a rotation, if there is one: the list is then in `order` and in the slots.
    #[inline(always)]
    pub(super) fn end_rotation(&mut self) {
        if self.rotation_is_stale.is_some() {
            self.list_from_rotation();
        }
    }

    #[cold]
    fn list_from_rotation(&mut self) {
        let rotation = self.rotation.from(self.rotation.place());
        for ((place, path), used) in self.order.iter_mut().zip(rotation).zip(self.clock + 1..) {
            *place = path as u32;
            self.slots[path].used = used;
        }
        self.clock += self.order.len() as u64;
        (self.rotation_is_stale, self.listed) = (None, true);
    }
}
