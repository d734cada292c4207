//! The striped target: `striped <n> <chunk> (<dev> <off>)×n`. Chunk k lies on stripe k mod n, at
//! chunk k / n of it.
//!
//! `chunk` is in sectors and need not be a power of two. The table above cuts reads and writes at
//! chunk boundaries ([`Target::max_io_len`]); discards and write-zeroes may cover many chunks and
//! become one request a stripe, a flush one a device.
//!
//! A request that fails turns the letter of its stripe in `status` from A to D and raises an event,
//! at most [`EVENTS_MAX`] times a device.

use std::fmt::Write;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use udm_core::{
    Bio, BioFlags, Cx, Extents, Lane, Limits, Op, OpenError, SECTOR_SIZE, Sector, Sectors, Status,
};
use udm_dm::TargetError;
use udm_dm::bugs::{self, Bug};
use udm_dm::divisor::Divisor;
use udm_dm::split::{Cursor, Cut, Piece, Step};
use udm_dm::split_lane::{Route, SplitLane, Way};
use udm_dm::target::{Below, DeviceRef, Notify, Target, TargetArgs, Used, decimal};

/// Failures of a device that raise an event; later ones only count (kernel: `DM_IO_ERROR_THRESHOLD`
/// is 15, and the fifteenth is silent).
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
    /// Sectors of a row that lie on other stripes than a given one.
    others: u64,
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
/// The kernel's, in its order: `Not enough arguments`, `Invalid stripe count`,
/// `Invalid chunk_size`, `Target length not divisible by number of stripes`,
/// `Target length not divisible by chunk size`, `Not enough destinations specified`,
/// `Couldn't parse stripe destination`.
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
    let layout =
        Layout { stripes: Divisor::new(count), chunk: Divisor::new(chunk), others: (count - 1) * chunk };
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
        let stripes = &self.shared.stripes;
        let lanes = stripes.iter().map(|s| s.device.device.open(cx)).collect::<Result<_, _>>()?;
        let id = |i: usize| stripes[i].device.device.id();
        let route = Stripes {
            shared: Arc::clone(&self.shared),
            layout: self.shared.layout,
            offsets: stripes.iter().map(|s| s.offset.0).collect(),
            flush: (0..stripes.len()).filter(|&i| (0..i).all(|before| id(before) != id(i))).collect(),
        };
        Ok(Box::new(SplitLane::new(route, lanes, cx)))
    }

    fn table(&self) -> String {
        let Layout { stripes, chunk, .. } = self.shared.layout;
        let mut text = format!("{} {}", stripes.get(), chunk.get());
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

    fn limits(&self, below: Below<'_>) -> Limits {
        let Layout { stripes, chunk, .. } = self.shared.layout;
        let bytes = chunk.get().saturating_mul(SECTOR_SIZE);
        let all = self.shared.stripes.iter().map(|s| below.limits(&s.device));
        let limits = all.fold(Limits::new(self.len), |all, one| all.stack(&one));
        let hint = |bytes: u64| u32::try_from(bytes).unwrap_or(0);
        Limits {
            request_stackable: false,
            io_min: hint(bytes).max(limits.io_min),
            io_opt: hint(bytes.saturating_mul(stripes.get())),
            ..limits
        }
    }

    fn extents(&self, from: Sector, len: Sectors, out: &mut Extents) {
        let layout = self.shared.layout;
        let (mut at, end) = (from.0, from.0 + len.0);
        while at < end && !out.is_full() {
            let (stripe, sector) = layout.map(at);
            let now = (layout.chunk.get() - layout.chunk.remainder(at)).min(end - at);
            let Stripe { device, offset, .. } = &self.shared.stripes[stripe];
            device.device.extents(Sector(offset.0 + sector), Sectors(now), out);
            at += now;
        }
    }

    fn devices(&self) -> Vec<Used> {
        let len = Sectors(self.len.0 / self.shared.layout.stripes.get());
        let used = |s: &Stripe| Used::new(&s.device, s.offset, len);
        self.shared.stripes.iter().map(used).collect()
    }

    fn max_io_len(&self) -> Option<Sectors> {
        Some(Sectors(self.shared.layout.chunk.get()))
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
            if let Some(notify) =
                self.notify.get().filter(|_| before < EVENTS_MAX && !bugs::on(Bug::StripeEventLost))
            {
                notify.event();
            }
        }
    }
}

impl Layout {
    /// The stripe of a sector of the target, and the sector within the stripe.
    fn map(&self, sector: u64) -> (usize, u64) {
        let (chunk, within) = self.chunk.div_rem(sector);
        let (row, stripe) = self.stripes.div_rem(chunk);
        let shift = u64::from(bugs::on(Bug::StripeShifted) && stripe + 1 == self.stripes.get() && stripe > 0);
        (stripe as usize, row * self.chunk.get() + within + shift)
    }

    /// The sector of the target behind a sector of a stripe.
    fn unmap(&self, stripe: usize, sector: u64) -> u64 {
        let row = self.chunk.quotient(sector);
        sector + row * self.others + stripe as u64 * self.chunk.get()
    }

    /// The first sector of `stripe` that belongs to `sector` of the target or to what is behind it.
    fn at_or_behind(&self, sector: u64, stripe: usize) -> u64 {
        let (here, at) = self.map(sector);
        let row = at - self.chunk.remainder(at);
        match stripe.cmp(&here) {
            std::cmp::Ordering::Equal => at,
            std::cmp::Ordering::Less => row + self.chunk.get(),
            std::cmp::Ordering::Greater => row,
        }
    }
}

/// Where the bios of a striped target go: reads and writes, which the table has cut at chunks, to
/// the stripe of their chunk. Flushes go to each device once, other ranges to each stripe that they
/// touch.
struct Stripes {
    shared: Arc<Shared>,
    layout: Layout,
    /// By stripe.
    offsets: Vec<u64>,
    /// A stripe of each device.
    flush: Vec<usize>,
}

impl Route for Stripes {
    #[inline(always)]
    fn plain(&self, bio: &mut Bio) -> Option<usize> {
        if !bio.op.has_data() {
            return None;
        }
        let (stripe, at) = self.layout.map(bio.sector.0);
        bio.sector.0 = self.offsets[stripe].wrapping_add(at);
        Some(stripe)
    }

    fn down(&self, bio: &mut Bio) -> Way {
        self.plain(bio).map_or(Way::Cut, Way::Leg)
    }

    #[inline(always)]
    fn up(&self, leg: usize, bios: &mut [Box<Bio>]) {
        let offset = self.offsets[leg];
        for bio in bios {
            if bio.op.has_data() {
                bio.sector.0 = self.layout.unmap(leg, bio.sector.0.wrapping_sub(offset));
            }
            if !bio.status.is_ok() && bio.status != Status::NotSupp && !bio.flags.contains(BioFlags::RAHEAD) {
                self.shared.failed(leg);
            }
        }
    }
}

impl Cut for Stripes {
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
