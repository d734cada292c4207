//! Paths that are equal take turns.
//!
//! Paths that all have part in each batch, and whose bios come back in one poll, are soon the same
//! to the last bit of their averages. Then a batch that makes full rounds of all of them is dealt
//! out as [`super::rounds`] would: along the list, back along it since of two that cost the same
//! the one chosen last is next, and so on; where they are stale, along it each time. All that a
//! batch has to see is that nothing is in flight.

use super::super::Bios;
use super::MANY;
use super::lane::{HistoricalLane, Slot};
use std::sync::atomic::Ordering::Relaxed;

impl HistoricalLane {
    /// True when paths that are equal have no bio in flight, and `count` bios are rounds of all of
    /// them.
    #[inline(always)]
    pub(super) fn goes_round(&self, count: usize) -> bool {
        let in_flight = self
            .slots
            .iter()
            .zip(self.selector.loads.all())
            .fold(0, |sum, (slot, load)| sum | load.load(Relaxed).wrapping_add(slot.fresh));
        let all = Slot { load: count as u64, ..self.slots[0] };
        (in_flight == 0)
            & all.is_plain(MANY)
            & (self.selector.threshold == 0)
            & count.is_multiple_of(self.slots.len())
    }

    /// The choices for a batch that [`HistoricalLane::goes_round`] is true of.
    #[inline(always)]
    pub(super) fn choose_round(&mut self, mut bios: impl Bios) {
        let (now, stale, paths) = (self.now, self.slots[0].is_stale(self.now), self.slots.len());
        if self.ring_of != Some(stale) {
            self.begin_ring(stale);
        }
        let rounds = (bios.left() / paths) as u64;
        let _ = self.ring.deal(&mut bios, |bio| {
            bio.sent = now;
            true
        });
        if !stale {
            // The list is the round that was the last, so that is the next too.
            self.ring.turn_to(if self.ring.place() == 0 { paths } else { 0 });
        }
        for slot in &mut self.slots {
            slot.fresh = slot.fresh.wrapping_add(rounds);
        }
    }

    #[cold]
    fn begin_ring(&mut self, stale: bool) {
        self.list();
        let back = if stale { &[] } else { &self.order[..] };
        self.ring.begin(self.order.iter().chain(back.iter().rev()).copied());
        self.ring_of = Some(stale);
    }

    /// If there is a ring, it is no more: the list is in `order` and in the slots.
    #[inline(always)]
    pub(super) fn end_ring(&mut self) {
        if self.ring_of.is_some() {
            self.list_of_ring();
        }
    }

    #[cold]
    fn list_of_ring(&mut self) {
        let ring = self.ring.from(self.ring.place());
        for ((place, path), used) in self.order.iter_mut().zip(ring).zip(self.clock + 1..) {
            *place = path as u32;
            self.slots[path].used = used;
        }
        self.clock += self.order.len() as u64;
        (self.ring_of, self.listed) = (None, true);
    }
}
