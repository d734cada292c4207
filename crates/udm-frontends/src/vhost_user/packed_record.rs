//! The record of requests in flight of a packed ring, in memory that the front end keeps
//! (`udm_wire::vhost_user`, `inflight_packed`).
//!
//! A back end that is killed at any point loses nothing:
//!
//! * A chain that is taken is copied to free entries. One store takes them off the free list.
//! * A completed batch is put on the free list, and the used position is advanced. Then the batch
//!   is published in the ring: its first descriptor last. Then the old list and the old position
//!   become the new ones.
//! * A new back end that finds two positions looks at the first descriptor of the batch: it takes
//!   the new ones if the batch was published, and the old ones otherwise.
//!
//! The front end may change the memory at any time: the lists in use are the ring's own.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use udm_buf::SharedMemoryMap;
use udm_core::interleave;
use udm_wire::vhost_user::{
    InflightArea, PackedInflightEntry, PackedInflightHeader, PackedInflightLayout, PackedInflightRecovery,
    recover_packed_inflight_requests,
};
use udm_wire::virtio::packed::{PackedDescriptor, PackedPosition};

/// The part of one ring.
pub(super) struct PackedInflightRecord {
    map: Arc<SharedMemoryMap>,
    /// Offset of the part.
    start: usize,
    layout: PackedInflightLayout,
    header: PackedInflightHeader,
    next_counter: u64,
}

/// What a new back end finds in a record.
pub(super) struct RecoveredPackedRing {
    pub(super) entries: Vec<PackedInflightEntry>,
    pub(super) found: PackedInflightRecovery,
    /// The first free entry.
    pub(super) free_head: u16,
    /// Position of the next used descriptor.
    pub(super) used: PackedPosition,
}

impl PackedInflightRecord {
    /// The part of ring `index`, which has `ring_size` entries, of `area`, which is mapped as
    /// `map`; `None` if the area has no such part.
    pub(super) fn new(
        map: &Arc<SharedMemoryMap>,
        area: &InflightArea,
        index: usize,
        ring_size: u16,
    ) -> Option<PackedInflightRecord> {
        let part_len = PackedInflightLayout { ring_size: area.ring_size }.part_len();
        let start = index.checked_mul(part_len)?;
        let end = start.checked_add(part_len)?;
        let (used, free_head) = (PackedPosition::START, 0);
        let header =
            PackedInflightHeader { ring_size, free_head, old_free_head: free_head, used, old_used: used };
        // The mapping may be longer than the area.
        let fits = index < usize::from(area.queues) && ring_size <= area.ring_size;
        (fits && end as u64 <= area.size && end <= map.len()).then(|| PackedInflightRecord {
            map: Arc::clone(map),
            start,
            layout: PackedInflightLayout { ring_size },
            header,
            next_counter: 0,
        })
    }

    /// Begins an empty record of a ring that continues at `used`.
    pub(super) fn reset(&mut self, used: PackedPosition) {
        // Not valid meanwhile.
        self.store(PackedInflightLayout::LISTS, 0);
        for index in 0..self.header.ring_size {
            let entry = PackedInflightEntry { next: index + 1, ..PackedInflightEntry::default() };
            let words = entry.to_words();
            (0..).zip(words).for_each(|(word, value)| self.store(self.layout.entry(index) + 8 * word, value));
        }
        let header = &mut self.header;
        (header.free_head, header.old_free_head) = (0, 0);
        (header.used, header.old_used) = (used, used);
        self.store_positions();
        self.store_lists();
    }

