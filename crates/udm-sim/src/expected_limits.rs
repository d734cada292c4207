//! The limits of devices, derived only from disks and tables.

use crate::disk::SimDisk;
use crate::model::Violation;
use crate::tables::{PassThroughTarget, TableLineDevice, TableLineTarget, TableSpec};
use udm_core::Limits;

/// No limit.
const ANY: u64 = u32::MAX as u64;

/// Limits of a disk or a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpectedLimits {
    /// Size in sectors.
    pub size: u64,
    /// Sectors per block.
    pub block: u64,
    /// True if writes fail.
    pub read_only: bool,
    /// True if there is a volatile cache, so flushes are needed.
    pub cache: bool,
    /// True if FUA is supported.
    pub fua: bool,
    /// Longest read or write in sectors. `None` if a write log is in between, which has its own
    /// limit.
    pub most: Option<u64>,
}

impl ExpectedLimits {
    /// Returns the limits of a disk in its present state.
    #[must_use]
    pub fn of_disk(disk: &SimDisk) -> ExpectedLimits {
        ExpectedLimits {
            size: disk.size,
            block: disk.block,
            read_only: disk.read_only,
            cache: disk.volatile,
            fua: disk.fua,
            most: Some(disk.max[0]),
        }
    }

    /// Returns the limits of a table: the strictest limits of the devices below.
    #[must_use]
    pub fn of_table(
        spec: &TableSpec,
        disk_of_path: &dyn Fn(usize) -> ExpectedLimits,
        device: &dyn Fn(usize) -> ExpectedLimits,
    ) -> ExpectedLimits {
        let mut all =
            ExpectedLimits { size: 0, block: 1, read_only: false, cache: false, fua: true, most: Some(ANY) };
        let mut add = |below: ExpectedLimits| {
            all.block = all.block.max(below.block);
            all.read_only |= below.read_only;
            all.cache |= below.cache;
            all.fua &= below.fua;
            all.most = all.most.zip(below.most).map(|(a, b)| a.min(b));
        };
        let of = |b: &TableLineDevice| match b {
            TableLineDevice::Path(p) => disk_of_path(*p),
            TableLineDevice::Device(d) => device(*d),
        };
        for (_, kind) in &spec.lines {
            match kind {
                TableLineTarget::PassThrough(PassThroughTarget::LogWrites(_), b, _) => {
                    add(ExpectedLimits { most: None, ..of(b) });
                }
                TableLineTarget::Linear(b, _) | TableLineTarget::PassThrough(_, b, _) => add(of(b)),
                TableLineTarget::Striped { of: parts, .. } => parts.iter().for_each(|(b, _)| add(of(b))),
                TableLineTarget::Multipath { via, .. } if !via.is_empty() => {
                    via.iter().for_each(|(_, d)| add(device(*d)));
                }
                TableLineTarget::Multipath { groups, .. } => {
                    groups.iter().flat_map(|(_, paths)| paths).for_each(|p| add(disk_of_path(*p)));
                }
                TableLineTarget::Zero | TableLineTarget::Error => {}
            }
        }
        ExpectedLimits { size: spec.sectors(), ..all }
    }

    /// Compares these limits with those that the device reports.
    ///
    /// # Errors
    /// If they differ. The text shows both.
    pub fn compare(&self, limits: &Limits) -> Result<(), Violation> {
        let reported = ExpectedLimits {
            size: limits.size.0,
            block: u64::from(limits.logical_block) / udm_core::SECTOR_SIZE,
            read_only: limits.read_only,
            cache: limits.write_cache,
            fua: limits.fua,
            most: self.most.map(|_| limits.max_sectors.0),
        };
        match reported == *self {
            true => Ok(()),
            false => Err(format!("reports {reported:?}, but the devices below give {self:?}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_of_all_below() {
        let disk = |p: usize| ExpectedLimits {
            size: 64,
            block: [1, 8][p],
            read_only: p == 1,
            cache: p == 0,
            fua: p == 0,
            most: Some([1024, 64][p]),
        };
        let of = vec![(TableLineDevice::Path(0), 0), (TableLineDevice::Path(1), 0)];
        let spec = TableSpec {
            lines: vec![(8, TableLineTarget::Zero), (32, TableLineTarget::Striped { chunk: 8, of })],
        };
        let all = ExpectedLimits::of_table(&spec, &disk, &|_| unreachable!());
        let want =
            ExpectedLimits { size: 40, block: 8, read_only: true, cache: true, fua: false, most: Some(64) };
        assert_eq!(all, want);
        let mut limits = Limits::new(udm_core::Sectors(40));
        assert!(all.compare(&limits).is_err());
        limits.logical_block = 4096;
        (limits.read_only, limits.write_cache, limits.fua) = (true, true, false);
        limits.max_sectors = udm_core::Sectors(64);
        all.compare(&limits).unwrap();
    }
}
