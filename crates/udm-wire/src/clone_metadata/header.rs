//! The header of the metadata.

use super::checksum_without_field;
use crate::bytes::{u32_at, u64_at};
use thiserror::Error;
use udm_core::{SECTOR_SIZE, Sectors};

const MAGIC: [u8; 8] = *b"udmclone";
const VERSION: u32 = 1;
const CHECKSUM_AT: usize = 12;
/// Bytes of the header: one sector. The rest of its block is zero.
const HEADER_LEN: usize = SECTOR_SIZE as usize;

/// Position and value of the magic number in the superblock of dm-clone (dm-clone-metadata.c).
const KERNEL_MAGIC: (usize, u64) = (32, 0x8af2_7f64);

/// Checksums of the first and the last piece of a source, by which another source is noticed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SourceFingerprint {
    /// CRC-32C of the first piece.
    pub first: u32,
    /// CRC-32C of the last piece.
    pub last: u32,
}

/// The header: what the bitmap describes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CloneHeader {
    /// The region size, a power of two.
    pub region: Sectors,
    /// Length of the target.
    pub len: Sectors,
    /// The source when the clone was created; `None` if it could not be read.
    pub source: Option<SourceFingerprint>,
}

/// The reason why a header is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum CloneHeaderError {
    /// Metadata of the kernel's dm-clone.
    #[error(
        "this is metadata of the kernel's dm-clone, which udm cannot read: let the kernel finish that clone, or \
         begin again with zeroed metadata"
    )]
    Kernel,
    /// Something else.
    #[error("this is no metadata of a clone: a new clone needs a device of zeroes")]
    Foreign,
    /// A version that this udm does not know.
    #[error("the metadata has version {0}, and this udm knows version {VERSION}")]
    Version(u32),
    /// The header is damaged.
    #[error("both copies of the header are damaged")]
    Damaged,
    /// The copies belong to different clones.
    #[error("the two copies of the header belong to different clones")]
    Differ,
}

impl CloneHeader {
    /// Reads a header from the begin of its block. Returns `None` if the sector is zero.
    ///
    /// # Errors
    /// It is no header, a damaged one, or one of another version.
    ///
    /// # Panics
    /// If `block` is shorter than a sector.
    pub fn decode(block: &[u8]) -> Result<Option<CloneHeader>, CloneHeaderError> {
        let bytes = &block[..HEADER_LEN];
        if bytes.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        if bytes[..MAGIC.len()] != MAGIC {
            let (at, magic) = KERNEL_MAGIC;
            let is_kernel = u64_at(bytes, at) == magic;
            return Err(if is_kernel { CloneHeaderError::Kernel } else { CloneHeaderError::Foreign });
        }
        if u32_at(bytes, CHECKSUM_AT) != checksum_without_field(bytes, CHECKSUM_AT) {
            return Err(CloneHeaderError::Damaged);
        }
        let version = u32_at(bytes, 8);
        if version != VERSION {
            return Err(CloneHeaderError::Version(version));
        }
        let source = match u32_at(bytes, 32) {
            0 => None,
            1 => Some(SourceFingerprint { first: u32_at(bytes, 36), last: u32_at(bytes, 40) }),
            _ => return Err(CloneHeaderError::Damaged),
        };
        let (region, len) = (Sectors(u64_at(bytes, 16)), Sectors(u64_at(bytes, 24)));
        if !region.0.is_power_of_two() || len.0 == 0 {
            return Err(CloneHeaderError::Damaged);
        }
        Ok(Some(CloneHeader { region, len, source }))
    }

    /// Writes the header to its block; the rest becomes zero.
    ///
    /// # Panics
    /// If `block` is shorter than a sector.
    pub fn encode(&self, block: &mut [u8]) {
        block.fill(0);
        block[..8].copy_from_slice(&MAGIC);
        let mut put = |at: usize, bytes: &[u8]| block[at..at + bytes.len()].copy_from_slice(bytes);
        put(8, &VERSION.to_le_bytes());
        put(16, &self.region.0.to_le_bytes());
        put(24, &self.len.0.to_le_bytes());
        if let Some(SourceFingerprint { first, last }) = self.source {
            put(32, &1u32.to_le_bytes());
            put(36, &first.to_le_bytes());
            put(40, &last.to_le_bytes());
        }
        let checksum = checksum_without_field(&block[..HEADER_LEN], CHECKSUM_AT);
        block[CHECKSUM_AT..CHECKSUM_AT + 4].copy_from_slice(&checksum.to_le_bytes());
    }
}

/// The header of the two `copies`; `None` if both are zero. One intact copy is enough.
///
/// # Errors
/// There is no intact copy, or the two differ.
pub fn read_header_copies(copies: [&[u8]; 2]) -> Result<Option<CloneHeader>, CloneHeaderError> {
    match copies.map(CloneHeader::decode) {
        [Ok(Some(one)), Ok(Some(other))] if one != other => Err(CloneHeaderError::Differ),
        [Ok(Some(one)), _] | [_, Ok(Some(one))] => Ok(Some(one)),
        [Ok(None), Ok(None)] => Ok(None),
        [Err(error), _] | [_, Err(error)] => Err(error),
    }
}
