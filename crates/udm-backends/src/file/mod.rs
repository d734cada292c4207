//! `file:PATH?direct=on&readonly=on&exclusive=off`, or a path alone: a regular file or a block
//! device, through the core's io_uring.
//!
//! The parts, in the order in which a device and then a request meet them:
//!
//! * `open`: resolves the path, opens descriptors, finds the limits. `warnings`: of odd files.
//! * `disk`: the open disk, shared by all its names. [`claim`]: its exclusive use.
//! * `lane`: the data path of one core: slots, the ring, the end of a request.
//! * `request`: a request and its steps, each one operation.
//! * [`inline_io`]: operations that the core executes itself.
//! * `flush`: one `fdatasync` for all flushes that wait. [`sync`]: the result that it may have.
//! * `outcome`: a completed operation: the next one, or the result.
//! * [`grow`], `extents`: a larger file; its data and holes. No request meets them.
//!
//! The rules:
//!
//! * **Disk.** A path is resolved when a table is loaded, and means the disk to which it leads
//!   then: the inode of a regular file, the number of a block device ([`crate::DiskIdentity`]).
//!   Several names of one disk (hard links, two device nodes) are separate devices over one disk.
//!   So they can be paths.
//! * **Page cache.** A block device is opened with `O_DIRECT` unless `direct=off`: two nodes of one
//!   disk have two page caches, and one cache does not see writes through the other. A regular file
//!   has one cache for all names and is opened without `O_DIRECT`, unless `direct=on`. Then
//!   unaligned data goes through an aligned buffer. Both modes at once are refused, because each
//!   would undo the other.
//! * **Execution.** The ring executes requests. For a file on tmpfs or ramfs the core does it
//!   itself ([`inline_io`]): the ring would pass each request to a kernel worker, at two context
//!   switches.
//! * **Exclusive use.** Unless `exclusive=off`, a disk that is written has no other writer. A block
//!   device is opened with `O_EXCL`, which mounts, swap and LVM respect too. A regular file is
//!   locked as QEMU locks it ([`claim`]).
//! * **Size.** Rounded down to sectors (with `direct=on` to the block of direct I/O), and read
//!   again at each load, so a disk may grow under a table that is loaded again. If a disk shrank,
//!   requests to the missing part fail with a path error. A read beyond the end of the file, a
//!   write of the last block, or a load notices that. From then on each write checks first if its
//!   range exists, so no write extends a truncated file. Before that, a write does: to check the
//!   length before each write would cost an operation each. A regular file is extended on request
//!   ([`grow`]).
//! * **Durability.** The volatile cache is the page cache, or that of the disk. A flush is
//!   `fdatasync`, FUA is `RWF_DSYNC`. If the kernel could not write data back, it reports that
//!   once, to one sync per descriptor. So a sync through the page cache counts only when all syncs
//!   that were in flight with it have ended, and a failed sync stays failed ([`sync`]).
//! * **Errors** follow the kernel's meaning of the errno. EIO can be an error of the path or of the
//!   medium, so another block is read. If that fails too, it is a path error. Otherwise the request
//!   is retried once, and if it fails again, it is a medium error. A block in the page cache would
//!   prove nothing and is skipped. If no other block is available, it is a path error, as in the
//!   kernel.
//! * A discard punches a hole; so does a write-zeroes, unless it must keep its blocks
//!   (`ZERO_RANGE`). If the file system supports neither, zeroes are written.

mod claim;
mod disk;
mod extents;
mod flush;
mod grow;
mod inline_io;
mod lane;
#[cfg(test)]
mod lane_tests;
#[cfg(test)]
mod name_tests;
mod open;
mod outcome;
mod request;
mod sync;
#[cfg(test)]
mod tests;
mod warnings;

pub(crate) use claim::lock_file_against_writers;
pub(crate) use disk::OpenDisks;

