//! The map of a table: it finds the target of a bio, and defines the pieces of a bio that cannot go
//! whole.

use super::check::TableLimits;
use super::child_layout::TargetChildMap;
use super::reverse_map::ReverseMap;
use super::run_index::SectorRunIndex;
use super::{Table, TableEntry};
use crate::divisor::Divisor;
use crate::split::{BioSplitRule, NextBioSplitStep, SplitCursor, SplitPiece};
use crate::stripes::StripeLayout;
use crate::target::TargetDataPath;
use std::collections::BTreeSet;
use udm_core::{Bio, BioFlags, Limits, Op, SECTOR_SIZE, Sector, Sectors};

/// The mapping of one table line, for the data path.
pub(super) struct TableLineMapping {
    /// The child of the target; the child of the first stripe, if it is striped.
    child: usize,
    start: u64,
    end: u64,
    /// Added to a sector on the way down and subtracted on the way up, modulo 2^64. Unused if the
    /// target is striped.
    shift: u64,
    stripes: Option<StripeMapping>,
    /// Reads and writes are cut at multiples of this, counted from the target's start. `None` if
    /// there is no such limit.
    chunk: Option<Divisor>,
    /// True if discards are cut at these multiples too.
    cuts_discards: bool,
    /// The longest request in sectors, by [`Op`] (reads and writes, discards, write-zeroes). A
    /// multiple of the logical block.
    max: [u64; 3],
}

/// Devices and chunks of a striped target.
pub(super) struct StripeMapping {
    layout: StripeLayout,
    /// The first sector of each stripe on its device.
    begins: Box<[u64]>,
    /// The child of the first stripe.
    child: usize,
}

/// All mappings of a table, and the data that flushes need.
pub(super) struct TableSectorMap {
    mappings: Vec<TableLineMapping>,
    /// Finds the mapping of a sector.
    index: SectorRunIndex,
    /// Restores the sectors of bios that come back, one per child.
    pub reverse_maps: Vec<ReverseMap>,
    /// The children that get a flush of the whole device.
    flush: Vec<usize>,
    /// Flags that are removed from the data pieces of a bio.
    strip: BioFlags,
    /// True if a write with FUA needs a flush after it.
    flush_behind: bool,
}

/// The kind of a table, for reads and writes that fit.
pub(super) enum TableFastPathMap {
    /// All bios go to the only child, with this offset.
    Single(u64),
    /// All bios go to the only child, with their sectors, unless they cross a multiple of a power
    /// of two, which is this value plus 1.
    Chunks(u64),
    /// The only target is striped. True if its layout uses only shifts.
    Striped(StripeMapping, bool),
    /// No target has chunks, so each bio goes whole to one of these.
    Lines(Box<[OffsetOnlyMapping]>),
    /// Some targets have chunks.
    Mixed,
}

/// The part of a mapping without chunks that a read or write needs.
#[derive(Clone, Copy)]
pub(super) struct OffsetOnlyMapping {
    pub end: u64,
    pub shift: u64,
    pub child: u32,
}

impl StripeMapping {
    /// The striped mapping of target `i`, if it is striped.
    fn new(children: &TargetChildMap, i: usize) -> Option<StripeMapping> {
        let (TargetDataPath::Striped(striped), child) = &children.lines[i] else { return None };
        let begins = striped.stripes.iter().map(|stripe| stripe.1.0).collect();
        Some(StripeMapping { layout: striped.layout, begins, child: *child })
    }

    /// The child of sector `at` of the target, and the sector there. Returns `None` if the
    /// `sectors` sectors from `at` cross the end of a chunk.
    #[inline(always)]
    pub fn place<const SHIFTS: bool>(&self, at: u64, sectors: u64) -> Option<(usize, u64)> {
        let (stripe, to, within) = self.layout.place::<SHIFTS>(at);
        let begin = self.begins.get(stripe)?;
        (within + sectors <= self.layout.chunk()).then_some((self.child + stripe, begin.wrapping_add(to)))
    }

    /// The part of a range of the target on stripe `next` or the first later stripe with a part:
    /// child, sector and length. Advances `next`. `None` if no part is left.
    fn part(&self, from: u64, to: u64, next: &mut u32) -> Option<(usize, u64, u64)> {
        loop {
            let stripe = *next as usize;
            let begin = self.begins.get(stripe)?;
            *next += 1;
            let (first, end) = self.layout.part(stripe, from, to);
            if first < end {
                return Some((self.child + stripe, begin.wrapping_add(first), end - first));
            }
        }
    }
}

impl TableLineMapping {
    fn new(children: &TargetChildMap, entries: &[TableEntry], i: usize, limits: &Limits) -> TableLineMapping {
        let entry = &entries[i];
        let block = u64::from(limits.logical_block) / SECTOR_SIZE;
        // A limit below one block would cause endless cutting. The device below then decides what
        // to do with a request of one block.
        let whole = |max: Sectors| (max.0 - max.0 % block.max(1)).max(block.max(1));
        TableLineMapping {
            child: children.lines[i].1,
            start: entry.start.0,
            end: entry.end().0,
            shift: children.shift(entries, i),
            stripes: StripeMapping::new(children, i),
            chunk: entry.target.max_io_len().map(|c| Divisor::new(c.0.clamp(1, Divisor::MAX))),
            cuts_discards: entry.target.features().cuts_discards,
            max: [whole(limits.max_sectors), whole(limits.max_discard), whole(limits.max_write_zeroes)],
        }
    }

