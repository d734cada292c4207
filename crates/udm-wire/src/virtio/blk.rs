//! The block device (VIRTIO 1.2, section 5.2): requests, status values and configuration space.

/// Bytes of a request's header.
pub const BLK_HEADER_SIZE: usize = 16;
/// Bytes of a range of DISCARD or WRITE ZEROES.
pub const BLK_RANGE_SIZE: usize = 16;
/// Bytes of the device's ID.
pub const BLK_ID_SIZE: usize = 20;
/// Bytes of the configuration space, up to the limits of WRITE ZEROES.
pub const BLK_CONFIG_SIZE: usize = 60;
/// Offset of `writeback` (the write cache) in the configuration space.
pub const BLK_CONFIG_WRITEBACK: usize = 32;

/// Status of a request: success.
pub const BLK_S_OK: u8 = 0;
/// Status of a request: an error of the device or of the driver.
pub const BLK_S_IOERR: u8 = 1;
/// Status of a request: not supported.
pub const BLK_S_UNSUPP: u8 = 2;

/// Type of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlkRequestType {
    /// Reads (`VIRTIO_BLK_T_IN`).
    Read,
    /// Writes (`VIRTIO_BLK_T_OUT`).
    Write,
    /// Makes completed writes durable.
    Flush,
    /// Reads the device's ID.
    GetId,
    /// Discards ranges.
    Discard,
    /// Fills ranges with zeroes.
    WriteZeroes,
    /// A type that udm does not know.
    Unknown(u32),
}

/// The header of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlkRequestHeader {
    /// What to do.
    pub kind: BlkRequestType,
    /// First sector of 512 bytes; 0 unless the request reads or writes.
    pub sector: u64,
}

impl BlkRequestHeader {
    /// Decodes a header.
    #[must_use]
    pub fn decode(bytes: &[u8; BLK_HEADER_SIZE]) -> BlkRequestHeader {
        let kind = match u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) {
            0 => BlkRequestType::Read,
            1 => BlkRequestType::Write,
            4 => BlkRequestType::Flush,
            8 => BlkRequestType::GetId,
            11 => BlkRequestType::Discard,
            13 => BlkRequestType::WriteZeroes,
            other => BlkRequestType::Unknown(other),
        };
        let mut sector = [0; 8];
        sector.copy_from_slice(&bytes[8..]);
        BlkRequestHeader { kind, sector: u64::from_le_bytes(sector) }
    }
}

/// A range of DISCARD or WRITE ZEROES.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlkRange {
    /// First sector of 512 bytes.
    pub sector: u64,
    /// Number of sectors of 512 bytes.
    pub sectors: u32,
    /// The blocks may be deallocated (WRITE ZEROES only).
    pub unmap: bool,
    /// A reserved flag is set: the request is not supported.
    pub has_unknown_flags: bool,
}

impl BlkRange {
    /// Decodes a range.
    #[must_use]
    pub fn decode(bytes: &[u8; BLK_RANGE_SIZE]) -> BlkRange {
        let mut sector = [0; 8];
        sector.copy_from_slice(&bytes[..8]);
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        BlkRange {
            sector: u64::from_le_bytes(sector),
            sectors: word(8),
            unmap: word(12) & 1 != 0,
            has_unknown_flags: word(12) & !1 != 0,
        }
    }
}

/// The configuration space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlkConfig {
    /// Size in sectors of 512 bytes.
    pub capacity: u64,
    /// Maximum number of bytes of a segment.
    pub size_max: u32,
    /// Maximum number of data segments of a request.
    pub seg_max: u32,
    /// Logical block size in bytes.
    pub blk_size: u32,
    /// Logical blocks per physical block, as a power of two.
    pub physical_block_exp: u8,
    /// Smallest efficient request in logical blocks.
    pub min_io_size: u16,
    /// Optimal request in logical blocks; 0 if unknown.
    pub opt_io_size: u32,
    /// The cache is in write-back mode.
    pub writeback: bool,
    /// Number of queues.
    pub num_queues: u16,
    /// Maximum sectors of a discarded range.
    pub max_discard_sectors: u32,
    /// Maximum number of ranges of DISCARD.
    pub max_discard_seg: u32,
    /// Alignment of discarded ranges in sectors; never 0.
    pub discard_sector_alignment: u32,
    /// Maximum sectors of a zeroed range.
    pub max_write_zeroes_sectors: u32,
    /// Maximum number of ranges of WRITE ZEROES.
    pub max_write_zeroes_seg: u32,
    /// WRITE ZEROES may deallocate blocks.
    pub write_zeroes_may_unmap: bool,
}

