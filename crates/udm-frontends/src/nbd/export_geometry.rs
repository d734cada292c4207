//! Size, block sizes and abilities of an export, from the limits of its device.

use super::request::DeviceBlockSize;
use udm_core::{Limits, SECTOR_SIZE, Sectors};
use udm_wire::nbd::{BlockSizes, ExportFlags, PAYLOAD_MAX, PAYLOAD_MAX_DEFAULT};

/// Size, block sizes and abilities of an export, as sent to a client. They are valid for the whole
/// connection: NBD cannot change them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ExportGeometry {
    /// Size in bytes, whole blocks of the device.
    pub(super) size: u64,
    /// Block size of the device. Requests may be smaller.
    pub(super) block: DeviceBlockSize,
    /// Minimum, preferred and maximum block size.
    pub(super) blocks: BlockSizes,
    /// Flags without `SEND_DF`, which depends on the client's options.
    pub(super) flags: ExportFlags,
    /// The longest read or write of the device in bytes; whole blocks.
    pub(super) data_max: u32,
    /// The longest discard of the device in bytes; whole blocks.
    pub(super) discard_max: u32,
    /// The longest write-zeroes of the device in bytes; whole blocks.
    pub(super) zeroes_max: u32,
}

impl ExportGeometry {
    pub(super) fn new(limits: &Limits, read_only: bool) -> ExportGeometry {
        let block = limits.logical_block;
        // The protocol requires a power of two, but the optimal size of the device may be a stripe
        // of any width.
        let optimum = limits.io_opt.max(limits.io_min).clamp(1, PAYLOAD_MAX_DEFAULT);
        let preferred = (1 << optimum.ilog2()).max(block).max(4096);
        let blocks = BlockSizes { minimum: 1, preferred, maximum: PAYLOAD_MAX };
        // All connections use one device, so a flush on one covers all. Zeroes are not transmitted
        // as data, so they are never slower than a write. If the device does not support them,
        // FAST_ZERO is refused, and other zeroes are written as data.
        let mut flags = ExportFlags::HAS_FLAGS
            | ExportFlags::SEND_FLUSH
            | ExportFlags::SEND_FUA
            | ExportFlags::CAN_MULTI_CONN
            | ExportFlags::SEND_CACHE
            | ExportFlags::SEND_WRITE_ZEROES
            | ExportFlags::SEND_FAST_ZERO;
        if limits.max_discard.0 > 0 {
            flags |= ExportFlags::SEND_TRIM;
        }
        if read_only || limits.read_only {
            flags |= ExportFlags::READ_ONLY;
        }
        let size = limits.size.bytes();
        ExportGeometry {
            size: size - size % u64::from(block),
            block: DeviceBlockSize { size: block },
            blocks,
            flags,
            data_max: max_export_request_bytes(limits.max_sectors, block),
            discard_max: max_export_request_bytes(limits.max_discard, block),
            zeroes_max: max_export_request_bytes(limits.max_write_zeroes, block),
        }
    }
}

/// Returns `max` in bytes, limited to whole blocks and to the length of a request. If the device
/// does not support the operation, it gets requests of any length and refuses them.
pub(crate) fn max_export_request_bytes(max: Sectors, block: u32) -> u32 {
    let bytes = if max == Sectors::ZERO { u64::MAX } else { max.0.saturating_mul(SECTOR_SIZE) };
    let bytes = bytes.min(u64::from(u32::MAX)) as u32;
    (bytes - bytes % block).max(block)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits() -> Limits {
        Limits::new(Sectors(1000))
    }

    #[test]
    fn block_sizes_keep_the_rules_of_the_protocol() {
        for logical_block in [512, 4096, 65536] {
            for (io_min, io_opt) in [(512, 0), (4096, 3 << 16), (512, 1 << 30), (0, 0), (1 << 20, u32::MAX)] {
                let g = ExportGeometry::new(&Limits { logical_block, io_min, io_opt, ..limits() }, false);
                assert!(g.blocks.is_valid(), "{:?}", g.blocks);
                assert_eq!((g.blocks.minimum, g.size % u64::from(logical_block)), (1, 0));
                assert!(g.blocks.preferred >= logical_block);
            }
        }
        let g = ExportGeometry::new(&Limits { io_opt: 3 << 16, ..limits() }, false);
        assert_eq!(g.blocks.preferred, 2 << 16, "the largest power of two up to the optimum");
    }

    #[test]
    fn ranges_are_whole_blocks() {
        for (max, block, expected) in [
            (8, 4096, 4096),
            (9, 4096, 4096),
            (1, 4096, 4096),
            (2049, 512, 2049 * 512),
            (0, 512, u32::MAX - 511),
            (u64::MAX, 65536, u32::MAX - 65535),
        ] {
            assert_eq!(
                max_export_request_bytes(Sectors(max), block),
                expected,
                "{max} sectors, blocks of {block}"
            );
        }
    }

    #[test]
    fn abilities_follow_the_limits() {
        let g = ExportGeometry::new(&Limits { max_discard: Sectors(0), ..limits() }, false);
        assert!(!g.flags.intersects(ExportFlags::SEND_TRIM | ExportFlags::READ_ONLY));
        assert!(ExportGeometry::new(&limits(), true).flags.contains(ExportFlags::READ_ONLY));
        let g = ExportGeometry::new(&Limits { read_only: true, ..limits() }, false);
        assert!(g.flags.contains(ExportFlags::READ_ONLY));
    }
}
