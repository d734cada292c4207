//! The record of requests in flight in memory that the front end keeps (`udm_wire::vhost_user`).
//!
//! Order of the writes, so that a back end that is killed at any point loses nothing: a request is
//! marked before it is started. A completed batch is linked before it is published in the used
//! ring, and its marks are cleared after that.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use udm_buf::{SharedMemoryMap, copy_from_shared, copy_to_shared};
use udm_core::interleave;
use udm_wire::vhost_user::{
    INFLIGHT_VERSION, InflightArea, InflightEntry, InflightLayout, InflightRecovery,
    recover_inflight_requests,
};

/// The part of one ring.
pub(super) struct InflightRecord {
    map: Arc<SharedMemoryMap>,
    /// Offset of the part.
    start: usize,
    layout: InflightLayout,
    next_counter: u64,
}

impl InflightRecord {
    /// The part of ring `index` of `area`, which is mapped as `map`; `None` if the area has no such
    /// part.
    pub(super) fn new(
        map: &Arc<SharedMemoryMap>,
        area: &InflightArea,
        index: usize,
    ) -> Option<InflightRecord> {
        let layout = InflightLayout { ring_size: area.ring_size };
        let start = index.checked_mul(layout.part_len())?;
        let end = start.checked_add(layout.part_len())?;
        // The mapping may be longer than the area.
        let fits = index < usize::from(area.queues) && end as u64 <= area.size && end <= map.len();
        fits.then(|| InflightRecord { map: Arc::clone(map), start, layout, next_counter: 0 })
    }

    /// Reads what the last back end left, given `idx` of the used ring, and prepares the record for
    /// this one.
    pub(super) fn recover(&mut self, ring_used: u16) -> InflightRecovery {
        let field = |offset: usize| self.map.u16_at(self.start + offset);
        let is_fresh = field(InflightLayout::VERSION).load(Ordering::Relaxed) != INFLIGHT_VERSION
            || field(InflightLayout::DESC_NUM).load(Ordering::Relaxed) != self.layout.ring_size;
        if is_fresh {
            // Marks of another layout mean nothing, and the ring may have been in use before.
            (0..self.layout.ring_size).for_each(|head| self.mark(head, false));
            field(InflightLayout::USED_IDX).store(ring_used, Ordering::Relaxed);
            interleave::mark_interleave_point();
            field(InflightLayout::DESC_NUM).store(self.layout.ring_size, Ordering::Relaxed);
            field(InflightLayout::VERSION).store(INFLIGHT_VERSION, Ordering::Release);
        }
        let entries: Vec<InflightEntry> = (0..self.layout.ring_size).map(|head| self.entry(head)).collect();
        let recorded = field(InflightLayout::USED_IDX).load(Ordering::Relaxed);
        let last_batch = field(InflightLayout::LAST_BATCH_HEAD).load(Ordering::Relaxed);
        let recovery = recover_inflight_requests(&entries, recorded, last_batch, ring_used);
        recovery.completed.iter().for_each(|head| self.mark(*head, false));
        self.set_used(ring_used);
        self.next_counter = recovery.next_counter;
        recovery
    }

    fn entry(&self, head: u16) -> InflightEntry {
        let mut bytes = [0; 16];
        copy_from_shared(self.map.words(), self.start + self.layout.entry(head), &mut bytes);
        let (front, counter) = bytes.split_at(8);
        InflightEntry {
            is_inflight: front[0] == 1,
            next: u16::from_ne_bytes([front[6], front[7]]),
            counter: u64::from_ne_bytes(counter.try_into().unwrap_or_default()),
        }
    }

    fn mark(&self, head: u16, is_inflight: bool) {
        interleave::mark_interleave_point();
        copy_to_shared(self.map.words(), self.start + self.layout.entry(head), &[u8::from(is_inflight)]);
    }

