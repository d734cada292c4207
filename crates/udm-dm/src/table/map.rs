//! Which target a bio goes to, and how a bio is cut that can't go whole.

use super::check::Fit;
use super::index::Index;
use super::legs_of::{LegsOf, Shift};
use super::{Entry, Table};
use crate::bugs::{self, Bug};
use crate::divisor::Divisor;
use crate::split::{Cursor, Cut, Piece, Step};
use udm_core::{Bio, BioFlags, Limits, Op, SECTOR_SIZE, Sector, Sectors};

/// What one line of a table maps, for the data path.
pub(super) struct Mapping {
    /// Where its bios go.
    pub leg: usize,
    start: u64,
    end: u64,
    /// Added to a bio's sector on the way down and taken off on the way up, modulo 2^64.
    pub shift: u64,
    /// Reads and writes end at multiples of this, counted from the target's start; `None` when they
    /// need not.
    chunk: Option<Divisor>,
    /// And so do discards.
    cuts_discards: bool,
    /// The longest request in sectors, by [`Op`] (reads and writes, discards, write-zeroes). A
    /// multiple of the logical block.
    max: [u64; 3],
}

/// All mappings of a table, and what flushes need.
pub(super) struct Map {
    pub mappings: Vec<Mapping>,
    /// Finds one by its sectors.
    index: Index,
    /// Short forms of all, if none has chunks.
    simple: Option<Box<[Simple]>>,
    /// What is added on the way to each leg.
    pub shifts: Vec<Shift>,
    /// The legs that a flush of the whole device goes to.
    flush: Vec<usize>,
    /// What is taken off the flags of a bio's data part.
    strip: BioFlags,
    /// A write with FUA is followed by a flush.
    flush_behind: bool,
}

/// What a read or write that fits needs of a mapping without chunks.
#[derive(Clone, Copy)]
pub(super) struct Simple {
    pub end: u64,
    pub shift: u64,
    pub leg: u32,
}

