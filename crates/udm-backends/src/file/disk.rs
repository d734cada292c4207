//! An open disk: a regular file or block device, independent of the names that lead to it.
//!
//! Contract: a [`OpenDisks`] has at most one [`OpenDisk`] per [`DiskIdentity`] as long as a device
//! uses it. State that all names of a disk share is in here: direct I/O or page cache, size,
//! exclusive claim, and failed syncs. The lock of the map is held for look-ups only, never during a
//! call to the file system.

use super::sync::DescriptorSyncTracker;
use super::{DirectAlignment, open};
use crate::DiskIdentity;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{self, FileType, Stat};
use rustix::io::Errno;
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;
use udm_core::{Sectors, SharedDiskState};
use udm_runtime::drop_blocking;

/// The open disks of a process.
#[derive(Default)]
pub(crate) struct OpenDisks {
    map: Mutex<HashMap<DiskIdentity, Weak<OpenDisk>>>,
    /// Number of cores that may use a disk.
    pub(super) cores: usize,
    pub(super) closing: Arc<ClosingDisks>,
}

/// Disks that another thread is closing. Their claims are held until that is done.
#[derive(Default)]
pub(super) struct ClosingDisks {
    disks: Mutex<Vec<DiskIdentity>>,
    closed: Condvar,
}

/// The longest wait for a disk that is being closed. A request that hangs may keep a descriptor
/// open for longer; then its claim holds.
const CLOSE_MAX: Duration = Duration::from_secs(5);

impl ClosingDisks {
    fn disks(&self) -> MutexGuard<'_, Vec<DiskIdentity>> {
        self.disks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `identity` is closed, if it is being closed.
    pub(super) fn wait(&self, identity: DiskIdentity) {
        let is_closing = |disks: &mut Vec<DiskIdentity>| disks.contains(&identity);
        // If the disk is not closed in time, its claim refuses the new open.
        drop(self.closed.wait_timeout_while(self.disks(), CLOSE_MAX, is_closing));
    }
}

/// Marks a disk as being closed until this is dropped.
struct ClosingDiskGuard(Arc<ClosingDisks>, DiskIdentity);

impl Drop for ClosingDiskGuard {
    fn drop(&mut self) {
        let mut disks = self.0.disks();
        if let Some(at) = disks.iter().position(|one| *one == self.1) {
            disks.swap_remove(at);
        }
        self.0.closed.notify_all();
    }
}

impl OpenDisks {
    /// Creates an empty map for `cores` cores.
    pub(crate) fn new(cores: usize) -> OpenDisks {
        OpenDisks { cores, ..OpenDisks::default() }
    }

    fn map(&self) -> MutexGuard<'_, HashMap<DiskIdentity, Weak<OpenDisk>>> {
        self.map.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the disk, if it is open.
    pub(super) fn get(&self, identity: DiskIdentity) -> Option<Arc<OpenDisk>> {
        self.map().get(&identity)?.upgrade()
    }

    /// Adds a disk that was just opened. Returns false if another thread has added it already.
    pub(super) fn put(&self, disk: &Arc<OpenDisk>) -> bool {
        let mut map = self.map();
        map.retain(|_, disk| disk.strong_count() > 0);
        if map.contains_key(&disk.identity) {
            return false;
        }
        map.insert(disk.identity, Arc::downgrade(disk));
        true
    }
}

/// An open disk, shared by the devices of all its names.
pub(super) struct OpenDisk {
    pub identity: DiskIdentity,
    /// The name by which the disk was first opened, for messages.
    pub path: PathBuf,
    /// Alignment for direct I/O; `None` if the page cache is used.
    pub direct: Option<DirectAlignment>,
    pub is_block: bool,
    pub shared_disk_state: SharedDiskState,
    /// The file is on a memory file system and uses the page cache, so no operation waits for
    /// storage.
    pub in_memory: bool,
    /// A sync has failed.
    pub failed: Arc<AtomicBool>,
    closing: Arc<ClosingDisks>,
    /// Descriptors, shared by the devices.
    fds: Mutex<DiskDescriptorsByMode>,
    /// Held while the size is read.
    looking: Mutex<()>,
    /// Block size in bytes. The size of the disk is rounded down to whole blocks.
    block: u64,
    /// Size in sectors when it was last read.
    size: AtomicU64,
    /// The largest value that `size` ever had.
    reach: AtomicU64,
    /// The disk is smaller than `reach`, or was so when a request found its end.
    cut: AtomicBool,
}

/// The descriptors of a disk. They stay open as long as the disk.
#[derive(Default)]
pub(super) struct DiskDescriptorsByMode {
    read: Option<PerCoreDescriptors>,
    write: Option<PerCoreDescriptors>,
    /// For reading and writing, and exclusive to this process.
    alone: Option<PerCoreDescriptors>,
}

