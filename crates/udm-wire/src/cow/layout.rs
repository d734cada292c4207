//! Where things are in a store.

use super::RECORD_LEN;
use thiserror::Error;
use udm_core::{SECTOR_SIZE, Sectors};

/// The size of a chunk: a power of two of sectors, below 2^31 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ChunkSize(u32);

/// Why a number of sectors is no size of a chunk, in the kernel's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ChunkSizeError {
    /// 0, or several bits.
    #[error("Chunk size is not a power of 2")]
    NotAPower,
    /// 2^31 bytes or more.
    #[error("Chunk size is too high")]
    TooHigh,
    /// Smaller than a block of the devices, or no multiple.
    #[error("Chunk size is not a multiple of device blocksize")]
    NotBlocks,
}

impl ChunkSize {
    /// What a new store gets for which nobody said anything: 16 KiB.
    pub const DEFAULT: ChunkSize = ChunkSize(32);
    /// The largest: 1 GiB.
    pub const MAX: ChunkSize = ChunkSize(1 << 21);

    /// A chunk of so many sectors.
    ///
    /// # Errors
    /// In the kernel's order: no power of two, then too large.
    pub fn new(sectors: u64) -> Result<ChunkSize, ChunkSizeError> {
        if !sectors.is_power_of_two() {
            return Err(ChunkSizeError::NotAPower);
        }
        match u32::try_from(sectors) {
            Ok(sectors) if sectors <= ChunkSize::MAX.0 => Ok(ChunkSize(sectors)),
            _ => Err(ChunkSizeError::TooHigh),
        }
    }

    /// Checks it against the block size of a device, in bytes.
    ///
    /// # Errors
    /// When a chunk is not whole blocks.
    pub fn check_blocks(self, block: u32) -> Result<(), ChunkSizeError> {
        if self.bytes().is_multiple_of(u64::from(block)) { Ok(()) } else { Err(ChunkSizeError::NotBlocks) }
    }

    /// In sectors.
    #[must_use]
    pub fn sectors(self) -> u32 {
        self.0
    }

    /// In bytes.
    #[must_use]
    pub fn bytes(self) -> u64 {
        u64::from(self.0) * SECTOR_SIZE
    }
}

/// The places in a store with chunks of one size. Chunks are counted from 0; all functions are
/// total for the chunks that a device can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreLayout {
    chunk: ChunkSize,
}

impl StoreLayout {
    /// With chunks of this size.
    #[must_use]
    pub fn new(chunk: ChunkSize) -> StoreLayout {
        StoreLayout { chunk }
    }

    /// The size of a chunk.
    #[must_use]
    pub fn chunk(self) -> ChunkSize {
        self.chunk
    }

    /// Records in an area.
    #[must_use]
    pub fn records(self) -> u64 {
        self.chunk.bytes() / RECORD_LEN as u64
    }

    /// Chunks from one area to the next.
    fn stride(self) -> u64 {
        self.records() + 1
    }

    /// The chunk of area `area`.
    #[must_use]
    pub fn area(self, area: u64) -> u64 {
        1 + area * self.stride()
    }

    /// True for the header and the areas.
    #[must_use]
    pub fn is_metadata(self, chunk: u64) -> bool {
        chunk == 0 || chunk % self.stride() == 1
    }

    /// The chunk for data behind `chunk`, or `chunk` itself where it is for data: 2 is the first.
    #[must_use]
    pub fn data_from(self, chunk: u64) -> u64 {
        let chunk = chunk.max(2);
        chunk + u64::from(self.is_metadata(chunk))
    }

    /// Which of the chunks for data `chunk` is, from 0; for metadata, the next one.
    #[must_use]
    pub fn data_index(self, chunk: u64) -> u64 {
        let chunk = self.data_from(chunk);
        chunk - 2 - (chunk - 1) / self.stride()
    }

    /// Chunk `index` of those for data, and how many from there on lie behind each other.
    #[must_use]
    pub fn data_chunk(self, index: u64) -> (u64, u64) {
        let (area, place) = (index / self.records(), index % self.records());
        (self.area(area) + 1 + place, self.records() - place)
    }

    /// Whole chunks in `size`.
    #[must_use]
    pub fn chunks(self, size: Sectors) -> u64 {
        size.0 / u64::from(self.chunk.sectors())
    }

    /// Exceptions that a store of `chunks` chunks holds. An area that is full has another behind
    /// it, or no reader takes the store: so the last record of an area needs room for the next area
    /// as well.
    #[must_use]
    pub fn capacity(self, chunks: u64) -> u64 {
        let behind_area = chunks.saturating_sub(2);
        let (full, rest) = (behind_area / self.stride(), behind_area % self.stride());
        full * self.records() + rest.min(self.records() - 1)
    }

    /// Chunks that a store of `exceptions` exceptions has at the least.
    #[must_use]
    pub fn chunks_for(self, exceptions: u64) -> u64 {
        2 + exceptions + exceptions / self.records()
    }
}
