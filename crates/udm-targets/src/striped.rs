//! The striped target: `striped <n> <chunk> (<dev> <off>)×n`. Chunk k lies on stripe k mod n, at chunk k / n of it.
//!
//! `chunk` is in sectors and need not be a power of two. The table above cuts reads and writes at chunk boundaries ([`Target::max_io_len`]); discards
//! and write-zeroes may cover many chunks and become one request a stripe, a flush one a device.
//!
//! A request that fails turns the letter of its stripe in `status` from A to D and raises an event, at most
//! [`EVENTS_MAX`] times a device.

use std::fmt::Write;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use udm_core::{
    Batch, Bio, BioFlags, Busy, Cx, Drain, Extents, Lane, Limits, Op, OpenError, SECTOR_SIZE, Sector,
    Sectors, Status,
};
use udm_dm::TargetError;
use udm_dm::bugs::{self, Bug};
use udm_dm::split::{Cursor, Cut, Piece, Splitter, Step};
use udm_dm::target::{DeviceRef, Notify, Target, TargetArgs, Used, decimal};

/// Failures of a device that raise an event; later ones only count (kernel: `DM_IO_ERROR_THRESHOLD` is 15, and the fifteenth is
/// silent).
const EVENTS_MAX: u32 = 14;

struct Stripe {
    device: DeviceRef,
    offset: Sector,
    /// Failures of the stripe's device. Written only when a request fails.
    errors: AtomicU32,
}

/// Where chunks lie.
#[derive(Clone, Copy)]
struct Layout {
    stripes: Divisor,
    chunk: Divisor,
}

struct Shared {
    stripes: Vec<Stripe>,
    layout: Layout,
    notify: OnceLock<Arc<dyn Notify>>,
}

struct Striped {
    shared: Arc<Shared>,
    len: Sectors,
}

/// Makes a striped target.
///
/// # Errors
/// The kernel's, in its order: `Not enough arguments`, `Invalid stripe count`, `Invalid chunk_size`, `Target length not divisible by number of stripes`,
/// `Target length not divisible by chunk size`, `Not enough destinations specified`, `Couldn't parse stripe destination`.
pub fn new(args: &mut TargetArgs<'_>) -> Result<Arc<dyn Target>, TargetError> {
    let refuse = |text: &str, word: usize| TargetError::new(format!("striped: {text}")).at(word);
    let [count, chunk, destinations @ ..] = args.args else {
        return Err(refuse("Not enough arguments", args.args.len()));
    };
    let small = |word: &str| decimal(word).filter(|&n| (1..=u64::from(u32::MAX)).contains(&n));
    let count = small(count).ok_or_else(|| refuse("Invalid stripe count", 0))?;
    let chunk = small(chunk).ok_or_else(|| refuse("Invalid chunk_size", 1))?;
    if !args.len.0.is_multiple_of(count) {
        return Err(refuse("Target length not divisible by number of stripes", 0));
    }
    let width = Sectors(args.len.0 / count);
    if !width.0.is_multiple_of(chunk) {
        return Err(refuse("Target length not divisible by chunk size", 1));
    }
    if destinations.len() as u64 != 2 * count {
        let word = args.args.len().min(2 + 2 * count as usize);
        return Err(refuse("Not enough destinations specified", word));
    }
    let mut stripes = Vec::with_capacity(destinations.len() / 2);
    for (i, pair) in destinations.chunks_exact(2).enumerate() {
        let text = "Couldn't parse stripe destination";
        let offset = decimal(&pair[1]).ok_or_else(|| refuse(text, 3 + 2 * i))?;
        let device = args
            .resolver
            .get(&pair[0])
            .map_err(|e| refuse(text, 2 + 2 * i).with_errno(e.errno).because(e.reason))?;
        stripes.push(Stripe { device, offset: Sector(offset), errors: AtomicU32::new(0) });
    }
    let layout = Layout { stripes: Divisor::new(count), chunk: Divisor::new(chunk) };
    Ok(Arc::new(Striped {
        shared: Arc::new(Shared { stripes, layout, notify: OnceLock::new() }),
        len: args.len,
    }))
}

