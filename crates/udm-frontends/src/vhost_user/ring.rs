//! A split ring in guest memory.
//!
//! The guest changes its parts at any time. Each index and descriptor is read once, and every value
//! that comes from the guest is checked before it is used.
//!
//! While the core is awake it looks at the ring itself and asks for no notification; see
//! `notifications`.

use super::chain::{BrokenChainError, DescriptorChain};
use super::inflight_record::InflightRecord;
use super::memory::GuestMemory;
use super::notifications::NotificationWish;
use super::virt_ring::{BrokenRingError, RingPart, VirtRing};
use std::sync::atomic::{AtomicU16, Ordering};
use udm_core::interleave;
use udm_wire::vhost_user::InflightRecovery;
use udm_wire::virtio::ring::{DESCRIPTOR_SIZE, RingDescriptor, SplitRingLayout};

/// The device's side of a split ring. A slot is the head of a chain.
pub(super) struct SplitRing {
    pub(super) layout: SplitRingLayout,
    descriptors: RingPart,
    avail: RingPart,
    used: RingPart,
    /// The guest and the device use `used_event` and `avail_event`.
    has_event_index: bool,
    /// Index of the next available entry to take.
    next_avail: u16,
    /// Index of the next used entry to write, and `idx` as it was last published.
    next_used: u16,
    published: u16,
    record: Option<InflightRecord>,
    /// Completed requests that are not published yet. Kept only for the record.
    completed: Vec<u16>,
    /// Requests to submit again, the first one last.
    resubmit: Vec<u16>,
}

impl SplitRing {
    /// A ring in the given parts, whose sizes and alignments the caller has checked. It continues
    /// at `next_avail`, and where the used ring ends now.
    pub(super) fn new(
        layout: SplitRingLayout,
        [descriptors, avail, used]: [RingPart; 3],
        has_event_index: bool,
        next_avail: u16,
    ) -> SplitRing {
        let next_used = u16::from_le(used.0.u16_at(used.1 + 2).load(Ordering::Acquire));
        SplitRing {
            layout,
            descriptors,
            avail,
            used,
            has_event_index,
            next_avail,
            next_used,
            published: next_used,
            record: None,
            completed: Vec::new(),
            resubmit: Vec::new(),
        }
    }

    /// Continues where the last back end ended, as `record` says.
    pub(super) fn continue_with(&mut self, record: InflightRecord, recovery: InflightRecovery) {
        self.next_avail = recovery.next_avail;
        self.resubmit = recovery.resubmit;
        self.resubmit.reverse();
        self.record = Some(record);
    }

    /// Number of requests that the last back end has left.
    pub(super) fn left_in_flight(&self) -> usize {
        self.resubmit.len()
    }

    /// Index of the next used entry.
    pub(super) fn next_used(&self) -> u16 {
        self.next_used
    }

    fn avail_index(&self) -> u16 {
        interleave::mark_interleave_point();
        u16::from_le(self.avail_index_word().load(Ordering::Acquire))
    }

    fn avail_index_word(&self) -> &AtomicU16 {
        self.avail.0.u16_at(self.avail.1 + 2)
    }

    /// The wish of the guest for notifications of used entries.
    #[inline(always)]
    fn guest_wish(&self) -> NotificationWish<'_, AtomicU16> {
        match self.has_event_index {
            true => NotificationWish::Event(self.avail.0.u16_at(self.avail.1 + self.layout.used_event())),
            false => NotificationWish::Flags(self.avail.0.u16_at(self.avail.1)),
        }
    }

    /// The wish of the device for notifications of available entries.
    #[inline(always)]
    fn device_wish(&self) -> NotificationWish<'_, AtomicU16> {
        match self.has_event_index {
            true => NotificationWish::Event(self.used.0.u16_at(self.used.1 + self.layout.avail_event())),
            false => NotificationWish::Flags(self.used.0.u16_at(self.used.1)),
        }
    }

    /// Reads descriptor `index`, which is below the size of the ring.
    pub(super) fn descriptor(&self, index: u16) -> RingDescriptor {
        interleave::mark_interleave_point();
        let at = (self.descriptors.1 + DESCRIPTOR_SIZE * usize::from(index)) / 8;
        let words = &self.descriptors.0.words()[at..at + 2];
        RingDescriptor::from_words([0, 1].map(|i| u64::from_le(words[i].load(Ordering::Relaxed))))
    }
}

impl VirtRing for SplitRing {
    fn slots(&self) -> usize {
        usize::from(self.layout.size)
    }

    fn has_available(&self) -> bool {
        self.avail_index() != self.next_avail
    }

    fn available(&mut self) -> Result<usize, BrokenRingError> {
        let count = self.avail_index().wrapping_sub(self.next_avail);
        if count > self.layout.size { Err(BrokenRingError::TooManyAvailable) } else { Ok(count.into()) }
    }

    /// Takes an entry, which [`SplitRing::available`] has counted.
    fn take(&mut self) -> Result<Option<u16>, BrokenRingError> {
        interleave::mark_interleave_point();
        let at = self.avail.1 + self.layout.avail_entry(self.next_avail);
        let head = u16::from_le(self.avail.0.u16_at(at).load(Ordering::Relaxed));
        if head >= self.layout.size {
            return Err(BrokenRingError::NoSuchDescriptor);
        }
        self.next_avail = self.next_avail.wrapping_add(1);
        Ok(Some(head))
    }

    fn begin(&mut self, head: u16) {
        if let Some(record) = &mut self.record {
            record.begin(head);
        }
    }

    fn resubmit(&mut self) -> Option<u16> {
        let head = self.resubmit.pop()?;
        self.begin(head);
        Some(head)
    }

    fn read_chain(
        &self,
        head: u16,
        memory: &GuestMemory,
        chain: &mut DescriptorChain,
    ) -> Result<(), BrokenChainError> {
        chain.read(self, memory, head)
    }

    /// Writes a used entry.
    fn push_used(&mut self, head: u16, written: u32) {
        if let Some(record) = &self.record {
            record.link(head);
            self.completed.push(head);
        }
        interleave::mark_interleave_point();
        let at = self.used.1 + self.layout.used_entry(self.next_used);
        self.used.0.u32_at(at).store(u32::from(head).to_le(), Ordering::Relaxed);
        self.used.0.u32_at(at + 4).store(written.to_le(), Ordering::Relaxed);
        self.next_used = self.next_used.wrapping_add(1);
    }

    fn publish(&mut self) -> Option<bool> {
        let old = std::mem::replace(&mut self.published, self.next_used);
        if old == self.next_used {
            return None;
        }
        let index = self.used.0.u16_at(self.used.1 + 2);
        let is_wanted = self.guest_wish().publish(index, old, self.next_used);
        if let Some(record) = &self.record {
            record.end(&self.completed, self.next_used);
            self.completed.clear();
        }
        Some(is_wanted)
    }

    /// With event indices nothing is to be done: an index in the past causes no notification.
    fn suppress_notifications(&mut self) {
        if !self.has_event_index {
            self.device_wish().withdraw();
        }
    }

    fn request_notification(&mut self) -> bool {
        let next = self.next_avail;
        // Each arm knows the kind of the wish, which saves a second branch.
        match self.device_wish() {
            wish @ NotificationWish::Event(_) => wish.request(self.avail_index_word(), next),
            wish @ NotificationWish::Flags(_) => wish.request(self.avail_index_word(), next),
        }
    }

    fn base(&self) -> u32 {
        self.next_avail.into()
    }
}
