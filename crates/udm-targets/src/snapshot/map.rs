//! Which chunks of the origin are kept in the store, and where: the exceptions of one snapshot.
//!
//! One word a chunk, in leaves that are made when the first of their chunks is touched. All cores
//! read and change it without a lock:
//!
//! ```text
//!            claim                publish              settle
//!  Free ---------------> Pending ---------> Copied ---------------> Settled
//!   ^                       |              |
//!   +------- give up -------+              reads of the snapshot go to the store from here on
//! ```
//!
//! *Pending*: the core that claimed the chunk copies it, or writes it. *Copied*: it is in the
//! store, for good. Reads that looked before may still be under way to the origin, so the origin
//! must not change yet. *Settled*: those are over ([`super::readers`]), and the origin may change.

use crossbeam_utils::CachePadded;
#[cfg(feature = "loom")]
use loom::sync::atomic::{AtomicU64, Ordering};
use once_cell::race::OnceBox;
use std::array::from_fn;
#[cfg(not(feature = "loom"))]
use std::sync::atomic::{AtomicU64, Ordering};
use udm_core::interleave;

/// Words in a leaf, and leaves in a branch: a power of two. A leaf is a page.
const FAN: usize = if cfg!(feature = "loom") { 2 } else { 512 };
/// Chunks in a leaf, and in a branch.
const LEAF: u64 = FAN as u64;
const BRANCH: u64 = LEAF * LEAF;

/// How far a chunk has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// In the origin alone.
    Free,
    /// Somebody is copying it.
    Pending,
    /// In this chunk of the store; readers of the origin may be under way.
    Copied(u64),
    /// In this chunk of the store.
    Settled(u64),
}

const PENDING: u64 = 1;
const COPIED: u64 = 2;
const SETTLED: u64 = 3;

impl Place {
    fn of(word: u64) -> Place {
        match word & 3 {
            COPIED => Place::Copied(word >> 2),
            SETTLED => Place::Settled(word >> 2),
            PENDING => Place::Pending,
            _ => Place::Free,
        }
    }

    /// The chunk of the store that it is in.
    pub(super) fn kept(self) -> Option<u64> {
        match self {
            Place::Copied(new) | Place::Settled(new) => Some(new),
            Place::Free | Place::Pending => None,
        }
    }
}

/// A pointer says by itself whether it is set: half of what the standard library's takes, and a
/// load less.
type Leaf = OnceBox<[AtomicU64; FAN]>;
type Branch = OnceBox<[Leaf; FAN]>;

/// See the module's documentation.
pub(super) struct ExceptionMap {
    /// How many there are. Changes while nothing is in flight.
    chunks: AtomicU64,
    /// How many are settled, or fewer: it is counted behind that. On a cache line of its own.
    settled: CachePadded<AtomicU64>,
    branches: Box<[Branch]>,
}

impl ExceptionMap {
    /// All of `chunks` chunks free.
    pub(super) fn new(chunks: u64) -> ExceptionMap {
        let count = chunks.div_ceil(BRANCH);
        let branches = (0..count).map(|_| Branch::new()).collect();
        let chunks = AtomicU64::new(chunks);
        ExceptionMap { chunks, settled: CachePadded::new(AtomicU64::new(0)), branches }
    }

    /// How many chunks there are.
    pub(super) fn chunks(&self) -> u64 {
        self.chunks.load(Ordering::Relaxed)
    }

    /// How many there can be: what there are branches for.
    pub(super) fn capacity(&self) -> u64 {
        self.branches.len() as u64 * BRANCH
    }

    /// There are `chunks` chunks from now on, if that is more. At most [`ExceptionMap::capacity`],
    /// and with nothing in flight.
    pub(super) fn grow(&self, chunks: u64) {
        assert!(chunks <= self.capacity(), "{chunks} chunks of {}", self.capacity());
        self.chunks.fetch_max(chunks, Ordering::Relaxed);
    }

