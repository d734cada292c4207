//! Header and data digests: CRC-32C (*TCP* 3.3.1.1), stored with the lowest byte first.

/// The digest of a PDU header, which follows the header.
#[must_use]
pub fn header_digest(header: &[u8]) -> [u8; 4] {
    crc32c::crc32c(header).to_le_bytes()
}

/// True if the last four bytes of `bytes` are the digest of the bytes before them.
#[must_use]
pub fn verify_header_digest(bytes: &[u8]) -> bool {
    bytes.split_last_chunk().is_some_and(|(header, digest)| header_digest(header) == *digest)
}

/// The digest of data that consists of `parts`, in order.
#[must_use]
pub fn data_digest<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> [u8; 4] {
    parts.into_iter().fold(0, crc32c::crc32c_append).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of RFC 3720, appendix B.4.
    #[test]
    fn digests_are_those_of_the_standard() {
        let ascending: Vec<u8> = (0..32).collect();
        assert_eq!(header_digest(&[0; 32]), 0x8a91_36aa_u32.to_le_bytes());
        assert_eq!(header_digest(&[0xff; 32]), 0x62a8_ab43_u32.to_le_bytes());
        assert_eq!(header_digest(&ascending), 0x46dd_794e_u32.to_le_bytes());
        assert_eq!(data_digest([&ascending[..7], &[], &ascending[7..]]), header_digest(&ascending));
        let mut whole = [&ascending[..], &header_digest(&ascending)].concat();
        assert!(verify_header_digest(&whole) && !verify_header_digest(&whole[1..]));
        whole[3] ^= 1;
        assert!(!verify_header_digest(&whole) && !verify_header_digest(&[0; 3]));
    }
}
