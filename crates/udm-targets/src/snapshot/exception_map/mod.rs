//! The exception map of one snapshot: which chunks of the origin the store holds, and where.
//!
//! The map has one word per chunk, in leaves of 512 words. A leaf is allocated when the first of
//! its chunks is touched, and grows with its exceptions ([`leaf`]). A fresh snapshot of any size
//! allocates nothing else. All cores read and change the map without a lock:
//!
//! ```text
//!            claim                publish              settle
//!  Free ---------------> Pending ---------> Copied ---------------> Settled
//!   ^                       |              |
//!   +------- give up -------+              reads of the snapshot go to the store from here on
//! ```
//!
//! *Pending*: the core that claimed the chunk copies or writes it. *Copied*: it is in the store for
//! good. Earlier reads of the origin may still be in flight, so the origin must not change yet.
//! *Settled*: these reads have completed ([`super::readers`]), and the origin may change.

mod leaf;
#[cfg(all(test, not(feature = "loom")))]
mod tests;

use crossbeam_utils::CachePadded;
use leaf::{ExceptionLeafPage, PackedExceptionRef, STORE_CHUNKS_MAX, SmallExceptionLeaf};
#[cfg(feature = "loom")]
use loom::sync::atomic::{AtomicU64, Ordering};
use once_cell::race::OnceBox;
use std::array::from_fn;
#[cfg(not(feature = "loom"))]
use std::sync::atomic::{AtomicU64, Ordering};
use udm_core::interleave;

/// Number of leaves in a branch.
const FAN: usize = leaf::CHUNKS;
/// Number of chunks in a leaf, and in a branch.
const LEAF: u64 = FAN as u64;
const BRANCH: u64 = LEAF * LEAF;

/// Maximum number of chunks of an origin: a petabyte of 4 KiB chunks. The pointers to the branches
/// take 8 MiB then.
pub(super) const CHUNKS_MAX: u64 = 1 << 38;

/// The state of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ChunkState {
    /// Only in the origin.
    Free,
    /// Being copied.
    Pending,
    /// In this chunk of the store; reads of the origin may still be in flight.
    Copied(u64),
    /// In this chunk of the store; the origin may change.
    Settled(u64),
}

const PENDING: u64 = 1;
const COPIED: u64 = 2;
const SETTLED: u64 = 3;

impl ChunkState {
    fn of(word: u64) -> ChunkState {
        match word & 3 {
            COPIED => ChunkState::Copied(word >> 2),
            SETTLED => ChunkState::Settled(word >> 2),
            PENDING => ChunkState::Pending,
            _ => ChunkState::Free,
        }
    }

    /// The chunk of the store that has the data.
    pub(super) fn store_chunk(self) -> Option<u64> {
        match self {
            ChunkState::Copied(new) | ChunkState::Settled(new) => Some(new),
            ChunkState::Free | ChunkState::Pending => None,
        }
    }
}

/// A branch of 512 leaves.
///
/// [`OnceBox`] is a single pointer, which itself shows whether it is set. It takes half the memory
/// of the standard library's `OnceLock`, and one load less.
struct ExceptionLeafBranch {
    leaves: [OnceBox<SmallExceptionLeaf>; FAN],
    /// The pages of leaves that have become pages.
    pages: OnceBox<[OnceBox<ExceptionLeafPage>; FAN]>,
}

impl ExceptionLeafBranch {
    fn new() -> ExceptionLeafBranch {
        ExceptionLeafBranch { leaves: from_fn(|_| OnceBox::new()), pages: OnceBox::new() }
    }

    /// The value of chunk `chunk` of leaf `leaf`; 0 if it has no word.
    #[inline(always)]
    fn value(&self, leaf: usize, chunk: usize) -> u64 {
        if let Some(page) = self.pages.get().and_then(|pages| pages[leaf].get()) {
            return match leaf::read_leaf_page_exception(page, chunk) {
                Ok(value) => value,
                Err(slot) => self.leaves[leaf].get().map_or(0, |small| small.value_at(slot)),
            };
        }
        self.value_in_slots(leaf, chunk)
    }

    #[inline(never)]
    fn value_in_slots(&self, leaf: usize, chunk: usize) -> u64 {
        let word = self.leaves[leaf].get().and_then(|small| small.word(chunk));
        word.map_or(0, |word| word.load(Ordering::Acquire))
    }

