//! The record of requests in flight of a packed ring (`vhost-user.rst`, "Inflight I/O tracking",
//! packed virtqueue).
//!
//! The device overwrites descriptors before their requests complete, so the record has a copy of
//! each descriptor that was taken. An entry is free, or holds a descriptor; free entries are a
//! list. The part of a ring is a header and the entries:
//!
//! ```text
//! header: features u64 | version u16 | desc_num u16 | free_head u16 | old_free_head u16
//!         used_idx u16 | old_used_idx u16 | used_wrap u8 | old_used_wrap u8 | padding
//! entry:  inflight u8 | padding u8 | next u16 | last u16 | num u16 | counter u64
//!         id u16 | flags u16 | len u32 | addr u64
//! ```
//!
//! The fields that change together are in one word of 64 bits, so each change is one store.

use super::INFLIGHT_VERSION;
use crate::virtio::packed::{PackedDescriptor, PackedPosition};

const HEADER: usize = 32;
const ENTRY: usize = 32;
/// Alignment of the parts of rings.
const ALIGN: usize = 64;

/// Byte offsets in an area for packed rings of `ring_size` entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedInflightLayout {
    /// Number of entries of each ring.
    pub ring_size: u16,
}

impl PackedInflightLayout {
    /// Offset of the word with `version`, `desc_num`, `free_head` and `old_free_head`.
    pub const LISTS: usize = 8;
    /// Offset of the word with the used positions.
    pub const POSITIONS: usize = 16;

    /// Bytes of the part of one ring.
    #[must_use]
    pub const fn part_len(self) -> usize {
        (HEADER + ENTRY * self.ring_size as usize).next_multiple_of(ALIGN)
    }

    /// Offset of an entry. Its words: state, counter, descriptor without its address, address.
    #[must_use]
    pub const fn entry(self, index: u16) -> usize {
        HEADER + ENTRY * index as usize
    }
}

/// The header of the part of a ring, without the version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedInflightHeader {
    /// Number of entries.
    pub ring_size: u16,
    /// The first free entry; `ring_size` or more if there is none.
    pub free_head: u16,
    /// The first free entry before the batch that is being published.
    pub old_free_head: u16,
    /// Position of the next used descriptor.
    pub used: PackedPosition,
    /// The position before the batch that is being published.
    pub old_used: PackedPosition,
}

impl PackedInflightHeader {
    /// Decodes the words at [`PackedInflightLayout::LISTS`] and
    /// [`PackedInflightLayout::POSITIONS`]; `None` if the version is another one.
    #[must_use]
    pub fn from_words([lists, positions]: [u64; 2]) -> Option<PackedInflightHeader> {
        let word = |of: u64, at: usize| u16::from_ne_bytes([of.to_ne_bytes()[at], of.to_ne_bytes()[at + 1]]);
        let wrap = |at: usize| positions.to_ne_bytes()[at] != 0;
        let position = |at, wrap| PackedPosition { index: word(positions, at), wrap };
        (word(lists, 0) == INFLIGHT_VERSION).then(|| PackedInflightHeader {
            ring_size: word(lists, 2),
            free_head: word(lists, 4),
            old_free_head: word(lists, 6),
            used: position(0, wrap(4)),
            old_used: position(2, wrap(5)),
        })
    }

    /// The word at [`PackedInflightLayout::LISTS`].
    #[must_use]
    pub fn lists(&self) -> u64 {
        let mut bytes = [0; 8];
        let fields = [INFLIGHT_VERSION, self.ring_size, self.free_head, self.old_free_head];
        fields
            .iter()
            .zip(bytes.chunks_mut(2))
            .for_each(|(field, out)| out.copy_from_slice(&field.to_ne_bytes()));
        u64::from_ne_bytes(bytes)
    }

    /// The word at [`PackedInflightLayout::POSITIONS`].
    #[must_use]
    pub fn positions(&self) -> u64 {
        let mut bytes = [0; 8];
        bytes[..2].copy_from_slice(&self.used.index.to_ne_bytes());
        bytes[2..4].copy_from_slice(&self.old_used.index.to_ne_bytes());
        (bytes[4], bytes[5]) = (self.used.wrap.into(), self.old_used.wrap.into());
        u64::from_ne_bytes(bytes)
    }
}

