//! A set of chunks.

use std::collections::BTreeMap;

/// Chunks in a block: 64 bytes of bits.
const BLOCK: u64 = 512;

/// A set of chunks, a bit each in blocks of [`BLOCK`]. What is far apart takes a block of its own,
/// so that no number makes it large.
#[derive(Clone, Debug, Default)]
pub struct ChunkSet {
    blocks: BTreeMap<u64, [u64; (BLOCK / 64) as usize]>,
}

impl ChunkSet {
    /// Puts `chunk` in; false when it is in already.
    pub fn insert(&mut self, chunk: u64) -> bool {
        let block = self.blocks.entry(chunk / BLOCK).or_default();
        let (word, bit) = (&mut block[(chunk % BLOCK / 64) as usize], 1 << (chunk % 64));
        let is_new = *word & bit == 0;
        *word |= bit;
        is_new
    }

    /// The chunks, in order.
    pub fn iter(&self) -> impl Iterator<Item = u64> {
        self.blocks.iter().flat_map(|(block, words)| {
            let is_in = |bit: &u64| words[(bit / 64) as usize] & (1 << (bit % 64)) != 0;
            (0..BLOCK).filter(is_in).map(move |bit| block * BLOCK + bit)
        })
    }
}