impl BlkConfig {
    /// Encodes the configuration space. The geometry is 0: the feature is not offered.
    #[must_use]
    pub fn encode(&self) -> [u8; BLK_CONFIG_SIZE] {
        let mut out = [0; BLK_CONFIG_SIZE];
        let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &self.capacity.to_le_bytes());
        put(8, &self.size_max.to_le_bytes());
        put(12, &self.seg_max.to_le_bytes());
        put(20, &self.blk_size.to_le_bytes());
        put(24, &[self.physical_block_exp, 0]);
        put(26, &self.min_io_size.to_le_bytes());
        put(28, &self.opt_io_size.to_le_bytes());
        put(BLK_CONFIG_WRITEBACK, &[u8::from(self.writeback), 0]);
        put(34, &self.num_queues.to_le_bytes());
        put(36, &self.max_discard_sectors.to_le_bytes());
        put(40, &self.max_discard_seg.to_le_bytes());
        put(44, &self.discard_sector_alignment.to_le_bytes());
        put(48, &self.max_write_zeroes_sectors.to_le_bytes());
        put(52, &self.max_write_zeroes_seg.to_le_bytes());
        put(56, &[u8::from(self.write_zeroes_may_unmap), 0, 0, 0]);
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_and_ranges_are_decoded() {
        let mut header = [0; BLK_HEADER_SIZE];
        header[0] = 13;
        header[8..].copy_from_slice(&0x0102_0304_0506_0708u64.to_le_bytes());
        let decoded = BlkRequestHeader::decode(&header);
        assert_eq!(decoded.sector, 0x0102_0304_0506_0708);
        let kinds = [0, 1, 4, 8, 11, 13, 2, 200].map(|kind| {
            header[0] = kind;
            BlkRequestHeader::decode(&header).kind
        });
        use BlkRequestType::{Discard, Flush, GetId, Read, Unknown, Write, WriteZeroes};
        assert_eq!(kinds, [Read, Write, Flush, GetId, Discard, WriteZeroes, Unknown(2), Unknown(200)]);
        let range = [9, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 1, 0, 0, 0];
        let expected = BlkRange { sector: 9, sectors: 8, unmap: true, has_unknown_flags: false };
        assert_eq!(BlkRange::decode(&range), expected);
        assert!(BlkRange::decode(&[0xff; 16]).has_unknown_flags);
    }

    /// The offsets of the specification's `struct virtio_blk_config`.
    #[test]
    fn the_configuration_space_has_its_layout() {
        let config = BlkConfig {
            capacity: 0x1122_3344_5566_7788,
            size_max: 0x0102_0304,
            seg_max: 126,
            blk_size: 4096,
            physical_block_exp: 3,
            min_io_size: 0x0506,
            opt_io_size: 0x0708_090a,
            writeback: true,
            num_queues: 0x0b0c,
            max_discard_sectors: 0x1000_0001,
            max_discard_seg: 2,
            discard_sector_alignment: 8,
            max_write_zeroes_sectors: 0x2000_0003,
            max_write_zeroes_seg: 4,
            write_zeroes_may_unmap: true,
        };
        let expected: [u8; BLK_CONFIG_SIZE] = [
            0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, 4, 3, 2, 1, 126, 0, 0, 0, 0, 0, 0, 0, 0, 16, 0,
            0, 3, 0, 6, 5, 10, 9, 8, 7, 1, 0, 12, 11, 1, 0, 0, 16, 2, 0, 0, 0, 8, 0, 0, 0, 3, 0, 0, 32, 4, 0,
            0, 0, 1, 0, 0, 0,
        ];
        assert_eq!(config.encode(), expected);
    }
}
