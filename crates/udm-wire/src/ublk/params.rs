//! The parameters of a device: `struct ublk_params`.

use super::{read_int, write_ints};

/// Bytes of encoded parameters: the header, the basic part and the part for discards.
pub const PARAMS_SIZE: usize = 60;

/// Types of parameters that are present.
const BASIC: u32 = 1 << 0;
const DISCARD: u32 = 1 << 1;

/// Attributes.
const READ_ONLY: u32 = 1 << 0;
const VOLATILE_CACHE: u32 = 1 << 2;
const FUA: u32 = 1 << 3;

/// The parameters that udm sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UblkParams {
    /// The device cannot be written.
    pub is_read_only: bool,
    /// Size in sectors.
    pub sectors: u64,
    /// Logical block in bytes: a power of two, 512 to 4096.
    pub logical_block: u32,
    /// Physical block in bytes: a power of two, at least the logical block.
    pub physical_block: u32,
    /// Smallest preferred request in bytes, a power of two.
    pub io_min: u32,
    /// Preferred request in bytes, a power of two.
    pub io_opt: u32,
    /// The longest read or write in sectors.
    pub max_sectors: u32,
    /// The longest discard in sectors; 0 if there is none.
    pub max_discard: u32,
    /// The longest write of zeroes in sectors; 0 if there is none.
    pub max_write_zeroes: u32,
    /// Granularity of discards in bytes.
    pub discard_granularity: u32,
}

impl UblkParams {
    /// Encodes the parameters. A device always has a volatile cache and FUA: flushes of a device
    /// without a cache cost little, and another table may have a cache.
    #[must_use]
    pub fn encode(&self) -> [u8; PARAMS_SIZE] {
        let mut out = [0; PARAMS_SIZE];
        let has_ranges = self.max_discard > 0 || self.max_write_zeroes > 0;
        let types = if has_ranges { BASIC | DISCARD } else { BASIC };
        let attributes = VOLATILE_CACHE | FUA | if self.is_read_only { READ_ONLY } else { 0 };
        let shift = |bytes: u32| bytes.max(1).ilog2() as u8;
        write_ints!(
            out,
            0 => PARAMS_SIZE as u32,
            4 => types,
            8 => attributes,
            12 => shift(self.logical_block),
            13 => shift(self.physical_block),
            14 => shift(self.io_opt),
            15 => shift(self.io_min),
            16 => self.max_sectors,
            24 => self.sectors,
        );
        if has_ranges {
            write_ints!(
                out,
                44 => self.discard_granularity,
                48 => self.max_discard,
                52 => self.max_write_zeroes,
                56 => 1u16,
            );
        }
        out
    }

    /// Decodes parameters; `None` if the basic part is missing, as before they were set.
    #[must_use]
    pub fn decode(bytes: &[u8; PARAMS_SIZE]) -> Option<UblkParams> {
        if read_int!(u32, bytes, 4) & BASIC == 0 {
            return None;
        }
        let bytes_of = |at: usize| 1u32.checked_shl(bytes[at].into()).unwrap_or(0);
        Some(UblkParams {
            is_read_only: read_int!(u32, bytes, 8) & READ_ONLY != 0,
            sectors: read_int!(u64, bytes, 24),
            logical_block: bytes_of(12),
            physical_block: bytes_of(13),
            io_opt: bytes_of(14),
            io_min: bytes_of(15),
            max_sectors: read_int!(u32, bytes, 16),
            max_discard: read_int!(u32, bytes, 48),
            max_write_zeroes: read_int!(u32, bytes, 52),
            discard_granularity: read_int!(u32, bytes, 44),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn params() -> UblkParams {
        UblkParams {
            is_read_only: true,
            sectors: 0x2827_2625_2423_2221,
            logical_block: 512,
            physical_block: 4096,
            io_min: 8192,
            io_opt: 65_536,
            max_sectors: 0x1413_1211,
            max_discard: 0x3433_3231,
            max_write_zeroes: 0x4443_4241,
            discard_granularity: 0x5453_5251,
        }
    }

    #[test]
    fn parameters_have_the_layout_of_the_kernel() {
        let expected = [
            [60, 0, 0, 0, 3, 0, 0, 0],                        // len, types
            [0x0d, 0, 0, 0, 9, 12, 16, 13],                   // attrs, logical, physical, io_opt, io_min
            [0x11, 0x12, 0x13, 0x14, 0, 0, 0, 0],             // max_sectors, chunk_sectors
            [0x21, 0x22, 0x23, 0x24, 0x25, 0x26, 0x27, 0x28], // dev_sectors
            [0; 8],                                           // virt_boundary_mask
            [0, 0, 0, 0, 0x51, 0x52, 0x53, 0x54],             // discard_alignment, discard_granularity
            [0x31, 0x32, 0x33, 0x34, 0x41, 0x42, 0x43, 0x44], // max_discard, max_write_zeroes
            [1, 0, 0, 0, 0, 0, 0, 0],                         // max_discard_segments, reserved
        ];
        assert_eq!(params().encode(), expected.as_flattened()[..PARAMS_SIZE]);
        assert_eq!(UblkParams::decode(&params().encode()), Some(params()));
    }

    #[test]
    fn a_device_without_discards_has_no_part_for_them() {
        let none = UblkParams { max_discard: 0, max_write_zeroes: 0, is_read_only: false, ..params() };
        let bytes = none.encode();
        assert_eq!((bytes[4], bytes[8]), (1, 0x0c));
        assert!(bytes[40..].iter().all(|byte| *byte == 0));
        assert_eq!(UblkParams::decode(&[0; PARAMS_SIZE]), None);
    }
}
