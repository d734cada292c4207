//! Ranges of memory that another process shares and may change at any time.
//!
//! A range is never a slice. Its bytes are copied once, or the kernel gets its address. A range
//! keeps its memory mapped by a reference count. The count changes when a range is created, but not
//! in [`Segments::retarget`](crate::Segments::retarget). So a user that keeps ranges for reuse
//! touches no shared count.

use crate::shared::fill_shared;
use crate::{Buf, SharedMemoryMap, copy_from_shared, copy_to_shared};
use std::sync::Arc;

/// A range of a [`SharedMemoryMap`], shorter than 4 GiB.
#[derive(Debug)]
pub struct SharedRange(pub(crate) Buf);

/// The error of a range beyond the end of the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedRangeOutOfBounds;

impl std::fmt::Display for SharedRangeOutOfBounds {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a range beyond the end of the shared memory")
    }
}

impl std::error::Error for SharedRangeOutOfBounds {}

impl SharedRange {
    /// Creates the range of `len` bytes at byte `at` of `map`.
    ///
    /// # Errors
    /// The range exceeds the memory, or is 4 GiB or longer.
    pub fn new(
        map: &Arc<SharedMemoryMap>,
        at: usize,
        len: usize,
    ) -> Result<SharedRange, SharedRangeOutOfBounds> {
        Ok(SharedRange(Buf::shared_range(Arc::clone(map), at, check_shared_range_bounds(map, at, len)?)))
    }

    /// Points the range to another range of the same memory. Touches no shared count and allocates
    /// nothing.
    ///
    /// # Errors
    /// The range exceeds the memory, or another piece of the old range is alive. It is unchanged
    /// then.
    pub fn retarget(&mut self, at: usize, len: usize) -> Result<(), SharedRangeOutOfBounds> {
        self.0.retarget(at, len)
    }
}

fn check_shared_range_bounds(
    map: &SharedMemoryMap,
    at: usize,
    len: usize,
) -> Result<u32, SharedRangeOutOfBounds> {
    let fits = at <= map.len() && len <= map.len() - at;
    u32::try_from(len).ok().filter(|_| fits).ok_or(SharedRangeOutOfBounds)
}

/// Operations on pieces of foreign memory.
impl Buf {
    /// True if another process may change the bytes.
    pub(crate) fn is_shared(&self) -> bool {
        self.slab().shared_range.is_some()
    }

    /// Points a foreign piece, the only one of its slab, to another range of the same memory.
    pub(crate) fn retarget(&mut self, at: usize, len: usize) -> Result<(), SharedRangeOutOfBounds> {
        let map = match &self.slab().shared_range {
            Some(map) if self.is_unique() => map,
            _ => return Err(SharedRangeOutOfBounds),
        };
        let len = check_shared_range_bounds(map, at, len)?;
        self.place(at, len);
        Ok(())
    }

    /// Copies bytes of a foreign piece, from byte `from` on, until `out` is full.
    pub(crate) fn read_shared(&self, from: usize, out: &mut [u8]) {
        assert!(from + out.len() <= self.len(), "beyond the range");
        if let Some((map, at)) = self.shared() {
            copy_from_shared(map.words(), at + from, out);
        }
    }

    /// Sets the bytes `range` of a foreign piece to `byte`.
    pub(crate) fn fill_shared(&self, range: std::ops::Range<usize>, byte: u8) {
        assert!(range.end <= self.len(), "beyond the range");
        if let Some((map, at)) = self.shared() {
            fill_shared(map.words(), at + range.start, range.len(), byte);
        }
    }

