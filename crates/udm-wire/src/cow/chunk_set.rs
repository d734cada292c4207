//! A set of chunks.

use std::collections::BTreeMap;

/// Chunks in a block: 64 bytes of bits.
const BLOCK: u64 = 512;

/// A set of chunks, a bit each in blocks of [`BLOCK`]. What is far apart takes a block of its own,
/// so that no number makes it large. What lies near what was put in last is found without a search.
#[derive(Clone, Debug, Default)]
pub struct ChunkSet {
    blocks: Vec<[u64; (BLOCK / 64) as usize]>,
    /// Where each block is.
    places: BTreeMap<u64, usize>,
    /// The block that was used last, and where it is.
    last: Option<(u64, usize)>,
}

impl ChunkSet {
    /// Puts `chunk` in; false when it is in already.
    #[inline]
    pub fn insert(&mut self, chunk: u64) -> bool {
        let place = match self.last {
            Some((block, place)) if block == chunk / BLOCK => place,
            _ => self.find(chunk / BLOCK),
        };
        let (word, bit) = (&mut self.blocks[place][(chunk % BLOCK / 64) as usize], 1 << (chunk % 64));
        let is_new = *word & bit == 0;
        *word |= bit;
        is_new
    }

    fn find(&mut self, block: u64) -> usize {
        let place = *self.places.entry(block).or_insert_with(|| {
            self.blocks.push(Default::default());
            self.blocks.len() - 1
        });
        self.last = Some((block, place));
        place
    }

    /// The chunks, in order.
    pub fn iter(&self) -> impl Iterator<Item = u64> {
        self.places.iter().flat_map(|(block, place)| {
            let words = &self.blocks[*place];
            let is_in = |bit: &u64| words[(bit / 64) as usize] & (1 << (bit % 64)) != 0;
            (0..BLOCK).filter(is_in).map(move |bit| block * BLOCK + bit)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_put_in_is_in_once_and_in_order() {
        let mut set = ChunkSet::default();
        let chunks = [0, u64::MAX, 511, 512, 1 << 40, 3, u64::MAX - 511, 513, u64::MAX - 512];
        for chunk in chunks {
            assert!(set.insert(chunk), "{chunk}");
        }
        for chunk in chunks {
            assert!(!set.insert(chunk), "{chunk}");
        }
        let mut sorted = chunks.to_vec();
        sorted.sort_unstable();
        assert_eq!(set.iter().collect::<Vec<_>>(), sorted);
    }
}