    /// True if a request goes to several children because it has no data and the target is striped.
    pub fn fans_out(&self, op: Op) -> bool {
        self.stripes.is_some() && !op.has_data()
    }

    /// The child of `sector`, and the sector there.
    pub fn whole(&self, sector: u64) -> (usize, u64) {
        match &self.stripes {
            None => (self.child, sector.wrapping_add(self.shift)),
            Some(stripes) => {
                let (stripe, to) = stripes.layout.map(sector - self.start);
                (stripes.child + stripe, stripes.begins[stripe].wrapping_add(to))
            }
        }
    }

    /// The child and the sector there for a read or write that fits, if it needs no cut.
    #[inline(always)]
    pub fn place(&self, sector: u64, sectors: u64) -> Option<(usize, u64)> {
        match &self.stripes {
            None => (self.left(sector) >= sectors).then(|| (self.child, sector.wrapping_add(self.shift))),
            Some(_) if sector + sectors > self.end => None,
            Some(stripes) => stripes.place::<false>(sector - self.start, sectors),
        }
    }

    /// The longest request for `op`, at any sector.
    pub fn max(&self, op: Op) -> u64 {
        match op {
            Op::Read | Op::Write => self.max[0],
            Op::Discard => self.max[1],
            Op::WriteZeroes => self.max[2],
            Op::Flush => u64::MAX,
        }
    }

    /// How many sectors from `at` a read or write may cover before it must be cut. `at` is in this
    /// mapping.
    #[inline]
    fn left(&self, at: u64) -> u64 {
        let left = self.end - at;
        match self.chunk {
            None => left,
            Some(chunk) => left.min(chunk.get() - chunk.remainder(at - self.start)),
        }
    }

    /// How many sectors from `at` one request for `op` may cover. `at` is in this mapping.
    pub fn room(&self, op: Op, at: u64) -> u64 {
        let cut = op.has_data() || op == Op::Discard && self.cuts_discards;
        let left = if cut { self.left(at) } else { self.end - at };
        left.min(self.max(op))
    }
}

impl TableSectorMap {
    pub fn new(table: &Table, table_limits: &TableLimits, children: &TargetChildMap) -> TableSectorMap {
        let entries = &table.entries;
        let mapping = |(i, limits)| TableLineMapping::new(children, entries, i, limits);
        let mappings: Vec<TableLineMapping> = table_limits.parts.iter().enumerate().map(mapping).collect();
        let fua = table_limits.whole.fua;
        // A mapped device below may get a cache by a reload, which this table would not notice.
        let cache =
            table_limits.whole.write_cache || table.devices().any(|below| below.device.stacked().is_some());
        TableSectorMap {
            index: SectorRunIndex::new(mappings.iter().map(|mapping| mapping.end).collect()),
            reverse_maps: ReverseMap::of_all(children, entries),
            flush: select_flush_children(table, children),
            strip: BioFlags::PREFLUSH | if fua { BioFlags::empty() } else { BioFlags::FUA },
            flush_behind: !fua && cache,
            mappings,
        }
    }

    /// The kind of this table.
    pub fn map_kind(&self, children: &TargetChildMap) -> TableFastPathMap {
        let simple = |m: &TableLineMapping| match m.chunk {
            None => Some(OffsetOnlyMapping { end: m.end, shift: m.shift, child: m.child as u32 }),
            Some(_) => None,
        };
        match (&*self.mappings, StripeMapping::new(children, 0), self.mappings.iter().map(simple).collect()) {
            ([_], Some(stripes), _) => {
                let shifts = stripes.layout.is_by_shifts();
                TableFastPathMap::Striped(stripes, shifts)
            }
            ([mapping], _, Some(_)) => TableFastPathMap::Single(mapping.shift),
            ([TableLineMapping { chunk: Some(chunk), start: 0, shift: 0, .. }], ..) if chunk.is_shift() => {
                TableFastPathMap::Chunks(chunk.get() - 1)
            }
            (_, _, Some(lines)) => TableFastPathMap::Lines(lines),
            _ => TableFastPathMap::Mixed,
        }
    }

    /// The longest read or write that every target accepts without a cut for its length.
    pub fn max(&self) -> u64 {
        self.mappings.iter().map(|mapping| mapping.max(Op::Read)).min().unwrap_or_default()
    }

    /// Flags of bios that must go through the splitter.
    pub fn special(&self) -> BioFlags {
        self.strip
    }

    /// The mapping of `sector`, which is below the end of the device.
    #[inline(always)]
    pub fn find(&self, sector: u64) -> &TableLineMapping {
        &self.mappings[self.index.find(sector)]
    }

