//! Size, limits and abilities of a disk, as a virtual machine sees them.

use super::slot::RANGES_MAX;
use crate::nbd::export_geometry::max_export_request_bytes;
use udm_core::{Limits, Op, SECTOR_SIZE, Sectors};
use udm_wire::virtio::VirtioFeatures;
use udm_wire::virtio::blk::VirtioBlkConfig;

/// Data segments per request: what a ring of 128 entries holds besides the header and the status.
const SEGMENTS_MAX: u32 = 126;

/// The limits of a disk.
#[derive(Clone, Copy, Debug)]
pub(super) struct DiskGeometry {
    pub(super) limits: Limits,
}

impl DiskGeometry {
    pub(super) fn new(mut limits: Limits, read_only: bool) -> DiskGeometry {
        limits.read_only |= read_only;
        DiskGeometry { limits }
    }

    /// The longest bio for `op`: whole blocks.
    pub(super) fn max_for(&self, op: Op) -> Sectors {
        let max = max_export_request_bytes(self.limits.max_for(op), self.limits.logical_block);
        Sectors(u64::from(max) / SECTOR_SIZE)
    }

    /// The features to offer, with `queues` queues.
    pub(super) fn features(&self, queues: u16) -> VirtioFeatures {
        let mut features = VirtioFeatures::VERSION_1
            | VirtioFeatures::INDIRECT_DESC
            | VirtioFeatures::EVENT_IDX
            | VirtioFeatures::RING_PACKED
            | VirtioFeatures::VHOST_PROTOCOL_FEATURES
            | VirtioFeatures::BLK_SEG_MAX
            | VirtioFeatures::BLK_BLK_SIZE
            | VirtioFeatures::BLK_TOPOLOGY
            | VirtioFeatures::BLK_FLUSH
            | VirtioFeatures::BLK_CONFIG_WCE;
        features.set(VirtioFeatures::BLK_RO, self.limits.read_only);
        features.set(VirtioFeatures::BLK_MQ, queues > 1);
        let can = |op: Op| !self.limits.read_only && self.limits.max_for(op) > Sectors::ZERO;
        features.set(VirtioFeatures::BLK_DISCARD, can(Op::Discard));
        features.set(VirtioFeatures::BLK_WRITE_ZEROES, can(Op::WriteZeroes));
        features
    }

    /// The configuration space.
    pub(super) fn config(&self, queues: u16, writeback: bool) -> VirtioBlkConfig {
        let limits = &self.limits;
        let block = limits.logical_block;
        let in_blocks = |bytes: u32| bytes / block;
        let ranges = RANGES_MAX as u32;
        let sectors = |op: Op| u32::try_from(self.max_for(op).0).unwrap_or(u32::MAX);
        let size = limits.size.0 - limits.size.0 % (u64::from(block) / SECTOR_SIZE);
        VirtioBlkConfig {
            capacity: size,
            size_max: 0,
            seg_max: SEGMENTS_MAX,
            blk_size: block,
            physical_block_exp: (limits.physical_block.max(block) / block).ilog2() as u8,
            min_io_size: u16::try_from(in_blocks(limits.io_min).max(1)).unwrap_or(u16::MAX),
            opt_io_size: in_blocks(limits.io_opt),
            writeback,
            num_queues: queues,
            max_discard_sectors: sectors(Op::Discard),
            max_discard_seg: ranges,
            discard_sector_alignment: (limits.io_min.max(block) / SECTOR_SIZE as u32).max(1),
            max_write_zeroes_sectors: sectors(Op::WriteZeroes),
            max_write_zeroes_seg: ranges,
            write_zeroes_may_unmap: true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_sees_the_limits_of_the_device() {
        let limits =
            Limits { logical_block: 4096, physical_block: 16_384, io_min: 0, ..Limits::new(Sectors(1001)) };
        let config = DiskGeometry::new(limits, false).config(4, true);
        assert_eq!((config.capacity, config.blk_size, config.physical_block_exp), (1000, 4096, 2));
        assert_eq!((config.min_io_size, config.discard_sector_alignment), (1, 8), "never 0");
        let none = Limits { max_discard: Sectors(0), max_write_zeroes: Sectors(0), ..limits };
        let features = DiskGeometry::new(none, false).features(1);
        let absent = VirtioFeatures::BLK_DISCARD
            | VirtioFeatures::BLK_WRITE_ZEROES
            | VirtioFeatures::BLK_MQ
            | VirtioFeatures::BLK_RO;
        assert!(!features.intersects(absent));
        let features = DiskGeometry::new(limits, true).features(2);
        assert!(features.contains(VirtioFeatures::BLK_RO | VirtioFeatures::BLK_MQ));
        assert!(!features.contains(VirtioFeatures::BLK_DISCARD), "it cannot be written");
        assert!(!features.intersects(VirtioFeatures::IN_ORDER), "requests complete in any order");
    }
}