impl Mapping {
    fn new(leg: usize, entry: &Entry, shift: u64, limits: &Limits) -> Mapping {
        let block = u64::from(limits.logical_block) / SECTOR_SIZE;
        // A limit below one block would cut for ever; what the device makes of such a request is
        // its own matter.
        let whole = |max: Sectors| (max.0 - max.0 % block.max(1)).max(block.max(1));
        Mapping {
            leg,
            start: entry.start.0,
            end: entry.end().0,
            shift,
            chunk: entry.target.max_io_len().map(|c| Divisor::new(c.0.clamp(1, Divisor::MAX))),
            cuts_discards: entry.target.cuts_discards(),
            max: [whole(limits.max_sectors), whole(limits.max_discard), whole(limits.max_write_zeroes)],
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

    /// True when how much a read or write may cover depends on where it lies.
    pub fn has_chunks(&self) -> bool {
        self.chunk.is_some()
    }

    /// How many sectors a read or write that begins at `at`, which is of this mapping, may cover
    /// before it has to be cut.
    #[inline]
    pub fn left(&self, at: u64) -> u64 {
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

impl Map {
    pub fn new(table: &Table, fit: &Fit, legs: &LegsOf) -> Map {
        let entries = &table.entries;
        let shift = |i: usize| {
            let offset = entries[i].target.as_linear().map_or(0, |(_, offset)| offset.0);
            offset.wrapping_sub(entries[i].start.0)
        };
        let mapping = |(i, limits)| Mapping::new(legs.of[i], &entries[i], shift(i), limits);
        let mappings: Vec<Mapping> = fit.parts.iter().enumerate().map(mapping).collect();
        let simple = |m: &Mapping| match m.chunk {
            None => Some(Simple { end: m.end, shift: m.shift, leg: m.leg as u32 }),
            Some(_) => None,
        };
        let fua = fit.whole.fua;
        // A device below that is mapped itself may get a cache by a reload, and this table would
        // not know.
        let cache = fit.whole.write_cache || table.devices().any(|below| below.device.stacked().is_some());
        Map {
            index: Index::new(mappings.iter().map(|mapping| mapping.end).collect()),
            simple: mappings.iter().map(simple).collect(),
            shifts: legs.shifts(entries, shift),
            flush: flush_targets(table).into_iter().map(|target| legs.of[target]).collect(),
            strip: BioFlags::PREFLUSH | if fua { BioFlags::empty() } else { BioFlags::FUA },
            flush_behind: !fua && cache,
            mappings,
        }
    }

    /// The flags of bios that can't pass through as they are.
    pub fn special(&self) -> BioFlags {
        self.strip
    }

    /// The mapping of `sector`, which is not behind the end.
    #[inline(always)]
    pub fn find(&self, sector: u64) -> &Mapping {
        &self.mappings[self.index.find(sector)]
    }

    /// The mapping of `sector`, if that is plain. For a sector behind the end it may be one too.
    #[inline(always)]
    pub fn find_plain(&self, sector: u64) -> Option<&Mapping> {
        self.index.plain(sector).map(|i| &self.mappings[i])
    }

    /// Finds mappings as [`Map::find_plain`] does, in their short form; `None` when some have none.
    #[inline(always)]
    pub fn simple(&self) -> Option<impl Fn(u64) -> Option<Simple>> {
        let simple = self.simple.as_deref()?;
        Some(|sector| self.index.plain(sector).map(|i| simple[i]))
    }

    fn flush_piece(&self, i: u64) -> Option<Piece> {
        if bugs::on(Bug::FlushNotFannedOut) && i > 0 {
            return None;
        }
        let leg = *self.flush.get(usize::try_from(i).ok()?)?;
        let flags = BioFlags::empty();
        Some(Piece { leg, op: Op::Flush, flags, sector: Sector(0), sectors: Sectors::ZERO })
    }
}

/// One flush a device when no target minds, else one a target; targets with nothing to flush end
/// theirs at once.
fn flush_targets(table: &Table) -> Vec<usize> {
    if !table.entries.iter().all(|e| e.target.flush_bypasses_map()) {
        return (0..table.entries.len()).collect();
    }
    let mut seen = std::collections::BTreeSet::new();
    let mut targets = Vec::new();
    for (i, entry) in table.entries.iter().enumerate() {
        let ids = entry.target.devices().into_iter().map(|used| used.device.device.id());
        // Not `any`: every device of the target counts as flushed.
        if ids.filter(|&id| seen.insert(id)).count() > 0 {
            targets.push(i);
        }
    }
    targets
}

const BEFORE: u8 = 0;
const DATA: u8 = 1;
const BEHIND: u8 = 2;

/// A flush before, the range in pieces, a flush behind; each only where asked for and each behind a
/// [`Step::Wait`].
impl Cut for Map {
    fn next(&self, bio: &Bio, cursor: &mut Cursor) -> Step {
        let flush_only = bio.op == Op::Flush;
        match cursor.stage {
            BEFORE
                if flush_only
                    || (bio.flags.contains(BioFlags::PREFLUSH) && !bugs::on(Bug::PreflushDropped)) =>
            {
                if let Some(piece) = self.flush_piece(cursor.at) {
                    cursor.at += 1;
                    return Step::Piece(piece);
                }
                *cursor = Cursor { stage: DATA, at: 0 };
                if flush_only { Step::End } else { Step::Wait }
            }
            BEFORE | DATA if cursor.at < bio.sectors.0 => {
                cursor.stage = DATA;
                let at = bio.sector.0 + cursor.at;
                let mapping = self.find(at);
                let sectors = Sectors(mapping.room(bio.op, at).min(bio.sectors.0 - cursor.at));
                cursor.at += sectors.0;
                let sector = Sector(at.wrapping_add(mapping.shift));
                let leg = mapping.leg;
                Step::Piece(Piece { leg, op: bio.op, flags: bio.flags - self.strip, sector, sectors })
            }
            BEFORE | DATA
                if self.flush_behind && bio.flags.contains(BioFlags::FUA) && !bugs::on(Bug::FuaDropped) =>
            {
                *cursor = Cursor { stage: BEHIND, at: 0 };
                Step::Wait
            }
            BEHIND => match self.flush_piece(cursor.at) {
                Some(piece) => {
                    cursor.at += 1;
                    Step::Piece(piece)
                }
                None => Step::End,
            },
            _ => Step::End,
        }
    }
}
