//! The split ring (VIRTIO 1.2, section 2.7): places of its parts in memory, and its arithmetic.
//!
//! Indices are free-running 16-bit counters. The entry of index `i` is at `i` modulo the size of the
//! ring, which is a power of two.

/// The largest size of a ring (VIRTIO 1.2, section 2.7).
pub const RING_SIZE_MAX: u16 = 32_768;

/// Bytes per descriptor.
pub const DESCRIPTOR_SIZE: usize = 16;

/// Bytes per entry of the used ring.
pub const USED_ENTRY_SIZE: usize = 8;

/// `flags` of a descriptor: the chain continues at `next`.
pub const DESC_F_NEXT: u16 = 1;
/// `flags` of a descriptor: the device writes to the buffer.
pub const DESC_F_WRITE: u16 = 2;
/// `flags` of a descriptor: the buffer is a table of descriptors.
pub const DESC_F_INDIRECT: u16 = 4;

/// `flags` of the available ring: the driver wants no notification.
pub const AVAIL_F_NO_INTERRUPT: u16 = 1;
/// `flags` of the used ring: the device wants no notification.
pub const USED_F_NO_NOTIFY: u16 = 1;

/// A descriptor of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingDescriptor {
    /// Address of the buffer in guest memory.
    pub address: u64,
    /// Length of the buffer in bytes.
    pub len: u32,
    /// `DESC_F_*`.
    pub flags: u16,
    /// The next descriptor of the chain, if `flags` has [`DESC_F_NEXT`].
    pub next: u16,
}

impl RingDescriptor {
    /// Decodes a descriptor from its two 64-bit words, as numbers.
    #[must_use]
    pub const fn from_words(words: [u64; 2]) -> RingDescriptor {
        RingDescriptor {
            address: words[0],
            len: words[1] as u32,
            flags: (words[1] >> 32) as u16,
            next: (words[1] >> 48) as u16,
        }
    }

    /// True if the chain continues at `next`.
    #[must_use]
    pub const fn has_next(&self) -> bool {
        self.flags & DESC_F_NEXT != 0
    }

    /// True if the device writes to the buffer.
    #[must_use]
    pub const fn is_writable(&self) -> bool {
        self.flags & DESC_F_WRITE != 0
    }

    /// True if the buffer is a table of descriptors.
    #[must_use]
    pub const fn is_indirect(&self) -> bool {
        self.flags & DESC_F_INDIRECT != 0
    }
}

/// Byte offsets in the parts of a ring of `size` entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SplitRingLayout {
    /// Number of entries: a power of two, 1 to [`RING_SIZE_MAX`].
    pub size: u16,
}

impl SplitRingLayout {
    /// Returns the layout of a ring of `size` entries; `None` if there is no such ring.
    #[must_use]
    pub fn new(size: u32) -> Option<SplitRingLayout> {
        let size = u16::try_from(size).ok().filter(|n| n.is_power_of_two() && *n <= RING_SIZE_MAX)?;
        Some(SplitRingLayout { size })
    }

    /// Bytes of the descriptor table, which is aligned to 16.
    #[must_use]
    pub const fn descriptors_len(self) -> usize {
        self.size as usize * DESCRIPTOR_SIZE
    }

    /// Bytes of the available ring with `used_event`; aligned to 2.
    #[must_use]
    pub const fn avail_len(self) -> usize {
        6 + 2 * self.size as usize
    }

    /// Bytes of the used ring with `avail_event`; aligned to 4.
    #[must_use]
    pub const fn used_len(self) -> usize {
        6 + USED_ENTRY_SIZE * self.size as usize
    }

    /// Offset of the entry of `index` in the available ring. `flags` is at 0 and `idx` at 2.
    #[must_use]
    pub const fn avail_entry(self, index: u16) -> usize {
        4 + 2 * (index & (self.size - 1)) as usize
    }

    /// Offset of `used_event` in the available ring.
    #[must_use]
    pub const fn used_event(self) -> usize {
        4 + 2 * self.size as usize
    }

    /// Offset of the entry of `index` in the used ring. `flags` is at 0 and `idx` at 2.
    #[must_use]
    pub const fn used_entry(self, index: u16) -> usize {
        4 + USED_ENTRY_SIZE * (index & (self.size - 1)) as usize
    }

    /// Offset of `avail_event` in the used ring.
    #[must_use]
    pub const fn avail_event(self) -> usize {
        4 + USED_ENTRY_SIZE * self.size as usize
    }
}

/// True if the other side wants a notification: its `event` index is one of those from `old` up to,
/// not including, `new` (VIRTIO 1.2, section 2.7.7.1).
#[must_use]
pub const fn needs_event(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_are_as_the_specification_has_them() {
        let bytes: [u8; 16] = [8, 7, 6, 5, 4, 3, 2, 1, 0x00, 0x10, 0, 0, 3, 0, 0x34, 0x12];
        let words = [0, 8].map(|at| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()));
        let descriptor = RingDescriptor::from_words(words);
        let expected = RingDescriptor { address: 0x0102_0304_0506_0708, len: 4096, flags: 3, next: 0x1234 };
        assert_eq!(descriptor, expected);
        assert!(descriptor.has_next() && descriptor.is_writable() && !descriptor.is_indirect());
    }

    #[test]
    fn parts_have_the_sizes_of_the_specification() {
        let ring = SplitRingLayout::new(256).unwrap();
        assert_eq!((ring.descriptors_len(), ring.avail_len(), ring.used_len()), (4096, 518, 2054));
        assert_eq!((ring.avail_entry(0), ring.avail_entry(257), ring.used_event()), (4, 6, 516));
        assert_eq!((ring.used_entry(1), ring.used_entry(u16::MAX), ring.avail_event()), (12, 2044, 2052));
        for size in [0, 3, 100, 65_536, u32::MAX] {
            assert_eq!(SplitRingLayout::new(size), None, "{size}");
        }
        assert!(SplitRingLayout::new(1).is_some() && SplitRingLayout::new(32_768).is_some());
    }

    #[test]
    fn an_event_is_needed_if_its_index_was_passed() {
        assert!(needs_event(5, 6, 5), "the entry of the event was just added");
        assert!(!needs_event(6, 6, 5), "the event is in the future");
        assert!(!needs_event(4, 6, 5), "it was reported before");
        assert!(needs_event(65_535, 2, 65_530), "over the wrap");
        assert!(!needs_event(3, 3, 3), "nothing was added");
    }
}
