//! The data path of a table: from the device's sectors to the targets' lanes and back.
//!
//! The table is the boundary: whatever comes in from above, targets only see requests inside their
//! range, aligned to their blocks, of operations that they take, no longer than their limits. The
//! usual bio (a read or write that fits) goes whole, its sector shifted on the way down and back on
//! the way up; a linear target has no lane of its own, the shift is all there is to it. The rest is
//! cut.

use super::Table;
use super::legs_of::LegsOf;
use super::map::{Map, Mapping, Simple};
use crate::bugs::{self, Bug};
use crate::legs::Deal;
use crate::split::{Cursor, Cut, Step};
use crate::split_lane::{Route, SplitLane, Way, all_to};
use std::rc::Rc;
use udm_core::{Bio, BioFlags, Cx, Limits, Op, OpenError, SECTOR_SIZE};

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
pub(crate) type TableLane = SplitLane<TableRoute>;

/// Where the bios of a table go.
pub(crate) struct TableRoute {
    limits: Limits,
    plain: Plain,
    /// The shift of the one target there is, if plain bios go to it whole wherever they lie.
    single: Option<u64>,
    map: Map,
    /// As when the lanes were opened, whatever became of the targets since.
    legs: Rc<LegsOf>,
}

impl TableLane {
    /// Opens the lanes of a table.
    ///
    /// # Errors
    /// When a device below can't be opened on this core.
    pub fn open(table: &Table, cx: &mut Cx<'_>) -> Result<TableLane, OpenError> {
        let legs = Rc::new(LegsOf::new(&table.entries));
        let mut lanes = Vec::with_capacity(legs.first.len());
        for &target in &legs.first {
            let entry = &table.entries[target];
            lanes.push(match entry.target.as_linear() {
                Some((device, _)) => device.device.open(cx)?,
                None => entry.target.open(cx)?,
            });
        }
        Ok(SplitLane::new(TableRoute::new(table, legs), lanes, cx))
    }

    /// The table is in use from now on: see [`udm_core::Lane::begin`].
    pub fn begin(&mut self, table: &Table, cx: &mut Cx<'_>) {
        let legs = Rc::clone(&self.route().legs);
        self.begin_with(TableRoute::new(table, legs), cx);
    }
}

impl TableRoute {
    fn new(table: &Table, legs: Rc<LegsOf>) -> TableRoute {
        let fit = table.fit();
        let map = Map::new(table, &fit, &legs);
        let limits = fit.whole;
        let size = limits.size.0;
        let single = match &*map.mappings {
            [mapping] if !mapping.has_chunks() => Some(mapping.shift),
            _ => None,
        };
        let plain = Plain {
            last: if limits.read_only { Op::Read } else { Op::Write },
            special: map.special(),
            unaligned: match bugs::on(Bug::BlocksIgnored) {
                true => 0,
                false => (u64::from(limits.logical_block) / SECTOR_SIZE).max(1) - 1,
            },
            max: map.mappings.iter().map(|mapping| mapping.max(Op::Read)).fold(size, u64::min),
            size,
        };
        TableRoute { limits, plain, single, map, legs }
    }

    #[inline(always)]
    fn to_single(&self, bio: &mut Bio, shift: u64) -> Option<usize> {
        self.plain.takes(bio).then(|| {
            bio.sector.0 = bio.sector.0.wrapping_add(shift);
            0
        })
    }

    #[inline(always)]
    fn to_mapping(&self, bio: &mut Bio, mapping: &Mapping) -> Option<usize> {
        (self.plain.takes(bio) && mapping.left(bio.sector.0) >= bio.sectors.0).then(|| {
            bio.sector.0 = bio.sector.0.wrapping_add(mapping.shift);
            mapping.leg
        })
    }

    #[inline(always)]
    fn to_simple(&self, bio: &mut Bio, find: impl Fn(u64) -> Option<Simple>) -> Option<usize> {
        let sector = bio.sector.0;
        let to = find(sector)?;
        // The sector is not far behind the end and no bio that fits is long: their sum is one. What
        // ends in front of the mapping's end is in front of the device's.
        (self.plain.fits(bio) && sector + bio.sectors.0 <= to.end).then(|| {
            bio.sector.0 = sector.wrapping_add(to.shift);
            to.leg as usize
        })
    }
}

impl Route for TableRoute {
    #[inline(always)]
    fn plain(&self, bio: &mut Bio) -> Option<usize> {
        match self.single {
            Some(shift) => self.to_single(bio, shift),
            None => self.map.find_plain(bio.sector.0).and_then(|mapping| self.to_mapping(bio, mapping)),
        }
    }

    /// Asks once for all what kind of table it is.
    #[inline(always)]
    fn all_to(&self, leg: usize, bios: &mut [Box<Bio>]) -> (usize, Option<usize>) {
        match (self.single, &*self.map.mappings, self.map.simple()) {
            (Some(0), ..) => all_to(leg, bios, |bio| self.plain.takes(bio).then_some(0)),
            (Some(shift), ..) => all_to(leg, bios, |bio| self.to_single(bio, shift)),
            (None, [mapping], _) => all_to(leg, bios, |bio| self.to_mapping(bio, mapping)),
            (None, _, Some(find)) => all_to(leg, bios, |bio| self.to_simple(bio, &find)),
            (None, ..) => all_to(leg, bios, |bio| self.plain(bio)),
        }
    }

    #[inline(always)]
    fn deal(&self, bios: &mut Deal<'_>) -> Option<Box<Bio>> {
        match self.map.simple() {
            Some(find) => bios.each(|bio| self.to_simple(bio, &find)),
            None => bios.each(|bio| self.plain(bio)),
        }
    }

    fn down(&self, bio: &mut Bio) -> Way {
        if let Err(status) = self.limits.check(bio.op, bio.sector, bio.sectors) {
            return Way::End(status);
        }
        if bio.op == Op::Flush || bio.flags.intersects(self.plain.special) {
            return Way::Cut;
        }
        let mapping = self.map.find(bio.sector.0);
        if mapping.room(bio.op, bio.sector.0) < bio.sectors.0 {
            return Way::Cut;
        }
        bio.sector.0 = bio.sector.0.wrapping_add(mapping.shift);
        Way::Leg(mapping.leg)
    }

    #[inline(always)]
    fn up(&self, leg: usize, bios: &mut [Box<Bio>]) {
        self.map.shifts[leg].undo(bios);
    }
}

impl Cut for TableRoute {
    fn next(&self, bio: &Bio, cursor: &mut Cursor) -> Step {
        self.map.next(bio, cursor)
    }
}
