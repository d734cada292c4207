//! A ublk device of this server, `/dev/ublkcN`: the memory in which the kernel describes requests,
//! and the file for I/O commands ([`RingOp::Ublk`](super::RingOp::Ublk)).
//!
//! Contract: the kernel writes the data of requests to the address that a command passed, at most
//! [`UblkDeviceQueue::io_bytes_max`] bytes. The ring passes no shorter buffer, and holds each one
//! until the command completes. The limit is read from the kernel after the file was opened: a
//! device keeps its number and its limit while it is open.

use super::ublk_control::UblkControl;
use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Pause between two attempts to open a device. After it was created, udev may still have to change
/// its owner.
const OPEN_PAUSE: Duration = Duration::from_millis(20);

/// Time limit of the command that reads the device's info.
const INFO_LIMIT: Duration = Duration::from_secs(10);

/// `UBLK_U_CMD_GET_DEV_INFO2`, the length of its answer, and the offset of the path's length in it.
const GET_INFO: u32 = 0x8020_7512;
const INFO: usize = 64;
const PATH_LENGTH: usize = 24;

/// Words of a descriptor (`struct ublksrv_io_desc`).
const WORDS: usize = 3;
/// The largest number of requests per queue, for which the driver reserves offsets.
const DEPTH_MAX: usize = 4096;

/// An open ublk device.
#[derive(Debug)]
pub struct UblkDevice {
    number: u32,
    queues: Vec<Arc<UblkDeviceQueue>>,
}

/// A queue of an open ublk device. The device is open as long as one of its queues is used.
#[derive(Debug)]
pub struct UblkDeviceQueue {
    file: Arc<OwnedFd>,
    depth: u16,
    io_bytes_max: usize,
    descriptors: UblkIoDescMmap,
}

impl UblkDevice {
    /// Opens `/dev/ublkcN` and maps the descriptors of its queues. Retries for `patience` while the
    /// file is missing, busy, or not yet permitted.
    ///
    /// # Errors
    /// The last error of these, and other errors of the system.
    pub fn open(control: &UblkControl, number: u32, patience: Duration) -> io::Result<UblkDevice> {
        let path = format!("/dev/ublkc{number}");
        let end = Instant::now() + patience;
        let file = loop {
            match open(&path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) {
                Err(Errno::NOENT | Errno::ACCESS | Errno::PERM | Errno::BUSY) if Instant::now() < end => {
                    std::thread::sleep(OPEN_PAUSE);
                }
                opened => break Arc::new(opened?),
            }
        };
        let info = get_ublk_device_info(control, number, &path)?;
        let (queues, depth) = (u16_at(&info, 0), u16_at(&info, 2));
        let io_bytes_max = u32::from_ne_bytes([info[8], info[9], info[10], info[11]]) as usize;
        let page = rustix::param::page_size();
        let stride = (DEPTH_MAX * WORDS * size_of::<u64>()).next_multiple_of(page);
        let bytes = (usize::from(depth) * WORDS * size_of::<u64>()).next_multiple_of(page);
        let map_queue = |queue: u16| {
            let descriptors = UblkIoDescMmap::new(&file, usize::from(queue) * stride, bytes)?;
            Ok(Arc::new(UblkDeviceQueue { file: Arc::clone(&file), depth, io_bytes_max, descriptors }))
        };
        Ok(UblkDevice { number, queues: (0..queues).map(map_queue).collect::<io::Result<_>>()? })
    }

    /// Number of the device.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.number
    }

    /// The queues, in their order.
    #[must_use]
    pub fn queues(&self) -> &[Arc<UblkDeviceQueue>] {
        &self.queues
    }
}

impl UblkDeviceQueue {
    /// Number of tags.
    #[must_use]
    pub fn depth(&self) -> u16 {
        self.depth
    }

    /// The longest data of a request in bytes; each buffer has at least this length.
    #[must_use]
    pub fn io_bytes_max(&self) -> usize {
        self.io_bytes_max
    }

