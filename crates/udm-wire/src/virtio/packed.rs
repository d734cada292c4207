//! The packed ring (VIRTIO 1.2, section 2.8): descriptors, positions and event suppression.
//!
//! There is one table of descriptors. The driver adds chains one behind the other, and the device
//! writes used descriptors over them, in the order of completion. Both go round the table. Each
//! round has a wrap counter, a bit that changes at the end of the table: two bits of each
//! descriptor say in which round it was made available, and in which it was used.

use super::ring::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, needs_event};

/// `flags` of a descriptor: the wrap counter of the driver when it was made available.
pub const DESC_F_AVAIL: u16 = 1 << 7;
/// `flags` of a descriptor: the wrap counter of the device when it was used, and the inverse one
/// when it was made available.
pub const DESC_F_USED: u16 = 1 << 15;

/// Bytes of an event suppression structure, which is aligned to 4.
pub const EVENT_SUPPRESSION_SIZE: usize = 4;

/// `flags` of an event suppression structure: notify always.
pub const EVENT_F_ENABLE: u16 = 0;
/// `flags` of an event suppression structure: do not notify.
pub const EVENT_F_DISABLE: u16 = 1;
/// `flags` of an event suppression structure: notify for one descriptor (`EVENT_IDX` only).
pub const EVENT_F_DESC: u16 = 2;

/// A wrap counter above 15 bits of a position.
const WRAP: u16 = 1 << 15;

/// A descriptor of a packed ring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PackedDescriptor {
    /// Address of the buffer in guest memory.
    pub address: u64,
    /// Length of the buffer in bytes; of a used descriptor, the bytes that the device has written.
    pub len: u32,
    /// ID of the chain, in its last descriptor and in the used one.
    pub id: u16,
    /// `DESC_F_*`.
    pub flags: u16,
}

impl PackedDescriptor {
    /// Decodes a descriptor from its two 64-bit words, as numbers.
    #[must_use]
    pub const fn from_words(words: [u64; 2]) -> PackedDescriptor {
        let [address, second] = words;
        PackedDescriptor {
            address,
            len: second as u32,
            id: (second >> 32) as u16,
            flags: (second >> 48) as u16,
        }
    }

    /// The second of the two words of the descriptor, as a number: all but the address.
    #[must_use]
    pub const fn second_word(&self) -> u64 {
        self.len as u64 | (self.id as u64) << 32 | (self.flags as u64) << 48
    }

    /// True if the next descriptor of the ring continues the chain.
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

/// A position in a packed ring: a descriptor, and the wrap counter of the round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedPosition {
    /// Index of the descriptor.
    pub index: u16,
    /// The wrap counter.
    pub wrap: bool,
}

impl PackedPosition {
    /// The first position of driver and device.
    pub const START: PackedPosition = PackedPosition { index: 0, wrap: true };

    /// Decodes a position: 15 bits of the index below the wrap counter.
    #[must_use]
    pub const fn decode(bits: u16) -> PackedPosition {
        PackedPosition { index: bits & !WRAP, wrap: bits & WRAP != 0 }
    }

    /// Encodes the position.
    #[must_use]
    pub const fn encode(self) -> u16 {
        self.index | if self.wrap { WRAP } else { 0 }
    }

    /// The position `count` descriptors further in a ring of `size`; `count` is at most `size`.
    #[must_use]
    pub const fn advanced(self, count: u16, size: u16) -> PackedPosition {
        let index = self.index as u32 + count as u32;
        match index >= size as u32 {
            true => PackedPosition { index: (index - size as u32) as u16, wrap: !self.wrap },
            false => PackedPosition { index: index as u16, wrap: self.wrap },
        }
    }

    /// True if a descriptor with `flags` at this position was made available in this round.
    #[must_use]
    pub const fn is_available(self, flags: u16) -> bool {
        (flags & DESC_F_AVAIL != 0) == self.wrap && (flags & DESC_F_USED != 0) != self.wrap
    }

    /// True if a descriptor with `flags` at this position was used in this round.
    #[must_use]
    pub const fn is_used(self, flags: u16) -> bool {
        (flags & DESC_F_AVAIL != 0) == self.wrap && (flags & DESC_F_USED != 0) == self.wrap
    }

    /// The two bits of a descriptor that is made available at this position.
    #[must_use]
    pub const fn available_flags(self) -> u16 {
        if self.wrap { DESC_F_AVAIL } else { DESC_F_USED }
    }

    /// The two bits of a descriptor that is used at this position.
    #[must_use]
    pub const fn used_flags(self) -> u16 {
        if self.wrap { DESC_F_AVAIL | DESC_F_USED } else { 0 }
    }
}

/// `num` of `SET_VRING_BASE` and of the reply to `GET_VRING_BASE`: the next available descriptor
/// below the next used one (`vhost-user.rst`, "A vring descriptor index for packed virtqueues").
#[must_use]
pub const fn encode_packed_base(available: PackedPosition, used: PackedPosition) -> u32 {
    available.encode() as u32 | (used.encode() as u32) << 16
}

