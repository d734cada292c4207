//! The routes of bios: from the sectors of a device to those of its children, and back.
//!
//! The functions that run per bio call no other function, so a loop over a batch keeps its values
//! in registers. The [`TableFastPathMap`] of the table is examined once per batch.

use super::Table;
use super::child_layout::TargetChildMap;
use super::map::{OffsetOnlyMapping, StripeMapping, TableFastPathMap, TableSectorMap};
use crate::child_lanes::ChildLaneDispatcher;
use crate::split::{BioSplitRule, NextBioSplitStep, SplitCursor};
use std::rc::Rc;
use udm_core::{Bio, BioFlags, Limits, Op, SECTOR_SIZE, Status};

/// The route of a bio.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum BioRoute {
    /// To this child, whole; its sector is already mapped.
    Child(usize),
    /// Through the splitter, in pieces.
    Split,
    /// To no child; the bio ends with this status.
    End(Status),
}

/// The conditions of the fast path: a read or write that only needs its sector mapped.
struct TableFastPathFilter {
    /// The last operation of the fast path; [`Op`] lists reads and writes first.
    last: Op,
    special: BioFlags,
    /// Bits that must be 0 in `sector` and `sectors`.
    unaligned: u64,
    max: u64,
    size: u64,
}

impl TableFastPathFilter {
    #[inline(always)]
    fn takes(&self, bio: &Bio) -> bool {
        // `max` is at most `size`, so the subtraction does not underflow for a bio that fits.
        self.fits(bio) && bio.sector.0 <= self.size.wrapping_sub(bio.sectors.0)
    }

    /// As `takes`, without the check against the end of the device.
    #[inline(always)]
    fn fits(&self, bio: &Bio) -> bool {
        let (sector, sectors) = (bio.sector.0, bio.sectors.0);
        bio.op as u8 <= self.last as u8
            && !bio.flags.intersects(self.special)
            && (sector | sectors) & self.unaligned == 0
            && sectors.wrapping_sub(1) < self.max
    }
}

/// Finds the route of each bio of a table, and restores bios that come back.
pub(super) struct TableRouter {
    limits: Limits,
    fast_path: TableFastPathFilter,
    map_kind: TableFastPathMap,
    map: TableSectorMap,
    /// The layout of the children when the lanes were opened.
    pub children: Rc<TargetChildMap>,
}

impl TableRouter {
    pub fn new(table: &Table, children: Rc<TargetChildMap>) -> TableRouter {
        let table_limits = table.table_limits();
        let map = TableSectorMap::new(table, &table_limits, &children);
        let limits = table_limits.whole;
        let size = limits.size.0;
        let fast_path = TableFastPathFilter {
            last: if limits.read_only { Op::Read } else { Op::Write },
            special: map.special(),
            unaligned: (u64::from(limits.logical_block) / SECTOR_SIZE).max(1) - 1,
            max: map.max().min(size),
            size,
        };
        TableRouter { limits, fast_path, map_kind: map.map_kind(&children), map, children }
    }

    /// The offset that is added to sectors, if all bios that go whole go to the only child.
    #[inline(always)]
    pub fn single(&self) -> Option<u64> {
        if let TableFastPathMap::Single(shift) = self.map_kind { Some(shift) } else { None }
    }

    #[inline(always)]
    pub fn to_single(&self, bio: &mut Bio, shift: u64) -> bool {
        let takes = self.fast_path.takes(bio);
        if takes {
            bio.sector.0 = bio.sector.0.wrapping_add(shift);
        }
        takes
    }

    /// True if `bio` lies within one of the chunks that begin at multiples of `mask` + 1.
    #[inline(always)]
    fn takes_within_chunk(&self, bio: &Bio, mask: u64) -> bool {
        // The sum does not overflow for a bio that fits.
        self.fast_path.takes(bio) && (bio.sector.0 & mask) + bio.sectors.0 <= mask + 1
    }

    #[inline(always)]
    fn to_stripe<const SHIFTS: bool>(&self, bio: &mut Bio, stripes: &StripeMapping) -> Option<usize> {
        // The device ends at a chunk boundary, so a bio within one chunk ends within the device.
        if !self.fast_path.fits(bio) || bio.sector.0 >= self.fast_path.size {
            return None;
        }
        let (child, sector) = stripes.place::<SHIFTS>(bio.sector.0, bio.sectors.0)?;
        bio.sector.0 = sector;
        Some(child)
    }