    /// The descriptor of the request that was fetched with `tag`. It is constant from the
    /// completion of the fetch to the next command with this tag.
    ///
    /// # Panics
    /// If there is no such tag.
    #[must_use]
    pub fn descriptor(&self, tag: u16) -> [u64; WORDS] {
        assert!(tag < self.depth, "tag {tag} of {}", self.depth);
        let words = &self.descriptors.words()[usize::from(tag) * WORDS..][..WORDS];
        // The completion of the fetch orders these reads after the kernel's writes.
        [0, 1, 2].map(|word| words[word].load(Ordering::Relaxed))
    }

    pub(super) fn raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}

/// Reads the info of the device. The kernel checks that `path` is the device.
fn get_ublk_device_info(control: &UblkControl, number: u32, path: &str) -> io::Result<Vec<u8>> {
    let mut buffer = path.as_bytes().to_vec();
    buffer.push(0);
    let path_len = buffer.len();
    buffer.resize(path_len + INFO, 0);
    let mut command = [0; 32];
    command[..4].copy_from_slice(&number.to_ne_bytes());
    command[4..6].copy_from_slice(&u16::MAX.to_ne_bytes());
    command[PATH_LENGTH..PATH_LENGTH + 2].copy_from_slice(&(path_len as u16).to_ne_bytes());
    let mut answer = control.execute(GET_INFO, &command, buffer, INFO_LIMIT)?;
    Ok(answer.split_off(path_len))
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_ne_bytes([bytes[at], bytes[at + 1]])
}

/// The descriptors of a queue, written by the kernel.
#[derive(Debug)]
struct UblkIoDescMmap {
    base: NonNull<AtomicU64>,
    bytes: usize,
}

// SAFETY: the memory consists of atomics that are only read, and the mapping lives as long as this
// value.
unsafe impl Send for UblkIoDescMmap {}
// SAFETY: as above.
unsafe impl Sync for UblkIoDescMmap {}

impl UblkIoDescMmap {
    fn new(file: &OwnedFd, offset: usize, bytes: usize) -> io::Result<UblkIoDescMmap> {
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: a new mapping at an address that the system chooses touches no other memory.
        let base = unsafe { mmap(std::ptr::null_mut(), bytes, ProtFlags::READ, flags, file, offset as u64) }?;
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(UblkIoDescMmap { base, bytes })
    }

    fn words(&self) -> &[AtomicU64] {
        // SAFETY: mapped with this length, readable and page-aligned, and unmapped in drop. The
        // kernel writes there at any time, as to atomics; loads of 64 bits need no write access.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.bytes / size_of::<u64>()) }
    }
}

impl Drop for UblkIoDescMmap {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` with this very length; each user of the mapping borrows this
        // value.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.bytes) };
        debug_assert!(unmapped.is_ok(), "munmap: {unmapped:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use std::io::Write;
    use std::sync::Arc;

    /// A memfd stands for the device.
    fn queue(depth: u16, io_bytes_max: usize, words: &[u64]) -> UblkDeviceQueue {
        let file = memfd_create("ublk", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, 4096).unwrap();
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        std::fs::File::from(file.try_clone().unwrap()).write_all(&bytes).unwrap();
        let descriptors = UblkIoDescMmap::new(&file, 0, 4096).unwrap();
        UblkDeviceQueue { file: Arc::new(file), depth, io_bytes_max, descriptors }
    }

    #[test]
    fn a_descriptor_is_found_by_its_tag() {
        let queue = queue(2, 4096, &[1, 2, 3, 4, 5, 6, 7, 8, 9]);
        assert_eq!((queue.descriptor(0), queue.descriptor(1)), ([1, 2, 3], [4, 5, 6]));
        assert!(std::panic::catch_unwind(|| queue.descriptor(2)).is_err());
    }

    /// A command to a file that knows none fails, and its buffer comes back.
    #[test]
    fn a_refused_command_returns_its_buffer() {
        let ring = crate::Ring::new().unwrap();
        let user = ring.user();
        let queue = Arc::new(queue(1, 4096, &[]));
        let data = udm_core::Buf::zeroed(4096).into();
        user.push(7, crate::RingOp::Ublk { queue, code: 0xc010_7520, command: [0; 16], data });
        let mut done = Vec::new();
        while done.is_empty() {
            ring.wait(Some(Duration::from_secs(10)));
            user.take(&mut done);
        }
        assert_eq!((done[0].tag, done[0].result), (7, Err(libc::EOPNOTSUPP)));
        assert_eq!(done[0].data.len(), 4096);
    }
}
