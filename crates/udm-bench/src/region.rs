//! The part of a device that a job uses.

use crate::load::{BytesOrPercent, FioLoadOptions};
use anyhow::{Result, bail, ensure};
use udm_core::{Limits, Op};

/// The part of the device that one job uses, in blocks of [`FioLoadOptions::block_bytes`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JobRegion {
    /// The first block.
    pub first: u64,
    /// Number of blocks.
    pub blocks: u64,
    /// Length in bytes as given in the options. It may end inside a block.
    pub bytes: u64,
}

impl FioLoadOptions {
    /// The region of each job on a device with these limits.
    ///
    /// # Errors
    /// If the device is too small for the load, or does not support it.
    pub fn regions(&self, limits: &Limits) -> Result<Vec<JobRegion>> {
        let block = u64::from(limits.logical_block);
        let bs = self.block_bytes();
        ensure!(bs.is_multiple_of(block), "bs={bs}: not a multiple of the device's block of {block}");
        for op in Op::ALL.iter().filter(|op| self.does(**op)) {
            let max = limits.max_for(*op).bytes();
            ensure!(max > 0, "the device takes no {op:?}");
            ensure!(bs <= max, "bs={bs}: the device takes {max} at most; a mapped device splits longer ones");
            ensure!(!op.is_write() || !limits.read_only, "the device is read-only");
        }
        let there = limits.size.bytes();
        let all = self.filesize.unwrap_or(there);
        ensure!(all <= there, "filesize={all}: the device has {there}");
        // As in fio, a percentage is rounded up to a block, a number of bytes down.
        let begin = match self.offset {
            None => 0,
            Some(BytesOrPercent::Percent(percent)) => multiply_by_percent(all, percent).div_ceil(bs),
            Some(BytesOrPercent::Bytes(bytes)) => bytes / bs,
        };
        ensure!(begin * bs < all, "offset={}: the device has {all}", begin * bs);
        let (blocks, size) = self.blocks(all, all - begin * bs)?;
        let jobs = u64::from(self.numjobs);
        let (share, bytes) =
            if self.verify.is_some() { (blocks / jobs, blocks / jobs * bs) } else { (blocks, size) };
        ensure!(share > 0, "bs={bs}: larger than the available part of the device");
        let first = |job| begin + if self.verify.is_some() { share * job } else { 0 };
        Ok((0..jobs).map(|job| JobRegion { first: first(job), blocks: share, bytes }).collect())
    }

    /// The blocks and bytes that the load uses. The device has `all` bytes, of which `left` follow
    /// the begin of the load. If the size ends inside a block, the load uses that block if the
    /// device has it. As in fio, it does not with a map of random blocks.
    fn blocks(&self, all: u64, left: u64) -> Result<(u64, u64)> {
        let bs = self.block_bytes();
        let size = match self.size {
            None => left,
            Some(BytesOrPercent::Percent(percent)) => multiply_by_percent(all, percent).min(left) / bs * bs,
            Some(BytesOrPercent::Bytes(size)) if size > left => bail!("size={size}: the device has {left}"),
            Some(BytesOrPercent::Bytes(size)) => size,
        };
        ensure!(size > 0, "size=0: nothing to do");
        ensure!(size >= bs, "bs={bs}: larger than the available part of the device");
        Ok((if self.has_map() { size / bs } else { size.div_ceil(bs).min(left / bs) }, size))
    }

    /// Whether a map of random blocks makes each block come once.
    pub fn has_map(&self) -> bool {
        self.rw.is_random() && !self.norandommap
    }
}

fn multiply_by_percent(all: u64, percent: u8) -> u64 {
    (u128::from(all) * u128::from(percent) / 100) as u64
}