    /// Marks a request that is about to start.
    pub(super) fn begin(&mut self, head: u16) {
        let at = self.start + self.layout.entry_counter(head);
        self.map.words()[at / 8].store(self.next_counter, Ordering::Relaxed);
        self.next_counter = self.next_counter.wrapping_add(1);
        fence(Ordering::Release);
        self.mark(head, true);
    }

    /// Links a completed request to the batch that is published next.
    pub(super) fn link(&self, head: u16) {
        let last = self.map.u16_at(self.start + InflightLayout::LAST_BATCH_HEAD);
        let next = last.load(Ordering::Relaxed);
        self.map.u16_at(self.start + self.layout.entry_next(head)).store(next, Ordering::Relaxed);
        fence(Ordering::Release);
        interleave::mark_interleave_point();
        last.store(head, Ordering::Release);
    }

    /// Clears the marks of a batch that was published; `used` is `idx` of the used ring.
    pub(super) fn end(&self, heads: &[u16], used: u16) {
        fence(Ordering::Release);
        heads.iter().for_each(|head| self.mark(*head, false));
        self.set_used(used);
    }

    fn set_used(&self, used: u16) {
        interleave::mark_interleave_point();
        fence(Ordering::Release);
        self.map.u16_at(self.start + InflightLayout::USED_IDX).store(used, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vhost_user::memory::tests::memfd;

    fn area(size: u64, ring_size: u16) -> InflightArea {
        InflightArea { size, offset: 0, queues: 64, ring_size }
    }

    fn record(map: &Arc<SharedMemoryMap>) -> InflightRecord {
        InflightRecord::new(map, &area(4096, 8), 1).unwrap()
    }

    #[test]
    fn a_new_back_end_continues_where_the_last_one_was_killed() {
        let map = Arc::new(SharedMemoryMap::of_guest_memory(memfd(4096), 0, 4096).unwrap());
        let mut first = record(&map);
        let fresh = first.recover(500);
        assert_eq!((fresh.resubmit, fresh.completed, fresh.next_avail), (vec![], vec![], 500));
        [3, 1, 7, 2].into_iter().for_each(|head| first.begin(head));
        first.link(1);
        first.end(&[1], 501);
        // Killed after it published the batch of 7 and 3, and before it cleared their marks.
        first.link(7);
        first.link(3);
        let mut second = record(&map);
        let recovery = second.recover(503);
        assert_eq!((recovery.completed, recovery.resubmit), (vec![3, 7], vec![2]));
        assert_eq!(recovery.next_avail, 504);
        // The third one finds only what is still in flight.
        assert_eq!(record(&map).recover(503).resubmit, [2]);
        second.link(2);
        second.end(&[2], 504);
        assert_eq!(record(&map).recover(504).resubmit, Vec::<u16>::new());
    }

    /// A record of another ring size is not followed.
    #[test]
    fn a_record_of_another_layout_is_begun_again() {
        let map = Arc::new(SharedMemoryMap::of_guest_memory(memfd(4096), 0, 4096).unwrap());
        let mut first = record(&map);
        first.recover(0);
        first.begin(2);
        map.u16_at(first.start + InflightLayout::DESC_NUM).store(16, Ordering::Relaxed);
        let recovery = record(&map).recover(9);
        assert_eq!((recovery.resubmit, recovery.completed, recovery.next_avail), (vec![], vec![], 9));
    }

    #[test]
    fn parts_are_inside_the_area() {
        let map = Arc::new(SharedMemoryMap::of_guest_memory(memfd(4096), 0, 4096).unwrap());
        let fits =
            |size, ring_size, index| InflightRecord::new(&map, &area(size, ring_size), index).is_some();
        assert!(fits(4096, 8, 20) && !fits(4096, 8, 21));
        assert!(fits(4032, 8, 20) && !fits(4031, 8, 20), "the area ends within a page");
        assert!(fits(4096, 1, 63) && !fits(8192, 1, 64), "there are 64 rings");
        assert!(!fits(4096, 8, usize::MAX) && !fits(4096, 1024, 0) && !fits(1 << 20, 1024, 0));
    }
}
