//! One block of the bitmap.

use super::{BLOCK_LEN, checksum_without_field};
use crate::bytes::{u32_at, u64_at};
use thiserror::Error;

const MAGIC: u32 = u32::from_le_bytes(*b"UCbm");
const CHECKSUM_AT: usize = 4;
const WORDS_AT: usize = 32;

/// Words of 64 regions in a block.
pub const WORDS_PER_BLOCK: usize = (BLOCK_LEN - WORDS_AT) / 8;

/// A block of the bitmap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BitmapBlock {
    /// Number of the commit that wrote the block, above 0.
    pub generation: u64,
    /// Index of the block in its copy.
    pub index: u64,
    /// The bits: bit `n % 64` of word `n / 64` is set if region `n` of the block is hydrated.
    pub words: Box<[u64; WORDS_PER_BLOCK]>,
}

/// The reason why a block is no block of the bitmap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum BitmapBlockError {
    /// The first bytes are not those of a bitmap block.
    #[error("it is no block of a bitmap")]
    Magic,
    /// The checksum does not fit: the block is damaged, or a power cut tore it.
    #[error("its checksum is wrong")]
    Checksum,
    /// The block belongs to another place.
    #[error("it is block {0} of the bitmap")]
    Index(u64),
    /// The block has bits that the bitmap does not have.
    #[error("it has regions beyond the end")]
    Beyond,
}

impl BitmapBlock {
    /// Reads block `index`. Returns `None` for a block of zeroes, which was never written.
    ///
    /// # Errors
    /// The block is damaged or another.
    ///
    /// # Panics
    /// If `bytes` is not a whole block.
    pub fn decode(bytes: &[u8], index: u64) -> Result<Option<BitmapBlock>, BitmapBlockError> {
        assert_eq!(bytes.len(), BLOCK_LEN);
        if bytes.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        if u32_at(bytes, 0) != MAGIC {
            return Err(BitmapBlockError::Magic);
        }
        if u32_at(bytes, CHECKSUM_AT) != checksum_without_field(bytes, CHECKSUM_AT) {
            return Err(BitmapBlockError::Checksum);
        }
        let (generation, found) = (u64_at(bytes, 8), u64_at(bytes, 16));
        if found != index {
            return Err(BitmapBlockError::Index(found));
        }
        let mut words = Box::new([0; WORDS_PER_BLOCK]);
        for (at, word) in words.iter_mut().enumerate() {
            *word = u64_at(bytes, WORDS_AT + 8 * at);
        }
        Ok(Some(BitmapBlock { generation, index, words }))
    }

    /// Writes a block with these words to `bytes`. Missing words are 0.
    ///
    /// # Panics
    /// If `bytes` is not a whole block, or there are too many words.
    pub fn encode(generation: u64, index: u64, words: impl Iterator<Item = u64>, bytes: &mut [u8]) {
        assert_eq!(bytes.len(), BLOCK_LEN);
        bytes.fill(0);
        bytes[..4].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[8..16].copy_from_slice(&generation.to_le_bytes());
        bytes[16..24].copy_from_slice(&index.to_le_bytes());
        for (at, word) in words.enumerate() {
            bytes[WORDS_AT + 8 * at..WORDS_AT + 8 * at + 8].copy_from_slice(&word.to_le_bytes());
        }
        let checksum = checksum_without_field(bytes, CHECKSUM_AT);
        bytes[CHECKSUM_AT..CHECKSUM_AT + 4].copy_from_slice(&checksum.to_le_bytes());
    }
}

/// Chooses between the two copies of a block: the valid one with the higher generation; `None` if
/// the block was never written. A power cut damages only a copy that is being written, so the other
/// one is the last state that was durable.
///
/// # Errors
/// Both copies are damaged: the error of the first one.
pub fn newest_bitmap_block(
    copies: [Result<Option<BitmapBlock>, BitmapBlockError>; 2],
) -> Result<Option<BitmapBlock>, BitmapBlockError> {
    match copies {
        [Err(error), Err(_)] => Err(error),
        [Ok(one), Err(_)] | [Err(_), Ok(one)] => Ok(one),
        [Ok(Some(one)), Ok(Some(other))] => {
            Ok(Some(if one.generation >= other.generation { one } else { other }))
        }
        [Ok(one), Ok(other)] => Ok(one.or(other)),
    }
}
