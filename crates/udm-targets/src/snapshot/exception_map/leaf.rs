//! The words of 512 consecutive chunks. Most leaves of a map have few exceptions or nearly all, so
//! a leaf begins small and becomes a page:
//!
//! ```text
//!  2 slots ──full──► 14 slots ──full──► 30 slots ──full──► a page, one word per chunk
//! ```
//!
//! A slot is a word with the number of its chunk in it. Slots are taken in order, and a chunk keeps
//! its slot for good: nothing is moved or freed, so any core may keep a reference to a word. A page
//! is allocated when all slots are taken. In the page, the words of chunks with slots refer to the
//! slots.
//!
//! | exceptions in 512 chunks | bytes, with the pointers of the map |
//! |---|---|
//! | 1 or 2 | 32 |
//! | 3 to 16 | 152 |
//! | 17 to 46 | 400 |
//! | more | 4,504 |
//!
//! A word:
//!
//! ```text
//!  63                    12 11         3  2   1   0
//!  chunk of the store       its chunk  S  state
//! ```
//!
//! S is set in a slot that is taken, and in a word of a page whose chunk has a slot: that word has
//! the number of the slot from bit 12 on.

#[cfg(feature = "loom")]
use loom::sync::atomic::{AtomicU64, Ordering};
use once_cell::race::OnceBox;
use std::array::from_fn;
#[cfg(not(feature = "loom"))]
use std::sync::atomic::{AtomicU64, Ordering};

/// Number of chunks in a leaf: a power of two.
pub(super) const CHUNKS: usize = if cfg!(feature = "loom") { 2 } else { 512 };

/// Set in a slot that is taken, and in a word of a page whose chunk has a slot.
const SLOT: u64 = 1 << 2;
const CHUNK_SHIFT: u32 = 3;
const NEW_SHIFT: u32 = 12;
/// The bits that identify the chunk of a slot; they never change once set.
const KEY_MASK: u64 = (1 << NEW_SHIFT) - SLOT;

/// A word and its key.
#[derive(Clone, Copy)]
pub(super) struct PackedExceptionRef<'a> {
    word: &'a AtomicU64,
    key: u64,
}

impl PackedExceptionRef<'_> {
    /// The value: the state in the lowest two bits, and the chunk of the store above them.
    pub(super) fn load(self, order: Ordering) -> u64 {
        unpack_exception(self.word.load(order))
    }

    pub(super) fn store(self, value: u64, order: Ordering) {
        self.word.store(self.pack(value), order);
    }

    pub(super) fn swap(self, value: u64, order: Ordering) -> u64 {
        unpack_exception(self.word.swap(self.pack(value), order))
    }

    /// Replaces `from` with `to`. Returns true if the value was `from`.
    pub(super) fn replace(self, from: u64, to: u64) -> bool {
        let (from, to) = (self.pack(from), self.pack(to));
        self.word.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    fn pack(self, value: u64) -> u64 {
        (value >> 2) << NEW_SHIFT | self.key | value & 3
    }
}

#[inline(always)]
fn unpack_exception(word: u64) -> u64 {
    (word >> NEW_SHIFT) << 2 | word & 3
}

/// Maximum number of chunks of a store, limited by the bits of a word.
pub(super) const STORE_CHUNKS_MAX: u64 = 1 << (64 - NEW_SHIFT);

/// Slots, and the next slots, which are allocated when these are taken.
pub(super) struct ExceptionLeafSlots<const N: usize, Next> {
    slots: [AtomicU64; N],
    next: OnceBox<Next>,
}

/// A leaf that is not a page.
pub(super) type SmallExceptionLeaf =
    ExceptionLeafSlots<FIRST, ExceptionLeafSlots<SECOND, ExceptionLeafSlots<30, ()>>>;
const FIRST: usize = 2;
const SECOND: usize = 14;

/// A leaf that is a page.
pub(super) type ExceptionLeafPage = [AtomicU64; CHUNKS];

impl<const N: usize, Next> ExceptionLeafSlots<N, Next> {
    fn new() -> ExceptionLeafSlots<N, Next> {
        ExceptionLeafSlots { slots: from_fn(|_| AtomicU64::new(0)), next: OnceBox::new() }
    }

    /// Finds the slot of `key`. `None` if the chunk has no slot here.
    fn find(&self, key: u64) -> Option<PackedExceptionRef<'_>> {
        for word in &self.slots {
            match word.load(Ordering::Acquire) & KEY_MASK {
                0 => return None,
                found if found == key => return Some(PackedExceptionRef { word, key }),
                _ => {}
            }
        }
        None
    }

    /// The slot of `key`, taken if the chunk had none; `None` if all are taken by other chunks.
    fn take(&self, key: u64) -> Option<PackedExceptionRef<'_>> {
        for word in &self.slots {
            let mut found = word.load(Ordering::Acquire) & KEY_MASK;
            if found == 0 {
                let taken = word.compare_exchange(0, key, Ordering::AcqRel, Ordering::Acquire);
                found = taken.map_or_else(|other| other & KEY_MASK, |_| key);
            }
            if found == key {
                return Some(PackedExceptionRef { word, key });
            }
        }
        None
    }

    /// Enters the slots of these chunks into `page`; `first` is the number of the first slot.
    fn mark(&self, page: &ExceptionLeafPage, first: usize) {
        for (word, slot) in self.slots.iter().zip(first..) {
            let chunk = (word.load(Ordering::Acquire) & KEY_MASK) >> CHUNK_SHIFT;
            page[chunk as usize].store((slot as u64) << NEW_SHIFT | SLOT, Ordering::Relaxed);
        }
    }
}

