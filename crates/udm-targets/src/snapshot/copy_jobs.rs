//! The copy jobs of one lane: runs of chunks, copied from the origin to the stores of all snapshots
//! that lack them.
//!
//! A job reads its run once, in pieces, and writes each piece to every store. Several pieces and
//! jobs are in flight at a time, limited by the lane's copy memory. A completed job returns the
//! runs that the stores now have.

use super::record_commits::ExceptionRun;
use slab::Slab;
use smallvec::SmallVec;
use std::cmp::Reverse;
use std::collections::VecDeque;
use udm_core::{Bio, Limits, Sectors};

/// Default maximum of bytes of a lane's copies in flight.
pub(super) const COPY_MEMORY: usize = 4 << 20;

/// The maximum length of a piece.
pub(super) const PIECE_MAX: Sectors = Sectors((256 << 10) / 512);

/// The maximum piece that all devices with these limits accept without a split: a multiple of each
/// device's block.
pub(super) fn max_copy_piece_size(all: &[Limits]) -> Sectors {
    let block = all.iter().map(block_sectors).max().unwrap_or(1);
    let most = all.iter().map(|limits| limits.max_sectors.0).min().unwrap_or(u64::MAX).min(PIECE_MAX.0);
    Sectors((most - most % block).max(block))
}

/// The block of a device with these limits, in sectors.
pub(super) fn block_sectors(limits: &Limits) -> u64 {
    Sectors::from_bytes(u64::from(limits.logical_block)).0.max(1)
}

/// The destination of a run.
#[derive(Clone, Copy, Debug)]
pub(super) struct ChunkCopyDestination {
    /// Index of the lane's snapshot.
    pub part: usize,
    /// Sequence number and position in the store.
    pub copied: ExceptionRun,
}

/// A run of chunks being copied.
pub(super) struct ChunkCopyJob {
    /// The sectors of the origin that are still to be read: `at..end`.
    at: u64,
    end: u64,
    /// The first sector of the run.
    pub start: u64,
    /// Pieces in flight: a piece that is written to two stores counts twice.
    pub in_flight: usize,
    pub dests: SmallVec<[ChunkCopyDestination; 1]>,
    /// A write of a part of the run's only chunk, which is applied to the data before it is stored.
    pub overlay: Option<Box<Bio>>,
}

impl ChunkCopyJob {
    /// A job that copies the sectors from `start` to `end`.
    pub(super) fn new(
        start: u64,
        end: u64,
        dests: SmallVec<[ChunkCopyDestination; 1]>,
        overlay: Option<Box<Bio>>,
    ) -> ChunkCopyJob {
        ChunkCopyJob { at: start, end, start, in_flight: 0, dests, overlay }
    }

    /// True if all sectors are copied.
    fn is_over(&self) -> bool {
        self.in_flight == 0 && self.at == self.end
    }

    /// Applies `overlay` to `data`, the sectors from `from` on.
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
pub(super) struct ChunkCopyJobQueue {
    jobs: Slab<ChunkCopyJob>,
    /// Jobs with pieces that have not been read, in order.
    ready: VecDeque<usize>,
    /// Bytes in flight.
    pub bytes: usize,
}

impl ChunkCopyJobQueue {
    pub(super) fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }

    pub(super) fn add(&mut self, job: ChunkCopyJob) {
        let index = self.jobs.insert(job);
        self.ready.push_back(index);
    }

    pub(super) fn get(&mut self, job: usize) -> &mut ChunkCopyJob {
        &mut self.jobs[job]
    }

    /// The next piece to read, of at most `max` sectors: job, first sector, length. `memory` limits
    /// the bytes in flight; a single piece may exceed it.
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

    /// Completes a piece. Returns the job if it was the last piece.
    pub(super) fn end_piece(&mut self, job: usize, bytes: usize) -> Option<ChunkCopyJob> {
        self.bytes -= bytes;
        self.jobs[job].in_flight -= 1;
        self.jobs[job].is_over().then(|| self.jobs.remove(job))
    }
}

/// Claimed chunks with reserved room, before they become jobs. Chunks that are consecutive in the
/// origin and in the store form one run.
#[derive(Default)]
pub(super) struct ChunkRunsToCopy(Vec<ChunkCopyDestination>);

impl ChunkRunsToCopy {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Appends a chunk to the last run of its snapshot, or starts a new run.
    pub(super) fn add(&mut self, dest: ChunkCopyDestination) {
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

    /// Takes all runs in the order of their addition. Used for a single snapshot, so that its
    /// records are in the order of its copies.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = ChunkCopyDestination> + '_ {
        self.0.drain(..)
    }

    /// Sorts the runs by position in the origin. `shift` returns the chunk size of a snapshot.
    pub(super) fn sort(&mut self, shift: impl Fn(usize) -> u32) {
        self.0.sort_unstable_by_key(|dest| Reverse((ChunkRunsToCopy::key(&shift, dest), dest.part)));
    }

    /// Takes the next run, and equal runs of other snapshots with it. The runs must be sorted.
    pub(super) fn take(
        &mut self,
        shift: impl Fn(usize) -> u32,
    ) -> Option<SmallVec<[ChunkCopyDestination; 1]>> {
        let first = self.0.pop()?;
        let key = ChunkRunsToCopy::key(&shift, &first);
        let mut group = SmallVec::from_elem(first, 1);
        while let Some(next) = self.0.pop_if(|next| ChunkRunsToCopy::key(&shift, next) == key) {
            group.push(next);
        }
        Some(group)
    }

    fn key(shift: impl Fn(usize) -> u32, dest: &ChunkCopyDestination) -> (u32, u64, u64) {
        (shift(dest.part), dest.copied.old, dest.copied.len)
    }
}
