//! A split ring in guest memory.
//!
//! The guest changes its parts at any time. Each index and descriptor is read once, and every value
//! that comes from the guest is checked before it is used.
//!
//! While the core is awake it looks at the ring itself and asks for no notification; see
//! `notifications`.

use super::notifications::NotificationWish;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use udm_buf::SharedMemoryMap;
use udm_core::interleave;
use udm_wire::virtio::ring::{DESCRIPTOR_SIZE, RingDescriptor, SplitRingLayout};

/// A part of a ring: a place in a mapping.
pub(super) type RingPart = (Arc<SharedMemoryMap>, usize);

/// The guest has broken the rules of the ring, so it cannot be used any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum BrokenRingError {
    #[error("the available ring has more entries than the ring")]
    TooManyAvailable,
    #[error("an entry of the available ring names no descriptor")]
    NoSuchDescriptor,
}

/// The device's side of a ring.
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
        }
    }

    /// Sets the index of the next available entry.
    pub(super) fn continue_at(&mut self, next_avail: u16) {
        self.next_avail = next_avail;
    }

    /// Index of the next available entry.
    pub(super) fn next_avail(&self) -> u16 {
        self.next_avail
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

    /// True if entries are available. Costs one load.
    pub(super) fn has_available(&self) -> bool {
        self.avail_index() != self.next_avail
    }

    /// Number of available entries.
    ///
    /// # Errors
    /// There are more than the ring has.
    pub(super) fn available(&self) -> Result<u16, BrokenRingError> {
        let count = self.avail_index().wrapping_sub(self.next_avail);
        if count > self.layout.size { Err(BrokenRingError::TooManyAvailable) } else { Ok(count) }
    }

    /// Takes the next available entry: the head of a chain of descriptors.
    ///
    /// # Errors
    /// The entry names no descriptor.
    pub(super) fn take(&mut self) -> Result<u16, BrokenRingError> {
        interleave::mark_interleave_point();
        let at = self.avail.1 + self.layout.avail_entry(self.next_avail);
        let head = u16::from_le(self.avail.0.u16_at(at).load(Ordering::Relaxed));
        if head >= self.layout.size {
            return Err(BrokenRingError::NoSuchDescriptor);
        }
        self.next_avail = self.next_avail.wrapping_add(1);
        Ok(head)
    }

    /// Reads descriptor `index`, which is below the size of the ring.
    pub(super) fn descriptor(&self, index: u16) -> RingDescriptor {
        interleave::mark_interleave_point();
        let at = (self.descriptors.1 + DESCRIPTOR_SIZE * usize::from(index)) / 8;
        let words = &self.descriptors.0.words()[at..at + 2];
        RingDescriptor::from_words([0, 1].map(|i| u64::from_le(words[i].load(Ordering::Relaxed))))
    }

    /// Writes a used entry. The guest sees it after [`SplitRing::publish`].
    pub(super) fn push_used(&mut self, head: u16, written: u32) {
        interleave::mark_interleave_point();
        let at = self.used.1 + self.layout.used_entry(self.next_used);
        self.used.0.u32_at(at).store(u32::from(head).to_le(), Ordering::Relaxed);
        self.used.0.u32_at(at + 4).store(written.to_le(), Ordering::Relaxed);
        self.next_used = self.next_used.wrapping_add(1);
    }

    /// Makes the written entries visible. Returns true if the guest wants to be notified.
    pub(super) fn publish(&mut self) -> bool {
        let old = std::mem::replace(&mut self.published, self.next_used);
        if old == self.next_used {
            return false;
        }
        let index = self.used.0.u16_at(self.used.1 + 2);
        self.guest_wish().publish(index, old, self.next_used)
    }

    /// Tells the guest that it need not notify. With event indices nothing is to be done: an index
    /// in the past causes no notification.
    pub(super) fn suppress_notifications(&self) {
        if !self.has_event_index {
            self.device_wish().withdraw();
        }
    }

    /// Asks the guest for a notification of the next entry. Returns true if there is one already.
    pub(super) fn request_notification(&self) -> bool {
        let next = self.next_avail;
        // Each arm knows the kind of the wish, which saves a second branch.
        match self.device_wish() {
            wish @ NotificationWish::Event(_) => wish.request(self.avail_index_word(), next),
            wish @ NotificationWish::Flags(_) => wish.request(self.avail_index_word(), next),
        }
    }
}