    /// Reads what the last back end left, and prepares the record for this one. An empty record
    /// continues at `base`. `flags` are those of a descriptor of the ring. `None` if the record is
    /// damaged.
    pub(super) fn recover(
        &mut self,
        base: PackedPosition,
        flags: impl Fn(u16) -> u16,
    ) -> Option<RecoveredPackedRing> {
        let words = [PackedInflightLayout::LISTS, PackedInflightLayout::POSITIONS].map(|at| self.load(at));
        let size = self.header.ring_size;
        match PackedInflightHeader::from_words(words).filter(|header| header.ring_size == size) {
            None => self.reset(base),
            Some(header) => self.header = header,
        }
        let header = &mut self.header;
        if header.used.index >= size || header.old_used.index >= size {
            return None;
        }
        if header.used != header.old_used && !header.old_used.is_available(flags(header.old_used.index)) {
            // The batch was published.
            (header.old_free_head, header.old_used) = (header.free_head, header.used);
        } else {
            (header.free_head, header.used) = (header.old_free_head, header.old_used);
        }
        let (free_head, used) = (header.free_head, header.used);
        self.store_lists();
        self.store_positions();
        let entries: Vec<PackedInflightEntry> = (0..size).map(|index| self.entry(index)).collect();
        let found = recover_packed_inflight_requests(&entries, free_head)?;
        found.free.iter().for_each(|index| self.unmark(*index));
        self.next_counter = found.next_counter;
        Some(RecoveredPackedRing { entries, found, free_head, used })
    }

    fn load(&self, at: usize) -> u64 {
        self.map.words()[(self.start + at) / 8].load(Ordering::Relaxed)
    }

    fn store(&self, at: usize, value: u64) {
        interleave::mark_interleave_point();
        self.map.words()[(self.start + at) / 8].store(value, Ordering::Release);
    }

    fn store_lists(&self) {
        self.store(PackedInflightLayout::LISTS, self.header.lists());
    }

    fn store_positions(&self) {
        self.store(PackedInflightLayout::POSITIONS, self.header.positions());
    }

    fn entry(&self, index: u16) -> PackedInflightEntry {
        let at = self.layout.entry(index);
        PackedInflightEntry::from_words([0, 8, 16, 24].map(|word| self.load(at + word)))
    }

    /// The descriptor in entry `index`.
    pub(super) fn descriptor(&self, index: u16) -> PackedDescriptor {
        self.entry(index).descriptor
    }

    fn unmark(&self, index: u16) {
        interleave::mark_interleave_point();
        self.map.u8_at(self.start + self.layout.entry(index)).store(0, Ordering::Relaxed);
    }

    /// Records a chain that is about to start: `descriptors` are copied to the entries from `head`
    /// on, which `links` connects.
    pub(super) fn begin(&mut self, head: u16, descriptors: &[PackedDescriptor], links: &[u16]) {
        let (mut index, mut last) = (head, head);
        for descriptor in descriptors {
            let entry = PackedInflightEntry { descriptor: *descriptor, ..PackedInflightEntry::default() };
            let [_, _, second, address] = entry.to_words();
            let at = self.layout.entry(index);
            self.store(at + 16, second);
            self.store(at + 24, address);
            (last, index) = (index, links[usize::from(index)]);
        }
        let state = PackedInflightEntry {
            is_inflight: true,
            next: links[usize::from(head)],
            last,
            num: descriptors.len() as u16,
            ..PackedInflightEntry::default()
        };
        let at = self.layout.entry(head);
        self.store(at + 8, self.next_counter);
        self.next_counter = self.next_counter.wrapping_add(1);
        self.store(at, state.to_words()[0]);
        (self.header.free_head, self.header.old_free_head) = (index, index);
        self.store_lists();
    }

    /// Puts a completed chain, which ends with entry `last`, before the free entry `free_head`. It
    /// belongs to the batch that is published next.
    pub(super) fn link(&self, last: u16, free_head: u16) {
        interleave::mark_interleave_point();
        let at = self.start + self.layout.entry(last) + 2;
        self.map.u16_at(at).store(free_head, Ordering::Release);
    }

    /// Records where the list of free entries begins and the ring continues after the batch. Called
    /// before the batch is published.
    pub(super) fn prepare(&mut self, free_head: u16, used: PackedPosition) {
        (self.header.free_head, self.header.used) = (free_head, used);
        self.store_lists();
        self.store_positions();
        fence(Ordering::Release);
    }

    /// Clears the marks of a batch that was published.
    pub(super) fn end(&mut self, heads: impl Iterator<Item = u16>) {
        fence(Ordering::Release);
        heads.for_each(|head| self.unmark(head));
        (self.header.old_free_head, self.header.old_used) = (self.header.free_head, self.header.used);
        self.store_lists();
        self.store_positions();
    }
}
