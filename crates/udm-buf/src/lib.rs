//! The memory of block requests.
//!
//! A [`Buf`] owns a byte range of a *slab*, one aligned allocation. `split_to` gives two `Buf`s
//! that own disjoint halves. So a request can be cut into fragments, and requests can be cut out of
//! one receive, without a copy and without a borrow. The slab is freed with its last `Buf`.
//!
//! Contract: the ranges of the live `Buf`s of a slab never overlap. From this follows that a `&mut
//! Buf` may give `&mut [u8]`, and that a `Buf` may move to another thread. The number of `Buf`s of
//! a slab is an atomic. Cutting the payload of a write out of a receive therefore costs one
//! uncontended atomic addition and one subtraction. Reads and library mode cut nothing.
//!
//! A large slab is a mapping of its own. Its pages take memory when they are first touched, and are
//! returned to the system when the slab is freed.
//!
//! **Shared memory** that several threads may change at once is never a slice. [`copy_from_shared`]
//! and [`copy_to_shared`] copy it. On x86-64 such a copy is one instruction.
//!
//! **Foreign memory** ([`SharedRange`]) belongs to a request but another process shares it. It must
//! be a memfd that is sealed against shrinking; otherwise the other process could remove a page in
//! use.
//!
//! * A lane does not see the difference. `Segments::consume` and `Segments::produce` copy foreign
//!   bytes once, in portions, or the ring gets the addresses.
//! * A byte may differ between two reads of it, for example when a write is sent again on another
//!   path. A guest that changes a buffer during I/O has the same effect.
//! * Inside this crate a foreign range has the form of a `Buf`, so passing on either kind costs the
//!   same. Taking foreign pieces apart with `iter` or `pop` panics.
//! * Only tests use it so far (`udm-conformance/tests/shared_memory`).
//! * Not covered: with `vm.overcommit_memory=2` a process that punches holes into its memfd while
//!   memory is short can still end the program.
//!
//! **Lent memory** ([`Buf::borrowed`]) belongs to a caller in another language, who does not touch
//! it until the request completes. `Buf::reborrow` points an existing `Buf` at the next request's
//! bytes, so lending allocates nothing. On completion the `Buf` is emptied; if a lane has kept a
//! piece, this panics.
//!
//! This crate is one of the few places in udm with `unsafe`. It does no I/O and knows no requests.
//! It lies below `udm-core`, so `udm-core` can forbid `unsafe`.

mod lost_pages;
mod partition;
mod pool;
mod segments;
mod shared;
mod shared_range;
#[cfg(feature = "slab-count")]
pub mod slab_count;

pub use partition::{append_all_if_none_flagged, partition_into_two_vecs};
pub use pool::{BufPool, PIECE_MAX};
pub use segments::Segments;
pub use shared::{SharedMemoryMap, copy_from_shared, copy_to_shared};
pub use shared_range::{SharedRange, SharedRangeOutOfBounds};

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering, fence};

/// Alignment of slabs in bytes: a page, the largest alignment that `O_DIRECT` demands.
pub const ALIGN: usize = 4096;

/// The largest slab in bytes (1 GiB): offsets and lengths are 32-bit.
pub const MAX_LEN: usize = 1 << 30;

/// Minimum size in bytes of a slab that is a mapping. The allocator would clear such slabs, because
/// they are aligned, and would not return freed ones to the system.
const MAP_MIN: usize = 64 << 10;

/// The header of a slab, in its own allocation, so that the data stays page-aligned without
/// padding.
struct SharedAllocationHeader {
    refs: AtomicU32,
    data: NonNull<u8>,
    len: u32,
    /// The foreign memory of the slab. Others may change it, so no slice of it may exist.
    shared_range: Option<Arc<SharedMemoryMap>>,
    /// The memory is lent and returns to its owner; see [`Buf::borrowed`].
    borrowed: bool,
}

/// An owned byte range of a slab. Ranges of live `Buf`s never overlap.
pub struct Buf {
    slab: NonNull<SharedAllocationHeader>,
    off: u32,
    len: u32,
}

// SAFETY: a Buf is the only access to its bytes (ranges never overlap), and the count of the slab
// is atomic.
unsafe impl Send for Buf {}
// SAFETY: a shared Buf gives only shared slices.
unsafe impl Sync for Buf {}