use disk::{OpenDisk, PerCoreDescriptors};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use std::sync::Arc;
use udm_core::errno::EOPNOTSUPP;
use udm_core::{
    Cx, Device, DeviceControlError, DeviceId, DiskInUseByOtherProgram, ExtentKind, Extents,
    GrowResultCallback, GrowthPolicy, InterProcessDiskLock, Lane, Limits, Sector, Sectors, SharedDiskState,
};
use udm_runtime::Ring;

/// The longest read or write in sectors (32 MiB), as NBD's default limit of payloads.
const MAX_SECTORS: Sectors = Sectors(32 << 11);

/// The longest discard or write-zeroes in sectors (256 MiB). If the file system does not support
/// the operation, that many zeroes are written.
const MAX_RANGE: Sectors = Sectors(256 << 11);

/// Alignment that direct I/O requires, in bytes. Both values are powers of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct DirectAlignment {
    /// Alignment of memory.
    memory: usize,
    /// Alignment of offsets and lengths.
    offset: u64,
}

/// A device for one name of a file or block device.
pub(crate) struct FileDevice {
    id: DeviceId,
    /// Dropped before `disk`: the disk holds the last reference and closes the descriptors on a
    /// thread.
    handles: PerCoreDescriptors,
    disk: Arc<OpenDisk>,
    /// All limits except the size, which is in `disk`.
    limits: Limits,
    growth: Option<GrowthPolicy>,
}

impl Device for FileDevice {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        let ring = Ring::of(cx)
            .ok_or_else(|| DeviceControlError::new(EOPNOTSUPP, "a file needs a core with an io_uring"))?;
        let handle = &self.handles[cx.core().index() % self.handles.len()];
        Ok(Box::new(lane::FileLane::new(ring.user(), &self.disk, handle, self.limits)))
    }

    fn limits(&self) -> Limits {
        Limits { size: self.disk.size(), ..self.limits }
    }

    fn refresh_size(&self) {
        // If the size cannot be read, the last one stays valid.
        let _ = self.disk.refresh();
    }

    fn may_shrink(&self) -> bool {
        !self.disk.is_block
    }

    fn growth(&self) -> Option<GrowthPolicy> {
        self.growth
    }

    fn grow(&self, size: Sectors, then: GrowResultCallback) {
        grow::start_file_growth(&self.disk, &self.handles[0].fd, self.limits.read_only, size, then);
    }

    fn extents(&self, from: Sector, len: Sectors, out: &mut Extents) {
        if self.disk.is_block {
            out.push(len, ExtentKind::Data);
        } else {
            // Any descriptor will do: nothing else uses its file position.
            extents::append_file_extents(self.handles[0].fd.as_fd(), from, len, out);
        }
    }

    fn shared_disk_state(&self) -> Option<&SharedDiskState> {
        Some(&self.disk.shared_disk_state)
    }

    /// Locks a file with `flock`. A block device needs no lock: it is opened exclusively for
    /// writing.
    fn lock(&self) -> Result<Option<InterProcessDiskLock>, DiskInUseByOtherProgram> {
        if self.disk.is_block || self.limits.read_only {
            return Ok(None);
        }
        let fd = Arc::clone(&self.handles[0].fd);
        let mut tries = 0;
        loop {
            match flock(&fd, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Some(Arc::new(FlockGuard(fd)))),
                // As for a block device: the rings of a killed process release the lock a little
                // later.
                Err(Errno::WOULDBLOCK) if tries < open::CLAIM_TRIES => {
                    tries += 1;
                    std::thread::sleep(open::CLAIM_PAUSE);
                }
                Err(Errno::WOULDBLOCK) => return Err(DiskInUseByOtherProgram),
                // The file system has no locks.
                Err(_) => return Ok(None),
            }
        }
    }
}

/// A file that is locked until this is dropped.
struct FlockGuard(Arc<OwnedFd>);

impl Drop for FlockGuard {
    fn drop(&mut self) {
        // Otherwise the lock would end with the last descriptor.
        let _ = flock(&self.0, FlockOperation::Unlock);
    }
}
