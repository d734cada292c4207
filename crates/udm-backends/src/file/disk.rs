//! A disk that is open: a regular file or block device as such, whatever names lead to it.
//!
//! Contract: within a [`OpenDisks`] there is one [`OpenDisk`] to an [`DiskIdentity`], for as long as a device
//! of it lives. What must be one for all names of a disk is here: whether it goes past the page
//! cache, how large it is, whether this process has it alone, and whether a sync has failed. The
//! map's lock is held for look-ups only, never while the file system is asked.

use super::sync::SyncTracker;
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
    /// How many cores may use one.
    pub(super) cores: usize,
    pub(super) closing: Arc<Closing>,
}

/// Disks that are being closed, on another thread: until that is done their claims are held.
#[derive(Default)]
pub(super) struct Closing {
    disks: Mutex<Vec<DiskIdentity>>,
    closed: Condvar,
}

/// The longest wait for a disk that is being closed. A descriptor may be kept for longer by a
/// request that hangs: then its claim holds.
const CLOSE_MAX: Duration = Duration::from_secs(5);

impl Closing {
    fn disks(&self) -> MutexGuard<'_, Vec<DiskIdentity>> {
        self.disks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `identity` is closed, if it is being closed.
    pub(super) fn wait(&self, identity: DiskIdentity) {
        let is_closing = |disks: &mut Vec<DiskIdentity>| disks.contains(&identity);
        // A disk that is not closed in time is refused by its claim.
        drop(self.closed.wait_timeout_while(self.disks(), CLOSE_MAX, is_closing));
    }
}

/// A disk that is being closed, until this is dropped.
struct ClosingGuard(Arc<Closing>, DiskIdentity);

impl Drop for ClosingGuard {
    fn drop(&mut self) {
        let mut disks = self.0.disks();
        if let Some(at) = disks.iter().position(|one| *one == self.1) {
            disks.swap_remove(at);
        }
        self.0.closed.notify_all();
    }
}

impl OpenDisks {
    /// None open, for `cores` cores.
    pub(crate) fn new(cores: usize) -> OpenDisks {
        OpenDisks { cores, ..OpenDisks::default() }
    }

    fn map(&self) -> MutexGuard<'_, HashMap<DiskIdentity, Weak<OpenDisk>>> {
        self.map.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The disk, when it is open.
    pub(super) fn get(&self, identity: DiskIdentity) -> Option<Arc<OpenDisk>> {
        self.map().get(&identity)?.upgrade()
    }

    /// Takes in a disk that was just opened; false when another thread was faster.
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

/// See the module's documentation.
pub(super) struct OpenDisk {
    pub identity: DiskIdentity,
    /// The name that it was opened by first, for messages.
    pub path: PathBuf,
    /// What direct I/O asks for; `None` when the page cache is used.
    pub direct: Option<DirectAlignment>,
    pub is_block: bool,
    pub shared_disk_state: SharedDiskState,
    /// It is a file in memory, that the page cache is used for: nothing of it waits for storage.
    pub in_memory: bool,
    /// A sync has failed.
    pub failed: Arc<AtomicBool>,
    closing: Arc<Closing>,
    /// Descriptors that devices share.
    fds: Mutex<DescriptorSets>,
    /// Whoever reads the size.
    looking: Mutex<()>,
    /// Bytes in a block: the size counts whole ones.
    block: u64,
    /// In sectors, as of the last look.
    size: AtomicU64,
    /// The largest that `size` ever was.
    reach: AtomicU64,
    /// It is smaller than `reach`, or was when a request found its end.
    cut: AtomicBool,
}

/// The descriptors of a disk. They stay open for as long as it does.
#[derive(Default)]
pub(super) struct DescriptorSets {
    read: Option<DiskHandles>,
    write: Option<DiskHandles>,
    /// For both, and for this process alone.
    alone: Option<DiskHandles>,
}

/// A descriptor and its syncs.
pub(super) struct DiskHandle {
    pub fd: Arc<OwnedFd>,
    /// Another descriptor of the same disk, whose syncs are told of lost data apart from those
    /// through `fd`; `None` where no such thing is told: past the page cache, and where nothing is
    /// written.
    pub witness: Option<Arc<OwnedFd>>,
    pub syncs: Arc<SyncTracker>,
}

/// Descriptors of one kind: a core has its own, as far as there are enough.
pub(super) type DiskHandles = Arc<[DiskHandle]>;

impl DescriptorSets {
    /// Those that serve, if there are any.
    pub(super) fn get(&self, write: bool, alone: bool) -> Option<DiskHandles> {
        let read = self.read.as_ref().filter(|_| !write);
        let write = self.write.as_ref().filter(|_| !alone);
        read.or(self.alone.as_ref()).or(write).cloned()
    }

    /// Takes some in.
    pub(super) fn put(&mut self, handles: DiskHandles, write: bool, alone: bool) {
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
        closing: Arc<Closing>,
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

    pub(super) fn fds(&self) -> MutexGuard<'_, DescriptorSets> {
        self.fds.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the size again, from a descriptor that is open: 0 when less than a block is left.
    pub(super) fn refresh(&self) -> Result<Sectors, Errno> {
        let handles = self.fds().get(false, false);
        let Some(DiskHandle { fd, .. }) = handles.iter().flat_map(|handles| handles.iter()).next() else {
            return Ok(self.size());
        };
        // One look at a time: an older one must not undo a newer.
        let _looks = self.looking.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = open::size(fd.as_fd(), &fs::fstat(fd)?)?;
        let size = Sectors::from_bytes(bytes / self.block * self.block).0;
        // Relaxed throughout: each number stands for itself, and lanes look once a batch.
        self.size.store(size, Relaxed);
        let reach = self.reach.fetch_max(size, Relaxed);
        self.cut.store(size < reach, Relaxed);
        Ok(Sectors(size))
    }

    /// Bytes in a block.
    pub(super) fn block(&self) -> u32 {
        self.block as u32
    }

    /// The size as of the last look.
    pub(super) fn size(&self) -> Sectors {
        Sectors(self.size.load(Relaxed))
    }

    /// How far requests may reach. A disk that shrinks keeps its reach: what is missing is found
    /// missing, and may come back.
    pub(super) fn reach(&self) -> Sectors {
        Sectors(self.reach.load(Relaxed))
    }

    /// True when writes must look first whether what they write to is still there: a write would
    /// make a file longer again.
    pub(super) fn is_cut(&self) -> bool {
        self.cut.load(Relaxed)
    }

    /// A request found that byte `end` is missing, where there should be more.
    pub(super) fn found_cut(&self, end: u64) {
        self.size.fetch_min(Sectors::from_bytes(end / self.block * self.block).0, Relaxed);
        self.cut.store(true, Relaxed);
    }
}

/// Closes what is open. Where a core is the last to let go, another thread does.
impl Drop for OpenDisk {
    fn drop(&mut self) {
        let fds = std::mem::take(self.fds.get_mut().unwrap_or_else(PoisonError::into_inner));
        self.closing.disks().push(self.identity);
        let guard = ClosingGuard(Arc::clone(&self.closing), self.identity);
        // The descriptors before the guard.
        drop_blocking((fds, guard));
    }
}

impl DiskIdentity {
    /// What `stat` is about; `None` when that is no disk.
    pub(super) fn of(stat: &Stat) -> Option<DiskIdentity> {
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => Some(DiskIdentity::File { device: stat.st_dev, inode: stat.st_ino }),
            FileType::BlockDevice => Some(DiskIdentity::Block { number: stat.st_rdev }),
            _ => None,
        }
    }
}
