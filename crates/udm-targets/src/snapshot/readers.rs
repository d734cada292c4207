//! Tracking of a snapshot's reads that go to its origin, so that no write of the origin overtakes
//! them.
//!
//! A read that finds its chunk free reads the origin. If the chunk is copied in the meantime, the
//! origin must not change before that read has completed. Reads are not counted per chunk. There is
//! an epoch, and each lane publishes the oldest epoch in which it has a read in flight.
//!
//! ```text
//! reader: oldest = epoch (if none in flight);   *fence*;   reads the map;   reads the origin
//! writer: sees the chunk copied;   *fence*;   epoch += 1 = e;   waits until every oldest >= e
//! ```
//!
//! In every interleaving, either the reader sees that the chunk is copied and reads the store, or
//! the writer sees the older epoch and waits. The fences exclude that both read before the other
//! has written. A read that begins after the epoch was advanced sees the copy, so a stream of new
//! reads delays no writer. The loom tests below try the interleavings.
//!
//! *Price.* One fence for the first read of a lane that had none in flight, and one when the oldest
//! epoch ends; otherwise one load per batch. A write of the origin to a chunk that was just copied
//! costs one atomic add, and one load per lane.

use crossbeam_utils::CachePadded;
#[cfg(feature = "loom")]
use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::collections::VecDeque;
#[cfg(not(feature = "loom"))]
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, OnceLock};
use udm_core::interleave;

/// No read is in flight.
const NONE: u64 = u64::MAX;

/// The published state of one lane's reads, on its own cache line.
#[repr(align(128))]
struct LaneReadEpochCell {
    oldest: AtomicU64,
    taken: AtomicBool,
    next: OnceLock<Arc<LaneReadEpochCell>>,
}

/// The readers of one snapshot, over all lanes.
pub(super) struct SnapshotReadTracker {
    epoch: CachePadded<AtomicU64>,
    /// Cells are added and never removed. A closed lane leaves its cell to the next one.
    first: OnceLock<Arc<LaneReadEpochCell>>,
    /// A writer waits for readers.
    awaited: AtomicBool,
}

impl SnapshotReadTracker {
    pub(super) fn new() -> SnapshotReadTracker {
        SnapshotReadTracker {
            epoch: CachePadded::new(AtomicU64::new(1)),
            first: OnceLock::new(),
            awaited: AtomicBool::new(false),
        }
    }

    /// Creates the reader of a lane. Takes no lock; allocates if no cell is free.
    pub(super) fn join(&self) -> LaneReadTracker {
        let mut place = &self.first;
        loop {
            let cell = place.get_or_init(|| {
                Arc::new(LaneReadEpochCell {
                    oldest: AtomicU64::new(NONE),
                    taken: AtomicBool::new(false),
                    next: OnceLock::new(),
                })
            });
            // Acquire pairs with the release of the lane that left the cell.
            if !cell.taken.swap(true, Ordering::Acquire) {
                return LaneReadTracker { cell: Arc::clone(cell), in_flight: VecDeque::new() };
            }
            place = &cell.next;
        }
    }

    /// Advances the epoch after the caller has seen a copied chunk. Returns the new epoch: all its
    /// readers, and all later ones, see the copy too.
    pub(super) fn advance_epoch(&self) -> u64 {
        interleave::mark_interleave_point();
        fence(Ordering::SeqCst);
        let epoch = self.epoch.fetch_add(1, Ordering::AcqRel) + 1;
        fence(Ordering::SeqCst);
        epoch
    }

    /// True if no read of an epoch before `epoch` is in flight. Acquire: these reads have
    /// completed.
    pub(super) fn are_past(&self, epoch: u64) -> bool {
        let mut cell = self.first.get();
        while let Some(one) = cell {
            if one.oldest.load(Ordering::Acquire) < epoch {
                return false;
            }
            cell = one.next.get();
        }
        true
    }

    /// As [`SnapshotReadTracker::are_past`]. If it returns false, [`LaneReadTracker::end`] returns
    /// true for the last reader.
    pub(super) fn are_past_or_notify(&self, epoch: u64) -> bool {
        if self.are_past(epoch) {
            return true;
        }
        self.awaited.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.are_past(epoch)
    }
}

/// The reader of one lane.
pub(super) struct LaneReadTracker {
    cell: Arc<LaneReadEpochCell>,
    /// Reads in flight: epoch and count, oldest first.
    in_flight: VecDeque<(u64, u64)>,
}

impl LaneReadTracker {
    /// Starts a batch with reads, before the map is read. Returns the epoch of the reads.
    pub(super) fn begin(&mut self, readers: &SnapshotReadTracker) -> u64 {
        interleave::mark_interleave_point();
        // Acquire: a read of this epoch sees the copies made before the epoch began.
        let epoch = readers.epoch.load(Ordering::Acquire);
        if self.in_flight.is_empty() {
            self.cell.oldest.store(epoch, Ordering::Relaxed);
            fence(Ordering::SeqCst);
        }
        if self.in_flight.back().is_none_or(|(last, _)| *last != epoch) {
            self.in_flight.push_back((epoch, 0));
        }
        epoch
    }

    /// Counts one read of the last epoch that goes to the origin.
    pub(super) fn count(&mut self) {
        if let Some((_, count)) = self.in_flight.back_mut() {
            *count += 1;
        }
    }

