//! Positions of header, areas and data in a store.

use super::RECORD_LEN;
use thiserror::Error;
use udm_core::{SECTOR_SIZE, Sectors};

/// The size of a chunk: a power of two of sectors, below 2^31 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ChunkSize(u32);

/// The reason why a number of sectors is not a chunk size, in the kernel's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ChunkSizeError {
    /// The number is 0 or not a power of two.
    #[error("Chunk size is not a power of 2")]
    NotAPower,
    /// The size is 2^31 bytes or more.
    #[error("Chunk size is too high")]
    TooHigh,
    /// The size is not a multiple of the device's block size.
    #[error("Chunk size is not a multiple of device blocksize")]
    NotBlocks,
}

impl ChunkSize {
    /// Default size of a new store: 16 KiB.
    pub const DEFAULT: ChunkSize = ChunkSize(32);
    /// The largest size: 1 GiB.
    pub const MAX: ChunkSize = ChunkSize(1 << 21);

    /// A chunk of `sectors` sectors.
    ///
    /// # Errors
    /// In the kernel's order: the number is not a power of two, or it is too large.
    pub fn new(sectors: u64) -> Result<ChunkSize, ChunkSizeError> {
        if !sectors.is_power_of_two() {
            return Err(ChunkSizeError::NotAPower);
        }
        match u32::try_from(sectors) {
            Ok(sectors) if sectors <= ChunkSize::MAX.0 => Ok(ChunkSize(sectors)),
            _ => Err(ChunkSizeError::TooHigh),
        }
    }

    /// Checks the size against the block size of a device, in bytes.
    ///
    /// # Errors
    /// If a chunk is not a multiple of the block size.
    pub fn check_blocks(self, block: u32) -> Result<(), ChunkSizeError> {
        if self.bytes().is_multiple_of(u64::from(block)) { Ok(()) } else { Err(ChunkSizeError::NotBlocks) }
    }

    /// The size in sectors.
    #[must_use]
    pub fn sectors(self) -> u32 {
        self.0
    }

    /// The size in bytes.
    #[must_use]
    pub fn bytes(self) -> u64 {
        u64::from(self.0) * SECTOR_SIZE
    }
}

/// The layout of a store with one chunk size. Chunks are counted from 0. No function panics for a
/// chunk number that a device can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExceptionStoreLayout {
    chunk: ChunkSize,
}

impl ExceptionStoreLayout {
    /// The layout with chunks of this size.
    #[must_use]
    pub fn new(chunk: ChunkSize) -> ExceptionStoreLayout {
        ExceptionStoreLayout { chunk }
    }

    /// The size of a chunk.
    #[must_use]
    pub fn chunk(self) -> ChunkSize {
        self.chunk
    }

    /// Records per area.
    #[must_use]
    pub fn records(self) -> u64 {
        self.chunk.bytes() / RECORD_LEN as u64
    }

    /// Chunks from one area to the next.
    fn stride(self) -> u64 {
        self.records() + 1
    }

    /// The chunk that holds area `area`.
    #[must_use]
    pub fn area(self, area: u64) -> u64 {
        1 + area * self.stride()
    }

    /// True if `chunk` is the header or an area.
    #[must_use]
    pub fn is_metadata(self, chunk: u64) -> bool {
        chunk == 0 || chunk % self.stride() == 1
    }

    /// The first data chunk at or after `chunk`. The first one in a store is 2.
    #[must_use]
    pub fn data_from(self, chunk: u64) -> u64 {
        let chunk = chunk.max(2);
        chunk + u64::from(self.is_metadata(chunk))
    }

    /// The index of data chunk `chunk` among all data chunks, from 0. For a metadata chunk, the
    /// index of the next data chunk.
    #[must_use]
    pub fn data_index(self, chunk: u64) -> u64 {
        let chunk = self.data_from(chunk);
        chunk - 2 - (chunk - 1) / self.stride()
    }

    /// The chunk of data index `index`, and the number of contiguous data chunks from there.
    #[must_use]
    pub fn data_chunk(self, index: u64) -> (u64, u64) {
        let (area, place) = (index / self.records(), index % self.records());
        (self.area(area) + 1 + place, self.records() - place)
    }

    /// Number of whole chunks in `size`.
    #[must_use]
    pub fn chunks(self, size: Sectors) -> u64 {
        size.0 / u64::from(self.chunk.sectors())
    }

    /// Number of exceptions that fit a store of `chunks` chunks. A full area must be followed by
    /// another area, or no reader accepts the store. So the last record of an area also needs room
    /// for the next area.
    #[must_use]
    pub fn capacity(self, chunks: u64) -> u64 {
        let behind_area = chunks.saturating_sub(2);
        let (full, rest) = (behind_area / self.stride(), behind_area % self.stride());
        full * self.records() + rest.min(self.records() - 1)
    }

    /// Minimum number of chunks of a store with `exceptions` exceptions.
    #[must_use]
    pub fn chunks_for(self, exceptions: u64) -> u64 {
        2 + exceptions + exceptions / self.records()
    }
}
