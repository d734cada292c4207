//! The metadata of a `clone` target: which regions of the destination hold their data.
//!
//! ```text
//! block 0, 1             the header, twice
//! block 2 .. 2+n         the bitmap, first copy: one bit per region in n blocks
//! block 2+n .. 2+2n      the bitmap, second copy
//! ```
//!
//! The format is udm's own; dm-clone of the kernel keeps a B-tree instead. A block has 4096 bytes,
//! and all integers are little-endian. A header fits one sector, so a power cut never leaves half
//! of one. Each block of the bitmap has its own checksum and *generation*, and is valid by itself:
//! bits only change from 0 to 1, so blocks of different generations are a correct state together.
//! A commit writes the changed blocks to one copy, makes them durable, and then writes them to the
//! other copy. The next commit begins with the other copy. So at any instant one copy of each
//! block is intact.
//!
//! A device of zeroes is a new clone. Contract: pure, no I/O; the bytes are hostile input.

mod bitmap;
mod header;
mod layout;

pub use bitmap::{BitmapBlock, BitmapBlockError, WORDS_PER_BLOCK, newest_bitmap_block};
pub use header::{CloneHeader, CloneHeaderError, SourceFingerprint, read_header_copies};
pub use layout::{CloneMetadataLayout, MetadataCopy};

/// Bytes of a block of metadata.
pub const BLOCK_LEN: usize = 4096;

/// The bytes of `block` with a checksum field of 4 bytes at `at` that counts as zero.
fn checksum_without_field(block: &[u8], at: usize) -> u32 {
    let crc = crc32c::crc32c(&block[..at]);
    let crc = crc32c::crc32c_append(crc, &[0; 4]);
    crc32c::crc32c_append(crc, &block[at + 4..])
}
