//! Where the bios of a table go: from the device's sectors to those of its legs, and back.
//!
//! What it is asked for each bio of a batch calls nothing, so that a loop of it keeps what it needs
//! in registers; the [`MapKind`] of the table is looked at once for all of them.

use super::Table;
use super::child_layout::ChildLayout;
use super::map::{MapKind, SimpleMapping, StripeMapping, TableMap};
use crate::child_lanes::BatchDispatch;
use crate::split::{SplitBio, SplitCursor, SplitStep};
use std::rc::Rc;
use udm_core::bugs::{self, Bug};
use udm_core::{Bio, BioFlags, Limits, Op, SECTOR_SIZE, Status};

/// Where a bio goes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum RouteAction {
    /// To this leg, whole; it has been moved.
    ChildLane(usize),
    /// In pieces.
    SplitBio,
    /// Nowhere.
    End(Status),
}

/// What makes a bio one of the usual ones: a read or write that needs nothing but its place looked
/// up.
struct FastPathFilter {
    /// The last of the operations that do, of a list that begins with reads and writes.
    last: Op,
    special: BioFlags,
    /// `sector` and `sectors` have none of these bits.
    unaligned: u64,
    max: u64,
    size: u64,
}

impl FastPathFilter {
    #[inline(always)]
    fn takes(&self, bio: &Bio) -> bool {
        // `max` is at most `size`, so the difference is one.
        self.fits(bio) && bio.sector.0 <= self.size.wrapping_sub(bio.sectors.0)
    }

    /// The same but for the end of the device.
    #[inline(always)]
    fn fits(&self, bio: &Bio) -> bool {
        let (sector, sectors) = (bio.sector.0, bio.sectors.0);
        bio.op as u8 <= self.last as u8
            && !bio.flags.intersects(self.special)
            && (sector | sectors) & self.unaligned == 0
            && sectors.wrapping_sub(1) < self.max
    }
}

/// See the module's documentation.
pub(super) struct TableRouter {
    limits: Limits,
    fast_path: FastPathFilter,
    map_kind: MapKind,
    map: TableMap,
    /// As when the lanes were opened.
    pub legs: Rc<ChildLayout>,
}

impl TableRouter {
    pub fn new(table: &Table, legs: Rc<ChildLayout>) -> TableRouter {
        let table_limits = table.table_limits();
        let map = TableMap::new(table, &table_limits, &legs);
        let limits = table_limits.whole;
        let size = limits.size.0;
        let fast_path = FastPathFilter {
            last: if limits.read_only { Op::Read } else { Op::Write },
            special: map.special(),
            unaligned: match bugs::on(Bug::BlocksIgnored) {
                true => 0,
                false => (u64::from(limits.logical_block) / SECTOR_SIZE).max(1) - 1,
            },
            max: map.max().min(size),
            size,
        };
        TableRouter { limits, fast_path, map_kind: map.map_kind(&legs), map, legs }
    }

    /// What is added to the sectors of bios that go whole, if they all go to the one leg there is
    /// wherever they lie.
    #[inline(always)]
    pub fn single(&self) -> Option<u64> {
        if let MapKind::Single(shift) = self.map_kind { Some(shift) } else { None }
    }

    #[inline(always)]
    pub fn to_single(&self, bio: &mut Bio, shift: u64) -> bool {
        let takes = self.fast_path.takes(bio);
        if takes {
            bio.sector.0 = bio.sector.0.wrapping_add(shift);
        }
        takes
    }

    #[inline(always)]
    fn to_stripe<const SHIFTS: bool>(&self, bio: &mut Bio, stripes: &StripeMapping) -> Option<usize> {
        // The device ends with a chunk: what lies in a chunk ends in front of that.
        if !self.fast_path.fits(bio) || bio.sector.0 >= self.fast_path.size {
            return None;
        }
        let (leg, sector) = stripes.place::<SHIFTS>(bio.sector.0, bio.sectors.0)?;
        bio.sector.0 = sector;
        Some(leg)
    }

