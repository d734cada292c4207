//! Reads of a snapshot that go to its origin, so that no write of the origin overtakes them.
//!
//! A read that finds its chunk free reads the origin. When the chunk is copied meanwhile, the
//! origin may change as soon as that read is over, and not before. Nobody counts the reads of a
//! chunk: there is an epoch, and each lane tells the oldest epoch in which it has a read under way.
//!
//! ```text
//! who reads:      oldest = epoch (if it had none);   *fence*;   looks at the map;   reads the origin
//! who may change: sees the chunk copied;   *fence*;   epoch += 1 = e;   waits until every oldest >= e
//! ```
//!
//! Whatever way the two interleave, either the one sees that the chunk is copied and reads the
//! store, or the other sees the older epoch and waits: the fences forbid that both look before the
//! other has written. A read that begins behind the move of the epoch has seen the copy, so reads
//! that keep coming hold up nobody. The loom tests below try the interleavings.
//!
//! *Price.* A fence for the first read of a lane that had none under way, and one when the oldest
//! epoch ends; a load a batch in between. A write of the origin to a chunk that was just copied: an
//! atomic add, and a load a lane.

use crossbeam_utils::CachePadded;
#[cfg(feature = "loom")]
use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::collections::VecDeque;
#[cfg(not(feature = "loom"))]
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, OnceLock};
use udm_core::interleave;

/// No read is under way.
const NONE: u64 = u64::MAX;

/// What a lane tells of its reads; on a cache line of its own.
#[repr(align(128))]
struct ReaderCell {
    oldest: AtomicU64,
    taken: AtomicBool,
    next: OnceLock<Arc<ReaderCell>>,
}

/// The readers of one snapshot, of all lanes. See the module's documentation.
pub(super) struct Readers {
    epoch: CachePadded<AtomicU64>,
    /// Cells are added and never taken away; a lane that closes leaves its own to the next.
    first: OnceLock<Arc<ReaderCell>>,
    /// Somebody waits for readers.
    awaited: AtomicBool,
}

impl Readers {
    pub(super) fn new() -> Readers {
        Readers {
            epoch: CachePadded::new(AtomicU64::new(1)),
            first: OnceLock::new(),
            awaited: AtomicBool::new(false),
        }
    }

    /// A lane's part. Takes no lock; allocates where no cell is free.
    pub(super) fn join(&self) -> LaneReader {
        let mut place = &self.first;
        loop {
            let cell = place.get_or_init(|| {
                Arc::new(ReaderCell {
                    oldest: AtomicU64::new(NONE),
                    taken: AtomicBool::new(false),
                    next: OnceLock::new(),
                })
            });
            // Acquire pairs with the release of the lane that left it.
            if !cell.taken.swap(true, Ordering::Acquire) {
                return LaneReader { cell: Arc::clone(cell), under_way: VecDeque::new() };
            }
            place = &cell.next;
        }
    }

    /// To be called when one has seen that a chunk is copied: the epoch whose readers, and all
    /// later ones, have seen it too.
    pub(super) fn advance_epoch(&self) -> u64 {
        interleave::point();
        fence(Ordering::SeqCst);
        let epoch = self.epoch.fetch_add(1, Ordering::AcqRel) + 1;
        fence(Ordering::SeqCst);
        epoch
    }

    /// True when no read from before `epoch` is under way. Acquire: they are over.
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

    /// As [`Readers::are_past`]; when it is false, the reader that ends last is told so by
    /// [`LaneReader::end`].
    pub(super) fn are_past_or_notify(&self, epoch: u64) -> bool {
        if self.are_past(epoch) {
            return true;
        }
        self.awaited.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.are_past(epoch)
    }
}

/// A lane's part of [`Readers`].
pub(super) struct LaneReader {
    cell: Arc<ReaderCell>,
    /// Reads under way: of which epoch how many, the oldest first.
    under_way: VecDeque<(u64, u64)>,
}

impl LaneReader {
    /// Before the look at the map for a batch with reads: the epoch that they belong to.
    pub(super) fn begin(&mut self, readers: &Readers) -> u64 {
        interleave::point();
        // Acquire: a read of this epoch sees what was copied before it began.
        let epoch = readers.epoch.load(Ordering::Acquire);
        if self.under_way.is_empty() {
            self.cell.oldest.store(epoch, Ordering::Relaxed);
            fence(Ordering::SeqCst);
        }
        if self.under_way.back().is_none_or(|(last, _)| *last != epoch) {
            self.under_way.push_back((epoch, 0));
        }
        epoch
    }

    /// One of them goes to the origin.
    pub(super) fn count(&mut self) {
        if let Some((_, count)) = self.under_way.back_mut() {
            *count += 1;
        }
    }

    /// One of `epoch` is over. [`LaneReader::end`] comes behind the last.
    pub(super) fn finish(&mut self, epoch: u64) {
        if let Some((_, count)) = self.under_way.iter_mut().find(|(known, _)| *known == epoch) {
            *count -= 1;
        }
    }

    /// Tells what is under way now: behind a batch, and behind reads that are over. True when
    /// somebody waited for it and has to be woken.
    pub(super) fn end(&mut self, readers: &Readers) -> bool {
        let before = self.under_way.len();
        while self.under_way.front().is_some_and(|(_, count)| *count == 0) {
            self.under_way.pop_front();
        }
        if self.under_way.len() == before {
            return false;
        }
        interleave::point();
        let oldest = self.under_way.front().map_or(NONE, |(epoch, _)| *epoch);
        // Release: the reads are over.
        self.cell.oldest.store(oldest, Ordering::Release);
        fence(Ordering::SeqCst);
        readers.awaited.load(Ordering::Relaxed) && readers.awaited.swap(false, Ordering::Relaxed)
    }
}

impl Drop for LaneReader {
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
        readers: Readers,
        /// What the chunk of the origin holds: 0 before the write.
        origin: AtomicU64,
    }

    /// Reads the chunk; what was read must be as it was.
    fn read(m: &Model, reader: &mut LaneReader) {
        let epoch = reader.begin(&m.readers);
        if m.map.get(0).kept().is_none() {
            reader.count();
            assert_eq!(m.origin.load(Ordering::Relaxed), 0, "a write of the origin overtook a read");
            reader.finish(epoch);
        }
        reader.end(&m.readers);
    }

    /// Writes the chunk of the origin, if that may be done now.
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

    /// A model and a reader. What is made on first use is made here: loom does not know std's
    /// locks.
    fn model() -> (Arc<Model>, LaneReader) {
        let map = ExceptionMap::new(1);
        map.claim(0);
        map.give_up(0);
        let readers = Readers::new();
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

    /// The one that writes did not copy, and sees what another core published.
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

    /// Of one who has to wait and one who ends, one acts.
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
            let told = reader.end(&m.readers);
            let past = other.join().unwrap();
            assert!(past || told, "nobody would go on");
        });
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::*;

    #[test]
    fn reads_that_keep_coming_hold_up_nobody() {
        let readers = Readers::new();
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
