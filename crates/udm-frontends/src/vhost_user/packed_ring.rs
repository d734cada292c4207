//! A packed ring in guest memory.
//!
//! The guest changes all of it at any time. Each descriptor is read once, and every value that
//! comes from the guest is checked before it is used. The ID of a chain may be anything: the slots
//! of requests are the ring's own.
//!
//! A slot is an entry of a list of free entries. A chain takes as many entries as it has
//! descriptors, as the record of requests in flight does (`packed_record`); so the chains in flight
//! never have more descriptors than the ring.

use super::chain::{BrokenChainError, DescriptorChain};
use super::event_suppression::{is_notification_wanted, request_notification, suppress_notifications};
use super::memory::GuestMemory;
use super::packed_record::{PackedInflightRecord, RecoveredPackedRing};
use super::virt_ring::{BrokenRingError, RingPart, VirtRing};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use udm_core::interleave;
use udm_wire::virtio::packed::{
    DESC_F_AVAIL, DESC_F_USED, PackedDescriptor, PackedPosition, encode_packed_base,
};
use udm_wire::virtio::ring::{DESC_F_WRITE, DESCRIPTOR_SIZE};

/// A chain in flight, by its slot.
#[derive(Clone, Copy, Debug, Default)]
struct PackedChain {
    /// Its last entry.
    last: u16,
    /// Number of its descriptors.
    num: u16,
    /// The ID that the guest has given it.
    id: u16,
}

/// The device's side of a packed ring.
pub(super) struct PackedRing {
    size: u16,
    descriptors: RingPart,
    driver_event: RingPart,
    device_event: RingPart,
    /// The guest and the device ask for notifications of a descriptor.
    has_event_index: bool,
    next_avail: PackedPosition,
    next_used: PackedPosition,
    /// Descriptors of chains that were taken and are not published.
    taken: u16,
    /// The next entry of each entry: of its chain, or of the list of free ones.
    links: Box<[u16]>,
    free_head: u16,
    chains: Box<[PackedChain]>,
    /// The descriptors of the chain that was taken last.
    descriptors_taken: Vec<PackedDescriptor>,
    /// Completed chains that are not published yet, with the bytes written.
    completed: Vec<(u16, u32)>,
    /// The guest may believe that a notification is wanted.
    asks_for_notifications: bool,
    record: Option<PackedInflightRecord>,
    /// Chains to submit again, the first one last.
    resubmit: Vec<u16>,
}

impl PackedRing {
    /// A ring of `size` descriptors in the given parts, whose sizes and alignments the caller has
    /// checked. Nothing is in flight, and it continues at `base`.
    pub(super) fn new(
        size: u16,
        [descriptors, driver_event, device_event]: [RingPart; 3],
        has_event_index: bool,
        base: PackedPosition,
    ) -> PackedRing {
        PackedRing {
            size,
            descriptors,
            driver_event,
            device_event,
            has_event_index,
            next_avail: base,
            next_used: base,
            taken: 0,
            links: (1..=size).collect(),
            free_head: 0,
            chains: vec![PackedChain::default(); usize::from(size)].into(),
            descriptors_taken: Vec::new(),
            completed: Vec::new(),
            asks_for_notifications: true,
            record: None,
            resubmit: Vec::new(),
        }
    }

    /// Position of the next available descriptor.
    pub(super) fn position(&self) -> PackedPosition {
        self.next_avail
    }

    /// True if no driver has ever used the ring: its last descriptor belongs to no round.
    pub(super) fn is_unused(&self) -> bool {
        self.flags(self.size - 1) & (DESC_F_AVAIL | DESC_F_USED) == 0
    }

    /// Continues where the last back end ended, as `record` says. False if the record is damaged.
    pub(super) fn continue_with(&mut self, mut record: PackedInflightRecord) -> bool {
        let Some(recovered) = record.recover(self.next_avail, |index| self.flags(index)) else {
            return false;
        };
        let RecoveredPackedRing { entries, found, free_head, used } = recovered;
        for head in &found.resubmit {
            let entry = &entries[usize::from(*head)];
            let id = entries[usize::from(entry.last)].descriptor.id;
            self.chains[usize::from(*head)] = PackedChain { last: entry.last, num: entry.num, id };
        }
        self.links.iter_mut().zip(&entries).for_each(|(link, entry)| *link = entry.next);
        (self.free_head, self.taken) = (free_head, found.taken);
        (self.next_used, self.next_avail) = (used, used.advanced(found.taken, self.size));
        // The last back end may have written a part of a batch and not its first descriptor. The
        // guest must not take that part for the descriptors that this one publishes.
        for ahead in 0..found.taken {
            let at = used.advanced(ahead, self.size);
            let flags = self.flags(at.index) & !(DESC_F_AVAIL | DESC_F_USED) | at.available_flags();
            interleave::mark_interleave_point();
            self.descriptors.0.u16_at(self.offset(at.index) + 14).store(flags.to_le(), Ordering::Relaxed);
        }
        self.resubmit = found.resubmit;
        self.resubmit.reverse();
        self.record = Some(record);
        true
    }

    /// Number of requests that the last back end has left.
    pub(super) fn left_in_flight(&self) -> usize {
        self.resubmit.len()
    }

    fn offset(&self, index: u16) -> usize {
        self.descriptors.1 + DESCRIPTOR_SIZE * usize::from(index)
    }

    fn flags(&self, index: u16) -> u16 {
        u16::from_le(self.descriptors.0.u16_at(self.offset(index) + 14).load(Ordering::Relaxed))
    }

