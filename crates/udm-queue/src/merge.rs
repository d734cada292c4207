//! Requests to the disk: single bios, or several adjacent bios merged into one.
//!
//! Reads and writes are merged with bios of the same operation and flags. Bios with FUA, PREFLUSH
//! or NOWAIT and bios in foreign memory are not merged. Data is joined on the way down and split on
//! the way up, so nothing is copied. Each bio comes back as it was submitted, with the status of
//! the whole request. If a merged read fails with a medium or I/O error, its parts are read again
//! one by one. So only the parts with a bad block fail. A write is never sent twice.

use slab::Slab;
use udm_core::{Batch, Bio, BioFlags, BioOwnerId, Op, Sector, Sectors, Status};
use udm_wire::uri::QueueParams;

/// A request to the disk.
#[derive(Debug)]
pub(crate) struct Request {
    /// The bio for the disk.
    pub bio: Box<Bio>,
    /// The merged bios by sector, without their data; empty if `bio` is itself from above.
    parts: Batch,
}

/// Limits of merging.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MergeLimits {
    /// The longest merged request.
    pub longest: Sectors,
    /// Block size in sectors, and the end of the disk. Lower layers refuse bios that are not whole
    /// blocks or exceed the end, and merging such a bio would fail the others too. If a layer above
    /// refuses such bios already, the values are 1 and the largest sector.
    pub block: u64,
    pub end: Sector,
}

/// Merges requests, and keeps the parts of merged requests.
pub(crate) struct Merger {
    /// The kernel's `nomerges` setting.
    nomerges: u32,
    merge_limits: MergeLimits,
    most_segments: usize,
    pub(crate) front: bool,
    owner: BioOwnerId,
    /// Parts of the merged requests that are with the disk, by cookie.
    in_flight: Slab<Batch>,
    free_bios: Batch,
    spare_parts: Vec<Batch>,
}

impl Merger {
    /// Creates a merger; its merged bios belong to `owner`.
    pub fn new(params: &QueueParams, merge_limits: MergeLimits, owner: BioOwnerId) -> Merger {
        Merger {
            nomerges: params.nomerges,
            merge_limits,
            most_segments: params.max_segments as usize,
            front: params.front_merges > 0,
            owner,
            in_flight: Slab::new(),
            free_bios: Batch::new(),
            spare_parts: Vec::new(),
        }
    }

    /// Sets new parameters and limits.
    pub fn change(&mut self, params: &QueueParams, merge_limits: MergeLimits) {
        (self.nomerges, self.merge_limits) = (params.nomerges, merge_limits);
        (self.most_segments, self.front) = (params.max_segments as usize, params.front_merges > 0);
    }

    /// Number of recent requests that a scheduler without an order tries to merge with.
    pub fn lookback(&self) -> usize {
        match self.nomerges {
            0 => 8,
            1 => 1,
            _ => 0,
        }
    }

    /// True if two neighbours in `batch` can be merged.
    #[inline]
    pub fn finds_merge(&self, batch: &Batch) -> bool {
        let behind = |pair: &[Box<Bio>]| pair[0].end() == pair[1].sector || pair[1].end() == pair[0].sector;
        self.nomerges < 2 && batch.windows(2).any(|pair| behind(pair) && self.can_merge(&pair[0], &pair[1]))
    }

    /// True if the two bios can be merged, provided that they are adjacent.
    pub fn can_merge(&self, a: &Bio, b: &Bio) -> bool {
        let single = BioFlags::FUA | BioFlags::PREFLUSH | BioFlags::NOWAIT;
        let kind = a.op == b.op && matches!(a.op, Op::Read | Op::Write) && a.flags == b.flags;
        let own = !a.flags.intersects(single);
        let MergeLimits { longest, block, end } = self.merge_limits;
        let length = a.sectors + b.sectors <= longest;
        let sound = |bio: &Bio| bio.end() <= end && (bio.sector.0 | bio.sectors.0) & (block - 1) == 0;
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

    /// Merges `bio` into `request`, after or before it. They must be adjacent, and
    /// [`Merger::can_merge`] must be true.
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

    /// Merges `behind`, which begins at the end of `request`, into `request`. [`Merger::can_merge`]
    /// must be true.
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
            self.free_bios.push(bio);
        }
    }

    /// Turns a request of one bio into a merged request.
    fn wrap(&mut self, request: &mut Request) {
        let mut whole = self.free_bios.pop().unwrap_or_default();
        let first = &mut request.bio;
        (whole.op, whole.flags, whole.owner) = (first.op, first.flags, self.owner);
        (whole.sector, whole.sectors, whole.started) = (first.sector, first.sectors, first.started);
        // `append` keeps the capacity of the vector.
        whole.data.append(std::mem::take(&mut first.data));
        let first = std::mem::replace(&mut request.bio, whole);
        request.parts = self.spare_parts.pop().unwrap_or_default();
        request.parts.push(first);
    }

    /// Returns the bio to send to the disk.
    pub fn send(&mut self, request: Request) -> Box<Bio> {
        let Request { mut bio, parts } = request;
        if !parts.is_empty() {
            bio.cookie = self.in_flight.insert(parts) as u64;
            bio.start();
        }
        bio
    }

    /// Appends the bios of a request that has not been sent.
    pub fn split(&mut self, request: Request, out: &mut Batch) {
        let Request { bio, parts } = request;
        match parts.is_empty() {
            true => out.push(bio),
            false => self.cut(bio, parts, |part| out.push(part)),
        }
    }

    /// True if merged requests are with the disk.
    #[inline]
    pub fn has_in_flight(&self) -> bool {
        !self.in_flight.is_empty()
    }

    /// Replaces merged bios of `back`, from index `from` on, by their parts. The parts get the
    /// status of the whole, or stay unchanged if they were `handed` back. Parts to be read again go
    /// to `retries`. `scratch` is empty before and after the call.
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
            self.cut(bio, parts, |mut part| {
                if single {
                    // Unchanged, since a drain may hand it back before it is sent again.
                    return retries.push(part);
                }
                if !handed {
                    part.end_with(status);
                }
                back.push(part);
            });
        }
    }

    /// Returns their data to the parts of `whole`.
    fn cut(&mut self, mut whole: Box<Bio>, mut parts: Batch, mut out: impl FnMut(Box<Bio>)) {
        let has_data = !whole.data.is_empty();
        for mut part in parts.drain(..) {
            if has_data {
                part.data = whole.data.split_to(part.sectors.bytes() as usize);
            }
            out(part);
        }
        debug_assert!(whole.data.is_empty(), "all data has been returned");
        self.spare_parts.push(parts);
        self.free_bios.push(whole);
    }
}

impl Request {
    /// First sector.
    pub fn sector(&self) -> Sector {
        self.bio.sector
    }

    /// First sector after the request.
    pub fn end(&self) -> Sector {
        self.bio.end()
    }
}
