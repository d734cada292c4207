//! Which target a bio goes to, and how a bio is cut that can't go whole.

use super::check::TableLimits;
use super::child_layout::{ChildLayout, TargetDataPath};
use super::reverse_map::ReverseMap;
use super::run_index::RunIndex;
use super::{Table, TableEntry};
use crate::divisor::Divisor;
use crate::split::{SplitBio, SplitCursor, SplitPiece, SplitStep};
use crate::stripes::StripeLayout;
use std::collections::BTreeSet;
use udm_core::bugs::{self, Bug};
use udm_core::{Bio, BioFlags, Limits, Op, SECTOR_SIZE, Sector, Sectors};

/// What one line of a table maps, for the data path.
pub(super) struct TargetMapping {
    /// Where its bios go; of a striped one those for the first stripe.
    leg: usize,
    start: u64,
    end: u64,
    /// Added to a bio's sector on the way down and taken off on the way up, modulo 2^64. Of no use
    /// where it is striped.
    shift: u64,
    stripes: Option<StripeMapping>,
    /// Reads and writes end at multiples of this, counted from the target's start; `None` when they
    /// need not.
    chunk: Option<Divisor>,
    /// And so do discards.
    cuts_discards: bool,
    /// The longest request in sectors, by [`Op`] (reads and writes, discards, write-zeroes). A
    /// multiple of the logical block.
    max: [u64; 3],
}

/// Where the chunks of a striped target lie.
pub(super) struct StripeMapping {
    layout: StripeLayout,
    /// Where each stripe begins on its device.
    begins: Box<[u64]>,
    /// The leg of the first.
    leg: usize,
}

/// All mappings of a table, and what flushes need.
pub(super) struct TableMap {
    mappings: Vec<TargetMapping>,
    /// Finds one by its sectors.
    index: RunIndex,
    /// Undoes what was done on the way to each leg.
    pub reverse_maps: Vec<ReverseMap>,
    /// The legs that a flush of the whole device goes to.
    flush: Vec<usize>,
    /// What is taken off the flags of a bio's data part.
    strip: BioFlags,
    /// A write with FUA is followed by a flush.
    flush_behind: bool,
}

/// What kind of table it is, for reads and writes that fit.
pub(super) enum MapKind {
    /// All go to the one leg there is, so many sectors further on.
    Single(u64),
    /// One striped target is all there is, by shifts or not.
    StripeSet(StripeMapping, bool),
    /// Each goes to one of these whole.
    Lines(Box<[SimpleMapping]>),
    /// Some targets have chunks.
    Mixed,
}

/// What a read or write that fits needs of a mapping without chunks.
#[derive(Clone, Copy)]
pub(super) struct SimpleMapping {
    pub end: u64,
    pub shift: u64,
    pub leg: u32,
}

impl StripeMapping {
    /// Of target `i`, if it is striped.
    fn new(legs: &ChildLayout, i: usize) -> Option<StripeMapping> {
        let (TargetDataPath::StripeSet(striped), leg) = &legs.lines[i] else { return None };
        let begins = striped.stripes.iter().map(|stripe| stripe.1.0).collect();
        Some(StripeMapping { layout: striped.layout, begins, leg: *leg })
    }

    /// The leg of sector `at` of the target, and the sector there, if that and those behind it,
    /// `sectors` in all, are of one chunk.
    #[inline(always)]
    pub fn place<const SHIFTS: bool>(&self, at: u64, sectors: u64) -> Option<(usize, u64)> {
        let (stripe, to, within) = self.layout.place::<SHIFTS>(at);
        let begin = self.begins.get(stripe)?;
        (within + sectors <= self.layout.chunk()).then_some((self.leg + stripe, begin.wrapping_add(to)))
    }

    /// Of a range of the target the part that lies on a stripe, of which `next` is the first that
    /// was not asked for: leg, sector and length. `None` when none is left.
    fn part(&self, from: u64, to: u64, next: &mut u32) -> Option<(usize, u64, u64)> {
        loop {
            let stripe = *next as usize;
            let begin = self.begins.get(stripe)?;
            *next += 1;
            let (first, end) = self.layout.part(stripe, from, to);
            if first < end {
                return Some((self.leg + stripe, begin.wrapping_add(first), end - first));
            }
        }
    }
}

