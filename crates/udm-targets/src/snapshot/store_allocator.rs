//! Chunks of a store, given out in order.
//!
//! A store is filled from its front: chunk after chunk, areas of records passed over. Only when it
//! is full to its end are the holes used that a crash may have left. Each grant has a number, its
//! *turn*: records go into the store in that order, as the kernel's do.

#[cfg(test)]
mod tests;

use crossbeam_utils::CachePadded;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use udm_core::{Sectors, interleave};
use udm_wire::cow::StoreLayout;

/// Chunks of the store that were given out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ChunkRange {
    /// The turn of the first; the others follow.
    pub seq: u64,
    /// The first chunk; the others lie behind it.
    pub new: u64,
    /// How many.
    pub len: u64,
    /// The first chunk behind all that were given out.
    pub end: u64,
}

/// Where things are in the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StoreChunks {
    /// As the kernel lays it out.
    Persistent(StoreLayout),
    /// All chunks are data; so many sectors each.
    Transient(u32),
}

impl StoreChunks {
    /// How many chunks of data a store of `size` has room for.
    fn capacity(self, size: Sectors) -> u64 {
        match self {
            StoreChunks::Persistent(layout) => layout.capacity(layout.chunks(size)),
            StoreChunks::Transient(sectors) => size.0 / u64::from(sectors),
        }
    }

    /// The least size with room for `chunks` chunks of data.
    fn size(self, chunks: u64) -> Sectors {
        let (chunks, sectors) = match self {
            StoreChunks::Persistent(layout) => (layout.chunks_for(chunks), layout.chunk().sectors()),
            StoreChunks::Transient(sectors) => (chunks, sectors),
        };
        Sectors(chunks.saturating_mul(u64::from(sectors)))
    }

    /// Chunk `index` of those for data, and how many from there on lie behind each other.
    fn chunk(self, index: u64) -> (u64, u64) {
        match self {
            StoreChunks::Persistent(layout) => layout.data_chunk(index),
            StoreChunks::Transient(_) => (index, u64::MAX),
        }
    }
}

/// Set in `next` when the front has reached the end once and holes are used.
const CLOSED: u64 = 1 << 63;

/// See the module's documentation.
pub(super) struct StoreAllocator {
    plan: StoreChunks,
    /// The first chunk of data that was free when the store was opened.
    begin: u64,
    /// The next one, of those for data. On a cache line of its own: what surrounds it every request
    /// reads.
    next: CachePadded<AtomicU64>,
    /// What is left besides.
    spare: Mutex<AllocatorHoles>,
    has_holes: bool,
}

#[derive(Default)]
struct AllocatorHoles {
    holes: VecDeque<Range<u64>>,
    /// The next turn and the next chunk of data, from when `next` was closed.
    at: Option<(u64, u64)>,
}

impl StoreAllocator {
    /// The first free chunk of data is `begin`; `holes` are chunks before it.
    pub(super) fn new(plan: StoreChunks, begin: u64, holes: Vec<Range<u64>>) -> StoreAllocator {
        let has_holes = !holes.is_empty();
        let spare = Mutex::new(AllocatorHoles { holes: holes.into(), at: None });
        StoreAllocator { plan, begin, next: CachePadded::new(AtomicU64::new(begin)), spare, has_holes }
    }

    /// Chunks behind each other, `want` of them or fewer, in a store of `size`; `None` when it is
    /// full.
    pub(super) fn take(&self, want: u64, size: Sectors) -> Option<ChunkRange> {
        interleave::point();
        let capacity = self.plan.capacity(size);
        // Relaxed: the number is all there is.
        let mut next = self.next.load(Ordering::Relaxed);
        loop {
            if next & CLOSED != 0 {
                return self.take_spare(want, capacity);
            }
            let (new, run) = self.plan.chunk(next);
            let len = want.min(run).min(capacity.saturating_sub(next));
            let then = match (len, self.has_holes) {
                (0, false) => return None,
                (0, true) => next | CLOSED,
                (len, _) => next + len,
            };
            match self.next.compare_exchange_weak(next, then, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) if len > 0 => {
                    return Some(ChunkRange { seq: next - self.begin, new, len, end: new + len });
                }
                Ok(_) => next = then,
                Err(now) => next = now,
            }
        }
    }

    /// The store was full once. Locks: nobody is in a hurry here.
    #[cold]
    fn take_spare(&self, want: u64, capacity: u64) -> Option<ChunkRange> {
        let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
        let closed = self.next.load(Ordering::Relaxed) & !CLOSED;
        let (seq, front) = spare.at.unwrap_or((closed - self.begin, closed));
        let (new, len) = match spare.holes.front_mut() {
            Some(hole) => {
                let len = want.min(hole.end - hole.start);
                let new = hole.start;
                hole.start += len;
                if hole.is_empty() {
                    spare.holes.pop_front();
                }
                (new, len)
            }
            None => {
                let (new, run) = self.plan.chunk(front);
                (new, want.min(run).min(capacity.saturating_sub(front)))
            }
        };
        let from_hole = new < self.plan.chunk(front).0;
        let front = if from_hole { front } else { front + len };
        spare.at = Some((seq + len, front));
        (len > 0).then(|| ChunkRange { seq, new, len, end: self.plan.chunk(front).0 })
    }

    /// True when a store of `size` is not full.
    pub(super) fn has_room(&self, size: Sectors) -> bool {
        let next = self.next.load(Ordering::Relaxed);
        let capacity = self.plan.capacity(size);
        if next & CLOSED == 0 {
            return next < capacity || self.has_holes;
        }
        let spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
        !spare.holes.is_empty() || spare.at.map_or(next & !CLOSED, |(_, front)| front) < capacity
    }

    /// True when holes wait for the front to reach the end.
    pub(super) fn keeps_holes(&self) -> bool {
        self.has_holes && self.next.load(Ordering::Relaxed) & CLOSED == 0
    }

    /// The least size of the store with more room than one of `size` has.
    pub(super) fn next_size(&self, size: Sectors) -> Sectors {
        self.plan.size(self.plan.capacity(size).saturating_add(1))
    }

    /// The first chunk behind all that were given out.
    pub(super) fn end(&self) -> u64 {
        let next = self.next.load(Ordering::Relaxed);
        let spare =
            (next & CLOSED != 0).then(|| self.spare.lock().unwrap_or_else(PoisonError::into_inner).at);
        let front = spare.flatten().map_or(next & !CLOSED, |(_, front)| front);
        self.plan.chunk(front).0
    }
}