impl Buf {
    /// Allocates a slab of `len` zeroed bytes, aligned to [`ALIGN`], and owns all of it.
    ///
    /// # Panics
    /// If `len` is 0 or above [`MAX_LEN`].
    #[must_use]
    pub fn zeroed(len: usize) -> Buf {
        assert!((1..=MAX_LEN).contains(&len), "slab of {len} bytes");
        let layout = Buf::layout(len);
        let data = if len >= MAP_MIN {
            // SAFETY: a new private mapping at an address that the system chooses touches no other
            // memory. It is zeroed and page-aligned.
            unsafe {
                mmap_anonymous(
                    std::ptr::null_mut(),
                    len,
                    ProtFlags::READ | ProtFlags::WRITE,
                    MapFlags::PRIVATE,
                )
            }
            .map_or(std::ptr::null_mut(), |data| data.cast())
        } else {
            // SAFETY: the layout has a size above zero.
            unsafe { alloc_zeroed(layout) }
        };
        let Some(data) = NonNull::new(data) else { handle_alloc_error(layout) };
        let slab = Box::new(SharedAllocationHeader {
            refs: AtomicU32::new(1),
            data,
            len: len as u32,
            shared_range: None,
            borrowed: false,
        });
        #[cfg(feature = "slab-count")]
        slab_count::adjust_live_slab_bytes(len as i64);
        Buf { slab: NonNull::from(Box::leak(slab)), off: 0, len: len as u32 }
    }

    fn layout(len: usize) -> Layout {
        Layout::from_size_align(len, ALIGN).expect("the length was checked at creation")
    }

    /// Wraps `len` bytes at `at` of shared memory as a `Buf` for [`Segments`]. It never leaves this
    /// crate, because it must not be read as a slice.
    fn shared_range(map: Arc<SharedMemoryMap>, at: usize, len: u32) -> Buf {
        let data = NonNull::from(map.words()).cast::<u8>();
        debug_assert!(at <= map.len() && len as usize <= map.len() - at);
        // SAFETY: the place is inside the mapping, or at its end, as the caller has checked.
        let data = unsafe { data.add(at) };
        let slab = Box::new(SharedAllocationHeader {
            refs: AtomicU32::new(1),
            data,
            len,
            shared_range: Some(map),
            borrowed: false,
        });
        Buf { slab: NonNull::from(Box::leak(slab)), off: 0, len }
    }

    /// Wraps `len` bytes at `data`, lent by a caller outside udm. They return to the caller when
    /// the last piece is dropped or points elsewhere.
    ///
    /// # Safety
    /// Until then, the bytes must stay valid. Nobody else may write bytes that udm reads, or access
    /// bytes that udm writes.
    ///
    /// # Panics
    /// If `len` is above [`MAX_LEN`].
    #[must_use]
    pub unsafe fn borrowed(data: NonNull<u8>, len: usize) -> Buf {
        assert!(len <= MAX_LEN, "{len} bytes lent");
        let len = len as u32;
        let slab = Box::new(SharedAllocationHeader {
            refs: AtomicU32::new(1),
            data,
            len,
            shared_range: None,
            borrowed: true,
        });
        Buf { slab: NonNull::from(Box::leak(slab)), off: 0, len }
    }

    /// Points lent memory to the `len` bytes at `data` instead, if no other piece of it exists.
    /// Returns whether it did. Allocates nothing, so a caller that keeps its pieces can lend at no
    /// cost.
    ///
    /// # Safety
    /// As for [`Buf::borrowed`].
    ///
    /// # Panics
    /// If `len` is above [`MAX_LEN`].
    pub unsafe fn reborrow(&mut self, data: NonNull<u8>, len: usize) -> bool {
        assert!(len <= MAX_LEN, "{len} bytes lent");
        if !self.slab().borrowed || !self.is_unique() {
            return false;
        }
        // SAFETY: this is the only piece, and `&mut self` is exclusive: nobody else reads the
        // header.
        let slab = unsafe { self.slab.as_mut() };
        (slab.data, slab.len) = (data, len as u32);
        (self.off, self.len) = (0, len as u32);
        true
    }

