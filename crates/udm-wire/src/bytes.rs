//! Numbers in bytes, little-endian.

/// The number of four bytes at `at`.
///
/// # Panics
/// When `bytes` ends before.
pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}

/// The number of eight bytes at `at`.
///
/// # Panics
/// When `bytes` ends before.
pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}
