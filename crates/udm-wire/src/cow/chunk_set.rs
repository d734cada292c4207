//! A set of chunks.

use std::collections::BTreeMap;

/// Chunks in a block: 64 bytes of bits.
const BLOCK: u64 = 512;

/// A set of chunks, one bit per chunk in blocks of [`BLOCK`]. Distant chunks use separate blocks,
/// so a large chunk number does not make the set large. A chunk near the last insertion is found
/// without a search.
#[derive(Clone, Debug, Default)]
pub struct SparseChunkBitmap {
    blocks: Vec<[u64; (BLOCK / 64) as usize]>,
    /// The index in `blocks` of each block number.
    places: BTreeMap<u64, usize>,
    /// The block that was used last, and its index in `blocks`.
    last: Option<(u64, usize)>,
}

impl SparseChunkBitmap {
    /// Inserts `chunk`. Returns false if it is already in the set.
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

    /// The chunks in ascending order.
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
        let mut set = SparseChunkBitmap::default();
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