    /// The mapping of `sector`, if the index finds it without a search. For a sector beyond the
    /// end, the result may be any mapping.
    #[inline(always)]
    pub fn find_unambiguous(&self, sector: u64) -> Option<&TableLineMapping> {
        self.index.pick(&self.mappings, sector)
    }

    /// As [`TableSectorMap::find_unambiguous`], for the short mappings of
    /// [`TableFastPathMap::Lines`].
    #[inline(always)]
    pub fn find_simple<'a>(
        &self,
        lines: &'a [OffsetOnlyMapping],
        sector: u64,
    ) -> Option<&'a OffsetOnlyMapping> {
        self.index.pick(lines, sector)
    }

    /// The next piece of the range of a bio.
    fn data_piece(&self, bio: &Bio, cursor: &mut SplitCursor) -> Option<SplitPiece> {
        while cursor.at < bio.sectors.0 {
            let at = bio.sector.0 + cursor.at;
            let mapping = self.find(at);
            let sectors = mapping.room(bio.op, at).min(bio.sectors.0 - cursor.at);
            let piece = |(child, sector, sectors)| {
                let flags = bio.flags - self.strip;
                SplitPiece { child, op: bio.op, flags, sector: Sector(sector), sectors: Sectors(sectors) }
            };
            // A request without data need not end at chunks. Each stripe gets one piece with all
            // its sectors in the range.
            if let Some(stripes) = mapping.stripes.as_ref().filter(|_| !bio.op.has_data()) {
                let from = at - mapping.start;
                if let Some(part) = stripes.part(from, from + sectors, &mut cursor.part) {
                    return Some(piece(part));
                }
                cursor.part = 0;
                cursor.at += sectors;
                continue;
            }
            cursor.at += sectors;
            let (child, sector) = mapping.whole(at);
            return Some(piece((child, sector, sectors)));
        }
        None
    }

    /// The next piece of a flush of the whole device.
    fn flush_piece(&self, cursor: &mut SplitCursor) -> Option<SplitPiece> {
        let child = *self.flush.get(usize::try_from(cursor.at).ok()?)?;
        cursor.at += 1;
        let flags = BioFlags::empty();
        Some(SplitPiece { child, op: Op::Flush, flags, sector: Sector(0), sectors: Sectors::ZERO })
    }
}

/// The children that get a flush. If all targets allow a bypass, each device gets one flush.
/// Otherwise each target gets one, and a striped target passes it to each of its devices. A target
/// with nothing to flush completes it at once.
fn select_flush_children(table: &Table, children: &TargetChildMap) -> Vec<usize> {
    let bypass = table.entries.iter().all(|entry| entry.target.features().flush_bypasses_map);
    let (mut seen, mut flush) = (BTreeSet::new(), Vec::new());
    for (entry, (form, child)) in table.entries.iter().zip(&children.lines) {
        if !bypass {
            seen.clear();
        }
        if let TargetDataPath::Striped(striped) = form {
            let devices = striped.stripes.iter().map(|stripe| stripe.0.device.id()).enumerate();
            flush.extend(devices.filter(|&(_, id)| seen.insert(id)).map(|(stripe, _)| child + stripe));
            continue;
        }
        let ids = entry.target.devices().into_iter().map(|used| used.device.device.id());
        // `count` instead of `any`, because every device of the target must be marked.
        if ids.filter(|&id| seen.insert(id)).count() > 0 || !bypass {
            flush.push(*child);
        }
    }
    flush
}

const BEFORE: u8 = 0;
const DATA: u8 = 1;
const STAGE_FLUSH_BEHIND: u8 = 2;

/// Splits a bio into a flush before, the pieces of its range, and a flush after. Each is present
/// only if requested, and follows a [`NextBioSplitStep::Wait`].
impl BioSplitRule for TableSectorMap {
    fn next(&self, bio: &Bio, cursor: &mut SplitCursor) -> NextBioSplitStep {
        let flush_only = bio.op == Op::Flush;
        let preflush = bio.flags.contains(BioFlags::PREFLUSH);
        if cursor.stage == BEFORE && (flush_only || preflush) {
            if let Some(piece) = self.flush_piece(cursor) {
                return NextBioSplitStep::Piece(piece);
            }
            *cursor = SplitCursor { stage: DATA, ..SplitCursor::default() };
            return if flush_only { NextBioSplitStep::End } else { NextBioSplitStep::Wait };
        }
        if cursor.stage != STAGE_FLUSH_BEHIND {
            cursor.stage = DATA;
            if let Some(piece) = self.data_piece(bio, cursor) {
                return NextBioSplitStep::Piece(piece);
            }
            if !self.flush_behind || !bio.flags.contains(BioFlags::FUA) {
                return NextBioSplitStep::End;
            }
            *cursor = SplitCursor { stage: STAGE_FLUSH_BEHIND, ..SplitCursor::default() };
            return NextBioSplitStep::Wait;
        }
        self.flush_piece(cursor).map_or(NextBioSplitStep::End, NextBioSplitStep::Piece)
    }
}