/// When a side of a ring wants to be notified: an event suppression structure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventSuppression {
    /// The descriptor for which a notification is wanted, with [`EVENT_F_DESC`].
    pub position: PackedPosition,
    /// `EVENT_F_*`.
    pub flags: u16,
}

impl EventSuppression {
    /// Decodes the structure from its 32 bits, as a number.
    #[must_use]
    pub const fn from_word(word: u32) -> EventSuppression {
        EventSuppression { position: PackedPosition::decode(word as u16), flags: (word >> 16) as u16 }
    }

    /// The 32 bits of the structure, as a number.
    #[must_use]
    pub const fn to_word(self) -> u32 {
        self.position.encode() as u32 | (self.flags as u32) << 16
    }

    /// True if the side with this structure wants to be notified of `count` descriptors of a ring
    /// of `size` that end before `new`.
    #[must_use]
    pub const fn is_notified(self, new: PackedPosition, count: u16, size: u16) -> bool {
        match self.flags {
            EVENT_F_DISABLE => false,
            EVENT_F_DESC => {
                let PackedPosition { index, wrap } = self.position;
                // A descriptor of the round before is that far before the start of this one.
                let event = if wrap == new.wrap { index } else { index.wrapping_sub(size) };
                needs_event(event, new.index, new.index.wrapping_sub(count))
            }
            // 3 is reserved.
            _ => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_are_as_the_specification_has_them() {
        let bytes: [u8; 16] = [8, 7, 6, 5, 4, 3, 2, 1, 0x00, 0x10, 0, 0, 0x34, 0x12, 0x83, 0];
        let words = [0, 8].map(|at| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()));
        let descriptor = PackedDescriptor::from_words(words);
        let flags = DESC_F_NEXT | DESC_F_WRITE | DESC_F_AVAIL;
        let expected = PackedDescriptor { address: 0x0102_0304_0506_0708, len: 4096, id: 0x1234, flags };
        assert_eq!((descriptor, descriptor.second_word()), (expected, words[1]));
        assert!(descriptor.has_next() && descriptor.is_writable() && !descriptor.is_indirect());
    }

    /// VIRTIO 1.2, section 2.8.1: which bits mean available and used in each round.
    #[test]
    fn the_wrap_counter_changes_at_the_end_of_the_ring() {
        let at = |index, wrap| PackedPosition { index, wrap };
        assert_eq!(PackedPosition::START.advanced(4, 5), at(4, true));
        assert_eq!(at(4, true).advanced(1, 5), at(0, false));
        assert_eq!(at(3, false).advanced(5, 5), at(3, true), "a whole round");
        for (wrap, available, used) in
            [(true, DESC_F_AVAIL, DESC_F_AVAIL | DESC_F_USED), (false, DESC_F_USED, 0)]
        {
            let position = at(7, wrap);
            assert_eq!((position.available_flags(), position.used_flags()), (available, used));
            for flags in [0, DESC_F_AVAIL, DESC_F_USED, DESC_F_AVAIL | DESC_F_USED] {
                assert_eq!(position.is_available(flags | 7), flags == available, "{wrap} {flags:x}");
                assert_eq!(position.is_used(flags | 7), flags == used, "{wrap} {flags:x}");
            }
            assert_eq!(PackedPosition::decode(position.encode()), position);
        }
        assert_eq!(encode_packed_base(PackedPosition::START, PackedPosition::START), 0x8000_8000);
        assert_eq!(encode_packed_base(at(3, false), at(2, true)), 0x8002_0003);
    }

    #[test]
    fn a_notification_is_wanted_if_its_descriptor_was_passed() {
        let at = |index, wrap| PackedPosition { index, wrap };
        let asks = |flags, position| EventSuppression { position, flags };
        let for_4 = asks(EVENT_F_DESC, at(4, true));
        assert_eq!(EventSuppression::from_word(for_4.to_word()), for_4);
        assert_eq!(for_4.to_word(), 0x0002_8004);
        assert!(for_4.is_notified(at(5, true), 1, 8) && for_4.is_notified(at(7, true), 3, 8));
        assert!(!for_4.is_notified(at(4, true), 2, 8), "it is the next one");
        assert!(!for_4.is_notified(at(6, true), 1, 8), "it was passed before");
        assert!(for_4.is_notified(at(1, false), 5, 8), "over the end of the ring");
        assert!(!for_4.is_notified(at(1, false), 4, 8), "the batch began behind it");
        assert!(!asks(EVENT_F_DESC, at(2, false)).is_notified(at(7, true), 4, 8), "the next round");
        assert!(asks(EVENT_F_ENABLE, at(0, true)).is_notified(at(3, true), 1, 8));
        assert!(!asks(EVENT_F_DISABLE, at(2, true)).is_notified(at(3, true), 1, 8));
    }
}
