//! What one lane copies: runs of chunks from the origin to the stores of those snapshots that lack
//! them.
//!
//! A job reads its run once, in pieces, and writes each piece to every store; several pieces and
//! jobs are under way at a time, as far as the lane's memory for it goes. Who is done is told what
//! the stores have now.

use super::record_commits::CopiedRun;
use slab::Slab;
use smallvec::SmallVec;
use std::cmp::Reverse;
use std::collections::VecDeque;
use udm_core::bugs::{self, Bug};
use udm_core::{Bio, Limits, Sectors};

/// Bytes of a lane's copies that are under way at the most, where nobody has set another number.
pub(super) const COPY_MEMORY: usize = 4 << 20;

/// The longest piece.
pub(super) const PIECE_MAX: Sectors = Sectors((256 << 10) / 512);

/// The longest piece that devices with these limits all take whole: of whole blocks of each.
pub(super) fn max_piece(all: &[Limits]) -> Sectors {
    let block = all.iter().map(block_sectors).max().unwrap_or(1);
    let most = all.iter().map(|limits| limits.max_sectors.0).min().unwrap_or(u64::MAX).min(PIECE_MAX.0);
    Sectors((most - most % block).max(block))
}

/// The block of a device with these limits, in sectors.
pub(super) fn block_sectors(limits: &Limits) -> u64 {
    Sectors::from_bytes(u64::from(limits.logical_block)).0.max(1)
}

/// Where a run goes.
#[derive(Clone, Copy, Debug)]
pub(super) struct CopyDest {
    /// Which of the lane's snapshots.
    pub part: usize,
    /// Its turn and place.
    pub copied: CopiedRun,
}

/// A run of chunks on its way.
pub(super) struct CopyJob {
    /// The sectors of the origin: from here on in what is to be read, to `end`.
    at: u64,
    end: u64,
    /// Where the run begins.
    pub start: u64,
    /// Pieces that are under way: one that is written to two stores counts twice.
    pub in_flight: usize,
    pub dests: SmallVec<[CopyDest; 1]>,
    /// A write of a part of the only chunk, which goes into the store with the rest of it.
    pub overlay: Option<Box<Bio>>,
}

impl CopyJob {
    /// Copies the sectors from `start` to `end`.
    pub(super) fn new(
        start: u64,
        end: u64,
        dests: SmallVec<[CopyDest; 1]>,
        overlay: Option<Box<Bio>>,
    ) -> CopyJob {
        CopyJob { at: start, end, start, in_flight: 0, dests, overlay }
    }

    /// True when all of it is where it belongs.
    fn is_over(&self) -> bool {
        self.in_flight == 0 && self.at == self.end
    }

    /// What `overlay` has of the sectors from `from` on, whose bytes are `data`.
    pub(super) fn apply_overlay(&self, from: u64, data: &mut [u8]) {
        let Some(bio) = &self.overlay else { return };
        let sectors = data.len() as u64 / 512;
        let (start, end) = (bio.sector.0.max(from), bio.end().0.min(from + sectors));
        if start < end {
            let into = &mut data[((start - from) * 512) as usize..((end - from) * 512) as usize];
            bio.data.copy_to_at(((start - bio.sector.0) * 512) as usize, into);
        }
    }
}

/// The jobs of a lane.
#[derive(Default)]
pub(super) struct CopyJobs {
    jobs: Slab<CopyJob>,
    /// Those with pieces that have not been read, in turn.
    ready: VecDeque<usize>,
    /// Bytes under way.
    pub bytes: usize,
}

impl CopyJobs {
    pub(super) fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }

    pub(super) fn add(&mut self, job: CopyJob) {
        let index = self.jobs.insert(job);
        self.ready.push_back(index);
    }

    pub(super) fn get(&mut self, job: usize) -> &mut CopyJob {
        &mut self.jobs[job]
    }

    /// The next piece to be read, of at most `max` sectors: of which job, from where, how much.
    /// `memory` is what may be under way; one piece alone may be more.
    pub(super) fn next_piece(&mut self, max: Sectors, memory: usize) -> Option<(usize, u64, Sectors)> {
        let index = *self.ready.front()?;
        let job = &mut self.jobs[index];
        let len = Sectors(max.0.min(job.end - job.at));
        let bytes = len.bytes() as usize;
        if self.bytes > 0 && self.bytes + bytes > memory {
            return None;
        }
        self.bytes += bytes;
        let from = job.at;
        job.at += len.0;
        job.in_flight += 1;
        if job.at == job.end {
            self.ready.pop_front();
        }
        Some((index, from, len))
    }

    /// A piece is over; the job, when it was the last one.
    pub(super) fn end_piece(&mut self, job: usize, bytes: usize) -> Option<CopyJob> {
        self.bytes -= if bugs::on(Bug::CopyMemoryKept) { 0 } else { bytes };
        self.jobs[job].in_flight -= 1;
        self.jobs[job].is_over().then(|| self.jobs.remove(job))
    }
}

/// Chunks that a lane has claimed and found room for, before they become jobs: what lies behind
/// each other in the origin and in the store is one run.
#[derive(Default)]
pub(super) struct ClaimedRuns(Vec<CopyDest>);

impl ClaimedRuns {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds a chunk to the last run of its snapshot, or begins another.
    pub(super) fn add(&mut self, dest: CopyDest) {
        let last = self.0.iter_mut().rev().find(|last| last.part == dest.part);
        if let Some(last) = last {
            let (run, next) = (&mut last.copied, &dest.copied);
            let follows = |a: u64, b: u64| a + run.len == b;
            if follows(run.old, next.old) && follows(run.new, next.new) && follows(run.seq, next.seq) {
                run.len += next.len;
                return;
            }
        }
        self.0.push(dest);
    }

    /// Takes all out, in the order in which they came: for a single snapshot, so that its records
    /// have their turns in the order of their copies.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = CopyDest> + '_ {
        self.0.drain(..)
    }

    /// Puts them in order: those of the front of the origin first. `shift` says how large a
    /// snapshot's chunks are.
    pub(super) fn sort(&mut self, shift: impl Fn(usize) -> u32) {
        self.0.sort_unstable_by_key(|dest| Reverse((ClaimedRuns::key(&shift, dest), dest.part)));
    }

    /// Takes the next run out: equal ones of several snapshots together. They are in order.
    pub(super) fn take(&mut self, shift: impl Fn(usize) -> u32) -> Option<SmallVec<[CopyDest; 1]>> {
        let first = self.0.pop()?;
        let key = ClaimedRuns::key(&shift, &first);
        let mut group = SmallVec::from_elem(first, 1);
        while let Some(next) = self.0.pop_if(|next| ClaimedRuns::key(&shift, next) == key) {
            group.push(next);
        }
        Some(group)
    }

    fn key(shift: impl Fn(usize) -> u32, dest: &CopyDest) -> (u32, u64, u64) {
        (shift(dest.part), dest.copied.old, dest.copied.len)
    }
}