    /// The word of `chunk`, where there is a leaf for it.
    #[inline(always)]
    fn find(&self, chunk: u64) -> Option<&AtomicU64> {
        let branch = self.branches.get((chunk / BRANCH) as usize)?.get()?;
        let leaf = branch[(chunk / LEAF % LEAF) as usize].get()?;
        Some(&leaf[(chunk % LEAF) as usize])
    }

    /// The word of `chunk`, which is below the number of chunks. Allocates for the first of 512.
    fn make(&self, chunk: u64) -> &AtomicU64 {
        let branch = &self.branches[(chunk / BRANCH) as usize];
        let branch = branch.get_or_init(|| Box::new(from_fn(|_| Leaf::new())));
        let leaf =
            branch[(chunk / LEAF % LEAF) as usize].get_or_init(|| Box::new(from_fn(|_| AtomicU64::new(0))));
        &leaf[(chunk % LEAF) as usize]
    }

    /// How far `chunk` has come. Acquire pairs with the release in [`ExceptionMap::publish`]: who
    /// sees where it is sees that it is there.
    #[inline(always)]
    pub(super) fn get(&self, chunk: u64) -> Place {
        Place::of(self.find(chunk).map_or(0, |word| word.load(Ordering::Acquire)))
    }

    /// True when the origin may change in `chunk`.
    #[inline(always)]
    pub(super) fn is_settled(&self, chunk: u64) -> bool {
        matches!(self.get(chunk), Place::Settled(_))
    }

    /// True when the origin may change in the chunks from `first` to `last`.
    pub(super) fn are_settled(&self, first: u64, last: u64) -> bool {
        (first..=last).all(|chunk| self.is_settled(chunk))
    }

    /// True when the origin may change wherever it is. Acquire pairs with the release in
    /// [`ExceptionMap::settle`].
    #[inline(always)]
    pub(super) fn are_all_settled(&self) -> bool {
        self.settled.load(Ordering::Acquire) == self.chunks()
    }