    /// Copies `data` to a foreign piece, from byte `from` on.
    pub(crate) fn write_shared(&self, from: usize, data: &[u8]) {
        assert!(from + data.len() <= self.len(), "beyond the range");
        if let Some((map, at)) = self.shared() {
            copy_to_shared(map.words(), at + from, data);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Buf, Segments};
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
    use std::os::fd::OwnedFd;
    use std::sync::atomic::{AtomicBool, Ordering};

    fn memfd(len: u64, seals: SealFlags) -> OwnedFd {
        let fd = memfd_create("shared", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, len).unwrap();
        fcntl_add_seals(&fd, seals).unwrap();
        fd
    }

    fn map(len: usize) -> Arc<SharedMemoryMap> {
        Arc::new(SharedMemoryMap::of_memfd(memfd(len as u64, SealFlags::SHRINK), len).unwrap())
    }

    #[test]
    fn what_could_lose_a_page_is_refused() {
        let refused = |fd: &OwnedFd, len| SharedMemoryMap::of_memfd(fd, len).unwrap_err().to_string();
        assert!(refused(&memfd(8192, SealFlags::empty()), 8192).contains("F_SEAL_SHRINK"));
        assert!(refused(&memfd(8192, SealFlags::GROW), 8192).contains("F_SEAL_SHRINK"));
        let good = memfd(8192, SealFlags::SHRINK);
        assert!(refused(&good, 12288).contains("8192 bytes"));
        for len in [0, 1, 8191, usize::MAX & !4095] {
            assert!(refused(&good, len).contains("multiple"), "{len}");
        }
        assert!(ftruncate(&good, 4096).is_err(), "the seal holds");
        // A file on a disk, a file on tmpfs that is not a memfd, a pipe, and memory that cannot be
        // written.
        let file = std::fs::File::open("/proc/self/exe").unwrap().into();
        assert!(refused(&file, 4096).contains("expected a memfd"));
        if let Ok(file) =
            std::fs::File::options().read(true).write(true).create_new(true).open("/dev/shm/udm-no-memfd")
        {
            std::fs::remove_file("/dev/shm/udm-no-memfd").unwrap();
            file.set_len(4096).unwrap();
            assert!(refused(&file.into(), 4096).contains("F_SEAL_SHRINK"));
        }
        assert!(SharedMemoryMap::of_memfd(rustix::pipe::pipe().unwrap().0, 4096).is_err());
        assert!(SharedMemoryMap::of_memfd(memfd(4096, SealFlags::SHRINK | SealFlags::WRITE), 4096).is_err());
    }

    /// A file that is cut while its memory is in use: the process lives, the memory reads as zeroes
    /// and is reported as lost. Other mappings are not affected.
    #[test]
    fn memory_of_a_file_that_is_cut_is_lost() {
        let fd = memfd(16 << 10, SealFlags::empty());
        let map = SharedMemoryMap::of_guest_memory(&fd, 4096, 12 << 10).unwrap();
        let other = SharedMemoryMap::of_guest_memory(&fd, 0, 4096).unwrap();
        copy_to_shared(map.words(), 8000, &[7; 8]);
        copy_to_shared(other.words(), 0, &[9; 8]);
        ftruncate(&fd, 8192).unwrap();
        assert!(!map.is_lost(), "nothing was accessed yet");
        let mut seen = [1; 8];
        copy_from_shared(map.words(), 8000, &mut seen);
        assert_eq!((seen, map.is_lost(), other.is_lost()), ([0; 8], true, false));
        copy_from_shared(other.words(), 0, &mut seen);
        assert_eq!(seen, [9; 8]);
        drop(map);
        assert!(!SharedMemoryMap::of_guest_memory(&fd, 0, 8192).unwrap().is_lost(), "a new slot");
        let refused =
            |offset, len| SharedMemoryMap::of_guest_memory(&fd, offset, len).unwrap_err().to_string();
        assert!(refused(4096, 8192).contains("of a file of 8192 bytes"));
        assert!(refused(u64::MAX - 4095, 4096).contains("of a file of 8192 bytes"));
        for (offset, len) in [(0, 0), (512, 4096), (0, usize::MAX & !4095)] {
            assert!(refused(offset, len).contains("1 byte to 16 TiB"), "{len} at {offset}");
        }
    }

    /// Memory for rings alone may end within a page, as its file does.
    #[test]
    fn guest_memory_may_end_within_a_page() {
        let fd = memfd(5000, SealFlags::empty());
        let map = SharedMemoryMap::of_guest_memory(&fd, 0, 5000).unwrap();
        assert_eq!(map.len(), 8192);
        copy_to_shared(map.words(), 4990, &[7; 10]);
        let mut seen = [0; 10];
        assert_eq!(rustix::io::pread(&fd, &mut seen[..], 4990), Ok(10));
        assert_eq!((seen, map.is_lost()), ([7; 10], false));
        assert!(SharedMemoryMap::of_guest_memory(&fd, 0, 5001).is_err(), "longer than its file");
    }

    #[test]
    fn words_are_those_of_the_other_process() {
        let map = map(4096);
        copy_to_shared(map.words(), 6, &[1, 2, 3, 4, 5, 6]);
        assert_eq!(map.u16_at(6).load(Ordering::Relaxed), u16::from_ne_bytes([1, 2]));
        map.u32_at(8).store(0, Ordering::Release);
        let mut seen = [9; 8];
        copy_from_shared(map.words(), 6, &mut seen);
        assert_eq!(seen, [1, 2, 0, 0, 0, 0, 0, 0]);
        let panics = |f: &dyn Fn()| std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)).is_err();
        assert!(panics(&|| assert!(map.u16_at(1).load(Ordering::Relaxed) < 1)));
        assert!(panics(&|| assert!(map.u16_at(4096).load(Ordering::Relaxed) < 1)));
        assert!(panics(&|| assert!(map.u32_at(2).load(Ordering::Relaxed) < 1)));
        assert!(panics(&|| assert!(map.u32_at(4096).load(Ordering::Relaxed) < 1)));
    }

    /// A list keeps its capacity, and its pieces go back to their owner for reuse.
    #[test]
    fn pieces_are_reused() {
        let map = map(8192);
        let mut spare = vec![SharedRange::new(&map, 0, 512).unwrap(), SharedRange::new(&map, 0, 8).unwrap()];
        let mut data = Segments::new();
        for from in [0, 2048] {
            for at in [from + 1024, from] {
                let mut piece = spare.pop().unwrap();
                piece.retarget(at, 512).unwrap();
                data.push_shared(piece);
            }
            assert_eq!((data.len(), data.ranges().count()), (1024, 2));
            data.take_shared(&mut spare);
            assert_eq!((data.len(), spare.len()), (0, 2));
        }
    }

    #[test]
    fn no_range_is_beyond_the_end() {
        let map = map(8192);
        for (at, len) in [(0, 8193), (8192, 1), (8193, 0), (usize::MAX, 1), (1, usize::MAX)] {
            assert_eq!(SharedRange::new(&map, at, len).err(), Some(SharedRangeOutOfBounds), "{len} at {at}");
        }
        let mut data = Segments::from(SharedRange::new(&map, 0, 512).unwrap());
        assert_eq!(data.retarget(8000, 193), Err(SharedRangeOutOfBounds));
        assert_eq!((data.len(), data.retarget(8000, 192), data.len()), (512, Ok(()), 192));
        let cut = data.split_to(64);
        assert_eq!(data.retarget(0, 8), Err(SharedRangeOutOfBounds), "another piece of the range is alive");
        drop(cut);
        assert_eq!(data.retarget(0, 8), Ok(()));
        assert_eq!(Segments::from(Buf::zeroed(1)).retarget(0, 1), Err(SharedRangeOutOfBounds));
    }

    /// Foreign data supports all operations of owned data, with the same result for each offset and
    /// length, also beyond one portion.
    #[test]
    fn it_is_used_as_owned_data_is() {
        let map = map(64 << 10);
        let shared_range = || {
            let mut data = Segments::from(SharedRange::new(&map, 100, 5000).unwrap());
            data.push_shared(SharedRange::new(&map, 20_000, 9000).unwrap());
            data.push_shared(SharedRange::new(&map, 29_000, 13).unwrap());
            data
        };
        let mut own = Segments::from(Buf::zeroed(14_013));
        let mut data = shared_range();
        assert_eq!((data.len(), data.ranges().count()), (14_013, 3));
        let bytes: Vec<u8> = (0..14_013u32).map(|i| (i * 7 / 3) as u8).collect();
        assert_eq!((data.copy_from(&bytes), own.copy_from(&bytes)), (14_013, 14_013));
        for from in [0, 1, 4095, 4999, 5000, 5001, 9096, 14_012, 14_013] {
            for len in [0, 1, 4096, 4097, 9013, 20_000] {
                data.produce(from, len, |at, part| part.fill(at as u8));
                let mut ends = Vec::new();
                data.consume(from, len, |at, part| ends.push(at + part.len()));
                // Repeats the same parts on owned data.
                let mut at = 0;
                for end in ends {
                    own.produce(from + at, end - at, |_, part| part.fill(at as u8));
                    at = end;
                }
                let (mut a, mut b) = (vec![0; 14_013], vec![0; 14_013]);
                assert_eq!((data.copy_to(&mut a), own.copy_to(&mut b)), (14_013, 14_013));
                assert!(a == b, "{len} at {from}");
                assert_eq!(data.copy_to_at(from, &mut a[..len.min(14_013)]), len.min(14_013 - from));
                data.fill_at(from, len, 3);
                own.fill_at(from, len, 3);
                assert_eq!((data.copy_to(&mut a), own.copy_to(&mut b)), (14_013, 14_013));
                assert!(a == b, "{len} at {from}");
            }
        }
        // Splits anywhere and joins again.
        let mut front = data.split_to(4999);
        let mut middle = data.split_to(5000);
        assert_eq!((front.len(), middle.len(), data.len()), (4999, 5000, 4014));
        middle.append(data);
        front.append(middle);
        assert_eq!((front.len(), front.ranges().count()), (14_013, 3));
        drop(front);
        assert_eq!(Arc::strong_count(&map), 1, "no range refers to the memory any more");
    }

    #[test]
    fn only_its_maker_takes_it_apart() {
        let map = map(4096);
        let data = || Segments::from(SharedRange::new(&map, 0, 512).unwrap());
        let panics = |f: &dyn Fn()| std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)).is_err();
        let mixed = || {
            let mut data = data();
            data.push(Buf::zeroed(1));
            data
        };
        for data in [&data as &dyn Fn() -> Segments, &mixed] {
            assert!(panics(&|| assert!(data().iter().count() > 0)) && panics(&|| drop(data().into_iter())));
            assert!(panics(&|| assert!(data().iter_mut().count() > 0)));
            assert!(panics(&|| {
                let mut data = data();
                while data.pop().is_some() {}
            }));
        }
        // A list of both kinds is copied as a whole.
        let mut both = mixed();
        both.fill(7);
        let mut out = [0; 513];
        assert_eq!((both.copy_to(&mut out), out), (513, [7; 513]));
    }

    /// While another thread changes the bytes all the time, a reader sees a fixed copy of each
    /// portion.
    #[test]
    fn what_is_seen_does_not_change() {
        let map = map(8192);
        let data = Segments::from(SharedRange::new(&map, 0, 8192).unwrap());
        let over = AtomicBool::new(false);
        std::thread::scope(|s| {
            s.spawn(|| {
                for byte in (0..=255).cycle().take_while(|_| !over.load(Ordering::Relaxed)) {
                    copy_to_shared(map.words(), 0, &[byte; 8192]);
                }
            });
            for _ in 0..2000 {
                data.consume(0, 8192, |_, part| {
                    let sum = || part.iter().map(|&b| u64::from(b)).sum::<u64>();
                    assert_eq!(sum(), sum());
                });
            }
            over.store(true, Ordering::Relaxed);
        });
    }
}