/// An entry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PackedInflightEntry {
    /// The request whose chain begins with this entry is in flight, unless the entry is free.
    pub is_inflight: bool,
    /// The next entry of the chain, or the next free one.
    pub next: u16,
    /// The last entry of the chain that begins here.
    pub last: u16,
    /// Number of entries of the chain that begins here.
    pub num: u16,
    /// Order in which chains were taken.
    pub counter: u64,
    /// The descriptor.
    pub descriptor: PackedDescriptor,
}

impl PackedInflightEntry {
    /// Decodes the words of an entry.
    #[must_use]
    pub fn from_words([state, counter, descriptor, address]: [u64; 4]) -> PackedInflightEntry {
        let (state, bytes) = (state.to_ne_bytes(), descriptor.to_ne_bytes());
        let word = |of: [u8; 8], at: usize| u16::from_ne_bytes([of[at], of[at + 1]]);
        PackedInflightEntry {
            is_inflight: state[0] == 1,
            next: word(state, 2),
            last: word(state, 4),
            num: word(state, 6),
            counter,
            descriptor: PackedDescriptor {
                address,
                len: u32::from_ne_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]),
                id: word(bytes, 0),
                flags: word(bytes, 2),
            },
        }
    }

    /// The words of the entry.
    #[must_use]
    pub fn to_words(&self) -> [u64; 4] {
        let PackedDescriptor { address, len, id, flags } = self.descriptor;
        let mut state = [u8::from(self.is_inflight), 0, 0, 0, 0, 0, 0, 0];
        state[2..4].copy_from_slice(&self.next.to_ne_bytes());
        state[4..6].copy_from_slice(&self.last.to_ne_bytes());
        state[6..].copy_from_slice(&self.num.to_ne_bytes());
        let mut descriptor = [0; 8];
        descriptor[..2].copy_from_slice(&id.to_ne_bytes());
        descriptor[2..4].copy_from_slice(&flags.to_ne_bytes());
        descriptor[4..].copy_from_slice(&len.to_ne_bytes());
        [u64::from_ne_bytes(state), self.counter, u64::from_ne_bytes(descriptor), address]
    }
}

/// What a new back end finds in the entries of a ring.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedInflightRecovery {
    /// The first entries of the chains to submit again, in the order in which they were taken.
    pub resubmit: Vec<u16>,
    /// The free entries.
    pub free: Vec<u16>,
    /// Descriptors of the chains in flight.
    pub taken: u16,
    /// The next counter.
    pub next_counter: u64,
}

