//! Memory that others may change at any time, and copies between it and owned memory.
//!
//! Contract: shared memory consists of [`AtomicU64`] words. A copy is not one atomic access: if
//! another thread changes the range meanwhile, each byte is the old or the new one. A copy orders
//! no other access. A reader that needs a complete copy must be synchronised by other means.
//!
//! The other process may also cut the file of the memory. [`SharedMemoryMap::of_memfd`] refuses
//! files that can be cut; [`SharedMemoryMap::of_guest_memory`] survives it and reports the loss.
//!
//! On x86-64 a copy is one CPU instruction. The compiler only knows that the instruction accesses
//! memory, as with an access by a device or a system call. Other CPUs copy word by word.

use crate::lost_pages::LostPagesGuard;
use rustix::fs::{SealFlags, fcntl_get_seals, fstat, fstatfs};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::io;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64};

/// Magic number of the file system of memfds (`statfs(2)`).
const TMPFS_MAGIC: u64 = 0x0102_1994;

/// Memory shared with another process, which may change it at any time: a mapped file. It consists
/// of [`AtomicU64`] words that are copied or given to the kernel, never read as a slice.
#[derive(Debug)]
pub struct SharedMemoryMap {
    base: NonNull<AtomicU64>,
    len: usize,
    /// `None` if the file cannot shrink.
    lost_pages: Option<LostPagesGuard>,
}

// SAFETY: the memory consists of atomics, which any thread may use. Nothing else uses the mapping,
// and it lives as long as this value.
unsafe impl Send for SharedMemoryMap {}
// SAFETY: as above; a shared borrow gives atomics only.
unsafe impl Sync for SharedMemoryMap {}

/// The longest mapping of a memfd in bytes (64 GiB).
const MAP_MAX: usize = 64 << 30;

/// The longest region of guest memory in bytes (16 TiB).
const GUEST_MAP_MAX: usize = 16 << 40;

impl SharedMemoryMap {
    /// Maps the first `len` bytes (a multiple of 4096, up to 64 GiB) of a memfd.
    ///
    /// # Errors
    /// The file is not a memfd, uses huge pages (the system may run out of them), may shrink (it
    /// needs `F_SEAL_SHRINK`), or is too short; and errors of the system. The error text has the
    /// reason.
    pub fn of_memfd(memfd: impl AsFd, len: usize) -> io::Result<SharedMemoryMap> {
        let refuse = |why: String| Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        if len == 0 || !len.is_multiple_of(crate::ALIGN) || len > MAP_MAX {
            return refuse(format!(
                "shared memory of {len} bytes: expected a multiple of 4096, from 4096 to {MAP_MAX}"
            ));
        }
        if fstatfs(&memfd)?.f_type as u64 != TMPFS_MAGIC {
            return refuse("shared memory: expected a memfd without huge pages".into());
        }
        let seals = fcntl_get_seals(&memfd).unwrap_or(SealFlags::empty());
        if !seals.contains(SealFlags::SHRINK) {
            return refuse("shared memory: the memfd needs F_SEAL_SHRINK".into());
        }
        // Read after the seal was checked: from there on the size only grows.
        let size = u64::try_from(fstat(&memfd)?.st_size).unwrap_or(0);
        if size < len as u64 {
            return refuse(format!("shared memory of {size} bytes, but {len} are needed"));
        }
        // The file cannot shrink, so the other process cannot remove a page in use.
        Ok(SharedMemoryMap { base: mmap_file_shared(memfd, 0, len)?, len, lost_pages: None })
    }

    /// Maps `len` bytes (1 byte to 16 TiB) at byte `offset` (a multiple of 4096) of the memory of a
    /// virtual machine. The file may be a memfd, also of huge pages, or a file of any file system
    /// that can be mapped. If it is cut later, the memory reads as zeroes and
    /// [`SharedMemoryMap::is_lost`] is true. The mapping has whole pages: it may be longer than
    /// `len`.
    ///
    /// # Errors
    /// The range does not begin at a page or exceeds the file, there are too many regions, and
    /// errors of the system. The error text has the reason.
    pub fn of_guest_memory(file: impl AsFd, offset: u64, len: usize) -> io::Result<SharedMemoryMap> {
        let refuse = |why: String| Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        if len == 0 || len > GUEST_MAP_MAX || !offset.is_multiple_of(crate::ALIGN as u64) {
            return refuse(format!(
                "guest memory of {len} bytes at {offset}: expected 1 byte to 16 TiB at a multiple of 4096"
            ));
        }
        let size = u64::try_from(fstat(&file)?.st_size).unwrap_or(0);
        if offset.checked_add(len as u64).is_none_or(|end| end > size) {
            return refuse(format!(
                "guest memory of {len} bytes at {offset} exceeds the end of a file of {size} bytes"
            ));
        }
        // Memory that holds only rings need not have whole pages.
        let len = len.next_multiple_of(crate::ALIGN);
        let base = mmap_file_shared(file, offset, len)?;
        let mut map = SharedMemoryMap { base, len, lost_pages: None };
        map.lost_pages = Some(LostPagesGuard::new(base.as_ptr().addr(), len)?);
        Ok(map)
    }

