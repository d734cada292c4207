//! The format of written blocks: a header that identifies the block, a checksum, and noise computed
//! from the header.
//!
//! ```text
//!  0 magic (u32) | 4 crc32c of all that follows (u32) | 8 byte offset on the device (u64) | 16 tag of the run (u64)
//! 24 which write of the job (u64) | 32 noise, 8 bytes at a time
//! ```
//! All numbers are little-endian.

/// "udmv".
const MAGIC: u32 = 0x766d_6475;
const HEADER: usize = 32;

/// The identity of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockHeader {
    /// Byte offset on the device.
    pub offset: u64,
    /// A number that identifies the run and the job.
    pub tag: u64,
    /// Number of the write in the job, from 0.
    pub index: u64,
}

/// Fills `block` (at least 512 bytes) with `stamp` and noise.
pub fn fill_block_with_header_and_crc(block: &mut [u8], stamp: BlockHeader) {
    let fields = [stamp.offset, stamp.tag, stamp.index];
    for (out, field) in block[8..HEADER].as_chunks_mut().0.iter_mut().zip(fields) {
        *out = field.to_le_bytes();
    }
    let mut state = stamp.offset ^ stamp.tag.rotate_left(21) ^ stamp.index.rotate_left(42);
    for out in block[HEADER..].as_chunks_mut().0 {
        // The increment of Weyl's sequence, mixed, so that neighbouring words and blocks differ.
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        *out = (state ^ (state >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9).to_le_bytes();
    }
    let crc = crc32c::crc32c(&block[8..]);
    block[..4].copy_from_slice(&MAGIC.to_le_bytes());
    block[4..8].copy_from_slice(&crc.to_le_bytes());
}

/// Checks `block`, read from byte `offset`. `tag` and `index` are compared if they are given.
///
/// # Errors
/// One line that describes the difference.
pub fn check_block_header_and_crc(
    block: &[u8],
    offset: u64,
    tag: Option<u64>,
    index: Option<u64>,
) -> Result<(), String> {
    let u32_at = |i: usize| u32::from_le_bytes(block[i..i + 4].try_into().expect("four bytes"));
    let u64_at = |i: usize| u64::from_le_bytes(block[i..i + 8].try_into().expect("eight bytes"));
    if u32_at(0) != MAGIC {
        return Err(format!("verify: bad magic header {:x}, wanted {MAGIC:x} at offset {offset}", u32_at(0)));
    }
    let crc = crc32c::crc32c(&block[8..]);
    if u32_at(4) != crc {
        return Err(format!("verify: bad crc32c {crc:08x}, wanted {:08x} at offset {offset}", u32_at(4)));
    }
    let (is, was, by) = (u64_at(8), u64_at(16), u64_at(24));
    if is != offset {
        return Err(format!("verify: the block of offset {is} at offset {offset}"));
    }
    if tag.is_some_and(|tag| tag != was) {
        return Err(format!("verify: a block of another run or job at offset {offset}"));
    }
    match index {
        Some(index) if index != by => {
            Err(format!("verify: the block of write {by}, wanted that of write {index}, at offset {offset}"))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_of_damage_is_seen() {
        let stamp = BlockHeader { offset: 4096, tag: 7, index: 3 };
        let mut block = vec![0; 1024];
        let what = |block: &[u8], offset, tag, index| {
            check_block_header_and_crc(block, offset, tag, index).unwrap_err()
        };
        assert!(what(&block, 4096, None, None).contains("bad magic header 0,"));
        fill_block_with_header_and_crc(&mut block, stamp);
        assert_eq!(check_block_header_and_crc(&block, 4096, Some(7), Some(3)), Ok(()));
        assert!(what(&block, 8192, None, None).contains("the block of offset 4096 at offset 8192"));
        assert!(what(&block, 4096, Some(8), None).contains("another run"));
        assert!(what(&block, 4096, Some(7), Some(4)).contains("write 3, wanted that of write 4"));
        for byte in [4, 9, 40, 1023] {
            let mut damaged = block.clone();
            damaged[byte] ^= 1;
            assert!(what(&damaged, 4096, None, None).contains("bad crc32c"), "byte {byte}");
        }
    }
}