    #[inline(always)]
    fn to_line(&self, bio: &mut Bio, lines: &[SimpleMapping]) -> Option<usize> {
        let sector = bio.sector.0;
        let to = self.map.find_simple(lines, sector)?;
        // The sector is not far behind the end and no bio that fits is long: their sum is one. What
        // ends in front of the mapping's end is in front of the device's.
        (self.fast_path.fits(bio) && sector + bio.sectors.0 <= to.end).then(|| {
            bio.sector.0 = sector.wrapping_add(to.shift);
            to.leg as usize
        })
    }

    #[inline(always)]
    fn to_any(&self, bio: &mut Bio) -> Option<usize> {
        let mapping = self.map.find_unambiguous(bio.sector.0)?;
        if !self.fast_path.takes(bio) {
            return None;
        }
        let (leg, sector) = mapping.place(bio.sector.0, bio.sectors.0)?;
        bio.sector.0 = sector;
        Some(leg)
    }

    /// As [`TableRouter::down`], for what nearly all bios are: moves `bio` and says which leg it goes to,
    /// if it is plain that it goes whole; else it is left as it is.
    #[inline(always)]
    pub fn fast_path(&self, bio: &mut Bio) -> Option<usize> {
        match &self.map_kind {
            MapKind::Single(shift) => self.to_single(bio, *shift).then_some(0),
            MapKind::StripeSet(stripes, true) => self.to_stripe::<true>(bio, stripes),
            MapKind::StripeSet(stripes, false) => self.to_stripe::<false>(bio, stripes),
            MapKind::Lines(lines) => self.to_line(bio, lines),
            MapKind::Mixed => self.to_any(bio),
        }
    }

    /// Does [`TableRouter::fast_path`] with each of `bio_faults` for as long as it is plain: with how many.
    #[inline(always)]
    pub fn fast_path_all(&self, bios: &mut [Box<Bio>]) -> usize {
        let stopped = match &self.map_kind {
            MapKind::Single(0) => bios.iter_mut().position(|bio| !self.fast_path.takes(bio)),
            MapKind::Single(shift) => bios.iter_mut().position(|bio| !self.to_single(bio, *shift)),
            _ => bios.iter_mut().position(|bio| self.fast_path(bio).is_none()),
        };
        stopped.unwrap_or(bios.len())
    }

    /// Deals out bios for as long as it is plain where they go: the first of which it is not.
    #[inline(never)]
    pub fn deal(&self, bios: &mut BatchDispatch<'_>) -> Option<Box<Bio>> {
        match &self.map_kind {
            MapKind::StripeSet(stripes, true) => bios.each(|bio| self.to_stripe::<true>(bio, stripes)),
            MapKind::StripeSet(stripes, false) => bios.each(|bio| self.to_stripe::<false>(bio, stripes)),
            MapKind::Lines(lines) => bios.each(|bio| self.to_line(bio, lines)),
            MapKind::Single(_) | MapKind::Mixed => bios.each(|bio| self.fast_path(bio)),
        }
    }

    /// The way of `bio`. One that goes whole is moved: its sector counts as the leg does from here
    /// on.
    pub fn down(&self, bio: &mut Bio) -> RouteAction {
        if let Err(status) = self.limits.check(bio.op, bio.sector, bio.sectors) {
            return RouteAction::End(status);
        }
        if bio.op == Op::Flush || bio.flags.intersects(self.fast_path.special) {
            return RouteAction::SplitBio;
        }
        let mapping = self.map.find(bio.sector.0);
        if mapping.room(bio.op, bio.sector.0) < bio.sectors.0 || mapping.fans_out(bio.op) {
            return RouteAction::SplitBio;
        }
        let (leg, sector) = mapping.whole(bio.sector.0);
        bio.sector.0 = sector;
        RouteAction::ChildLane(leg)
    }

    /// Undoes that for bios that came back from leg `leg`, pieces among them, whose place nobody
    /// looks at any more.
    #[inline(always)]
    pub fn up(&self, leg: usize, bios: &mut [Box<Bio>]) {
        self.map.reverse_maps[leg].restore_sectors(bios);
    }
}

impl SplitBio for TableRouter {
    fn next(&self, bio: &Bio, cursor: &mut SplitCursor) -> SplitStep {
        self.map.next(bio, cursor)
    }
}