    /// True if the file was cut and a lost page was accessed here. What was read from the memory
    /// since may be zeroes, and the other process sees nothing that is written.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.lost_pages.as_ref().is_some_and(LostPagesGuard::is_lost)
    }

    /// The byte at `at`.
    ///
    /// # Panics
    /// If there are fewer bytes.
    #[must_use]
    pub fn u8_at(&self, at: usize) -> &AtomicU8 {
        assert!(at < self.len, "a byte at {at} of {}", self.len);
        // SAFETY: inside the mapping.
        let byte = unsafe { self.base.cast::<AtomicU8>().add(at) };
        // SAFETY: as above.
        unsafe { byte.as_ref() }
    }

    /// The 16-bit word at byte `at`, in the byte order of this machine.
    ///
    /// # Panics
    /// If `at` is odd, or the word exceeds the memory.
    #[must_use]
    pub fn u16_at(&self, at: usize) -> &AtomicU16 {
        assert!(at.is_multiple_of(2) && at < self.len, "a word of 16 bits at {at} of {}", self.len);
        // SAFETY: inside the mapping, which has whole pages.
        let word = unsafe { self.base.cast::<AtomicU16>().add(at / 2) };
        // SAFETY: as above.
        unsafe { word.as_ref() }
    }

    /// The 32-bit word at byte `at`, in the byte order of this machine.
    ///
    /// # Panics
    /// If `at` is no multiple of 4, or the word exceeds the memory.
    #[must_use]
    pub fn u32_at(&self, at: usize) -> &AtomicU32 {
        assert!(at.is_multiple_of(4) && at < self.len, "a word of 32 bits at {at} of {}", self.len);
        // SAFETY: as above.
        let word = unsafe { self.base.cast::<AtomicU32>().add(at / 4) };
        // SAFETY: as above.
        unsafe { word.as_ref() }
    }

    /// The memory as words.
    #[must_use]
    pub fn words(&self) -> &[AtomicU64] {
        // Others may write there at any time, as to atomics. Every value of a byte is valid.
        // SAFETY: mapped with this length by `mmap_file_shared`, readable and writable,
        // page-aligned, and unmapped in drop. A page is in the file, or is replaced on access
        // (`lost_pages`).
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len / size_of::<AtomicU64>()) }
    }

    /// Length in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }
}

/// Maps `len` bytes at byte `offset` of `file`, readable and writable.
fn mmap_file_shared(file: impl AsFd, offset: u64, len: usize) -> io::Result<NonNull<AtomicU64>> {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address that the system chooses touches no other memory.
    let base = unsafe { mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, file, offset) }?;
    NonNull::new(base.cast()).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
}

impl Drop for SharedMemoryMap {
    fn drop(&mut self) {
        // Nothing else may use the addresses of a guard.
        self.lost_pages = None;
        // SAFETY: mapped by `mmap_file_shared` with this very length; each user of the mapping
        // holds this value.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok(), "munmap: {unmapped:?}");
    }
}

/// Copies from byte `at` of `words` on, until `out` is full.
///
/// # Panics
/// If there are fewer bytes.
pub fn copy_from_shared(words: &[AtomicU64], at: usize, out: &mut [u8]) {
    assert_shared_copy_in_bounds(words, at, out.len());
    #[cfg(target_arch = "x86_64")]
    // SAFETY: both ranges are inside their slices, and they do not overlap, because the borrow of
    // `out` is exclusive. Bytes of atomics may be read while others write them: the access is not
    // the compiler's, and every value of a byte is valid.
    unsafe {
        copy_bytes_ascending(words.as_ptr().cast::<u8>().wrapping_add(at), out.as_mut_ptr(), out.len());
    }
    #[cfg(not(target_arch = "x86_64"))]
    by_words::read(words, at, out);
}

/// Copies `data` to byte `at` of `words` and after it.
///
/// # Panics
/// If there are fewer bytes.
pub fn copy_to_shared(words: &[AtomicU64], at: usize, data: &[u8]) {
    assert_shared_copy_in_bounds(words, at, data.len());
    #[cfg(target_arch = "x86_64")]
    // SAFETY: both ranges are inside their slices. Memory of atomics may be written through a
    // shared borrow, whatever accesses others make: the access is not the compiler's.
    unsafe {
        copy_bytes_ascending(
            data.as_ptr(),
            words.as_ptr().cast_mut().cast::<u8>().wrapping_add(at),
            data.len(),
        );
    }
    #[cfg(not(target_arch = "x86_64"))]
    by_words::write(words, at, data);
}

/// Sets the `len` bytes at byte `at` of `words` to `byte`.
///
/// # Panics
/// If there are fewer bytes.
pub fn fill_shared(words: &[AtomicU64], at: usize, len: usize, byte: u8) {
    assert_shared_copy_in_bounds(words, at, len);
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the range is inside its slice. Memory of atomics may be written through a shared
    // borrow, whatever accesses others make: the access is not the compiler's. The direction flag
    // is clear, as the calling convention demands.
    unsafe {
        std::arch::asm!(
            "rep stosb",
            inout("rcx") len => _,
            inout("rdi") words.as_ptr().cast_mut().cast::<u8>().wrapping_add(at) => _,
            in("al") byte,
            options(nostack, preserves_flags),
        );
    }
    #[cfg(not(target_arch = "x86_64"))]
    by_words::write(words, at, &vec![byte; len]);
}

