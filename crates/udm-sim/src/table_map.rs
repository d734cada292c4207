//! The mapping of tables, computed per sector without the code under test. A [`ModelTableMap`]
//! gives the disk sector of each sector of a device, and the effect of the targets on its data.

use crate::register_model::SectorRegisterModel;
use crate::tables::{FlakeyFault, PassThroughTarget, TableLineDevice, TableLineTarget, TableSpec};
use std::sync::Arc;

/// A sector that reads as zeroes and drops writes.
pub const ZERO: u32 = u32::MAX;

/// A sector whose requests fail.
pub const ERROR: u32 = u32::MAX - 1;

/// The mapping of a table.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct ModelTableMap {
    /// Register of each sector, or [`ZERO`], or [`ERROR`].
    pub cells: Vec<u32>,
    /// The disks below the device.
    pub disks: Vec<usize>,
    /// True if some sectors have no disk.
    pub bare: bool,
    /// Ranges in which a target loses or changes data on purpose.
    pub lossy: Vec<FlakeyRange>,
    /// True if a discarded sector keeps its content or reads as zeroes; otherwise its content is
    /// undefined.
    pub clears: bool,
}

/// A range of a target that loses or changes data on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlakeyRange {
    /// First sector.
    pub start: u64,
    /// Length in sectors.
    pub len: u64,
    /// The fault of the target.
    pub flaw: FlakeyFault,
    /// True if the fault is always active.
    pub always: bool,
}

impl FlakeyRange {
    /// True if the range contains `sector`.
    #[must_use]
    pub fn covers(&self, sector: u64) -> bool {
        (self.start..self.start + self.len).contains(&sector)
    }
}

impl ModelTableMap {
    /// Computes the mapping of `spec`. `below` returns the maps of lower devices.
    #[must_use]
    pub fn of(
        spec: &TableSpec,
        disk_of_path: &[usize],
        cells: &SectorRegisterModel,
        below: &dyn Fn(usize) -> Arc<ModelTableMap>,
    ) -> ModelTableMap {
        let mut map = ModelTableMap::default();
        let find = |b: TableLineDevice, sector: u64| match b {
            TableLineDevice::Path(p) => cells.index(disk_of_path[p], sector),
            TableLineDevice::Device(d) => below(d).cells[sector as usize],
        };
        for (len, kind) in &spec.lines {
            for s in 0..*len {
                map.cells.push(match kind {
                    TableLineTarget::Linear(b, at) | TableLineTarget::PassThrough(_, b, at) => {
                        find(*b, at + s)
                    }
                    TableLineTarget::Striped { chunk, of } => {
                        let (nr, rest) = (s / chunk, s % chunk);
                        let (b, at) = of[(nr % of.len() as u64) as usize];
                        find(b, at + nr / of.len() as u64 * chunk + rest)
                    }
                    TableLineTarget::Zero => ZERO,
                    TableLineTarget::Error => ERROR,
                    TableLineTarget::Multipath { disk, .. } => cells.index(*disk, s),
                });
            }
            if let TableLineTarget::Multipath { disk, .. } = kind {
                map.disks.push(*disk);
            }
            match kind {
                TableLineTarget::PassThrough(PassThroughTarget::Flakey(up, _, flaw), ..)
                    if flaw.is_lossy() =>
                {
                    let start = map.cells.len() as u64 - len;
                    map.lossy.push(FlakeyRange { start, len: *len, flaw: *flaw, always: *up == 0 });
                }
                _ => {}
            }
        }
        map.disks.extend(spec.paths().iter().map(|p| disk_of_path[*p]));
        for d in spec.devices() {
            let lower = below(d);
            map.disks.extend(&lower.disks);
            map.bare |= lower.bare;
        }
        map.disks.sort_unstable();
        map.disks.dedup();
        map.bare |=
            spec.lines.iter().any(|(_, k)| matches!(k, TableLineTarget::Zero | TableLineTarget::Error));
        map
    }

    /// Returns the register of `sector`. A sector beyond the end fails.
    #[must_use]
    pub fn cell(&self, sector: u64) -> u32 {
        self.cells.get(sector as usize).copied().unwrap_or(ERROR)
    }

    /// `Some(true)` if writes of `sector` are dropped, `Some(false)` if they may be dropped.
    #[must_use]
    pub fn drops(&self, sector: u64) -> Option<bool> {
        let drop = |l: &&FlakeyRange| l.flaw == FlakeyFault::DropWrites && l.covers(sector);
        self.lossy.iter().find(drop).map(|l| l.always)
    }

    /// True if flushes may be dropped.
    #[must_use]
    pub fn drops_flushes(&self) -> bool {
        self.lossy.iter().any(|l| l.flaw == FlakeyFault::DropWrites)
    }

    /// Size of the device in sectors.
    #[must_use]
    pub fn sectors(&self) -> u64 {
        self.cells.len() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stripes_are_dealt_in_turn() {
        let cells = SectorRegisterModel::new(&[64, 64], |_, s| s);
        let spec = TableSpec {
            lines: vec![
                (8, TableLineTarget::Zero),
                (
                    32,
                    TableLineTarget::Striped {
                        chunk: 8,
                        of: vec![(TableLineDevice::Path(0), 16), (TableLineDevice::Path(1), 0)],
                    },
                ),
            ],
        };
        assert_eq!(spec.text(1), "0 8 zero\n8 32 striped 2 8 p0 16 p1 0");
        let map = ModelTableMap::of(&spec, &[0, 1], &cells, &|_| unreachable!());
        assert_eq!((map.sectors(), map.disks.as_slice(), map.bare), (40, &[0, 1][..], true));
        assert_eq!(map.cells[7..10], [ZERO, 16, 17]);
        assert_eq!(map.cells[16], 64);
        assert_eq!(map.cells[24], 24);
        assert_eq!(map.cells[39], 64 + 15);
    }
}