    fn words(&self, index: u16) -> &[AtomicU64] {
        let at = self.offset(index) / 8;
        &self.descriptors.0.words()[at..at + 2]
    }

    /// Reads a descriptor. What the guest wrote before its flags is seen afterwards.
    #[inline(always)]
    fn descriptor(&self, index: u16) -> PackedDescriptor {
        interleave::mark_interleave_point();
        let words = self.words(index);
        let second = u64::from_le(words[1].load(Ordering::Acquire));
        let address = u64::from_le(words[0].load(Ordering::Relaxed));
        PackedDescriptor::from_words([address, second])
    }

    fn write_used(&self, at: PackedPosition, (slot, written): (u16, u32), order: Ordering) {
        interleave::mark_interleave_point();
        let is_written = if written > 0 { DESC_F_WRITE } else { 0 };
        let used = PackedDescriptor {
            address: 0,
            len: written,
            id: self.chains[usize::from(slot)].id,
            flags: at.used_flags() | is_written,
        };
        self.words(at.index)[1].store(used.second_word().to_le(), order);
    }

    fn driver_event(&self) -> &AtomicU32 {
        self.driver_event.0.u32_at(self.driver_event.1)
    }

    fn device_event(&self) -> &AtomicU32 {
        self.device_event.0.u32_at(self.device_event.1)
    }
}

impl VirtRing for PackedRing {
    fn slots(&self) -> usize {
        usize::from(self.size)
    }

    fn has_available(&self) -> bool {
        self.next_avail.is_available(self.descriptor(self.next_avail.index).flags)
    }

    /// The guest publishes each chain by itself, so their number is not known.
    fn available(&mut self) -> Result<usize, BrokenRingError> {
        Ok(usize::from(self.size))
    }

    fn take(&mut self) -> Result<Option<u16>, BrokenRingError> {
        let mut at = self.next_avail;
        let mut descriptor = self.descriptor(at.index);
        if !at.is_available(descriptor.flags) {
            return Ok(None);
        }
        let free = self.size - self.taken;
        let head = self.free_head;
        let mut last = head;
        self.descriptors_taken.clear();
        loop {
            if self.descriptors_taken.len() == usize::from(free) {
                return Err(BrokenRingError::TooManyDescriptors);
            }
            self.descriptors_taken.push(descriptor);
            at = at.advanced(1, self.size);
            if !descriptor.has_next() {
                break;
            }
            descriptor = self.descriptor(at.index);
            last = self.links[usize::from(last)];
        }
        let num = self.descriptors_taken.len() as u16;
        // VIRTIO 1.2, 2.8.6: the ID is in the last descriptor.
        self.chains[usize::from(head)] = PackedChain { last, num, id: descriptor.id };
        self.free_head = self.links[usize::from(last)];
        self.taken += num;
        self.next_avail = at;
        Ok(Some(head))
    }

    fn begin(&mut self, slot: u16) {
        if let Some(record) = &mut self.record {
            record.begin(slot, &self.descriptors_taken, &self.links);
        }
    }

    fn resubmit(&mut self) -> Option<u16> {
        let (head, record) = (self.resubmit.pop()?, self.record.as_ref()?);
        self.descriptors_taken.clear();
        let mut index = head;
        for _ in 0..self.chains[usize::from(head)].num {
            self.descriptors_taken.push(record.descriptor(index));
            index = self.links[usize::from(index)];
        }
        Some(head)
    }

    fn read_chain(
        &self,
        _: u16,
        memory: &GuestMemory,
        chain: &mut DescriptorChain,
    ) -> Result<(), BrokenChainError> {
        chain.read_packed(&self.descriptors_taken, memory)
    }

    fn push_used(&mut self, slot: u16, written: u32) {
        self.completed.push((slot, written));
    }

    fn publish(&mut self) -> Option<bool> {
        let first = *self.completed.first()?;
        let mut count = 0;
        for (slot, _) in &self.completed {
            let PackedChain { last, num, .. } = self.chains[usize::from(*slot)];
            if let Some(record) = &self.record {
                record.link(last, self.free_head);
            }
            self.links[usize::from(last)] = self.free_head;
            self.free_head = *slot;
            count += num;
        }
        let old = self.next_used;
        let new = old.advanced(count, self.size);
        if let Some(record) = &mut self.record {
            record.prepare(self.free_head, new);
        }
        // The guest looks at the first descriptor first, so the batch is published with that.
        let mut at = old.advanced(self.chains[usize::from(first.0)].num, self.size);
        for used in &self.completed[1..] {
            self.write_used(at, *used, Ordering::Relaxed);
            at = at.advanced(self.chains[usize::from(used.0)].num, self.size);
        }
        self.write_used(old, first, Ordering::Release);
        self.next_used = new;
        self.taken -= count;
        let is_wanted =
            is_notification_wanted(self.driver_event(), self.has_event_index, new, count, self.size);
        if let Some(record) = &mut self.record {
            record.end(self.completed.iter().map(|(slot, _)| *slot));
        }
        self.completed.clear();
        Some(is_wanted)
    }

    fn suppress_notifications(&mut self) {
        if std::mem::take(&mut self.asks_for_notifications) {
            suppress_notifications(self.device_event());
        }
    }

    fn request_notification(&mut self) -> bool {
        self.asks_for_notifications = true;
        let next = self.next_avail;
        request_notification(self.device_event(), self.has_event_index, next, || self.has_available())
    }

    fn base(&self) -> u32 {
        encode_packed_base(self.next_avail, self.next_used)
    }
}

#[cfg(test)]
mod tests;
