//! Where the bios of a table go: from the device's sectors to those of its legs, and back.
//!
//! What it is asked for each bio of a batch calls nothing, so that a loop of it keeps what it needs
//! in registers; the [`Shape`] of the table is looked at once for all of them.

use super::Table;
use super::legs_of::LegsOf;
use super::map::{Map, Shape, Simple, Stripes};
use crate::legs::Deal;
use crate::split::{Cursor, Cut, Step};
use std::rc::Rc;
use udm_core::bugs::{self, Bug};
use udm_core::{Bio, BioFlags, Limits, Op, SECTOR_SIZE, Status};

/// Where a bio goes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// To this leg, whole; it has been moved.
    Leg(usize),
    /// In pieces.
    Cut,
    /// Nowhere.
    End(Status),
}

/// What makes a bio one of the usual ones: a read or write that needs nothing but its place looked
/// up.
struct Plain {
    /// The last of the operations that do, of a list that begins with reads and writes.
    last: Op,
    special: BioFlags,
    /// `sector` and `sectors` have none of these bits.
    unaligned: u64,
    max: u64,
    size: u64,
}

impl Plain {
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
pub(super) struct Route {
    limits: Limits,
    plain: Plain,
    shape: Shape,
    map: Map,
    /// As when the lanes were opened.
    pub legs: Rc<LegsOf>,
}

impl Route {
    pub fn new(table: &Table, legs: Rc<LegsOf>) -> Route {
        let fit = table.fit();
        let map = Map::new(table, &fit, &legs);
        let limits = fit.whole;
        let size = limits.size.0;
        let plain = Plain {
            last: if limits.read_only { Op::Read } else { Op::Write },
            special: map.special(),
            unaligned: match bugs::on(Bug::BlocksIgnored) {
                true => 0,
                false => (u64::from(limits.logical_block) / SECTOR_SIZE).max(1) - 1,
            },
            max: map.max().min(size),
            size,
        };
        Route { limits, plain, shape: map.shape(&legs), map, legs }
    }

    /// What is added to the sectors of bios that go whole, if they all go to the one leg there is
    /// wherever they lie.
    #[inline(always)]
    pub fn single(&self) -> Option<u64> {
        if let Shape::Single(shift) = self.shape { Some(shift) } else { None }
    }

    #[inline(always)]
    pub fn to_single(&self, bio: &mut Bio, shift: u64) -> bool {
        let takes = self.plain.takes(bio);
        if takes {
            bio.sector.0 = bio.sector.0.wrapping_add(shift);
        }
        takes
    }

    #[inline(always)]
    fn to_stripe<const SHIFTS: bool>(&self, bio: &mut Bio, stripes: &Stripes) -> Option<usize> {
        // The device ends with a chunk: what lies in a chunk ends in front of that.
        if !self.plain.fits(bio) || bio.sector.0 >= self.plain.size {
            return None;
        }
        let (leg, sector) = stripes.place::<SHIFTS>(bio.sector.0, bio.sectors.0)?;
        bio.sector.0 = sector;
        Some(leg)
    }

    #[inline(always)]
    fn to_line(&self, bio: &mut Bio, lines: &[Simple]) -> Option<usize> {
        let sector = bio.sector.0;
        let to = self.map.find_simple(lines, sector)?;
        // The sector is not far behind the end and no bio that fits is long: their sum is one. What
        // ends in front of the mapping's end is in front of the device's.
        (self.plain.fits(bio) && sector + bio.sectors.0 <= to.end).then(|| {
            bio.sector.0 = sector.wrapping_add(to.shift);
            to.leg as usize
        })
    }

    #[inline(always)]
    fn to_any(&self, bio: &mut Bio) -> Option<usize> {
        let mapping = self.map.find_plain(bio.sector.0)?;
        if !self.plain.takes(bio) {
            return None;
        }
        let (leg, sector) = mapping.place(bio.sector.0, bio.sectors.0)?;
        bio.sector.0 = sector;
        Some(leg)
    }

    /// As [`Route::down`], for what nearly all bios are: moves `bio` and says which leg it goes to,
    /// if it is plain that it goes whole; else it is left as it is.
    #[inline(always)]
    pub fn plain(&self, bio: &mut Bio) -> Option<usize> {
        match &self.shape {
            Shape::Single(shift) => self.to_single(bio, *shift).then_some(0),
            Shape::Striped(stripes, true) => self.to_stripe::<true>(bio, stripes),
            Shape::Striped(stripes, false) => self.to_stripe::<false>(bio, stripes),
            Shape::Lines(lines) => self.to_line(bio, lines),
            Shape::Mixed => self.to_any(bio),
        }
    }

    /// Does [`Route::plain`] with each of `bios` for as long as it is plain: with how many.
    #[inline(always)]
    pub fn all_plain(&self, bios: &mut [Box<Bio>]) -> usize {
        let stopped = match &self.shape {
            Shape::Single(0) => bios.iter_mut().position(|bio| !self.plain.takes(bio)),
            Shape::Single(shift) => bios.iter_mut().position(|bio| !self.to_single(bio, *shift)),
            _ => bios.iter_mut().position(|bio| self.plain(bio).is_none()),
        };
        stopped.unwrap_or(bios.len())
    }

    /// Deals out bios for as long as it is plain where they go: the first of which it is not.
    #[inline(never)]
    pub fn deal(&self, bios: &mut Deal<'_>) -> Option<Box<Bio>> {
        match &self.shape {
            Shape::Striped(stripes, true) => bios.each(|bio| self.to_stripe::<true>(bio, stripes)),
            Shape::Striped(stripes, false) => bios.each(|bio| self.to_stripe::<false>(bio, stripes)),
            Shape::Lines(lines) => bios.each(|bio| self.to_line(bio, lines)),
            Shape::Single(_) | Shape::Mixed => bios.each(|bio| self.plain(bio)),
        }
    }

    /// The way of `bio`. One that goes whole is moved: its sector counts as the leg does from here
    /// on.
    pub fn down(&self, bio: &mut Bio) -> Way {
        if let Err(status) = self.limits.check(bio.op, bio.sector, bio.sectors) {
            return Way::End(status);
        }
        if bio.op == Op::Flush || bio.flags.intersects(self.plain.special) {
            return Way::Cut;
        }
        let mapping = self.map.find(bio.sector.0);
        if mapping.room(bio.op, bio.sector.0) < bio.sectors.0 || mapping.fans_out(bio.op) {
            return Way::Cut;
        }
        let (leg, sector) = mapping.whole(bio.sector.0);
        bio.sector.0 = sector;
        Way::Leg(leg)
    }

    /// Undoes that for bios that came back from leg `leg`, pieces among them, whose place nobody
    /// looks at any more.
    #[inline(always)]
    pub fn up(&self, leg: usize, bios: &mut [Box<Bio>]) {
        self.map.backs[leg].undo(bios);
    }
}

impl Cut for Route {
    fn next(&self, bio: &Bio, cursor: &mut Cursor) -> Step {
        self.map.next(bio, cursor)
    }
}