impl Target for Striped {
    fn type_name(&self) -> &'static str {
        "striped"
    }

    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, OpenError> {
        let mut legs: Vec<Leg> = Vec::with_capacity(self.shared.stripes.len());
        let mut flush = Vec::new();
        for (i, stripe) in self.shared.stripes.iter().enumerate() {
            let id = stripe.device.device.id();
            if self.shared.stripes[..i].iter().all(|s| s.device.device.id() != id) {
                flush.push(i);
            }
            legs.push(Leg {
                lane: stripe.device.device.open(cx)?,
                out: Batch::new(),
                offset: stripe.offset.0,
            });
        }
        let pieces =
            Pieces { layout: self.shared.layout, offsets: legs.iter().map(|l| l.offset).collect(), flush };
        Ok(Box::new(StripedLane {
            shared: Arc::clone(&self.shared),
            layout: self.shared.layout,
            legs,
            pieces,
            split: Splitter::new(cx.new_owner()),
        }))
    }

    fn table(&self) -> String {
        let Layout { stripes, chunk } = self.shared.layout;
        let mut text = format!("{} {}", stripes.by, chunk.by);
        for stripe in &self.shared.stripes {
            let _ = write!(text, " {} {}", stripe.device.number, stripe.offset);
        }
        text
    }

    fn status(&self) -> String {
        let mut text = format!("{} ", self.shared.stripes.len());
        for stripe in &self.shared.stripes {
            let _ = write!(text, "{} ", stripe.device.number);
        }
        text.push_str("1 ");
        let letter = |s: &Stripe| if s.errors.load(Ordering::Relaxed) == 0 { 'A' } else { 'D' };
        text.extend(self.shared.stripes.iter().map(letter));
        text
    }

    fn limits(&self) -> Limits {
        let Layout { stripes, chunk } = self.shared.layout;
        let bytes = chunk.by.saturating_mul(SECTOR_SIZE);
        let below = self.shared.stripes.iter().map(|s| s.device.device.limits());
        let limits = below.fold(Limits::new(self.len), |all, one| all.stack(&one));
        let hint = |bytes: u64| u32::try_from(bytes).unwrap_or(0);
        Limits {
            request_stackable: false,
            io_min: hint(bytes).max(limits.io_min),
            io_opt: hint(bytes.saturating_mul(stripes.by)),
            ..limits
        }
    }

    fn extents(&self, from: Sector, len: Sectors, out: &mut Extents) {
        let layout = self.shared.layout;
        let (mut at, end) = (from.0, from.0 + len.0);
        while at < end && !out.is_full() {
            let (stripe, sector) = layout.map(at);
            let now = (layout.chunk.by - layout.chunk.div_rem(at).1).min(end - at);
            let Stripe { device, offset, .. } = &self.shared.stripes[stripe];
            device.device.extents(Sector(offset.0 + sector), Sectors(now), out);
            at += now;
        }
    }

    fn devices(&self) -> Vec<Used> {
        let len = Sectors(self.len.0 / self.shared.layout.stripes.by);
        let used = |s: &Stripe| Used { device: s.device.clone(), start: s.offset, len };
        self.shared.stripes.iter().map(used).collect()
    }

    fn max_io_len(&self) -> Option<Sectors> {
        Some(Sectors(self.shared.layout.chunk.by))
    }

    fn flush_bypasses_map(&self) -> bool {
        true
    }

    fn attach(&self, notify: Arc<dyn Notify>) {
        // A table is loaded once; a second device would be a bug above.
        let _ = self.shared.notify.set(notify);
    }
}

impl Shared {
    /// Counts a failure on `stripe`, on all stripes of its device.
    #[cold]
    fn failed(&self, stripe: usize) {
        let id = self.stripes[stripe].device.device.id();
        for stripe in self.stripes.iter().filter(|s| s.device.device.id() == id) {
            // Relaxed: a count for people; nothing is ordered by it.
            let before = stripe.errors.fetch_add(1, Ordering::Relaxed);
            if let Some(notify) = self.notify.get().filter(|_| before < EVENTS_MAX) {
                notify.event();
            }
        }
    }
}

/// Division by a number fixed at load, by a shift when it is a power of two.
#[derive(Clone, Copy)]
struct Divisor {
    by: u64,
    shift: Option<u32>,
}

impl Divisor {
    fn new(by: u64) -> Divisor {
        Divisor { by, shift: by.is_power_of_two().then(|| by.trailing_zeros()) }
    }

    fn div_rem(self, n: u64) -> (u64, u64) {
        match self.shift {
            Some(shift) => (n >> shift, n & (self.by - 1)),
            None => (n / self.by, n % self.by),
        }
    }
}

impl Layout {
    /// The stripe of a sector of the target, and the sector within the stripe.
    fn map(&self, sector: u64) -> (usize, u64) {
        let (chunk, within) = self.chunk.div_rem(sector);
        let (row, stripe) = self.stripes.div_rem(chunk);
        let shift = u64::from(bugs::on(Bug::StripeShifted) && stripe + 1 == self.stripes.by && stripe > 0);
        (stripe as usize, row * self.chunk.by + within + shift)
    }

