//! A bitmap of blocks for requests of different lengths. It finds the next free block without a
//! scan of all blocks.

/// Blocks, each either free or taken.
#[derive(Clone)]
pub struct FreeBlockMap {
    /// The first level has one bit per block. Each further level has one bit per word of the level
    /// below, which is set if all bits of the word are. Bits after the last block are set.
    levels: Vec<Vec<u64>>,
    blocks: u64,
}

impl FreeBlockMap {
    /// Creates a map of `blocks` free blocks, at least one.
    pub fn new(blocks: u64) -> FreeBlockMap {
        let (mut levels, mut bits) = (Vec::new(), blocks);
        loop {
            let words = bits.div_ceil(64);
            levels.push(vec![0u64; words as usize]);
            if words == 1 {
                break;
            }
            bits = words;
        }
        let mut map = FreeBlockMap { levels, blocks };
        map.clear();
        map
    }

    /// Frees all blocks.
    pub fn clear(&mut self) {
        let mut bits = self.blocks;
        for words in &mut self.levels {
            words.fill(0);
            if let (Some(last), 1..) = (words.last_mut(), bits % 64) {
                *last = u64::MAX << (bits % 64);
            }
            bits = words.len() as u64;
        }
    }

    /// The first free block from `at` on. If there is none, the first free block of all.
    pub fn next_free(&self, at: u64) -> Option<u64> {
        self.free_from(at).or_else(|| self.free_from(0))
    }

    fn free_from(&self, mut at: u64) -> Option<u64> {
        let mut level = 0;
        loop {
            let word = self.levels.get(level)?.get((at / 64) as usize)?;
            let free = !word & (u64::MAX << (at % 64));
            if free == 0 {
                (level, at) = (level + 1, at / 64 + 1);
                continue;
            }
            at = at / 64 * 64 + u64::from(free.trailing_zeros());
            if level == 0 {
                return Some(at);
            }
            (level, at) = (level - 1, at * 64);
        }
    }

    /// Takes up to `most` contiguous free blocks from `at` on, and returns their number.
    pub fn take(&mut self, at: u64, most: u64) -> u64 {
        (at..at + most).take_while(|block| self.take_one(*block)).count() as u64
    }

    fn take_one(&mut self, block: u64) -> bool {
        let mut bit = block;
        for (level, words) in self.levels.iter_mut().enumerate() {
            let Some(word) = words.get_mut((bit / 64) as usize) else { return false };
            let mask = 1 << (bit % 64);
            if level == 0 && *word & mask != 0 {
                return false;
            }
            *word |= mask;
            if *word != u64::MAX {
                break;
            }
            bit /= 64;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_block_is_found_once() {
        for blocks in [1, 63, 64, 65, 4096, 4097, 300_000] {
            let mut map = FreeBlockMap::new(blocks);
            let memory = map.levels[0].as_ptr();
            for _ in 0..2 {
                let (mut left, mut at) = (blocks, 0);
                while let Some(free) = map.next_free(at) {
                    assert!(free < blocks);
                    let taken = map.take(free, 7);
                    assert!((1..=7).contains(&taken), "{taken} at {free} of {blocks}");
                    left -= taken;
                    at = (at + 48_271 * 64) % blocks;
                }
                assert_eq!(left, 0, "of {blocks}");
                map.clear();
            }
            assert_eq!(map.levels[0].as_ptr(), memory, "the next pass has the same");
        }
    }

    #[test]
    fn what_is_taken_ends_a_run() {
        let mut map = FreeBlockMap::new(100);
        assert_eq!((map.take(10, 5), map.take(5, 20), map.take(98, 9)), (5, 5, 2));
        assert_eq!((map.take(10, 1), map.next_free(5), map.next_free(98)), (0, Some(15), Some(0)));
    }
}