impl TargetMapping {
    fn new(legs: &ChildLayout, entries: &[TableEntry], i: usize, limits: &Limits) -> TargetMapping {
        let entry = &entries[i];
        let block = u64::from(limits.logical_block) / SECTOR_SIZE;
        // A limit below one block would cut for ever; what the device makes of such a request is
        // its own matter.
        let whole = |max: Sectors| (max.0 - max.0 % block.max(1)).max(block.max(1));
        TargetMapping {
            leg: legs.lines[i].1,
            start: entry.start.0,
            end: entry.end().0,
            shift: legs.shift(entries, i),
            stripes: StripeMapping::new(legs, i),
            chunk: entry.target.max_io_len().map(|c| Divisor::new(c.0.clamp(1, Divisor::MAX))),
            cuts_discards: entry.target.cuts_discards(),
            max: [whole(limits.max_sectors), whole(limits.max_discard), whole(limits.max_write_zeroes)],
        }
    }

    /// True for what goes to several legs unless it ends at chunks.
    pub fn fans_out(&self, op: Op) -> bool {
        self.stripes.is_some() && !op.has_data()
    }

    /// The leg of `sector`, and the sector there.
    pub fn whole(&self, sector: u64) -> (usize, u64) {
        match &self.stripes {
            None => (self.leg, sector.wrapping_add(self.shift)),
            Some(stripes) => {
                let (stripe, to) = stripes.layout.map(sector - self.start);
                (stripes.leg + stripe, stripes.begins[stripe].wrapping_add(to))
            }
        }
    }

    /// The same for a read or write that fits, if it lies in one piece.
    #[inline(always)]
    pub fn place(&self, sector: u64, sectors: u64) -> Option<(usize, u64)> {
        match &self.stripes {
            None => (self.left(sector) >= sectors).then(|| (self.leg, sector.wrapping_add(self.shift))),
            Some(_) if sector + sectors > self.end => None,
            Some(stripes) => stripes.place::<false>(sector - self.start, sectors),
        }
    }

    /// The longest request for `op`, wherever it lies.
    pub fn max(&self, op: Op) -> u64 {
        match op {
            Op::Read | Op::Write => self.max[0],
            Op::Discard => self.max[1],
            Op::WriteZeroes => self.max[2],
            Op::Flush => u64::MAX,
        }
    }

    /// How many sectors a read or write that begins at `at`, which is of this mapping, may cover
    /// before it has to be cut.
    #[inline]
    fn left(&self, at: u64) -> u64 {
        let left = self.end - at;
        match self.chunk {
            None => left,
            Some(chunk) => left.min(chunk.get() - chunk.remainder(at - self.start)),
        }
    }

    /// How many of the sectors from `at`, which is of this mapping, one request for `op` may cover.
    pub fn room(&self, op: Op, at: u64) -> u64 {
        let cut = op.has_data() || op == Op::Discard && self.cuts_discards;
        let left = if cut { self.left(at) } else { self.end - at };
        left.min(self.max(op))
    }
}

impl TableMap {
    pub fn new(table: &Table, table_limits: &TableLimits, legs: &ChildLayout) -> TableMap {
        let entries = &table.entries;
        let mapping = |(i, limits)| TargetMapping::new(legs, entries, i, limits);
        let mappings: Vec<TargetMapping> = table_limits.parts.iter().enumerate().map(mapping).collect();
        let fua = table_limits.whole.fua;
        // A device below that is mapped itself may get a cache by a reload, and this table would
        // not know.
        let cache =
            table_limits.whole.write_cache || table.devices().any(|below| below.device.stacked().is_some());
        TableMap {
            index: RunIndex::new(mappings.iter().map(|mapping| mapping.end).collect()),
            reverse_maps: ReverseMap::of_all(legs, entries),
            flush: flush_legs(table, legs),
            strip: BioFlags::PREFLUSH | if fua { BioFlags::empty() } else { BioFlags::FUA },
            flush_behind: !fua && cache,
            mappings,
        }
    }

    /// What kind of table it is.
    pub fn map_kind(&self, legs: &ChildLayout) -> MapKind {
        let simple = |m: &TargetMapping| match m.chunk {
            None => Some(SimpleMapping { end: m.end, shift: m.shift, leg: m.leg as u32 }),
            Some(_) => None,
        };
        match (&*self.mappings, StripeMapping::new(legs, 0), self.mappings.iter().map(simple).collect()) {
            ([_], Some(stripes), _) => {
                let shifts = stripes.layout.is_by_shifts();
                MapKind::StripeSet(stripes, shifts)
            }
            ([mapping], _, Some(_)) => MapKind::Single(mapping.shift),
            (_, _, Some(lines)) => MapKind::Lines(lines),
            _ => MapKind::Mixed,
        }
    }

    /// The longest read or write that no target needs cut for its length.
    pub fn max(&self) -> u64 {
        self.mappings.iter().map(|mapping| mapping.max(Op::Read)).min().unwrap_or_default()
    }

    /// The flags of bios that can't pass through as they are.
    pub fn special(&self) -> BioFlags {
        self.strip
    }