fn pack_chunk_slot_key(chunk: usize) -> u64 {
    (chunk as u64) << CHUNK_SHIFT | SLOT
}

impl SmallExceptionLeaf {
    /// The word of `chunk`, if it has a slot.
    pub(super) fn word(&self, chunk: usize) -> Option<PackedExceptionRef<'_>> {
        let key = pack_chunk_slot_key(chunk);
        self.find(key).or_else(|| {
            let second = self.next.get()?;
            second.find(key).or_else(|| second.next.get()?.find(key))
        })
    }

    /// The word of `chunk`, with a slot taken for it; `None` if all slots are taken by other
    /// chunks. `allocated` is called with the bytes of each allocation.
    pub(super) fn make(&self, chunk: usize, allocated: impl Fn(usize)) -> Option<PackedExceptionRef<'_>> {
        let key = pack_chunk_slot_key(chunk);
        if let Some(word) = self.take(key) {
            return Some(word);
        }
        let second = get_or_alloc_leaf_slots(&self.next, &allocated);
        if let Some(word) = second.take(key) {
            return Some(word);
        }
        get_or_alloc_leaf_slots(&second.next, &allocated).take(key)
    }

    /// The values of all taken slots, with their chunks.
    fn words(&self) -> impl Iterator<Item = (usize, u64)> + '_ {
        let second = self.next.get();
        let third = second.and_then(|second| second.next.get());
        let rest = second
            .into_iter()
            .flat_map(|slots| &slots.slots)
            .chain(third.into_iter().flat_map(|slots| &slots.slots));
        let taken = self
            .slots
            .iter()
            .chain(rest)
            .map(|word| word.load(Ordering::Acquire))
            .take_while(|word| word & KEY_MASK != 0);
        taken.map(|word| (((word & KEY_MASK) >> CHUNK_SHIFT) as usize, unpack_exception(word)))
    }

    /// The first chunk from `from` on that has a slot with a value that `wanted` accepts, with the
    /// value.
    pub(super) fn next(&self, from: usize, wanted: impl Fn(u64) -> bool) -> Option<(usize, u64)> {
        self.words().filter(|(chunk, value)| *chunk >= from && wanted(*value)).min()
    }

    /// The page for this leaf, whose slots are all taken.
    fn page(&self) -> Box<ExceptionLeafPage> {
        let page: Box<ExceptionLeafPage> = Box::new(from_fn(|_| AtomicU64::new(0)));
        self.mark(&page, 0);
        if let Some(second) = self.next.get() {
            second.mark(&page, FIRST);
            second.next.get().inspect(|third| third.mark(&page, FIRST + SECOND));
        }
        page
    }

    /// The value in slot `slot`, which is taken.
    #[inline]
    pub(super) fn value_at(&self, slot: usize) -> u64 {
        let found = match slot.checked_sub(FIRST) {
            None => Some(&self.slots[slot]),
            Some(at) => self.next.get().and_then(|second| match at.checked_sub(SECOND) {
                None => Some(&second.slots[at]),
                Some(at) => second.next.get().and_then(|third| third.slots.get(at)),
            }),
        };
        found.map_or(0, |word| unpack_exception(word.load(Ordering::Acquire)))
    }
}

fn get_or_alloc_leaf_slots<'a, const N: usize, Next>(
    next: &'a OnceBox<ExceptionLeafSlots<N, Next>>,
    allocated: &impl Fn(usize),
) -> &'a ExceptionLeafSlots<N, Next> {
    next.get_or_init(|| {
        allocated(size_of::<ExceptionLeafSlots<N, Next>>());
        Box::new(ExceptionLeafSlots::new())
    })
}

/// The small leaf, allocated on first use; `allocated` is called with the bytes of the allocation.
pub(super) fn get_or_alloc_small_leaf<'a>(
    leaf: &'a OnceBox<SmallExceptionLeaf>,
    allocated: &impl Fn(usize),
) -> &'a SmallExceptionLeaf {
    get_or_alloc_leaf_slots(leaf, allocated)
}

/// The page of a leaf whose slots are all taken, allocated on first use.
pub(super) fn get_or_alloc_leaf_page<'a>(
    leaf: &'a OnceBox<ExceptionLeafPage>,
    small: &SmallExceptionLeaf,
    allocated: &impl Fn(usize),
) -> &'a ExceptionLeafPage {
    leaf.get_or_init(|| {
        allocated(size_of::<ExceptionLeafPage>());
        small.page()
    })
}

/// The value of `chunk` in a page.
///
/// # Errors
/// The number of the chunk's slot, if it has one.
#[inline(always)]
pub(super) fn read_leaf_page_exception(page: &ExceptionLeafPage, chunk: usize) -> Result<u64, usize> {
    let word = page[chunk].load(Ordering::Acquire);
    if word & SLOT == 0 { Ok(unpack_exception(word)) } else { Err((word >> NEW_SHIFT) as usize) }
}

/// The word of `chunk` in a page; `None` if the chunk has a slot.
pub(super) fn get_leaf_page_exception_ref(
    page: &ExceptionLeafPage,
    chunk: usize,
) -> Option<PackedExceptionRef<'_>> {
    let word = &page[chunk];
    // Relaxed: this bit does not change after the page is allocated.
    (word.load(Ordering::Relaxed) & SLOT == 0).then_some(PackedExceptionRef { word, key: 0 })
}