    /// The word of chunk `chunk` of leaf `leaf`, if it has one.
    fn find(&self, leaf: usize, chunk: usize) -> Option<PackedExceptionRef<'_>> {
        let page = self.pages.get().and_then(|pages| pages[leaf].get());
        page.and_then(|page| leaf::get_leaf_page_exception_ref(page, chunk))
            .or_else(|| self.leaves[leaf].get()?.word(chunk))
    }

    /// The first chunk of leaf `leaf` from `from` on that is in the store, and its chunk there.
    fn next_in_store(&self, leaf: usize, from: usize) -> Option<(usize, u64)> {
        let in_slots =
            self.leaves[leaf].get()?.next(from, |word| ChunkState::of(word).store_chunk().is_some());
        let page = self.pages.get().and_then(|pages| pages[leaf].get());
        let end = in_slots.map_or(FAN, |(chunk, _)| chunk);
        let in_page = page.and_then(|page| {
            (from..end).find_map(|chunk| {
                Some((chunk, leaf::read_leaf_page_exception(page, chunk).ok()?))
                    .filter(|(_, value)| ChunkState::of(*value).store_chunk().is_some())
            })
        });
        let (chunk, word) = in_page.or(in_slots)?;
        Some((chunk, ChunkState::of(word).store_chunk()?))
    }

    /// The word of chunk `chunk` of leaf `leaf`, allocated if it has none.
    fn make(&self, leaf: usize, chunk: usize, allocated: &impl Fn(usize)) -> PackedExceptionRef<'_> {
        if let Some(word) = self.find(leaf, chunk) {
            return word;
        }
        let small = leaf::get_or_alloc_small_leaf(&self.leaves[leaf], allocated);
        small.make(chunk, allocated).unwrap_or_else(|| {
            let pages = self.pages.get_or_init(|| {
                allocated(size_of::<[OnceBox<ExceptionLeafPage>; FAN]>());
                Box::new(from_fn(|_| OnceBox::new()))
            });
            let page = leaf::get_or_alloc_leaf_page(&pages[leaf], small, allocated);
            leaf::get_leaf_page_exception_ref(page, chunk).expect("a chunk with a slot is in the small leaf")
        })
    }
}

/// The exception map of one snapshot.
pub(super) struct ExceptionMap {
    /// Number of chunks. It changes only while nothing is in flight.
    chunks: AtomicU64,
    /// Number of settled chunks. The count is increased after a chunk is settled, so it may be too
    /// low. On its own cache line.
    settled: CachePadded<AtomicU64>,
    /// Bytes allocated.
    bytes: AtomicU64,
    branches: Box<[OnceBox<ExceptionLeafBranch>]>,
}

impl ExceptionMap {
    /// A map of `chunks` free chunks; at most [`CHUNKS_MAX`].
    pub(super) fn new(chunks: u64) -> ExceptionMap {
        assert!(chunks <= CHUNKS_MAX, "{chunks} chunks");
        let count = chunks.div_ceil(BRANCH);
        let branches: Box<[OnceBox<ExceptionLeafBranch>]> = (0..count).map(|_| OnceBox::new()).collect();
        ExceptionMap {
            chunks: AtomicU64::new(chunks),
            settled: CachePadded::new(AtomicU64::new(0)),
            bytes: AtomicU64::new(size_of_val(&*branches) as u64),
            branches,
        }
    }

    /// Bytes of memory of the map.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Number of chunks.
    pub(super) fn chunks(&self) -> u64 {
        self.chunks.load(Ordering::Relaxed)
    }

    /// Maximum number of chunks, for which there are branches.
    pub(super) fn capacity(&self) -> u64 {
        self.branches.len() as u64 * BRANCH
    }

    /// Raises the number of chunks to `chunks`, if that is more. At most
    /// [`ExceptionMap::capacity`], and only while nothing is in flight.
    pub(super) fn grow(&self, chunks: u64) {
        assert!(chunks <= self.capacity(), "{chunks} chunks of {}", self.capacity());
        self.chunks.fetch_max(chunks, Ordering::Relaxed);
    }

    /// The value of `chunk`. Acquire pairs with the release in [`ExceptionMap::publish`]: a core
    /// that sees the chunk of the store also sees its data.
    #[inline(always)]
    fn value(&self, chunk: u64) -> u64 {
        let branch = self.branches.get((chunk / BRANCH) as usize).and_then(OnceBox::get);
        branch.map_or(0, |branch| branch.value((chunk / LEAF % LEAF) as usize, (chunk % LEAF) as usize))
    }