    /// The mapping of `sector`, which is not behind the end.
    #[inline(always)]
    pub fn find(&self, sector: u64) -> &TargetMapping {
        &self.mappings[self.index.find(sector)]
    }

    /// The mapping of `sector`, if that is plain. For a sector behind the end it may be one too.
    #[inline(always)]
    pub fn find_unambiguous(&self, sector: u64) -> Option<&TargetMapping> {
        self.index.pick(&self.mappings, sector)
    }

    /// The same in its short form, out of those of [`MapKind::Lines`].
    #[inline(always)]
    pub fn find_simple<'a>(&self, lines: &'a [SimpleMapping], sector: u64) -> Option<&'a SimpleMapping> {
        self.index.pick(lines, sector)
    }

    /// The next piece of what a bio does to its range.
    fn data_piece(&self, bio: &Bio, cursor: &mut SplitCursor) -> Option<SplitPiece> {
        while cursor.at < bio.sectors.0 {
            let at = bio.sector.0 + cursor.at;
            let mapping = self.find(at);
            let sectors = mapping.room(bio.op, at).min(bio.sectors.0 - cursor.at);
            let piece = |(leg, sector, sectors)| {
                let flags = bio.flags - self.strip;
                SplitPiece { leg, op: bio.op, flags, sector: Sector(sector), sectors: Sectors(sectors) }
            };
            // What has no data need not end at chunks: of each stripe all that it touches there.
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
            let (leg, sector) = mapping.whole(at);
            return Some(piece((leg, sector, sectors)));
        }
        None
    }

    /// The next flush of the whole device.
    fn flush_piece(&self, cursor: &mut SplitCursor) -> Option<SplitPiece> {
        if bugs::on(Bug::FlushNotFannedOut) && cursor.at > 0 {
            return None;
        }
        let leg = *self.flush.get(usize::try_from(cursor.at).ok()?)?;
        cursor.at += 1;
        let flags = BioFlags::empty();
        Some(SplitPiece { leg, op: Op::Flush, flags, sector: Sector(0), sectors: Sectors::ZERO })
    }
}

/// One flush a device when no target minds, else one a target, of which one that is striped passes
/// it to each of its devices; targets with nothing to flush end theirs at once.
fn flush_legs(table: &Table, legs: &ChildLayout) -> Vec<usize> {
    let bypass = table.entries.iter().all(|entry| entry.target.flush_bypasses_map());
    let (mut seen, mut flush) = (BTreeSet::new(), Vec::new());
    for (entry, (form, leg)) in table.entries.iter().zip(&legs.lines) {
        if !bypass {
            seen.clear();
        }
        if let TargetDataPath::StripeSet(striped) = form {
            let devices = striped.stripes.iter().map(|stripe| stripe.0.device.id()).enumerate();
            flush.extend(devices.filter(|&(_, id)| seen.insert(id)).map(|(stripe, _)| leg + stripe));
            continue;
        }
        let ids = entry.target.devices().into_iter().map(|used| used.device.device.id());
        // Not `any`: every device of the target counts as flushed.
        if ids.filter(|&id| seen.insert(id)).count() > 0 || !bypass {
            flush.push(*leg);
        }
    }
    flush
}

const BEFORE: u8 = 0;
const DATA: u8 = 1;
const BEHIND: u8 = 2;

/// A flush before, the range in pieces, a flush behind; each only where asked for and each behind a
/// [`SplitStep::Wait`].
impl SplitBio for TableMap {
    fn next(&self, bio: &Bio, cursor: &mut SplitCursor) -> SplitStep {
        let flush_only = bio.op == Op::Flush;
        let preflush = bio.flags.contains(BioFlags::PREFLUSH) && !bugs::on(Bug::PreflushDropped);
        if cursor.stage == BEFORE && (flush_only || preflush) {
            if let Some(piece) = self.flush_piece(cursor) {
                return SplitStep::SplitPiece(piece);
            }
            *cursor = SplitCursor { stage: DATA, ..SplitCursor::default() };
            return if flush_only { SplitStep::End } else { SplitStep::Wait };
        }
        if cursor.stage != BEHIND {
            cursor.stage = DATA;
            if let Some(piece) = self.data_piece(bio, cursor) {
                return SplitStep::SplitPiece(piece);
            }
            if !self.flush_behind || !bio.flags.contains(BioFlags::FUA) || bugs::on(Bug::FuaDropped) {
                return SplitStep::End;
            }
            *cursor = SplitCursor { stage: BEHIND, ..SplitCursor::default() };
            return SplitStep::Wait;
        }
        self.flush_piece(cursor).map_or(SplitStep::End, SplitStep::SplitPiece)
    }
}
