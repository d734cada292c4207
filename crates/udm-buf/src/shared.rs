//! Memory that others may change at the same time, and copies between it and memory that is owned.
//!
//! Contract: shared memory is words of [`AtomicU64`]. A copy is no one access: of a range that
//! another changes meanwhile, each byte is one or the other's. Nothing is ordered by it; whoever
//! must see a copy whole has been told of it in another way.
//!
//! On x86-64 a copy is one instruction of the CPU, which the compiler knows nothing of but that it
//! touches memory, as it does of a device's or a system call's access. Elsewhere it goes word by
//! word.

use rustix::fs::{SealFlags, fcntl_get_seals, fstat, fstatfs};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::io;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

/// The file system of memfds (`statfs(2)`).
const TMPFS_MAGIC: u64 = 0x0102_1994;

/// Memory that is shared with another process, which may change it at any time: a sealed memfd,
/// mapped. It is words of [`AtomicU64`], copied as above, or given to the kernel; nobody makes a
/// slice of it.
///
/// What the other process does to the file can't take a page from under this one, which would be a
/// SIGBUS: the file can't shrink.
#[derive(Debug)]
pub struct SharedMap {
    base: NonNull<AtomicU64>,
    len: usize,
}

// SAFETY: it is memory of atomics, which any thread may use; the mapping belongs to nobody else and
// lives as long as this.
unsafe impl Send for SharedMap {}
// SAFETY: as above; a shared borrow gives atomics only.
unsafe impl Sync for SharedMap {}

/// The longest mapping in bytes (64 GiB).
const MAP_MAX: usize = 64 << 30;

impl SharedMap {
    /// Maps the first `len` bytes (a multiple of 4096, up to 64 GiB) of a memfd.
    ///
    /// # Errors
    /// What is no memfd, or one of huge pages (the system may run out of those), one that may
    /// shrink (it needs `F_SEAL_SHRINK`), one that is shorter, and what the system says; with the
    /// reason.
    pub fn of_memfd(memfd: impl AsFd, len: usize) -> io::Result<SharedMap> {
        let refuse = |why: String| Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        if len == 0 || !len.is_multiple_of(crate::ALIGN) || len > MAP_MAX {
            return refuse(format!(
                "shared memory of {len} bytes: not a multiple of 4096 in 4096..={MAP_MAX}"
            ));
        }
        if fstatfs(&memfd)?.f_type as u64 != TMPFS_MAGIC {
            return refuse("shared memory that is no memfd of plain pages".into());
        }
        let seals = fcntl_get_seals(&memfd).unwrap_or(SealFlags::empty());
        if !seals.contains(SealFlags::SHRINK) {
            return refuse("shared memory that may shrink: it needs F_SEAL_SHRINK".into());
        }
        // It is looked at behind the seal: from there on it only grows.
        let size = u64::try_from(fstat(&memfd)?.st_size).unwrap_or(0);
        if size < len as u64 {
            return refuse(format!("shared memory of {size} bytes, and {len} are wanted"));
        }
        // SAFETY: a new mapping, where the system likes it, touches no memory of anybody's.
        let base = unsafe {
            mmap(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, memfd, 0)
        }?;
        let Some(base) = NonNull::new(base.cast()) else { return Err(io::ErrorKind::OutOfMemory.into()) };
        Ok(SharedMap { base, len })
    }

    /// The memory.
    #[must_use]
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: mapped with this length in `of_memfd`, readable and writable, page-aligned, and
        // unmapped in drop. Others may write there at any time, as they may to atomics; every value
        // of a byte is valid. The file can't shrink, so every page is there.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len / size_of::<AtomicU64>()) }
    }

    /// Its length in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }
}

impl Drop for SharedMap {
    fn drop(&mut self) {
        // SAFETY: mapped in `of_memfd` with this very length; whoever uses it holds it.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok(), "munmap: {unmapped:?}");
    }
}

/// Copies from byte `at` of `words` on into `out`, which it fills.
///
/// # Panics
/// When there are fewer bytes.
pub fn copy_from_shared(words: &[AtomicU64], at: usize, out: &mut [u8]) {
    check(words, at, out.len());
    #[cfg(target_arch = "x86_64")]
    // SAFETY: both ranges are inside their slices, and they are no overlap, because `out` is
    // borrowed alone. Bytes of atomics may be read while others write them: the access is not the
    // compiler's, and every value of a byte is valid.
    unsafe {
        copy(words.as_ptr().cast::<u8>().wrapping_add(at), out.as_mut_ptr(), out.len());
    }
    #[cfg(not(target_arch = "x86_64"))]
    by_words::read(words, at, out);
}

/// Copies `data` to byte `at` of `words` and behind.
///
/// # Panics
/// When there are fewer bytes.
pub fn copy_to_shared(words: &[AtomicU64], at: usize, data: &[u8]) {
    check(words, at, data.len());
    #[cfg(target_arch = "x86_64")]
    // SAFETY: both ranges are inside their slices. Memory of atomics may be written through a
    // shared borrow, while others do what they like with it: the access is not the compiler's.
    unsafe {
        copy(data.as_ptr(), words.as_ptr().cast_mut().cast::<u8>().wrapping_add(at), data.len());
    }
    #[cfg(not(target_arch = "x86_64"))]
    by_words::write(words, at, data);
}

fn check(words: &[AtomicU64], at: usize, len: usize) {
    let there = size_of_val(words);
    assert!(at <= there && len <= there - at, "{len} bytes at {at} of {there}");
}

/// Copies `len` bytes, upwards.
///
/// # Safety
/// `from` can be read and `to` written for `len` bytes.
#[cfg(target_arch = "x86_64")]
unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: as the caller says. The direction flag is clear, as the calling convention has it,
    // and no other flag is touched.
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

/// The same word by word.
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
    fn nothing_beyond_the_end() {
        let words = words(2);
        for (at, len) in [(0, 17), (16, 1), (17, 0), (usize::MAX, 2)] {
            let data = vec![0; len];
            assert!(std::panic::catch_unwind(|| copy_to_shared(&words, at, &data)).is_err());
            assert!(std::panic::catch_unwind(|| copy_from_shared(&words, at, &mut data.clone())).is_err());
        }
    }

    /// A byte is one writer's or the other's.
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
