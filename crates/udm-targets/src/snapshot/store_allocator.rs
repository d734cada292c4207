//! Allocation of the chunks of a store.
//!
//! A store is filled from its front, chunk after chunk, skipping areas of records. Holes that a
//! crash may have left are used only when the store is full to its end. Each allocation has a
//! *sequence number*: records are written in that order, as by the kernel.

#[cfg(test)]
mod tests;

use crossbeam_utils::CachePadded;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use udm_core::{Sectors, interleave};
use udm_wire::cow::ExceptionStoreLayout;

/// A run of allocated chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AllocatedChunkRun {
    /// Sequence number of the first chunk; the others follow.
    pub seq: u64,
    /// The first chunk; the others follow it.
    pub new: u64,
    /// Number of chunks.
    pub len: u64,
    /// The first chunk after all allocated ones.
    pub end: u64,
}

/// The layout of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StoreChunkLayout {
    /// The kernel's layout.
    Persistent(ExceptionStoreLayout),
    /// All chunks are data, with this many sectors each.
    Transient(u32),
}

impl StoreChunkLayout {
    /// Number of data chunks of a store of `size`.
    fn capacity(self, size: Sectors) -> u64 {
        match self {
            StoreChunkLayout::Persistent(layout) => layout.capacity(layout.chunks(size)),
            StoreChunkLayout::Transient(sectors) => size.0 / u64::from(sectors),
        }
    }

    /// The minimum size of a store with `chunks` data chunks.
    fn size(self, chunks: u64) -> Sectors {
        let (chunks, sectors) = match self {
            StoreChunkLayout::Persistent(layout) => (layout.chunks_for(chunks), layout.chunk().sectors()),
            StoreChunkLayout::Transient(sectors) => (chunks, sectors),
        };
        Sectors(chunks.saturating_mul(u64::from(sectors)))
    }

    /// The position of data chunk `index`, and the number of consecutive data chunks from there on.
    fn chunk(self, index: u64) -> (u64, u64) {
        match self {
            StoreChunkLayout::Persistent(layout) => layout.data_chunk(index),
            StoreChunkLayout::Transient(_) => (index, u64::MAX),
        }
    }
}

/// Set in `next` when the front has reached the end of the store and holes are used.
const CLOSED: u64 = 1 << 63;

/// The allocator of one store.
pub(super) struct StoreAllocator {
    plan: StoreChunkLayout,
    /// The first free data chunk when the store was opened.
    begin: u64,
    /// The next free data chunk. On its own cache line, because every request reads the fields
    /// around it.
    next: CachePadded<AtomicU64>,
    /// The holes, and the front after `next` was closed.
    holes: Mutex<StoreAllocatorHoles>,
    has_holes: bool,
}

#[derive(Default)]
struct StoreAllocatorHoles {
    ranges: VecDeque<Range<u64>>,
    /// The next sequence number and data chunk, since `next` was closed.
    at: Option<(u64, u64)>,
}

impl StoreAllocator {
    /// The first free data chunk is `begin`; `holes` are chunks before it.
    pub(super) fn new(plan: StoreChunkLayout, begin: u64, holes: Vec<Range<u64>>) -> StoreAllocator {
        let has_holes = !holes.is_empty();
        let holes = Mutex::new(StoreAllocatorHoles { ranges: holes.into(), at: None });
        StoreAllocator { plan, begin, next: CachePadded::new(AtomicU64::new(begin)), holes, has_holes }
    }

    /// Allocates up to `want` consecutive chunks in a store of `size`. `None` if the store is full.
    pub(super) fn take(&self, want: u64, size: Sectors) -> Option<AllocatedChunkRun> {
        interleave::mark_interleave_point();
        let capacity = self.plan.capacity(size);
        // Relaxed: no other data depends on the number.
        let mut next = self.next.load(Ordering::Relaxed);
        loop {
            if next & CLOSED != 0 {
                return self.take_hole(want, capacity);
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
                    return Some(AllocatedChunkRun { seq: next - self.begin, new, len, end: new + len });
                }
                Ok(_) => next = then,
                Err(now) => next = now,
            }
        }
    }

    /// Allocates when the store was full once. It takes a lock, because this is rare.
    #[cold]
    fn take_hole(&self, want: u64, capacity: u64) -> Option<AllocatedChunkRun> {
        let mut holes = self.holes.lock().unwrap_or_else(PoisonError::into_inner);
        let closed = self.next.load(Ordering::Relaxed) & !CLOSED;
        let (seq, front) = holes.at.unwrap_or((closed - self.begin, closed));
        let (new, len) = match holes.ranges.front_mut() {
            Some(hole) => {
                let len = want.min(hole.end - hole.start);
                let new = hole.start;
                hole.start += len;
                if hole.is_empty() {
                    holes.ranges.pop_front();
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
        holes.at = Some((seq + len, front));
        (len > 0).then(|| AllocatedChunkRun { seq, new, len, end: self.plan.chunk(front).0 })
    }

    /// True if a store of `size` is not full.
    pub(super) fn has_room(&self, size: Sectors) -> bool {
        let next = self.next.load(Ordering::Relaxed);
        let capacity = self.plan.capacity(size);
        if next & CLOSED == 0 {
            return next < capacity || self.has_holes;
        }
        let holes = self.holes.lock().unwrap_or_else(PoisonError::into_inner);
        !holes.ranges.is_empty() || holes.at.map_or(next & !CLOSED, |(_, front)| front) < capacity
    }

    /// True if there are holes that are not used yet.
    pub(super) fn keeps_holes(&self) -> bool {
        self.has_holes && self.next.load(Ordering::Relaxed) & CLOSED == 0
    }

    /// The minimum size of the store with more room than one of `size`.
    pub(super) fn next_size(&self, size: Sectors) -> Sectors {
        self.plan.size(self.plan.capacity(size).saturating_add(1))
    }

    /// The first chunk after all allocated ones.
    pub(super) fn end(&self) -> u64 {
        let next = self.next.load(Ordering::Relaxed);
        let holes =
            (next & CLOSED != 0).then(|| self.holes.lock().unwrap_or_else(PoisonError::into_inner).at);
        let front = holes.flatten().map_or(next & !CLOSED, |(_, front)| front);
        self.plan.chunk(front).0
    }
}