    #[inline(always)]
    fn to_line(&self, bio: &mut Bio, lines: &[OffsetOnlyMapping]) -> Option<usize> {
        let sector = bio.sector.0;
        let to = self.map.find_simple(lines, sector)?;
        // The sum does not overflow: the sector is at most slightly beyond the end, and a bio that
        // fits is short. A bio that ends before the end of its mapping ends before the end of the
        // device.
        (self.fast_path.fits(bio) && sector + bio.sectors.0 <= to.end).then(|| {
            bio.sector.0 = sector.wrapping_add(to.shift);
            to.child as usize
        })
    }

    #[inline(always)]
    fn to_any(&self, bio: &mut Bio) -> Option<usize> {
        let mapping = self.map.find_unambiguous(bio.sector.0)?;
        if !self.fast_path.takes(bio) {
            return None;
        }
        let (child, sector) = mapping.place(bio.sector.0, bio.sectors.0)?;
        bio.sector.0 = sector;
        Some(child)
    }

    /// As [`TableRouter::down`], for the usual bios. If `bio` surely goes whole, maps it and
    /// returns its child. Otherwise leaves it unchanged and returns `None`.
    #[inline(always)]
    pub fn fast_path(&self, bio: &mut Bio) -> Option<usize> {
        match &self.map_kind {
            TableFastPathMap::Single(shift) => self.to_single(bio, *shift).then_some(0),
            TableFastPathMap::Chunks(mask) => self.takes_within_chunk(bio, *mask).then_some(0),
            TableFastPathMap::Striped(stripes, true) => self.to_stripe::<true>(bio, stripes),
            TableFastPathMap::Striped(stripes, false) => self.to_stripe::<false>(bio, stripes),
            TableFastPathMap::Lines(lines) => self.to_line(bio, lines),
            TableFastPathMap::Mixed => self.to_any(bio),
        }
    }

    /// Maps bios with [`TableRouter::fast_path`] until one is refused. Returns how many were
    /// mapped.
    #[inline(always)]
    pub fn fast_path_all(&self, bios: &mut [Box<Bio>]) -> usize {
        let stopped = match &self.map_kind {
            TableFastPathMap::Single(0) => bios.iter_mut().position(|bio| !self.fast_path.takes(bio)),
            TableFastPathMap::Single(shift) => bios.iter_mut().position(|bio| !self.to_single(bio, *shift)),
            TableFastPathMap::Chunks(mask) => {
                bios.iter_mut().position(|bio| !self.takes_within_chunk(bio, *mask))
            }
            _ => bios.iter_mut().position(|bio| self.fast_path(bio).is_none()),
        };
        stopped.unwrap_or(bios.len())
    }

    /// Distributes bios until the fast path refuses one, and returns this bio.
    #[inline(never)]
    pub fn deal(&self, bios: &mut ChildLaneDispatcher<'_>) -> Option<Box<Bio>> {
        match &self.map_kind {
            TableFastPathMap::Striped(stripes, true) => bios.each(|bio| self.to_stripe::<true>(bio, stripes)),
            TableFastPathMap::Striped(stripes, false) => {
                bios.each(|bio| self.to_stripe::<false>(bio, stripes))
            }
            TableFastPathMap::Lines(lines) => bios.each(|bio| self.to_line(bio, lines)),
            TableFastPathMap::Single(_) | TableFastPathMap::Chunks(_) | TableFastPathMap::Mixed => {
                bios.each(|bio| self.fast_path(bio))
            }
        }
    }

    /// Decides the route of `bio`. If it goes whole, its sector is changed to that of the child.
    pub fn down(&self, bio: &mut Bio) -> BioRoute {
        if let Err(status) = self.limits.check(bio.op, bio.sector, bio.sectors) {
            return BioRoute::End(status);
        }
        if bio.op == Op::Flush || bio.flags.intersects(self.fast_path.special) {
            return BioRoute::Split;
        }
        let mapping = self.map.find(bio.sector.0);
        if mapping.room(bio.op, bio.sector.0) < bio.sectors.0 || mapping.fans_out(bio.op) {
            return BioRoute::Split;
        }
        let (child, sector) = mapping.whole(bio.sector.0);
        bio.sector.0 = sector;
        BioRoute::Child(child)
    }

    /// Restores the sectors of bios that came back from child `child`. They may include fragments,
    /// whose sectors are not used any more.
    #[inline(always)]
    pub fn up(&self, child: usize, bios: &mut [Box<Bio>]) {
        self.map.reverse_maps[child].restore_sectors(bios);
    }
}

impl BioSplitRule for TableRouter {
    fn next(&self, bio: &Bio, cursor: &mut SplitCursor) -> NextBioSplitStep {
        self.map.next(bio, cursor)
    }
}
