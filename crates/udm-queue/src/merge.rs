//! What goes down as one request: a bio, or several that lie behind each other.
//!
//! Reads and writes are merged, of the same operation and flags, and none that has to be durable by
//! itself, is not to wait, or lies in memory that others share. Data is joined on the way down and
//! cut again on the way up, so nothing is copied. Each bio comes back as it was given, with the
//! status of the whole; of a read that met a bad block, or an error that may be one, the parts are
//! read again one by one, so that only those fail that lie there. A write is never sent a second
//! time.

use slab::Slab;
use udm_core::bugs::{self, Bug};
use udm_core::{Batch, Bio, BioFlags, Op, OwnerId, Sector, Sectors, Status};
use udm_wire::uri::QueueParams;

/// What goes down as one.
#[derive(Debug)]
pub(crate) struct Request {
    /// What the disk is given.
    pub bio: Box<Bio>,
    /// The bios that it was made of, in the order of their sectors, without their data; none where
    /// `bio` came from above itself.
    parts: Batch,
}

/// What is merged at all.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MergeLimits {
    /// The longest request that is made of several.
    pub longest: Sectors,
    /// Sectors in a block, and where the disk ends. What is no whole blocks, or beyond the end, is
    /// refused below, and would take others with it. Where somebody above refuses it already these
    /// are 1 and the last there is.
    pub block: u64,
    pub end: Sector,
}

/// Which requests are merged, and those that were.
pub(crate) struct Merger {
    /// The kernel's `nomerges`.
    nomerges: u32,
    merge_limits: MergeLimits,
    most_segments: usize,
    pub(crate) front: bool,
    owner: OwnerId,
    /// The parts of what is with the disk, by cookie.
    in_flight: Slab<Batch>,
    spare: Batch,
    spare_parts: Vec<Batch>,
}

impl Merger {
    /// Merges within `merge_limits`; what it makes is `owner`'s.
    pub fn new(params: &QueueParams, merge_limits: MergeLimits, owner: OwnerId) -> Merger {
        Merger {
            nomerges: params.nomerges,
            merge_limits,
            most_segments: params.max_segments as usize,
            front: params.front_merges > 0,
            owner,
            in_flight: Slab::new(),
            spare: Batch::new(),
            spare_parts: Vec::new(),
        }
    }

    /// Merges by `params` and within `merge_limits` from now on.
    pub fn change(&mut self, params: &QueueParams, merge_limits: MergeLimits) {
        (self.nomerges, self.merge_limits) = (params.nomerges, merge_limits);
        (self.most_segments, self.front) = (params.max_segments as usize, params.front_merges > 0);
    }

    /// Of how many of the latest requests a scheduler without an order of its own tries each.
    pub fn lookback(&self) -> usize {
        match self.nomerges {
            0 => 8,
            1 => 1,
            _ => 0,
        }
    }

    /// True when neighbours in `batch` can go down as one.
    #[inline]
    pub fn finds_merge(&self, batch: &Batch) -> bool {
        let behind = |pair: &[Box<Bio>]| pair[0].end() == pair[1].sector || pair[1].end() == pair[0].sector;
        self.nomerges < 2 && batch.windows(2).any(|pair| behind(pair) && self.can_merge(&pair[0], &pair[1]))
    }

    /// True when the two can go down as one, if they lie behind each other.
    pub fn can_merge(&self, a: &Bio, b: &Bio) -> bool {
        let single = BioFlags::FUA | BioFlags::PREFLUSH | BioFlags::NOWAIT;
        let flags = a.flags == b.flags || bugs::on(Bug::MergedFlags);
        let kind = a.op == b.op && matches!(a.op, Op::Read | Op::Write) && flags;
        let own = !a.flags.intersects(single) || bugs::on(Bug::MergedFlags);
        let MergeLimits { longest, block, end } = self.merge_limits;
        let length = a.sectors + b.sectors <= longest;
        let sound = |bio: &Bio| {
            let fits = bio.end() <= end && (bio.sector.0 | bio.sectors.0) & (block - 1) == 0;
            fits || bugs::on(Bug::MergedUnsound)
        };
        let pieces = |bio: &Bio| bio.data.ranges().count();
        kind && own
            && length
            && sound(a)
            && sound(b)
            && a.data.is_empty() == b.data.is_empty()
            && pieces(a) + pieces(b) <= self.most_segments
            && !a.data.is_shared()
            && !b.data.is_shared()
    }

    /// A request of one bio.
    pub fn single(bio: Box<Bio>) -> Request {
        Request { bio, parts: Batch::new() }
    }

