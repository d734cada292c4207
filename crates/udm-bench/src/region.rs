//! The part of a device that a job uses, and the offsets of its random requests.

use crate::distribution::{OffsetGenerator, RandomOffsetDistribution};
use crate::load::{BytesOrPercent, FioLoadOptions};
use crate::stats::DIRECTIONS;
use anyhow::{Result, bail, ensure};
use rand::rngs::SmallRng;
use udm_core::{Limits, Op};

/// Maximum number of blocks in the maps of a load: 512 MiB of bits.
const MAP_MAX: u64 = 1 << 32;

/// The part of the device that one job uses, in blocks of [`FioLoadOptions::unit`].
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
        let (unit, longest, what) = (self.unit(), self.longest(), self.sizes_word());
        ensure!(
            self.used_sizes().all(|sizes| sizes.are_multiples_of(block)),
            "{what}: not a multiple of the device's block of {block}"
        );
        for op in Op::ALL.iter().filter(|op| self.does(**op)) {
            let max = limits.max_for(*op).bytes();
            ensure!(max > 0, "the device takes no {op:?}");
            ensure!(
                longest <= max,
                "{what}: the device takes {max} at most; a mapped device splits longer ones"
            );
            ensure!(!op.is_write() || !limits.read_only, "the device is read-only");
        }
        let there = limits.size.bytes();
        let all = self.filesize.unwrap_or(there);
        ensure!(all <= there, "filesize={all}: the device has {there}");
        // As in fio, a percentage is rounded up to a block, a number of bytes down.
        let begin = match self.offset {
            None => 0,
            Some(BytesOrPercent::Percent(percent)) => multiply_by_percent(all, percent).div_ceil(unit),
            Some(BytesOrPercent::Bytes(bytes)) => bytes / unit,
        };
        ensure!(begin * unit < all, "offset={}: the device has {all}", begin * unit);
        let (blocks, size) = self.blocks(all, all - begin * unit)?;
        if let Some(BytesOrPercent::Percent(percent)) = self.io_size {
            let bytes = multiply_by_percent(size, percent);
            ensure!(bytes >= unit, "io_size={percent}%: {bytes} bytes, less than a request");
        }
        let jobs = u64::from(self.numjobs);
        let (share, bytes) =
            if self.verify.is_some() { (blocks / jobs, blocks / jobs * unit) } else { (blocks, size) };
        ensure!(share > 0, "{what}: larger than the available part of the device");
        if self.fixed().is_none() {
            let all_fit = self.used_sizes().all(|sizes| sizes.min <= share * unit);
            ensure!(all_fit, "{what}: larger than the available part of the device");
        }
        self.check_places(share * unit, block)?;
        let first = |job| begin + if self.verify.is_some() { share * job } else { 0 };
        let mapped = self.mapped(share);
        ensure!(mapped <= MAP_MAX, "{what}: a map of {share} blocks; norandommap needs none");
        Ok((0..jobs).map(|job| JobRegion { first: first(job), blocks: share, bytes }).collect())
    }

    /// Checks the memory for the maps of loads that run at the same time, with their regions.
    ///
    /// # Errors
    /// One line that names the remedy.
    pub fn check_maps<'a>(loads: impl Iterator<Item = (&'a FioLoadOptions, &'a [JobRegion])>) -> Result<()> {
        let blocks = |(load, regions): (&FioLoadOptions, &[JobRegion])| {
            regions.first().map_or(0, |r| load.mapped(r.blocks))
        };
        let all = loads.map(blocks).fold(0, u64::saturating_add);
        ensure!(all <= MAP_MAX, "maps of {all} blocks in all; norandommap needs none");
        Ok(())
    }

    /// Blocks in the maps of all jobs, each of which has `blocks` blocks.
    fn mapped(&self, blocks: u64) -> u64 {
        let needs_one = self.has_map() && self.fixed().is_none();
        if needs_one { blocks.saturating_mul(self.numjobs.into()) } else { 0 }
    }

    /// Checks that random requests fit a region of `bytes` bytes and begin at a block of the
    /// device.
    fn check_places(&self, bytes: u64, block: u64) -> Result<()> {
        for direction in self.used().iter().filter(|_| self.rw.is_random() && !self.has_map()) {
            let align = self.align(*direction);
            let even = align.is_multiple_of(block);
            ensure!(even, "blockalign={align}: not a multiple of the device's block of {block}");
            let fits = self.places(*direction, bytes) > 0;
            ensure!(fits, "blockalign={align}: larger than the available part of the device");
        }
        Ok(())
    }

    /// The blocks and bytes that the load uses. The device has `all` bytes, of which `left` follow
    /// the begin of the load. If the size ends inside a block, the load uses that block if the
    /// device has it. As in fio, it does not with a map of random blocks or with different lengths.
    fn blocks(&self, all: u64, left: u64) -> Result<(u64, u64)> {
        let unit = self.unit();
        let size = match self.size {
            None => left,
            Some(BytesOrPercent::Percent(percent)) => {
                multiply_by_percent(all, percent).min(left) / unit * unit
            }
            Some(BytesOrPercent::Bytes(size)) if size > left => bail!("size={size}: the device has {left}"),
            Some(BytesOrPercent::Bytes(size)) => size,
        };
        ensure!(size > 0, "size=0: nothing to do");
        ensure!(size >= unit, "{}: larger than the available part of the device", self.sizes_word());
        let whole = self.has_map() || self.fixed().is_none();
        Ok((if whole { size / unit } else { size.div_ceil(unit).min(left / unit) }, size))
    }

    /// Whether a map of random blocks makes each block come once.
    pub fn has_map(&self) -> bool {
        // As in fio, this includes the alignment of directions that the load does not have.
        let aligned = (0..DIRECTIONS).all(|direction| self.align(direction) == self.sizes(direction).min);
        self.rw.is_random()
            && !self.norandommap
            && aligned
            && self.random_distribution == RandomOffsetDistribution::Random
    }

    /// The alignment of random requests of a direction.
    pub fn align(&self, direction: usize) -> u64 {
        let align = self.blockalign.as_ref().and_then(|align| align.of[direction]);
        align.map_or_else(|| self.sizes(direction).min, |one| one.0)
    }

    /// The generators of random offsets, by direction, in a region of `bytes` bytes.
    pub fn random_places(&self, bytes: u64, rng: &mut SmallRng) -> [OffsetGenerator; DIRECTIONS] {
        std::array::from_fn(|direction| {
            let count = self.places(direction, bytes).max(1);
            OffsetGenerator::new(&self.random_distribution, direction, count, self.align(direction), rng)
        })
    }

    /// Number of places at which a random request may begin in a region of `bytes` bytes.
    pub fn places(&self, direction: usize, bytes: u64) -> u64 {
        let (align, shortest) = (self.align(direction), self.sizes(direction).min);
        bytes.saturating_sub(shortest.saturating_sub(align)) / align
    }
}

pub(crate) fn multiply_by_percent(all: u64, percent: u8) -> u64 {
    (u128::from(all) * u128::from(percent) / 100) as u64
}