fn assert_shared_copy_in_bounds(words: &[AtomicU64], at: usize, len: usize) {
    let there = size_of_val(words);
    assert!(
        at <= there && len <= there - at,
        "{len} bytes at byte {at} exceed the {there} bytes of the memory"
    );
}

/// Copies `len` bytes in ascending order.
///
/// # Safety
/// `from` can be read and `to` written for `len` bytes.
#[cfg(target_arch = "x86_64")]
unsafe fn copy_bytes_ascending(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller guarantees both ranges. The direction flag is clear, as the calling
    // convention demands, and no other flag is changed.
    unsafe {
        std::arch::asm!(
            "rep movsb",
            inout("rcx") len => _,
            inout("rsi") from => _,
            inout("rdi") to => _,
            options(nostack, preserves_flags),
        );
    }
}

/// Copies of the same contract, word by word.
#[cfg(any(test, not(target_arch = "x86_64")))]
mod by_words {
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

    pub(super) fn read(words: &[AtomicU64], mut at: usize, mut out: &mut [u8]) {
        while !out.is_empty() {
            let (now, rest) = out.split_at_mut(out.len().min(8 - at % 8));
            let word = words[at / 8].load(Relaxed).to_ne_bytes();
            now.copy_from_slice(&word[at % 8..at % 8 + now.len()]);
            at += now.len();
            out = rest;
        }
    }

    pub(super) fn write(words: &[AtomicU64], mut at: usize, mut data: &[u8]) {
        while !data.is_empty() {
            let (now, rest) = data.split_at(data.len().min(8 - at % 8));
            let mut word = if now.len() < 8 { words[at / 8].load(Relaxed).to_ne_bytes() } else { [0; 8] };
            word[at % 8..at % 8 + now.len()].copy_from_slice(now);
            words[at / 8].store(u64::from_ne_bytes(word), Relaxed);
            at += now.len();
            data = rest;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering::Relaxed;

    fn words(n: usize) -> Vec<AtomicU64> {
        (0..n).map(|i| AtomicU64::new(0x0101_0101_0101_0101u64.wrapping_mul(i as u64))).collect()
    }

    fn bytes(words: &[AtomicU64]) -> Vec<u8> {
        words.iter().flat_map(|w| w.load(Relaxed).to_ne_bytes()).collect()
    }

    #[test]
    fn every_begin_and_length() {
        for at in 0..=40 {
            for len in 0..=40 - at {
                let (one, other) = (words(5), words(5));
                let data: Vec<u8> = (0..len).map(|i| 200 + i as u8).collect();
                let mut want = bytes(&one);
                want[at..at + len].copy_from_slice(&data);
                copy_to_shared(&one, at, &data);
                by_words::write(&other, at, &data);
                assert_eq!((bytes(&one), bytes(&other)), (want.clone(), want.clone()), "{len} at {at}");
                let (mut got, mut words) = (vec![0; len], vec![0; len]);
                copy_from_shared(&one, at, &mut got);
                by_words::read(&one, at, &mut words);
                assert_eq!((&got, &words), (&data, &data), "{len} at {at}");
            }
        }
    }

    #[test]
    fn ranges_are_filled() {
        for (at, len) in [(0, 40), (3, 30), (7, 1), (40, 0)] {
            let words = words(5);
            let mut want = bytes(&words);
            want[at..at + len].fill(9);
            fill_shared(&words, at, len, 9);
            assert_eq!(bytes(&words), want, "{len} at {at}");
        }
        assert!(std::panic::catch_unwind(|| fill_shared(&words(1), 7, 2, 0)).is_err());
    }

    #[test]
    fn nothing_beyond_the_end() {
        let words = words(2);
        for (at, len) in [(0, 17), (16, 1), (17, 0), (usize::MAX, 2)] {
            let data = vec![0; len];
            assert!(std::panic::catch_unwind(|| copy_to_shared(&words, at, &data)).is_err());
            assert!(std::panic::catch_unwind(|| copy_from_shared(&words, at, &mut data.clone())).is_err());
        }
    }

    /// Each byte is from one of the two writers.
    #[test]
    fn two_write_at_a_time() {
        let words = words(512);
        std::thread::scope(|s| {
            for byte in [1u8, 2] {
                let words = &words;
                s.spawn(move || (0..200).for_each(|_| copy_to_shared(words, 3, &[byte; 4000])));
            }
            let mut seen = [0; 4000];
            for _ in 0..200 {
                copy_from_shared(&words, 3, &mut seen);
            }
        });
        let mut end = [0; 4000];
        copy_from_shared(&words, 3, &mut end);
        assert!(end.iter().all(|b| matches!(b, 1 | 2)));
    }
}