    /// Puts `bio` behind what `request` has, or in front of it where it lies there: one of the two,
    /// and they [`Merger::can_merge`].
    pub fn merge(&mut self, request: &mut Request, mut bio: Box<Bio>) {
        if request.parts.is_empty() {
            self.wrap(request);
        }
        let whole = &mut request.bio;
        whole.sectors += bio.sectors;
        whole.started = whole.started.min(bio.started);
        let mut data = std::mem::take(&mut bio.data);
        if bio.sector >= whole.sector {
            whole.data.append(data);
            request.parts.push(bio);
        } else {
            whole.sector = bio.sector;
            data.append(std::mem::take(&mut whole.data));
            whole.data = data;
            request.parts.insert(0, bio);
        }
    }

    /// Puts all of `behind` behind what `request` has, where it lies; and they [`Merger::can_merge`].
    pub fn join(&mut self, request: &mut Request, behind: Request) {
        if request.parts.is_empty() {
            self.wrap(request);
        }
        let Request { mut bio, mut parts } = behind;
        let whole = &mut request.bio;
        whole.sectors += bio.sectors;
        whole.started = whole.started.min(bio.started);
        whole.data.append(std::mem::take(&mut bio.data));
        if parts.is_empty() {
            request.parts.push(bio);
        } else {
            request.parts.append(&mut parts);
            self.spare_parts.push(parts);
            self.spare.push(bio);
        }
    }

    /// Makes a request of one that is a bio from above.
    fn wrap(&mut self, request: &mut Request) {
        let mut whole = self.spare.pop().unwrap_or_default();
        let first = &mut request.bio;
        (whole.op, whole.flags, whole.owner) = (first.op, first.flags, self.owner);
        (whole.sector, whole.sectors, whole.started) = (first.sector, first.sectors, first.started);
        // Keeps its room.
        whole.data.append(std::mem::take(&mut first.data));
        let first = std::mem::replace(&mut request.bio, whole);
        request.parts = self.spare_parts.pop().unwrap_or_default();
        request.parts.push(first);
    }

    /// What the disk is given for `request`.
    pub fn send(&mut self, request: Request) -> Box<Bio> {
        let Request { mut bio, parts } = request;
        if !parts.is_empty() {
            bio.cookie = self.in_flight.insert(parts) as u64;
            bio.start();
        }
        bio
    }

    /// The bios that `request`, which has not been sent, was made of.
    pub fn split(&mut self, request: Request, out: &mut Batch) {
        let Request { bio, parts } = request;
        match parts.is_empty() {
            true => out.push(bio),
            false => self.cut(bio, parts, |part| out.push(part)),
        }
    }

    /// True when there may be requests with the disk that were made of several.
    #[inline]
    pub fn has_in_flight(&self) -> bool {
        !self.in_flight.is_empty()
    }

    /// Replaces what was made of several by those, in `back` from `from` on: with the status of the
    /// whole, or unchanged where it was `handed` back. Parts that are to be read once more go to
    /// `retries`. `scratch` is empty before and behind it.
    pub fn back(
        &mut self,
        back: &mut Batch,
        from: usize,
        handed: bool,
        retries: &mut Batch,
        scratch: &mut Batch,
    ) {
        scratch.extend(back.drain(from..));
        for mut bio in scratch.drain(..) {
            if bio.owner != self.owner {
                back.push(bio);
                continue;
            }
            let (parts, status) = (self.in_flight.remove(bio.cookie as usize), bio.status);
            let is_bad = matches!(status, Status::Medium | Status::IoErr);
            let single = !handed && bio.op == Op::Read && is_bad;
            bio.finish();
            let mut last_ok = bugs::on(Bug::MergedErrorLost);
            self.cut(bio, parts, |mut part| {
                if single {
                    // As it was given: a drain may hand it back before it goes down again.
                    return retries.push(part);
                }
                if !handed {
                    part.end_with(if std::mem::take(&mut last_ok) { Status::Ok } else { status });
                }
                back.push(part);
            });
        }
    }

    /// Gives the parts of `bytes_io` their data back.
    fn cut(&mut self, mut whole: Box<Bio>, mut parts: Batch, mut out: impl FnMut(Box<Bio>)) {
        let has_data = !whole.data.is_empty();
        if bugs::on(Bug::MergedReadShifted) && whole.op == Op::Read {
            parts.reverse();
        }
        for mut part in parts.drain(..) {
            if has_data {
                part.data = whole.data.split_to(part.sectors.bytes() as usize);
            }
            out(part);
        }
        debug_assert!(whole.data.is_empty(), "all data has gone back");
        self.spare_parts.push(parts);
        self.spare.push(whole);
    }
}

impl Request {
    /// Its first sector.
    pub fn sector(&self) -> Sector {
        self.bio.sector
    }

    /// The first sector behind it.
    pub fn end(&self) -> Sector {
        self.bio.end()
    }
}