    /// Points the only piece of a foreign range to `len` bytes at `at` of its memory, which must
    /// contain them.
    fn place(&mut self, at: usize, len: u32) {
        debug_assert!(self.is_unique());
        // SAFETY: this is the only piece, and `&mut self` is exclusive: nobody else reads the
        // header.
        let slab = unsafe { self.slab.as_mut() };
        let Some(map) = &slab.shared_range else { return };
        assert!(at <= map.len() && len as usize <= map.len() - at);
        // SAFETY: the place is inside the mapping, or at its end.
        slab.data = unsafe { NonNull::from(map.words()).cast::<u8>().add(at) };
        slab.len = len;
        (self.off, self.len) = (0, len);
    }

    /// The foreign memory of this piece, and its offset there.
    fn shared(&self) -> Option<(&Arc<SharedMemoryMap>, usize)> {
        let map = self.slab().shared_range.as_ref()?;
        Some((map, self.addr() - map.words().as_ptr().addr()))
    }

    fn slab(&self) -> &SharedAllocationHeader {
        // SAFETY: the slab lives as long as any Buf of it.
        unsafe { self.slab.as_ref() }
    }

    /// Number of bytes owned.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// True if no bytes are owned.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Length of the whole slab in bytes.
    #[must_use]
    pub fn slab_len(&self) -> usize {
        self.slab().len as usize
    }

    fn start(&self) -> *mut u8 {
        let data = self.slab().data.as_ptr();
        // SAFETY: off never exceeds the length of the slab.
        unsafe { data.add(self.off as usize) }
    }

    /// Splits off and returns the first `at` bytes; `self` keeps the rest.
    ///
    /// # Panics
    /// If `at` is beyond the end.
    #[must_use = "the front part would be dropped"]
    pub fn split_to(&mut self, at: usize) -> Buf {
        assert!(at <= self.len(), "split at {at} of {}", self.len);
        // Relaxed: a caller that adds a reference already holds one.
        let old = self.slab().refs.fetch_add(1, Ordering::Relaxed);
        assert!(old < u32::MAX / 2, "too many pieces of one slab");
        let front = Buf { slab: self.slab, off: self.off, len: at as u32 };
        self.off += at as u32;
        self.len -= at as u32;
        front
    }

    /// Keeps only the first `len` bytes. No Buf owns the others until [`Buf::reclaim`].
    ///
    /// # Panics
    /// If `len` is beyond the end.
    pub fn truncate(&mut self, len: usize) {
        assert!(len <= self.len(), "truncate to {len} of {}", self.len);
        self.len = len as u32;
    }

    /// Joins `next` to `self` if it is the piece directly after `self`.
    ///
    /// # Errors
    /// Returns `next` unchanged if it is from another slab or not adjacent.
    pub fn try_join(&mut self, next: Buf) -> Result<(), Buf> {
        if self.slab == next.slab && self.off + self.len == next.off {
            self.len += next.len;
            Ok(())
        } else {
            Err(next)
        }
    }

    /// True if no other piece of the slab is alive.
    #[must_use]
    pub fn is_unique(&self) -> bool {
        // Acquire pairs with the release in drop: the writes of the other pieces are done.
        self.slab().refs.load(Ordering::Acquire) == 1
    }

    /// Makes `self` own the whole slab again, if no other piece is alive. Returns whether it does.
    pub fn reclaim(&mut self) -> bool {
        if !self.is_unique() {
            return false;
        }
        self.off = 0;
        self.len = self.slab().len;
        true
    }

    /// Address of the first byte, for checks of alignment.
    #[must_use]
    pub fn addr(&self) -> usize {
        self.start() as usize
    }
}

impl std::ops::Deref for Buf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        debug_assert!(self.slab().shared_range.is_none(), "foreign memory is no slice");
        // SAFETY: the range is inside the slab, initialised (zeroed at birth), and no other Buf
        // covers it. Foreign memory never gets here: its Bufs stay in `Segments`, which returns
        // owned pieces only.
        unsafe { std::slice::from_raw_parts(self.start(), self.len()) }
    }
}

impl std::ops::DerefMut for Buf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for deref, and `&mut self` makes this the only slice of the range.
        unsafe { std::slice::from_raw_parts_mut(self.start(), self.len()) }
    }
}

impl std::fmt::Debug for Buf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buf({}+{} of {})", self.off, self.len, self.slab_len())
    }
}