    /// Counts a completed read of `epoch`. Call [`LaneReadTracker::end`] after the last one.
    pub(super) fn finish(&mut self, epoch: u64) {
        if let Some((_, count)) = self.in_flight.iter_mut().find(|(known, _)| *known == epoch) {
            *count -= 1;
        }
    }

    /// Publishes the oldest epoch in flight, after a batch and after completed reads. Returns true
    /// if a writer waits and must be woken.
    pub(super) fn end(&mut self, readers: &SnapshotReadTracker) -> bool {
        let before = self.in_flight.len();
        while self.in_flight.front().is_some_and(|(_, count)| *count == 0) {
            self.in_flight.pop_front();
        }
        if self.in_flight.len() == before {
            return false;
        }
        interleave::mark_interleave_point();
        let oldest = self.in_flight.front().map_or(NONE, |(epoch, _)| *epoch);
        // Release: the reads have completed.
        self.cell.oldest.store(oldest, Ordering::Release);
        fence(Ordering::SeqCst);
        readers.awaited.load(Ordering::Relaxed) && readers.awaited.swap(false, Ordering::Relaxed)
    }
}

impl Drop for LaneReadTracker {
    fn drop(&mut self) {
        self.cell.oldest.store(NONE, Ordering::Release);
        self.cell.taken.store(false, Ordering::Release);
    }
}

#[cfg(all(test, feature = "loom"))]
mod loom_tests {
    use super::*;
    use crate::snapshot::exception_map::{ChunkState, ExceptionMap};
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicU64;
    use loom::thread;

    struct Model {
        map: ExceptionMap,
        readers: SnapshotReadTracker,
        /// The content of the chunk of the origin: 0 before the write.
        origin: AtomicU64,
    }

    /// Reads the chunk, which must have its old content.
    fn read(m: &Model, reader: &mut LaneReadTracker) {
        let epoch = reader.begin(&m.readers);
        if m.map.get(0).store_chunk().is_none() {
            reader.count();
            assert_eq!(m.origin.load(Ordering::Relaxed), 0, "a write of the origin overtook a read");
            reader.finish(epoch);
        }
        reader.end(&m.readers);
    }

    /// Writes the chunk of the origin, if it is allowed now.
    fn write(m: &Model) {
        if m.map.claim(0) {
            m.map.publish(0, 2);
        }
        if let ChunkState::Copied(_) = m.map.get(0) {
            let epoch = m.readers.advance_epoch();
            if !m.readers.are_past_or_notify(epoch) {
                return;
            }
            m.map.settle(0, 0);
        }
        if m.map.are_all_settled() || m.map.are_settled(0, 0) {
            m.origin.store(1, Ordering::Relaxed);
        }
    }

    /// A model and a reader. Lazy allocations are made here, because loom does not know the
    /// standard library's locks.
    fn model() -> (Arc<Model>, LaneReadTracker) {
        let map = ExceptionMap::new(1);
        map.claim(0);
        map.give_up(0);
        let readers = SnapshotReadTracker::new();
        let reader = readers.join();
        (Arc::new(Model { map, readers, origin: AtomicU64::new(0) }), reader)
    }

    #[test]
    fn loom_no_write_overtakes_a_read() {
        loom::model(|| {
            let (m, mut reader) = model();
            let other = {
                let m = Arc::clone(&m);
                thread::spawn(move || write(&m))
            };
            read(&m, &mut reader);
            read(&m, &mut reader);
            other.join().unwrap();
        });
    }

    /// The writer did not copy the chunk; it sees the copy that another core published.
    #[test]
    fn loom_who_finds_a_copy_waits_for_readers_too() {
        let mut model_of = loom::model::Builder::new();
        model_of.preemption_bound = Some(3);
        model_of.check(|| {
            let (m, mut reader) = model();
            let threads: Vec<_> = (0..2)
                .map(|_| {
                    let m = Arc::clone(&m);
                    thread::spawn(move || write(&m))
                })
                .collect();
            read(&m, &mut reader);
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        });
    }

    /// A writer that must wait races with a reader that ends: one of them continues the write.
    #[test]
    fn loom_who_waits_is_told() {
        loom::model(|| {
            let (m, mut reader) = model();
            let epoch = reader.begin(&m.readers);
            reader.count();
            let other = {
                let m = Arc::clone(&m);
                thread::spawn(move || {
                    let epoch = m.readers.advance_epoch();
                    m.readers.are_past_or_notify(epoch)
                })
            };
            reader.finish(epoch);
            let woken = reader.end(&m.readers);
            let past = other.join().unwrap();
            assert!(past || woken, "nobody would go on");
        });
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::*;

    #[test]
    fn reads_that_keep_coming_hold_up_nobody() {
        let readers = SnapshotReadTracker::new();
        let (mut one, other) = (readers.join(), readers.join());
        let first = one.begin(&readers);
        one.count();
        let epoch = readers.advance_epoch();
        assert!(!readers.are_past_or_notify(epoch));
        let second = one.begin(&readers);
        one.count();
        assert!(second > first && !readers.are_past(epoch));
        one.finish(first);
        assert!(one.end(&readers), "somebody waits");
        assert!(readers.are_past(epoch) && !readers.are_past(readers.advance_epoch()));
        one.finish(second);
        assert!(!one.end(&readers), "nobody does");
        drop((one, other));
        assert!(readers.are_past(u64::MAX));
        let again = readers.join();
        assert!(Arc::ptr_eq(&again.cell, readers.first.get().unwrap()), "cells are taken again");
    }
}
