//! The data path of a table: from the device's sectors to the targets' lanes and back.
//!
//! The table is the boundary: whatever comes in from above, targets only see requests inside their range, aligned to their blocks, of operations that
//! they take, no longer than their limits. The usual bio (a read or write that fits) goes whole, its sector shifted on the way
//! down and back on the way up; a linear target has no lane of its own, the shift is all there is to it. The rest is cut.

use super::Table;
use super::map::Map;
use crate::bugs::{self, Bug};
use crate::split::{Cursor, Cut, Step};
use crate::split_lane::{Route, SplitLane, Way};
use udm_core::{Bio, BioFlags, Cx, Limits, Op, OpenError, SECTOR_SIZE};

/// What makes a bio one of the usual ones: a read or write that needs nothing but its place looked up.
struct Plain {
    /// The operations, a bit each.
    ops: u8,
    special: BioFlags,
    /// `sector` and `sectors` have none of these bits.
    unaligned: u64,
    max: u64,
    size: u64,
}

impl Plain {
    // One branch a bio: the tests are joined without shortcuts.
    #[inline(always)]
    fn takes(&self, bio: &Bio) -> bool {
        let (sector, sectors) = (bio.sector.0, bio.sectors.0);
        let op = self.ops >> (bio.op as u8) & 1 == 1;
        let flags = !bio.flags.intersects(self.special);
        let aligned = (sector | sectors) & self.unaligned == 0;
        // `max` is at most `size`, so the difference below is one where it counts.
        let len = sectors.wrapping_sub(1) < self.max;
        let range = sector <= self.size.wrapping_sub(sectors);
        op & flags & aligned & len & range
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
}

impl TableLane {
    /// Opens the lanes of a table.
    ///
    /// # Errors
    /// When a device below can't be opened on this core.
    pub fn open(table: &Table, cx: &mut Cx<'_>) -> Result<TableLane, OpenError> {
        let fit = table.fit();
        let map = Map::new(table, &fit);
        let mut lanes = Vec::with_capacity(table.entries.len());
        for entry in &table.entries {
            lanes.push(match entry.target.as_linear() {
                Some((device, _)) => device.device.open(cx)?,
                None => entry.target.open(cx)?,
            });
        }
        let limits = fit.whole;
        let size = limits.size.0;
        let single = match &*map.places {
            [place] if !place.has_chunks() => Some(place.shift),
            _ => None,
        };
        let plain = Plain {
            ops: 1 << Op::Read as u8 | u8::from(!limits.read_only) << Op::Write as u8,
            special: map.special(),
            unaligned: match bugs::on(Bug::BlocksIgnored) {
                true => 0,
                false => (u64::from(limits.logical_block) / SECTOR_SIZE).max(1) - 1,
            },
            max: map.places.iter().map(|place| place.max(Op::Read)).fold(size, u64::min),
            size,
        };
        Ok(SplitLane::new(TableRoute { limits, plain, single, map }, lanes, cx))
    }
}

impl TableRoute {
    /// The way of a bio that is not one of the usual ones, or that may not fit whole.
    #[cold]
    fn unusual(&self, bio: &mut Bio) -> Way {
        if let Err(status) = self.limits.check(bio.op, bio.sector, bio.sectors) {
            return Way::End(status);
        }
        if bio.op == Op::Flush || bio.flags.intersects(self.plain.special) {
            return Way::Cut;
        }
        let leg = self.map.find(bio.sector.0);
        let place = &self.map.places[leg];
        if place.room(bio.op, bio.sector.0) < bio.sectors.0 {
            return Way::Cut;
        }
        bio.sector.0 = bio.sector.0.wrapping_add(place.shift);
        Way::Leg(leg)
    }
}

impl Route for TableRoute {
    #[inline(always)]
    fn run_down(&self, bios: &mut [Box<Bio>]) -> usize {
        let Some(shift) = self.single else { return 0 };
        let mut run = 0;
        for bio in bios {
            if !self.plain.takes(bio) {
                break;
            }
            bio.sector.0 = bio.sector.0.wrapping_add(shift);
            run += 1;
        }
        run
    }

    #[inline(always)]
    fn down(&self, bio: &mut Bio) -> Way {
        if !self.plain.takes(bio) {
            return self.unusual(bio);
        }
        if let Some(shift) = self.single {
            bio.sector.0 = bio.sector.0.wrapping_add(shift);
            return Way::Leg(0);
        }
        let leg = self.map.find(bio.sector.0);
        let place = &self.map.places[leg];
        if place.left(bio.sector.0) < bio.sectors.0 {
            return Way::Cut;
        }
        bio.sector.0 = bio.sector.0.wrapping_add(place.shift);
        Way::Leg(leg)
    }

    #[inline(always)]
    fn up(&self, leg: usize, bios: &mut [Box<Bio>]) {
        let shift = self.map.places[leg].shift;
        if shift != 0 {
            for bio in bios.iter_mut().filter(|bio| bio.status.is_ok() || !bugs::on(Bug::OffsetKeptOnError)) {
                bio.sector.0 = bio.sector.0.wrapping_sub(shift);
            }
        }
    }
}

impl Cut for TableRoute {
    fn next(&self, bio: &Bio, cursor: &mut Cursor) -> Step {
        self.map.next(bio, cursor)
    }
}
