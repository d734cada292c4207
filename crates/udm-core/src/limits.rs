//! Size and limits of devices.

use crate::{Sectors, Status};

/// Size and limits of a device, in the kernel's terms (`struct queue_limits`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Size of the device.
    pub size: Sectors,
    /// Logical block size in bytes: every range is aligned to it. A power of two, 512..=65536.
    pub logical_block: u32,
    /// Physical block size in bytes: smaller writes cost a read.
    pub physical_block: u32,
    /// Preferred smallest request in bytes.
    pub io_min: u32,
    /// Preferred request size in bytes; 0 if there is none.
    pub io_opt: u32,
    /// The longest read or write in sectors. The mapped device splits longer ones.
    pub max_sectors: Sectors,
    /// The longest discard in sectors; 0 if the device does not support discard.
    pub max_discard: Sectors,
    /// The longest write-zeroes in sectors; 0 if the device does not support write-zeroes.
    pub max_write_zeroes: Sectors,
    /// The device has a volatile cache, so a flush has an effect.
    pub write_cache: bool,
    /// The device supports FUA. If not, a mapped device sends a flush after the write instead.
    pub fua: bool,
    /// The device is read-only: writes fail.
    pub read_only: bool,
    /// Reads may come from a cache of this device node alone, so writes to the disk through another
    /// node may not be visible.
    pub private_cache: bool,
    /// A flush makes durable only writes through this device node, not writes to the disk through
    /// another node.
    pub private_flush: bool,
    /// Request-based in the kernel's terms: true for a backend, false for a bio-based mapped
    /// device.
    pub request_stackable: bool,
}

impl Limits {
    /// Limits of a device of `size` that accepts all operations in any length, with 512-byte blocks
    /// and no cache.
    #[must_use]
    pub const fn new(size: Sectors) -> Limits {
        Limits {
            size,
            logical_block: 512,
            physical_block: 512,
            io_min: 512,
            io_opt: 0,
            max_sectors: Sectors(u32::MAX as u64),
            max_discard: Sectors(u32::MAX as u64),
            max_write_zeroes: Sectors(u32::MAX as u64),
            write_cache: false,
            fua: true,
            read_only: false,
            private_cache: false,
            private_flush: false,
            request_stackable: true,
        }
    }

    /// Combines limits for a device over both `self` and `below` (kernel `blk_stack_limits`). Keeps
    /// `self.size`: the table sets the size.
    #[must_use]
    pub fn stack(self, below: &Limits) -> Limits {
        let lcm = |a: u32, b: u32| match (a, b) {
            (0, x) | (x, 0) => x,
            (a, b) => {
                let (mut x, mut y) = (a, b);
                while y != 0 {
                    (x, y) = (y, x % y);
                }
                (a / x).checked_mul(b).unwrap_or(0)
            }
        };
        Limits {
            size: self.size,
            logical_block: self.logical_block.max(below.logical_block),
            physical_block: self.physical_block.max(below.physical_block),
            io_min: self.io_min.max(below.io_min),
            io_opt: lcm(self.io_opt, below.io_opt),
            max_sectors: self.max_sectors.min(below.max_sectors),
            max_discard: self.max_discard.min(below.max_discard),
            max_write_zeroes: self.max_write_zeroes.min(below.max_write_zeroes),
            write_cache: self.write_cache || below.write_cache,
            fua: self.fua && below.fua,
            read_only: self.read_only || below.read_only,
            private_cache: self.private_cache || below.private_cache,
            private_flush: self.private_flush || below.private_flush,
            request_stackable: self.request_stackable && below.request_stackable,
        }
    }

    /// The longest request for `op`; 0 if it is not supported. A flush has no length, so its limit
    /// is the largest value.
    #[must_use]
    pub fn max_for(&self, op: crate::Op) -> Sectors {
        match op {
            crate::Op::Read | crate::Op::Write => self.max_sectors,
            crate::Op::Discard => self.max_discard,
            crate::Op::WriteZeroes => self.max_write_zeroes,
            crate::Op::Flush => Sectors(u64::MAX),
        }
    }

    /// Checks the range, alignment and permission of a request from outside. A request that is too
    /// long passes.
    ///
    /// # Errors
    /// The status with which the request fails.
    pub fn check(&self, op: crate::Op, sector: crate::Sector, sectors: Sectors) -> Result<(), Status> {
        if op == crate::Op::Flush {
            return Ok(());
        }
        if op.is_write() && self.read_only {
            return Err(Status::ReadOnly);
        }
        if self.max_for(op) == Sectors::ZERO {
            return Err(Status::NotSupp);
        }
        let end = sector.0.checked_add(sectors.0).ok_or(Status::IoErr)?;
        if end > self.size.0 {
            return Err(Status::IoErr);
        }
        let block = u64::from(self.logical_block) / crate::SECTOR_SIZE;
        if sectors.0 == 0 || !sector.0.is_multiple_of(block) || !sectors.0.is_multiple_of(block) {
            return Err(Status::Inval);
        }
        Ok(())
    }
}
