//! Positions of the header and the bitmap in the metadata.

use super::{BLOCK_LEN, WORDS_PER_BLOCK};
use udm_core::{SECTOR_SIZE, Sector};

/// Sectors of a block.
const BLOCK_SECTORS: u64 = BLOCK_LEN as u64 / SECTOR_SIZE;

/// Number of headers.
const HEADERS: u64 = 2;

/// One of the two copies of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetadataCopy {
    /// The copy with the lower position.
    First,
    /// The copy with the higher position.
    Second,
}

impl MetadataCopy {
    /// Both copies.
    pub const ALL: [MetadataCopy; 2] = [MetadataCopy::First, MetadataCopy::Second];

    /// The other copy.
    #[must_use]
    pub fn other(self) -> MetadataCopy {
        match self {
            MetadataCopy::First => MetadataCopy::Second,
            MetadataCopy::Second => MetadataCopy::First,
        }
    }

    fn index(self) -> u64 {
        u64::from(self == MetadataCopy::Second)
    }
}

/// The layout of the metadata for a number of regions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CloneMetadataLayout {
    regions: u64,
}

impl CloneMetadataLayout {
    /// The layout for `regions` regions.
    #[must_use]
    pub fn new(regions: u64) -> CloneMetadataLayout {
        CloneMetadataLayout { regions }
    }

    /// Blocks of one copy of the bitmap.
    #[must_use]
    pub fn bitmap_blocks(self) -> u64 {
        self.regions.div_ceil(64 * WORDS_PER_BLOCK as u64)
    }

    /// Blocks of the whole metadata.
    #[must_use]
    pub fn blocks(self) -> u64 {
        HEADERS + 2 * self.bitmap_blocks()
    }

    /// Sectors of the whole metadata, the minimum size of its device.
    #[must_use]
    pub fn sectors(self) -> u64 {
        self.blocks() * BLOCK_SECTORS
    }

    /// The first sector of a copy of the header.
    #[must_use]
    pub fn header(self, copy: MetadataCopy) -> Sector {
        Sector(copy.index() * BLOCK_SECTORS)
    }

    /// The first sector of block `index` in a copy of the bitmap.
    #[must_use]
    pub fn bitmap(self, copy: MetadataCopy, index: u64) -> Sector {
        Sector((HEADERS + copy.index() * self.bitmap_blocks() + index) * BLOCK_SECTORS)
    }

    /// Words of block `index` of the bitmap in which bits may be set.
    #[must_use]
    pub fn words(self, index: u64) -> usize {
        let first = index * WORDS_PER_BLOCK as u64;
        self.regions.div_ceil(64).saturating_sub(first).min(WORDS_PER_BLOCK as u64) as usize
    }

    /// True if `block` is a block of this bitmap: no bit beyond the last region is set.
    #[must_use]
    pub fn accepts(self, block: &super::BitmapBlock) -> bool {
        let words = self.words(block.index);
        let beyond = block.words[words..].iter().any(|word| *word != 0);
        let last_bits = self.regions % 64;
        let is_last = block.index + 1 == self.bitmap_blocks();
        let tail = is_last && last_bits != 0 && words > 0 && block.words[words - 1] >> last_bits != 0;
        !beyond && !tail
    }
}
