//! The data path of a table: from the device's sectors to the targets' lanes and back.
//!
//! The table is the boundary: whatever comes in from above, targets only see requests inside their range, aligned to their blocks, of operations that
//! they take, no longer than their limits. The usual bio (a read or write that fits) passes through as it is, its sector shifted on the way
//! down and back on the way up; a linear target has no lane of its own, the shift is all there is to it. The rest goes
//! through the [`Splitter`].

use super::Table;
use super::map::Map;
use crate::bugs::{self, Bug};
use crate::split::Splitter;
use udm_core::{Batch, Bio, BioFlags, Busy, Cx, Drain, Lane, Limits, Op, OpenError, SECTOR_SIZE};

/// What makes a bio one of the usual ones: a read or write that needs nothing but its place looked up.
struct Plain {
    read_only: bool,
    special: BioFlags,
    /// `sector` and `sectors` have none of these bits.
    unaligned: u64,
    max: u64,
    size: u64,
}

impl Plain {
    // One branch a bio: the tests are joined without shortcuts.
    fn takes(&self, bio: &Bio) -> bool {
        let (sector, sectors) = (bio.sector.0, bio.sectors.0);
        let op = (bio.op == Op::Read) | ((bio.op == Op::Write) & !self.read_only);
        let flags = !bio.flags.intersects(self.special);
        let aligned = (sector | sectors) & self.unaligned == 0;
        // `max` is at most `size`, so the difference below is one where it counts.
        let len = sectors.wrapping_sub(1) < self.max;
        let range = sector <= self.size.wrapping_sub(sectors);
        op & flags & aligned & len & range
    }
}

/// The lane of one target, or of the device below a linear one.
struct Leg {
    lane: Box<dyn Lane>,
    out: Batch,
    shift: u64,
}

/// See the module's documentation.
pub(super) struct TableLane {
    limits: Limits,
    plain: Plain,
    /// One target that takes any length: the batch goes through in one pass.
    single: bool,
    map: Map,
    legs: Vec<Leg>,
    /// The legs whose batch is not empty.
    dirty: Vec<usize>,
    split: Splitter,
}

impl TableLane {
    pub fn open(table: &Table, cx: &mut Cx<'_>) -> Result<TableLane, OpenError> {
        let fit = table.fit();
        let map = Map::new(table, &fit);
        let mut legs = Vec::with_capacity(table.entries.len());
        for (entry, place) in table.entries.iter().zip(&map.places) {
            let lane = match entry.target.as_linear() {
                Some((device, _)) => device.device.open(cx)?,
                None => entry.target.open(cx)?,
            };
            legs.push(Leg { lane, out: Batch::new(), shift: place.shift });
        }
        let limits = fit.whole;
        let size = limits.size.0;
        let (single, max) = match &*map.places {
            [place] => (place.plain_max().is_some(), place.plain_max().unwrap_or(size)),
            _ => (false, size),
        };
        let unaligned = (u64::from(limits.logical_block) / SECTOR_SIZE).max(1) - 1;
        let plain = Plain {
            read_only: limits.read_only,
            special: map.special(),
            unaligned,
            max: max.min(size),
            size,
        };
        let split = Splitter::new(cx.new_owner());
        Ok(TableLane { limits, plain, single, map, legs, dirty: Vec::new(), split })
    }

    /// Puts a bio where it goes: a leg's batch, the splitter, or back with an error.
    fn place(&mut self, mut bio: Box<Bio>, hint: &mut usize) {
        if !self.plain.takes(&bio) {
            if let Err(status) = self.limits.check(bio.op, bio.sector, bio.sectors) {
                return self.split.end(bio, status);
            }
            if bio.op == Op::Flush || bio.flags.intersects(self.plain.special) {
                return self.split.take(bio);
            }
        }
        *hint = self.map.find(bio.sector.0, *hint);
        let place = &self.map.places[*hint];
        if place.room(bio.op, bio.sector.0) < bio.sectors.0 {
            return self.split.take(bio);
        }
        bio.sector.0 = bio.sector.0.wrapping_add(place.shift);
        push(&mut self.legs, &mut self.dirty, *hint, bio);
    }

    fn pump(&mut self) {
        self.split.pump(&self.map, |leg, fragment| push(&mut self.legs, &mut self.dirty, leg, fragment));
    }

    /// Submits what the legs' batches hold; says whether there was anything.
    fn send(&mut self, cx: &mut Cx<'_>) -> bool {
        let any = !self.dirty.is_empty();
        for i in self.dirty.drain(..) {
            let leg = &mut self.legs[i];
            if bugs::on(Bug::SubmitTwice) {
                leg.out.extend(leg.out.last().map(|bio| bugs::twin(bio)).into_iter().collect::<Vec<_>>());
            }
            leg.lane.submit(&mut leg.out, cx);
        }
        any
    }
}

fn push(legs: &mut [Leg], dirty: &mut Vec<usize>, leg: usize, bio: Box<Bio>) {
    let out = &mut legs[leg].out;
    if out.is_empty() {
        dirty.push(leg);
    }
    out.push(bio);
}

fn undo(shift: u64, batch: &mut [Box<Bio>]) {
    if shift != 0 {
        for bio in batch.iter_mut().filter(|bio| bio.status.is_ok() || !bugs::on(Bug::OffsetKeptOnError)) {
            bio.sector.0 = bio.sector.0.wrapping_sub(shift);
        }
    }
}

impl Lane for TableLane {
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        let mut rest = 0;
        if self.single {
            let leg = &mut self.legs[0];
            for bio in batch.iter_mut() {
                if !self.plain.takes(bio) {
                    break;
                }
                bio.sector.0 = bio.sector.0.wrapping_add(leg.shift);
                rest += 1;
            }
            if rest == batch.len() {
                return leg.lane.submit(batch, cx);
            }
            for bio in batch.drain(..rest) {
                push(&mut self.legs, &mut self.dirty, 0, bio);
            }
        }
        let mut hint = 0;
        for bio in batch.drain(..) {
            self.place(bio, &mut hint);
        }
        if !self.split.is_idle() {
            self.pump();
        }
        self.send(cx);
    }

    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        let start = done.len();
        self.split.take_again();
        for leg in &mut self.legs {
            let from = done.len();
            leg.lane.poll(done, cx);
            undo(leg.shift, &mut done[from..]);
        }
        if self.split.is_idle() {
            return;
        }
        self.split.collect(done, start);
        self.pump();
        if self.send(cx) || self.split.has_returned() {
            // What was just sent may be done already; what is to be handed back waits for a `drain`.
            cx.wake_at(cx.now);
        }
        self.split.take_finished(done);
    }

    fn drain(&mut self, how: Drain, back: &mut Batch, cx: &mut Cx<'_>) {
        let start = back.len();
        for leg in &mut self.legs {
            let from = back.len();
            leg.lane.drain(how, back, cx);
            undo(leg.shift, &mut back[from..]);
        }
        self.split.collect_back(back, start);
        self.split.take_returned(back);
    }

    fn busy(&self) -> Busy {
        self.legs.iter().map(|leg| leg.lane.busy()).max().unwrap_or_default()
    }
}
