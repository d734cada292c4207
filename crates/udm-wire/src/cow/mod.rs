//! The store of a snapshot, byte for byte as the kernel lays it out (dm-snap-persistent.c).
//!
//! ```text
//! chunk 0 magic "SnAp" u32 | valid u32 | version u32 | chunk size in sectors u32 the header chunk
//! 1 old chunk u64 | new chunk u64, again and again area 0: E records chunks 2 .. E+1 the data of
//! area 0 chunk E+2 area 1, and so on: area a is chunk 1 + a (E + 1)
//! ```
//!
//! All integers are little-endian. A *chunk* is a power of two of sectors, and E is the number of
//! 16-byte records in a chunk. A record is an *exception*: chunk `old` of the origin is kept in
//! chunk `new` of the store. Records fill the areas without gaps; the first with new chunk 0 ends
//! them. After a full area comes the next one, even if that is empty.
//!
//! Contract: pure, no I/O. A store is hostile input. An error names the byte at which it is. The
//! kernel accepts records that point beyond the store, into its areas, or twice to one chunk; this
//! parser refuses them. Bytes after the end of the records are never read as records, and are
//! reported; the kernel may later read them as records.

mod chunk_set;
mod error;
mod layout;
mod store_walk;

pub use chunk_set::SparseChunkBitmap;
pub use error::{ExceptionStoreError, ExceptionStoreErrorKind};
pub use layout::{ChunkSize, ChunkSizeError, ExceptionStoreLayout};
pub use store_walk::{ExceptionStoreScanResult, ExceptionStoreScanner};

use crate::bytes::{u32_at, u64_at};
use error::exception_store_error_at;

/// The first four bytes of a store: "SnAp".
pub const MAGIC: u32 = 0x7041_6e53;
/// The only known version.
pub const VERSION: u32 = 1;
/// Bytes of the header; the rest of its chunk is zero.
pub const HEADER_LEN: usize = 16;
/// Bytes of a record.
pub const RECORD_LEN: usize = 16;

/// The header of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExceptionStoreHeader {
    /// True if the snapshot is usable: no copy was lost.
    pub valid: bool,
    /// The chunk size.
    pub chunk: ChunkSize,
}

/// A chunk of the origin that is kept in the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SnapshotException {
    /// The chunk of the origin.
    pub old: u64,
    /// The chunk of the store; never 0.
    pub new: u64,
}

impl ExceptionStoreHeader {
    /// Reads the header from the first bytes of a store. Returns `None` for a blank device: its
    /// magic number is 0, and the rest is ignored.
    ///
    /// # Errors
    /// Another magic number or version, an invalid chunk size, or fewer than [`HEADER_LEN`] bytes.
    pub fn decode(first: &[u8]) -> Result<Option<ExceptionStoreHeader>, ExceptionStoreError> {
        if first.len() < HEADER_LEN {
            return Err(exception_store_error_at(0, ExceptionStoreErrorKind::Short));
        }
        match u32_at(first, 0) {
            0 => return Ok(None),
            MAGIC => {}
            other => return Err(exception_store_error_at(0, ExceptionStoreErrorKind::Magic(other))),
        }
        let version = u32_at(first, 8);
        if version != VERSION {
            return Err(exception_store_error_at(8, ExceptionStoreErrorKind::Version(version)));
        }
        let chunk = u32_at(first, 12);
        let chunk = ChunkSize::new(u64::from(chunk))
            .map_err(|why| exception_store_error_at(12, ExceptionStoreErrorKind::ChunkSize(chunk, why)))?;
        Ok(Some(ExceptionStoreHeader { valid: u32_at(first, 4) != 0, chunk }))
    }

    /// Writes the header to the start of `chunk` and clears the rest.
    ///
    /// # Panics
    /// If `chunk` is shorter than [`HEADER_LEN`].
    pub fn encode(&self, chunk: &mut [u8]) {
        let words = [MAGIC, u32::from(self.valid), VERSION, self.chunk.sectors()];
        for (at, word) in words.into_iter().enumerate() {
            chunk[4 * at..4 * at + 4].copy_from_slice(&word.to_le_bytes());
        }
        chunk[HEADER_LEN..].fill(0);
    }
}

impl SnapshotException {
    /// Reads record `index` of `area`; `None` at the end of the records.
    ///
    /// # Panics
    /// If the area has no such record.
    #[must_use]
    pub fn decode(area: &[u8], index: usize) -> Option<SnapshotException> {
        let at = index * RECORD_LEN;
        let (old, new) = (u64_at(area, at), u64_at(area, at + 8));
        (new != 0).then_some(SnapshotException { old, new })
    }

    /// Writes the exception as record `index` of `area`.
    ///
    /// # Panics
    /// If the area has no such record.
    pub fn encode(&self, area: &mut [u8], index: usize) {
        let at = index * RECORD_LEN;
        area[at..at + 8].copy_from_slice(&self.old.to_le_bytes());
        area[at + 8..at + 16].copy_from_slice(&self.new.to_le_bytes());
    }
}