/// A descriptor and its syncs.
pub(super) struct SyncTrackedDescriptor {
    pub fd: Arc<OwnedFd>,
    /// Another descriptor of the same disk, to which the kernel reports lost data independently of
    /// `fd`. `None` if the kernel reports no lost data: with direct I/O, and for read-only use.
    pub witness: Option<Arc<OwnedFd>>,
    pub syncs: Arc<DescriptorSyncTracker>,
}

/// Descriptors of one kind: one per core, up to a maximum.
pub(super) type PerCoreDescriptors = Arc<[SyncTrackedDescriptor]>;

impl DiskDescriptorsByMode {
    /// Returns open descriptors that can be used in this way, if there are any.
    pub(super) fn get(&self, write: bool, alone: bool) -> Option<PerCoreDescriptors> {
        let read = self.read.as_ref().filter(|_| !write);
        let write = self.write.as_ref().filter(|_| !alone);
        read.or(self.alone.as_ref()).or(write).cloned()
    }

    /// Adds descriptors.
    pub(super) fn put(&mut self, handles: PerCoreDescriptors, write: bool, alone: bool) {
        *(match (write, alone) {
            (false, _) => &mut self.read,
            (true, false) => &mut self.write,
            (true, true) => &mut self.alone,
        }) = Some(handles);
    }
}

impl OpenDisk {
    pub(super) fn new(
        identity: DiskIdentity,
        path: PathBuf,
        direct: Option<DirectAlignment>,
        in_memory: bool,
        block: u32,
        closing: Arc<ClosingDisks>,
    ) -> OpenDisk {
        OpenDisk {
            identity,
            path,
            direct,
            in_memory: in_memory && direct.is_none(),
            is_block: matches!(identity, DiskIdentity::Block { .. }),
            shared_disk_state: SharedDiskState::default(),
            failed: Arc::default(),
            closing,
            fds: Mutex::default(),
            looking: Mutex::default(),
            block: u64::from(block),
            size: AtomicU64::new(0),
            reach: AtomicU64::new(0),
            cut: AtomicBool::new(false),
        }
    }

    pub(super) fn fds(&self) -> MutexGuard<'_, DiskDescriptorsByMode> {
        self.fds.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the size again, from an open descriptor. The size is 0 if less than a block is left.
    pub(super) fn refresh(&self) -> Result<Sectors, Errno> {
        let handles = self.fds().get(false, false);
        let Some(SyncTrackedDescriptor { fd, .. }) = handles.iter().flat_map(|handles| handles.iter()).next()
        else {
            return Ok(self.size());
        };
        // One thread at a time: an older size must not replace a newer one.
        let _looks = self.looking.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = open::query_fd_size_bytes(fd.as_fd(), &fs::fstat(fd)?)?;
        let size = Sectors::from_bytes(bytes / self.block * self.block).0;
        // Relaxed is enough: each number is independent, and lanes read it once per batch.
        self.size.store(size, Relaxed);
        let reach = self.reach.fetch_max(size, Relaxed);
        self.cut.store(size < reach, Relaxed);
        Ok(Sectors(size))
    }

    /// Bytes in a block.
    pub(super) fn block(&self) -> u32 {
        self.block as u32
    }

    /// The size when it was last read.
    pub(super) fn size(&self) -> Sectors {
        Sectors(self.size.load(Relaxed))
    }

    /// Sectors that requests may access. A disk that shrinks keeps its reach: requests to the
    /// missing part fail, and succeed if the part returns.
    pub(super) fn reach(&self) -> Sectors {
        Sectors(self.reach.load(Relaxed))
    }

    /// Returns true if a write must first check that its range still exists, because it would
    /// extend a truncated file.
    pub(super) fn is_truncated(&self) -> bool {
        self.cut.load(Relaxed)
    }

    /// Records that a request found the end of the disk at byte `end`, before its expected end.
    pub(super) fn note_truncation(&self, end: u64) {
        self.size.fetch_min(Sectors::from_bytes(end / self.block * self.block).0, Relaxed);
        self.cut.store(true, Relaxed);
    }
}

/// Closes the descriptors. On a core, another thread closes them.
impl Drop for OpenDisk {
    fn drop(&mut self) {
        let fds = std::mem::take(self.fds.get_mut().unwrap_or_else(PoisonError::into_inner));
        self.closing.disks().push(self.identity);
        let guard = ClosingDiskGuard(Arc::clone(&self.closing), self.identity);
        // The descriptors are dropped before the guard.
        drop_blocking((fds, guard));
    }
}

impl DiskIdentity {
    /// Identity of the disk that `stat` describes; `None` if it is no disk.
    pub(crate) fn of(stat: &Stat) -> Option<DiskIdentity> {
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => Some(DiskIdentity::File { device: stat.st_dev, inode: stat.st_ino }),
            FileType::BlockDevice => Some(DiskIdentity::Block { number: stat.st_rdev }),
            _ => None,
        }
    }
}