    /// The word of `chunk`, if it has one.
    fn find(&self, chunk: u64) -> Option<PackedExceptionRef<'_>> {
        let branch = self.branches.get((chunk / BRANCH) as usize)?.get()?;
        branch.find((chunk / LEAF % LEAF) as usize, (chunk % LEAF) as usize)
    }

    /// The word of `chunk`, which must be below the capacity. Allocates if the leaf must grow.
    fn make(&self, chunk: u64) -> PackedExceptionRef<'_> {
        // Relaxed: the count is informational and an approximate limit.
        let allocated = |bytes: usize| {
            self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        };
        let branch = self.branches[(chunk / BRANCH) as usize].get_or_init(|| {
            allocated(size_of::<ExceptionLeafBranch>());
            Box::new(ExceptionLeafBranch::new())
        });
        branch.make((chunk / LEAF % LEAF) as usize, (chunk % LEAF) as usize, &allocated)
    }

    /// The state of `chunk`.
    #[inline(always)]
    pub(super) fn get(&self, chunk: u64) -> ChunkState {
        ChunkState::of(self.value(chunk))
    }

    /// True if the origin may change in `chunk`.
    #[inline(always)]
    pub(super) fn is_settled(&self, chunk: u64) -> bool {
        self.value(chunk) & 3 == SETTLED
    }

    /// True if the origin may change in the chunks from `first` to `last`.
    pub(super) fn are_settled(&self, first: u64, last: u64) -> bool {
        (first..=last).all(|chunk| self.is_settled(chunk))
    }

    /// True if the origin may change in all chunks. Acquire pairs with the release in
    /// [`ExceptionMap::settle`].
    #[inline(always)]
    pub(super) fn are_all_settled(&self) -> bool {
        self.settled.load(Ordering::Acquire) == self.chunks()
    }

    /// Claims a free chunk. If it returns true, the caller copies the chunk. Acquire and release: a
    /// chunk may be given up and claimed by another core.
    pub(super) fn claim(&self, chunk: u64) -> bool {
        interleave::mark_interleave_point();
        let word = self.make(chunk);
        word.replace(0, PENDING)
    }

    /// Gives up a claimed chunk that was not copied.
    pub(super) fn give_up(&self, chunk: u64) {
        self.make(chunk).store(0, Ordering::Release);
    }

    /// Marks `chunk` as copied to chunk `new` of the store. Only the core that claimed the chunk
    /// calls this.
    pub(super) fn publish(&self, chunk: u64, new: u64) {
        debug_assert!(new < STORE_CHUNKS_MAX);
        self.make(chunk).store(new << 2 | COPIED, Ordering::Release);
    }

    /// Settles the copied chunks from `first` to `last`: no read of the origin for them is in
    /// flight any more. Any core may call this.
    pub(super) fn settle(&self, first: u64, last: u64) {
        let mut settled = 0;
        for word in (first..=last).filter_map(|chunk| self.find(chunk)) {
            let copied = word.load(Ordering::Acquire);
            // If several cores settle a chunk, only one counts it.
            if copied & 3 == COPIED {
                settled += u64::from(word.replace(copied, copied | SETTLED));
            }
        }
        if settled > 0 {
            // Release: a core that sees that all chunks are settled also sees that their readers
            // have completed.
            self.settled.fetch_add(settled, Ordering::Release);
        }
    }

    /// Enters an exception of the store before the map is in use.
    pub(super) fn load(&self, chunk: u64, new: u64) {
        let word = self.make(chunk);
        if word.load(Ordering::Relaxed) & 3 != SETTLED {
            // Relaxed, and no atomic add: no other thread uses the map yet.
            self.settled.store(self.settled.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        }
        word.store(new << 2 | SETTLED, Ordering::Release);
    }

    /// Marks `chunk`, in chunk `new` of the store, as copied and not settled, so that writes in the
    /// store must wait for readers. Only for a merge, which is the only writer.
    pub(super) fn unsettle(&self, chunk: u64, new: u64) {
        self.change(chunk, new << 2 | COPIED);
    }

    /// Marks `chunk` as free: it is only in the origin again. Only for a merge, which is the only
    /// writer.
    pub(super) fn forget(&self, chunk: u64) {
        self.change(chunk, 0);
    }

    fn change(&self, chunk: u64, word: u64) {
        if self.make(chunk).swap(word, Ordering::AcqRel) & 3 == SETTLED {
            self.settled.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// The first chunk between `from` and `end` that is in the store. Branches that were never
    /// allocated are skipped.
    pub(super) fn next_in_store(&self, from: u64, end: u64) -> Option<(u64, u64)> {
        let (mut chunk, end) = (from, end.min(self.chunks()));
        while chunk < end {
            let branch = self.branches[(chunk / BRANCH) as usize].get();
            let Some(branch) = branch else {
                chunk = (chunk / BRANCH + 1) * BRANCH;
                continue;
            };
            let start = chunk / LEAF * LEAF;
            let leaf = (chunk / LEAF % LEAF) as usize;
            if let Some((next, new)) = branch.next_in_store(leaf, (chunk - start) as usize) {
                return Some((start + next as u64, new)).filter(|(chunk, _)| *chunk < end);
            }
            chunk = start + LEAF;
        }
        None
    }
}