    /// Takes a free chunk on: who is told true copies it. Acquire and release: a chunk may be given
    /// up and claimed by another.
    pub(super) fn claim(&self, chunk: u64) -> bool {
        interleave::point();
        let word = self.make(chunk);
        word.compare_exchange(0, PENDING, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Gives a chunk back that was claimed and is not copied.
    pub(super) fn give_up(&self, chunk: u64) {
        self.make(chunk).store(0, Ordering::Release);
    }

    /// `chunk` is in chunk `new` of the store. Only by who claimed it.
    pub(super) fn publish(&self, chunk: u64, new: u64) {
        self.make(chunk).store(new << 2 | COPIED, Ordering::Release);
    }

    /// Nobody reads those of the chunks from `first` to `last` that are copied from the origin any
    /// more. Anyone who knows may say so.
    pub(super) fn settle(&self, first: u64, last: u64) {
        let mut settled = 0;
        for word in (first..=last).filter_map(|chunk| self.find(chunk)) {
            let copied = word.load(Ordering::Acquire);
            // Of several who say so one counts it.
            if copied & 3 == COPIED {
                let done =
                    word.compare_exchange(copied, copied | SETTLED, Ordering::AcqRel, Ordering::Acquire);
                settled += u64::from(done.is_ok());
            }
        }
        if settled > 0 {
            // Release: who sees that all are settled sees that the readers of each are over.
            self.settled.fetch_add(settled, Ordering::Release);
        }
    }

    /// `chunk` is in chunk `new` of the store, and was before anybody came.
    pub(super) fn load(&self, chunk: u64, new: u64) {
        let word = self.make(chunk);
        if word.load(Ordering::Relaxed) & 3 != SETTLED {
            // Relaxed, and no addition of the processor's own: nobody else is here.
            self.settled.store(self.settled.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        }
        word.store(new << 2 | SETTLED, Ordering::Release);
    }

    /// `chunk` is in chunk `new` of the store, and whoever changes it there has to wait for readers
    /// again. For a merge, with nobody else who writes it.
    pub(super) fn unsettle(&self, chunk: u64, new: u64) {
        self.change(chunk, new << 2 | COPIED);
    }

    /// `chunk` is in the origin again. For a merge, with nobody else who writes it.
    pub(super) fn forget(&self, chunk: u64) {
        self.change(chunk, 0);
    }

    fn change(&self, chunk: u64, word: u64) {
        if self.make(chunk).swap(word, Ordering::AcqRel) & 3 == SETTLED {
            self.settled.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// The next chunk from `from` on, below `end`, that is in the store. Leaves that nobody touched
    /// are passed over.
    pub(super) fn next_kept(&self, from: u64, end: u64) -> Option<(u64, u64)> {
        let (mut chunk, end) = (from, end.min(self.chunks()));
        while chunk < end {
            let branch = self.branches[(chunk / BRANCH) as usize].get();
            let Some(branch) = branch else {
                chunk = (chunk / BRANCH + 1) * BRANCH;
                continue;
            };
            if branch[(chunk / LEAF % LEAF) as usize].get().is_none() {
                chunk = (chunk / LEAF + 1) * LEAF;
                continue;
            }
            if let Some(new) = self.get(chunk).kept() {
                return Some((chunk, new));
            }
            chunk += 1;
        }
        None
    }

    /// Bytes of memory that it takes.
    #[cfg(test)]
    pub(super) fn bytes(&self) -> u64 {
        let branches: Vec<_> = self.branches.iter().filter_map(Branch::get).collect();
        let leaves = branches.iter().flat_map(|branch| branch.iter()).filter(|leaf| leaf.get().is_some());
        let (leaves, branches) = (leaves.count(), branches.len());
        let leaves = leaves * size_of::<[AtomicU64; FAN]>();
        let branches = branches * size_of::<[Leaf; FAN]>();
        (leaves + branches + self.branches.len() * size_of::<Branch>()) as u64
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_goes_its_way_and_memory_follows() {
        let map = ExceptionMap::new(1 << 28);
        let empty = map.bytes();
        assert!(empty < 64 << 10, "a terabyte of 4 KiB chunks, untouched: {empty} bytes");
        assert_eq!(map.get(77), Place::Free);
        assert!(map.claim(77) && !map.claim(77));
        assert_eq!(map.get(77), Place::Pending);
        map.give_up(77);
        assert!(map.claim(77));
        map.publish(77, 2);
        assert_eq!(map.get(77), Place::Copied(2));
        assert!(!map.are_settled(77, 77) && !map.claim(77));
        map.settle(77, 78);
        assert!(map.are_settled(77, 77) && !map.are_settled(77, 78));
        map.load((1 << 28) - 1, 3);
        assert_eq!(map.next_kept(0, u64::MAX), Some((77, 2)));
        assert_eq!(map.next_kept(78, 1 << 28), Some(((1 << 28) - 1, 3)));
        assert_eq!((map.next_kept(0, 77), map.next_kept(78, (1 << 28) - 1)), (None, None));
        map.forget(77);
        assert_eq!((map.get(77), map.next_kept(1 << 28, u64::MAX)), (Place::Free, None));
        assert!(map.bytes() < empty + (64 << 10));
    }

    #[test]
    fn who_is_settled_is_counted_once() {
        let map = ExceptionMap::new(1000);
        (0..500).for_each(|chunk| map.load(chunk, chunk + 2));
        map.load(7, 9);
        for chunk in 500..1000 {
            assert!(map.claim(chunk) && !map.are_all_settled());
            map.publish(chunk, chunk + 2);
        }
        (0..2).for_each(|_| map.settle(400, 998));
        assert!(!map.are_all_settled());
        map.settle(999, 999);
        assert!(map.are_all_settled());
        map.unsettle(3, 5);
        assert!(!map.are_all_settled() && map.get(3) == Place::Copied(5));
        map.settle(0, 999);
        assert!(map.are_all_settled());
        map.forget(3);
        assert!(!map.are_all_settled());
    }

    #[test]
    fn a_dense_map_takes_little_more_than_eight_bytes_a_chunk() {
        let map = ExceptionMap::new(1 << 20);
        (0..1 << 20).for_each(|chunk| map.load(chunk, chunk + 2));
        assert!(map.bytes() * 10 <= 85 << 20, "{} bytes", map.bytes());
    }
}
