//! Size, limits and abilities of a disk, as the kernel sees them.

use crate::nbd::export_geometry::max_export_request_bytes;
use std::io;
use udm_core::{Limits, Op, SECTOR_SIZE, Sectors};
use udm_wire::ublk::{BLOCK_MAX, UblkParams};

/// The shortest limit of a request that the kernel allows: a page, in sectors.
const PAGE_SECTORS: u64 = 8;

/// The limits of a disk.
#[derive(Clone, Copy, Debug)]
pub(super) struct UblkGeometry {
    pub(super) limits: Limits,
}

impl UblkGeometry {
    pub(super) fn new(mut limits: Limits, read_only: bool) -> UblkGeometry {
        limits.read_only |= read_only;
        UblkGeometry { limits }
    }

    /// The longest bio for `op`: whole blocks.
    pub(super) fn max_for(&self, op: Op) -> Sectors {
        let max = max_export_request_bytes(self.limits.max_for(op), self.limits.logical_block);
        Sectors(u64::from(max) / SECTOR_SIZE)
    }

    /// Size in sectors, whole blocks.
    pub(super) fn sectors(&self) -> u64 {
        let block = u64::from(self.limits.logical_block) / SECTOR_SIZE;
        self.limits.size.0 - self.limits.size.0 % block
    }

    /// The parameters of a device with buffers of `io_bytes_max` bytes.
    ///
    /// # Errors
    /// The blocks are too long for the driver.
    pub(super) fn params(&self, io_bytes_max: u32) -> io::Result<UblkParams> {
        let limits = &self.limits;
        let block = limits.logical_block;
        if block > BLOCK_MAX {
            let text = format!("blocks of {block} bytes: ublk has blocks of at most {BLOCK_MAX} bytes");
            return Err(io::Error::new(io::ErrorKind::Unsupported, text));
        }
        // A bio is split again if the device has a smaller limit.
        let buffer = u64::from(io_bytes_max) / SECTOR_SIZE;
        let max = self.max_for(Op::Read).0.clamp(PAGE_SECTORS.min(buffer), buffer);
        let ranges = |op: Op| match limits.read_only || limits.max_for(op) == Sectors::ZERO {
            true => 0,
            false => u32::try_from(self.max_for(op).0).unwrap_or(u32::MAX),
        };
        let power = |bytes: u32| 1u32 << bytes.max(1).ilog2();
        let physical = power(limits.physical_block.max(block));
        Ok(UblkParams {
            is_read_only: limits.read_only,
            sectors: self.sectors(),
            logical_block: block,
            physical_block: physical,
            io_min: power(limits.io_min.max(physical)),
            io_opt: power(limits.io_opt.max(physical)),
            max_sectors: max as u32,
            max_discard: ranges(Op::Discard),
            max_write_zeroes: ranges(Op::WriteZeroes),
            discard_granularity: limits.io_min.max(block),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_sees_the_limits_of_the_device() {
        let limits =
            Limits { logical_block: 4096, physical_block: 16_384, io_min: 0, ..Limits::new(Sectors(1001)) };
        let params = UblkGeometry::new(limits, false).params(512 << 10).unwrap();
        assert_eq!((params.sectors, params.logical_block, params.physical_block), (1000, 4096, 16_384));
        assert_eq!((params.io_min, params.io_opt, params.discard_granularity), (16_384, 16_384, 4096));
        assert_eq!((params.max_sectors, params.is_read_only), (1024, false), "as long as the buffer");
        assert!(params.max_discard > 0 && params.max_discard.is_multiple_of(8));
        let small = Limits { max_sectors: Sectors(3), ..Limits::new(Sectors(9)) };
        assert_eq!(UblkGeometry::new(small, false).params(512 << 10).unwrap().max_sectors, 8);
        let some = Limits { max_sectors: Sectors(100), ..Limits::new(Sectors(9)) };
        assert_eq!(UblkGeometry::new(some, false).params(512 << 10).unwrap().max_sectors, 100);
    }

    #[test]
    fn what_the_device_cannot_do_is_not_offered() {
        let none =
            Limits { max_discard: Sectors(0), max_write_zeroes: Sectors(0), ..Limits::new(Sectors(8)) };
        let params = UblkGeometry::new(none, false).params(4096).unwrap();
        assert_eq!((params.max_discard, params.max_write_zeroes), (0, 0));
        let params = UblkGeometry::new(Limits::new(Sectors(8)), true).params(4096).unwrap();
        assert_eq!((params.is_read_only, params.max_discard, params.max_write_zeroes), (true, 0, 0));
        let long = Limits { logical_block: 65_536, ..Limits::new(Sectors(1024)) };
        let error = UblkGeometry::new(long, false).params(4096).unwrap_err().to_string();
        assert!(error.contains("blocks of 65536 bytes"), "{error}");
    }
}
