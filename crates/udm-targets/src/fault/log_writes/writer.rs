//! The half of a log-writes lane that writes to the log device.

use super::shared::{Placed, Shared, State};
use slab::Slab;
use std::ops::Range;
use udm_core::{
    Batch, Bio, BioFlags, BioPool, Buf, BufPool, Cx, Drain, Lane, Op, OwnerId, SECTOR_SIZE, Sector, Sectors,
    Segments,
};
use udm_wire::log_writes::{EntryFlags, Superblock};

/// Bytes of free copies that a lane keeps.
const COPIES_KEPT: usize = 16 << 20;

/// The cookie of the superblock.
const SUPERBLOCK: u64 = u64::MAX;

/// What a batch adds to the shared counts.
#[derive(Default)]
pub(super) struct Tally {
    pub(super) bytes: isize,
    pub(super) requests: isize,
}

/// Entries that were given their places together.
struct Job {
    range: Range<u64>,
    /// How many are still being written.
    left: usize,
    ok: bool,
    /// Requests that are returned when all are written.
    acks: Batch,
}

pub(super) struct Writer {
    log: Box<dyn Lane>,
    owner: OwnerId,
    sector_size: u32,
    bios: BioPool,
    pub(super) copies: BufPool,
    jobs: Slab<Job>,
    /// The superblock under way counts so many entries.
    counting: Option<u64>,
    down: Batch,
    home: Batch,
}

impl Writer {
    pub(super) fn new(log: Box<dyn Lane>, sector_size: u32, cx: &mut Cx<'_>) -> Writer {
        Writer {
            log,
            owner: cx.new_owner(),
            sector_size,
            // As many as there are entries, which the bound on copies and the requests in flight above bound.
            bios: BioPool::new(usize::MAX),
            copies: BufPool::new(COPIES_KEPT),
            jobs: Slab::new(),
            counting: None,
            down: Batch::new(),
            home: Batch::new(),
        }
    }

    /// True while something is on its way to the log.
    pub(super) fn is_busy(&self) -> bool {
        !self.jobs.is_empty() || self.counting.is_some() || self.log.is_busy()
    }

    fn write(&mut self, at: u64, head: Buf, data: Option<Buf>, cookie: u64, flags: BioFlags) {
        let mut bio = self.bios.get().expect("the pool has no bound");
        bio.op = Op::Write;
        bio.flags = flags;
        bio.owner = self.owner;
        bio.cookie = cookie;
        bio.data = Segments::from(head);
        if let Some(data) = data {
            bio.data.push(data);
        }
        bio.sector = Sector(at);
        bio.sectors = Sectors::from_bytes(bio.data.len() as u64);
        bio.start();
        self.down.push(bio);
    }

    /// Writes entries `range`, then returns `acks` from `poll`. When there are none, as with a full log, they are handed back at once.
    #[must_use]
    pub(super) fn entries(&mut self, range: Range<u64>, placed: &mut Vec<Placed>, acks: Batch) -> Batch {
        if placed.is_empty() {
            return acks;
        }
        let job = Job { range, left: placed.len(), ok: true, acks };
        let key = self.jobs.insert(job) as u64;
        for Placed { at, append } in placed.drain(..) {
            let mut head = self.copies.get(self.sector_size as usize);
            if append.entry.flags.contains(EntryFlags::MARK) {
                append.entry.encode(append.data.as_deref().unwrap_or_default(), &mut head);
                self.write(at, head, None, key, BioFlags::empty());
            } else {
                append.entry.encode(&[], &mut head);
                self.write(at, head, append.data, key, BioFlags::empty());
            }
        }
        Batch::new()
    }

    /// Writes a superblock that counts `entries`.
    pub(super) fn superblock(&mut self, entries: u64) {
        let mut head = self.copies.get(self.sector_size as usize);
        Superblock { entries, sector_size: self.sector_size }.encode(&mut head);
        self.counting = Some(entries);
        self.write(0, head, None, SUPERBLOCK, BioFlags::FUA);
    }

    /// Sends down what there is to write.
    pub(super) fn submit(&mut self, cx: &mut Cx<'_>) {
        if !self.down.is_empty() {
            self.log.submit(&mut self.down, cx);
        }
    }

    /// Takes in what was written, appends to `done` the requests that waited for it, and counts it in the superblock.
    pub(super) fn poll(&mut self, shared: &Shared, done: &mut Batch, tally: &mut Tally, cx: &mut Cx<'_>) {
        self.log.poll(&mut self.home, cx);
        if self.home.is_empty() {
            return;
        }
        let mut state = shared.lock();
        let mut home = std::mem::take(&mut self.home);
        for mut bio in home.drain(..) {
            bio.finish();
            if !bio.status.is_ok() {
                shared.disable(&mut state, "Error writing log block");
            }
            if bio.cookie == SUPERBLOCK {
                if let Some(entries) = self.counting.take() {
                    state.end_count(entries);
                }
            } else {
                tally.bytes -= (bio.data.len() - self.sector_size as usize) as isize;
                self.end_one(bio.cookie as usize, bio.status.is_ok(), &mut state, done, tally);
            }
            for buf in std::mem::take(&mut bio.data) {
                self.copies.put(buf);
            }
            self.bios.put(bio);
        }
        self.home = home;
        if let Some(entries) = state.begin_count() {
            self.superblock(entries);
        }
    }

    /// One entry of a job is on the log, or failed.
    fn end_one(&mut self, key: usize, ok: bool, state: &mut State, done: &mut Batch, tally: &mut Tally) {
        let job = &mut self.jobs[key];
        job.left -= 1;
        job.ok &= ok;
        if job.left == 0 {
            let mut job = self.jobs.remove(key);
            if job.ok {
                state.wrote(job.range);
            }
            tally.requests -= job.acks.len() as isize;
            done.append(&mut job.acks);
        }
    }

    /// Has the log device end what it only holds back.
    pub(super) fn drain(&mut self, cx: &mut Cx<'_>) {
        self.log.drain(Drain::Flush, &mut self.home, cx);
    }
}

/// The position and length of `bio` in sectors of `sector_size` bytes.
pub(super) fn range_in(bio: &Bio, sector_size: u32) -> (u64, u64) {
    let unit = u64::from(sector_size) / SECTOR_SIZE;
    (bio.sector.0 / unit, bio.sectors.0 / unit)
}