impl Drop for Buf {
    fn drop(&mut self) {
        // Release: writes of this owner happen before the free or the reuse by another owner.
        if self.slab().refs.fetch_sub(1, Ordering::Release) != 1 {
            return;
        }
        fence(Ordering::Acquire);
        // SAFETY: the count reached zero, so this is the last Buf; the box was leaked when it was
        // made.
        let slab = unsafe { Box::from_raw(self.slab.as_ptr()) };
        let (data, len) = (slab.data.as_ptr(), slab.len as usize);
        #[cfg(feature = "slab-count")]
        slab_count::adjust_live_slab_bytes(if slab.shared_range.is_some() || slab.borrowed {
            0
        } else {
            -(len as i64)
        });
        if slab.shared_range.is_some() || slab.borrowed {
            // The memory belongs to the map, whose last user unmaps it, or to the lender.
        } else if len >= MAP_MIN {
            // SAFETY: mapped in `zeroed` with this very length, and no piece of it is alive.
            let unmapped = unsafe { munmap(data.cast(), len) };
            debug_assert!(unmapped.is_ok(), "munmap: {unmapped:?}");
        } else {
            // SAFETY: allocated in `zeroed` with this very layout.
            unsafe { dealloc(data, Buf::layout(len)) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn split_pieces_are_disjoint_and_join_back() {
        let mut b = Buf::zeroed(8192);
        assert_eq!(b.addr() % ALIGN, 0);
        let mut front = b.split_to(100);
        front.fill(1);
        b.fill(2);
        assert_eq!((front.len(), b.len()), (100, 8092));
        assert!(front.iter().all(|&x| x == 1) && b.iter().all(|&x| x == 2));
        assert!(!b.is_unique() && !b.reclaim());
        front.try_join(b).unwrap();
        assert_eq!(front.len(), 8192);
        assert!(front.is_unique());
    }

    #[test]
    fn only_neighbours_join() {
        let mut a = Buf::zeroed(64);
        let mut b = a.split_to(32);
        let c = b.split_to(16);
        assert!(a.try_join(c).is_err());
        assert!(b.try_join(Buf::zeroed(1)).is_err());
    }

    #[test]
    fn reclaim_after_the_pieces_are_gone() {
        let mut a = Buf::zeroed(64);
        drop(a.split_to(60));
        assert_eq!(a.len(), 4);
        assert!(a.reclaim());
        assert_eq!(a.len(), 64);
    }

    #[test]
    fn large_slabs_are_zeroed_and_aligned_as_small_ones_are() {
        for len in [1, 4095, MAP_MIN - 1, MAP_MIN, MAP_MIN + 1, 1 << 20] {
            let mut b = Buf::zeroed(len);
            assert_eq!((b.addr() % ALIGN, b.len()), (0, len));
            assert!(b.iter().all(|&x| x == 0));
            b.fill(1);
        }
    }

    #[test]
    fn lent_memory_goes_back_as_it_is() {
        let (mut first, mut second) = (vec![1u8; 8192], vec![2u8; 512]);
        let at = |memory: &mut Vec<u8>| NonNull::new(memory.as_mut_ptr()).unwrap();
        // SAFETY: the memory outlives the pieces, and is not accessed before they are dropped.
        let mut buf = unsafe { Buf::borrowed(at(&mut first), 8192) };
        let mut front = buf.split_to(4096);
        front.fill(9);
        // SAFETY: as above.
        assert!(!unsafe { buf.reborrow(at(&mut second), 512) }, "another piece is alive");
        assert!(front.try_join(buf).is_ok());
        // SAFETY: as above.
        assert!(unsafe { front.reborrow(at(&mut second), 512) });
        assert_eq!((front.len(), front[0]), (512, 2));
        front.fill(3);
        drop(front);
        assert!(first[..4096].iter().all(|&b| b == 9) && first[4096..].iter().all(|&b| b == 1));
        assert!(second.iter().all(|&b| b == 3));
        // SAFETY: as above; a slab of udm's own stays unchanged.
        assert!(!unsafe { Buf::zeroed(512).reborrow(at(&mut second), 512) });
    }

    #[test]
    fn pieces_move_between_threads() {
        let mut a = Buf::zeroed(1 << 16);
        let mut b = a.split_to(1 << 15);
        let t = std::thread::spawn(move || {
            b.fill(7);
            b
        });
        a.fill(9);
        let b = t.join().unwrap();
        assert_eq!((a[0], b[0]), (9, 7));
    }
}