/// Returns what was in flight when the last back end ended, given the list of free entries from
/// `free_head` on. `None` if an entry is neither free nor in exactly one chain: no back end leaves
/// such a record.
#[must_use]
pub fn recover_packed_inflight_requests(
    entries: &[PackedInflightEntry],
    free_head: u16,
) -> Option<PackedInflightRecovery> {
    let mut is_seen = vec![false; entries.len()];
    let mut see = |index: u16| {
        let seen = is_seen.get_mut(usize::from(index))?;
        (!std::mem::replace(seen, true)).then_some(())
    };
    let mut free = Vec::new();
    let mut index = free_head;
    while let Some(entry) = entries.get(usize::from(index)) {
        see(index)?;
        free.push(index);
        index = entry.next;
    }
    let mut resubmit: Vec<u16> = (0..entries.len() as u16)
        .filter(|index| entries[usize::from(*index)].is_inflight && !free.contains(index))
        .collect();
    let mut taken = 0;
    for head in &resubmit {
        let PackedInflightEntry { num, last, .. } = entries[usize::from(*head)];
        let mut index = *head;
        for at in 0..num {
            see(index)?;
            match at + 1 == num {
                true if index != last => return None,
                true => {}
                false => index = entries[usize::from(index)].next,
            }
        }
        taken += num;
    }
    if free.len() + usize::from(taken) != entries.len() {
        return None;
    }
    resubmit.sort_by_key(|head| entries[usize::from(*head)].counter);
    let next_counter = entries.iter().map(|entry| entry.counter).max().map_or(0, |max| max.wrapping_add(1));
    Some(PackedInflightRecovery { resubmit, free, taken, next_counter })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_layout_is_that_of_the_specification() {
        let layout = PackedInflightLayout { ring_size: 128 };
        assert_eq!((layout.part_len(), layout.entry(0), layout.entry(127)), (4160, 32, 4096));
        assert_eq!(PackedInflightLayout { ring_size: 1 }.part_len(), 64);
        let header = PackedInflightHeader {
            ring_size: 128,
            free_head: 3,
            old_free_head: 4,
            used: PackedPosition { index: 0x102, wrap: false },
            old_used: PackedPosition { index: 0x304, wrap: true },
        };
        let words = [header.lists(), header.positions()];
        if cfg!(target_endian = "little") {
            assert_eq!(words, [0x0004_0003_0080_0001, 0x0000_0100_0304_0102]);
        }
        assert_eq!(PackedInflightHeader::from_words(words), Some(header));
        assert_eq!(PackedInflightHeader::from_words([0, words[1]]), None);
        let descriptor = PackedDescriptor { address: 5, len: 0x0607_0809, id: 0x0a0b, flags: 0x0c0d };
        let entry = PackedInflightEntry {
            is_inflight: true,
            next: 0x0102,
            last: 0x0304,
            num: 0x0506,
            counter: 9,
            descriptor,
        };
        if cfg!(target_endian = "little") {
            assert_eq!(entry.to_words(), [0x0506_0304_0102_0001, 9, 0x0607_0809_0c0d_0a0b, 5]);
        }
        assert_eq!(PackedInflightEntry::from_words(entry.to_words()), entry);
    }

    fn entry(is_inflight: bool, next: u16, last: u16, num: u16, counter: u64) -> PackedInflightEntry {
        PackedInflightEntry { is_inflight, next, last, num, counter, ..PackedInflightEntry::default() }
    }

    #[test]
    fn requests_in_flight_are_submitted_again_in_their_order() {
        // Two chains, 2-0 and 4, and the free entries 3 and 1. Entry 3 was in flight before.
        let entries = [
            entry(false, 77, 0, 0, 0),
            entry(false, 5, 0, 0, 8),
            entry(true, 0, 0, 2, 7),
            entry(true, 1, 3, 1, 9),
            entry(true, 3, 4, 1, 5),
        ];
        let found = recover_packed_inflight_requests(&entries, 3).unwrap();
        assert_eq!((found.resubmit, found.free), (vec![4, 2], vec![3, 1]));
        assert_eq!((found.taken, found.next_counter), (3, 10));
        let full = [entry(true, 1, 1, 2, 0), entry(false, 0, 0, 0, 0)];
        assert_eq!(recover_packed_inflight_requests(&full, 2).unwrap().free, Vec::<u16>::new());
        assert_eq!(recover_packed_inflight_requests(&[], 0).unwrap().taken, 0);
    }

    #[test]
    fn damaged_records_are_refused() {
        let refused = |entries: &[PackedInflightEntry], free_head| {
            assert_eq!(recover_packed_inflight_requests(entries, free_head), None);
        };
        refused(&[entry(false, 0, 0, 0, 0)], 0);
        refused(&[entry(false, 1, 0, 0, 0), entry(false, 0, 0, 0, 0)], 0);
        // In no list, in two, a chain that is longer than the ring, and one with another end.
        refused(&[entry(false, 9, 0, 0, 0)], 1);
        refused(&[entry(true, 1, 1, 2, 0), entry(false, 9, 0, 0, 0)], 1);
        refused(&[entry(true, 0, 0, 3, 0)], 1);
        refused(&[entry(true, 5, 0, u16::MAX, 0)], 1);
        refused(&[entry(true, 1, 0, 2, 0), entry(false, 9, 0, 0, 0)], 2);
        refused(&[entry(true, 1, 1, 2, 0), entry(true, 9, 1, 1, 0)], 2);
        refused(&[entry(true, 1, 0, 0, 0)], 1);
    }
}
