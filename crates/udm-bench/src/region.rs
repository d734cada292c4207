//! Which part of a device a job uses, and where its random requests begin.

use crate::distribution::{Distribution, OffsetGenerator};
use crate::load::{BytesOrPercent, Load};
use crate::stats::DIRECTIONS;
use anyhow::{Result, bail, ensure};
use rand::rngs::SmallRng;
use udm_core::{Limits, Op};

/// Blocks in the maps of a load at the most: 512 MiB of bits.
const MAP_MAX: u64 = 1 << 32;

/// The part of the device that one job uses, in blocks of [`Load::unit`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// The first block.
    pub first: u64,
    /// How many.
    pub blocks: u64,
    /// The same in bytes, as it was said: it may end inside a block.
    pub bytes: u64,
}

impl Load {
    /// The region of each job on a device of these limits.
    ///
    /// # Errors
    /// When the device is too small for the load, or can't take it.
    pub fn regions(&self, limits: &Limits) -> Result<Vec<Region>> {
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
        // As fio: a percentage begins at the next block, bytes at the block that they are in.
        let begin = match self.offset {
            None => 0,
            Some(BytesOrPercent::Percent(percent)) => percent_of(all, percent).div_ceil(unit),
            Some(BytesOrPercent::Bytes(bytes)) => bytes / unit,
        };
        ensure!(begin * unit < all, "offset={}: the device has {all}", begin * unit);
        let (blocks, size) = self.blocks(all, all - begin * unit)?;
        if let Some(BytesOrPercent::Percent(percent)) = self.io_size {
            let bytes = percent_of(size, percent);
            ensure!(bytes >= unit, "io_size={percent}%: {bytes} bytes, less than a request");
        }
        let jobs = u64::from(self.numjobs);
        let (share, bytes) =
            if self.verify.is_some() { (blocks / jobs, blocks / jobs * unit) } else { (blocks, size) };
        ensure!(share > 0, "{what}: more than there is of the device");
        if self.fixed().is_none() {
            let all_fit = self.used_sizes().all(|sizes| sizes.min <= share * unit);
            ensure!(all_fit, "{what}: more than there is of the device");
        }
        self.check_places(share * unit, block)?;
        let first = |job| begin + if self.verify.is_some() { share * job } else { 0 };
        let mapped = self.mapped(share);
        ensure!(mapped <= MAP_MAX, "{what}: a map of {share} blocks; norandommap needs none");
        Ok((0..jobs).map(|job| Region { first: first(job), blocks: share, bytes }).collect())
    }

    /// Loads that run beside each other, with their regions, have memory for their maps.
    ///
    /// # Errors
    /// One line that says what helps.
    pub fn check_maps<'a>(loads: impl Iterator<Item = (&'a Load, &'a [Region])>) -> Result<()> {
        let blocks =
            |(load, regions): (&Load, &[Region])| regions.first().map_or(0, |r| load.mapped(r.blocks));
        let all = loads.map(blocks).fold(0, u64::saturating_add);
        ensure!(all <= MAP_MAX, "maps of {all} blocks in all; norandommap needs none");
        Ok(())
    }

    /// Blocks in the maps of all jobs, which have so many each.
    fn mapped(&self, blocks: u64) -> u64 {
        let needs_one = self.has_map() && self.fixed().is_none();
        if needs_one { blocks.saturating_mul(self.numjobs.into()) } else { 0 }
    }

    /// Random requests find a place in a region of so many bytes, and begin at a block of the
    /// device.
    fn check_places(&self, bytes: u64, block: u64) -> Result<()> {
        for direction in self.used().iter().filter(|_| self.rw.is_random() && !self.has_map()) {
            let align = self.align(*direction);
            let even = align.is_multiple_of(block);
            ensure!(even, "blockalign={align}: not a multiple of the device's block of {block}");
            let fits = self.places(*direction, bytes) > 0;
            ensure!(fits, "blockalign={align}: more than there is of the device");
        }
        Ok(())
    }

    /// How many blocks and bytes the load uses of a device of `list` bytes, of which `left` are
    /// behind where it begins. Of a size that ends inside a block that block is used, where there
    /// is one, but for the map of random blocks, and where requests differ: as fio does.
    fn blocks(&self, all: u64, left: u64) -> Result<(u64, u64)> {
        let unit = self.unit();
        let size = match self.size {
            None => left,
            Some(BytesOrPercent::Percent(percent)) => percent_of(all, percent).min(left) / unit * unit,
            Some(BytesOrPercent::Bytes(size)) if size > left => bail!("size={size}: the device has {left}"),
            Some(BytesOrPercent::Bytes(size)) => size,
        };
        ensure!(size > 0, "size=0: nothing to do");
        ensure!(size >= unit, "{}: more than there is of the device", self.sizes_word());
        let whole = self.has_map() || self.fixed().is_none();
        Ok((if whole { size / unit } else { size.div_ceil(unit).min(left / unit) }, size))
    }

    /// Each block comes once, in random order.
    pub fn has_map(&self) -> bool {
        // An alignment of what the load has none of counts too, in fio.
        let aligned = (0..DIRECTIONS).all(|direction| self.align(direction) == self.sizes(direction).min);
        self.rw.is_random()
            && !self.norandommap
            && aligned
            && self.random_distribution == Distribution::Random
    }

    /// Random requests of a direction begin at a multiple of this.
    pub fn align(&self, direction: usize) -> u64 {
        let said = self.blockalign.as_ref().and_then(|align| align.of[direction]);
        said.map_or_else(|| self.sizes(direction).min, |one| one.0)
    }

    /// Where random requests of each direction begin in a region of so many bytes.
    pub fn random_places(&self, bytes: u64, rng: &mut SmallRng) -> [OffsetGenerator; DIRECTIONS] {
        std::array::from_fn(|direction| {
            let count = self.places(direction, bytes).max(1);
            OffsetGenerator::new(&self.random_distribution, direction, count, self.align(direction), rng)
        })
    }

    /// In how many places of a region of so many bytes a random request of a direction may begin.
    pub fn places(&self, direction: usize, bytes: u64) -> u64 {
        let (align, shortest) = (self.align(direction), self.sizes(direction).min);
        bytes.saturating_sub(shortest.saturating_sub(align)) / align
    }
}

pub(crate) fn percent_of(all: u64, percent: u8) -> u64 {
    (u128::from(all) * u128::from(percent) / 100) as u64
}