    /// The sector of the target behind a sector of a stripe.
    fn unmap(&self, stripe: usize, sector: u64) -> u64 {
        let (row, within) = self.chunk.div_rem(sector);
        (row * self.stripes.by + stripe as u64) * self.chunk.by + within
    }

    /// The first sector of `stripe` that belongs to `sector` of the target or to what is behind it.
    fn at_or_behind(&self, sector: u64, stripe: usize) -> u64 {
        let (here, at) = self.map(sector);
        let row = at - self.chunk.div_rem(at).1;
        match stripe.cmp(&here) {
            std::cmp::Ordering::Equal => at,
            std::cmp::Ordering::Less => row + self.chunk.by,
            std::cmp::Ordering::Greater => row,
        }
    }
}

/// Flushes go to each device once, ranges to each stripe that they touch.
struct Pieces {
    layout: Layout,
    offsets: Vec<u64>,
    flush: Vec<usize>,
}

impl Cut for Pieces {
    fn next(&self, bio: &Bio, cursor: &mut Cursor) -> Step {
        loop {
            let i = cursor.at as usize;
            cursor.at += 1;
            if bio.op == Op::Flush {
                let Some(&leg) = self.flush.get(i) else { return Step::End };
                let (sector, sectors) = (Sector(0), Sectors::ZERO);
                return Step::Piece(Piece { leg, op: Op::Flush, flags: bio.flags, sector, sectors });
            }
            let Some(offset) = self.offsets.get(i) else { return Step::End };
            let from = self.layout.at_or_behind(bio.sector.0, i);
            let to = self.layout.at_or_behind(bio.end().0, i);
            if from < to {
                let (sector, sectors) = (Sector(offset + from), Sectors(to - from));
                return Step::Piece(Piece { leg: i, op: bio.op, flags: bio.flags, sector, sectors });
            }
        }
    }
}

struct Leg {
    lane: Box<dyn Lane>,
    out: Batch,
    offset: u64,
}

struct StripedLane {
    shared: Arc<Shared>,
    layout: Layout,
    legs: Vec<Leg>,
    pieces: Pieces,
    split: Splitter,
}

impl StripedLane {
    /// Submits what is in the legs' batches; says whether there was anything.
    fn send(&mut self, cx: &mut Cx<'_>) -> bool {
        let mut any = false;
        for leg in self.legs.iter_mut().filter(|leg| !leg.out.is_empty()) {
            leg.lane.submit(&mut leg.out, cx);
            any = true;
        }
        any
    }

    fn pump(&mut self) {
        self.split.pump(&self.pieces, |leg, fragment| self.legs[leg].out.push(fragment));
    }
}

impl Lane for StripedLane {
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        for mut bio in batch.drain(..) {
            if bio.op.has_data() {
                let (stripe, at) = self.layout.map(bio.sector.0);
                let leg = &mut self.legs[stripe];
                bio.sector.0 = leg.offset.wrapping_add(at);
                leg.out.push(bio);
            } else {
                self.split.take(bio);
            }
        }
        if !self.split.is_idle() {
            self.pump();
        }
        self.send(cx);
    }

    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        let start = done.len();
        self.split.take_again();
        for (i, leg) in self.legs.iter_mut().enumerate() {
            let from = done.len();
            leg.lane.poll(done, cx);
            for bio in &mut done[from..] {
                if bio.op.has_data() {
                    bio.sector.0 = self.layout.unmap(i, bio.sector.0.wrapping_sub(leg.offset));
                }
                let ignored = bio.status == Status::NotSupp || bio.flags.contains(BioFlags::RAHEAD);
                if !bio.status.is_ok() && !ignored {
                    self.shared.failed(i);
                }
            }
        }
        if self.split.is_idle() {
            return;
        }
        self.split.collect(done, start);
        self.pump();
        if self.send(cx) || self.split.has_returned() {
            cx.wake_at(cx.now);
        }
        self.split.take_finished(done);
    }

    fn drain(&mut self, how: Drain, back: &mut Batch, cx: &mut Cx<'_>) {
        let start = back.len();
        for (i, leg) in self.legs.iter_mut().enumerate() {
            let from = back.len();
            leg.lane.drain(how, back, cx);
            for bio in back[from..].iter_mut().filter(|bio| bio.op.has_data()) {
                bio.sector.0 = self.layout.unmap(i, bio.sector.0.wrapping_sub(leg.offset));
            }
        }
        self.split.collect_back(back, start);
        self.split.take_returned(back);
    }

    fn busy(&self) -> Busy {
        self.legs.iter().map(|leg| leg.lane.busy()).max().unwrap_or_default()
    }
}
