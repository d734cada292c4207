//! `file:PATH?direct=on&readonly=on&exclusive=off`, or a path alone: a regular file or a block
//! device, by the core's io_uring.
//!
//! * **Which disk.** A path is looked up when a table is loaded, and means the disk that it leads
//!   to then: the inode of a regular file, the number of a block device ([`crate::Identity`]).
//!   Several names of one disk (hard links, twin device nodes) are devices of their own, so that
//!   they can be paths, over one disk: one size, one way past or through the page cache, one fate
//!   of its syncs.
//! * **Page cache.** A block device is opened with `O_DIRECT` unless `direct=off`: two nodes of one
//!   disk have two page caches, and what is written through one is not seen through the other. A
//!   regular file has one cache for all its names and is opened without, unless `direct=on`; data
//!   whose memory is not aligned for that goes through a buffer that is. Both ways at once are
//!   refused: each would undo the other's work.
//! * **Who does it.** The ring, which never waits; for a file on a file system that is memory the
//!   core itself ([`here`]).
//! * **Exclusive.** Unless `exclusive=off`, a disk that is written has no other writer: a block
//!   device is opened with `O_EXCL`, which mounts, swap and LVM respect too; a regular file is
//!   locked as QEMU locks it ([`claim`]).
//! * **Size.** Rounded down to sectors (with `direct=on` to the block of direct I/O), read again at
//!   each load, so that a disk may grow under a table that is then loaded anew. A disk that shrank
//!   gives a path error where it is missing, and is not made longer by writes once that is known;
//!   a write of its last block looks first. So what was cut off is missing for good, and seen.
//!   A regular file is made longer when it is asked to be ([`grow`]).
//! * **Durable.** The volatile cache is the page cache, or the disk's own, so a flush is
//!   `fdatasync`, and FUA is `RWF_DSYNC`. With the page cache a failed sync is for good, a medium
//!   error ([`sync`]).
//! * **Errors** are the kernel's, by errno. EIO says least: another block is read, and when that
//!   fails too the path is to blame. Else the request is tried once more, and when it fails again
//!   the medium is to blame. A block that comes from the page cache would prove nothing and is
//!   passed over; where none can be had that does not, the path is to blame, as in the kernel.
//! * A discard punches a hole; so does a write-zeroes, unless it must keep its blocks
//!   (`ZERO_RANGE`). Where the file system can do neither, zeroes are written.

mod claim;
mod disk;
mod extents;
mod flush;
mod grow;
mod here;
mod lane;
#[cfg(test)]
mod lane_tests;
#[cfg(test)]
mod name_tests;
mod open;
mod outcome;
mod slot;
mod sync;
#[cfg(test)]
mod tests;
mod warnings;

pub(crate) use disk::Disks;

use disk::{Disk, Handles};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use std::sync::Arc;
use udm_core::errno::EOPNOTSUPP;
use udm_core::{
    Commons, Content, Cx, Device, DeviceId, DiskLock, DiskTaken, Extents, Grown, Growth, Lane, Limits,
    OpenError, Sector, Sectors,
};
use udm_runtime::Ring;

/// The longest read or write in sectors (32 MiB): the most that an NBD client may ask for.
const MAX_SECTORS: Sectors = Sectors(32 << 11);

/// The longest discard or write-zeroes in sectors (256 MiB): where the file system can't, it is a
/// write of so many zeroes.
const MAX_RANGE: Sectors = Sectors(256 << 11);

/// What direct I/O asks for, in bytes, both powers of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Direct {
    /// Alignment of memory.
    memory: usize,
    /// Alignment of offsets and lengths.
    offset: u64,
}

/// A name of a file or block device.
pub(crate) struct File {
    id: DeviceId,
    /// Before the disk, which is the last to let go of them.
    handles: Handles,
    disk: Arc<Disk>,
    /// But for the size.
    limits: Limits,
    growth: Option<Growth>,
}

impl Device for File {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, OpenError> {
        let ring =
            Ring::of(cx).ok_or_else(|| OpenError::new(EOPNOTSUPP, "a file needs a core with an io_uring"))?;
        let handle = &self.handles[cx.core().index() % self.handles.len()];
        Ok(Box::new(lane::FileLane::new(ring.user(), &self.disk, handle, self.limits)))
    }

    fn limits(&self) -> Limits {
        Limits { size: self.disk.size(), ..self.limits }
    }

    fn look_again(&self) {
        // What can't be looked at keeps the size that it had.
        let _ = self.disk.refresh();
    }

    fn can_be_cut(&self) -> bool {
        !self.disk.is_block
    }

    fn growth(&self) -> Option<Growth> {
        self.growth
    }

    fn grow(&self, size: Sectors, then: Grown) {
        grow::start(&self.disk, &self.handles[0].fd, self.limits.read_only, size, then);
    }

    fn extents(&self, from: Sector, len: Sectors, out: &mut Extents) {
        if self.disk.is_block {
            out.push(len, Content::Data);
        } else {
            // Any of them: its position is not used otherwise.
            extents::extents(self.handles[0].fd.as_fd(), from, len, out);
        }
    }

    fn commons(&self) -> Option<&Commons> {
        Some(&self.disk.commons)
    }

    /// By `flock`. A block device that is written to is exclusive as it is.
    fn lock(&self) -> Result<Option<DiskLock>, DiskTaken> {
        if self.disk.is_block || self.limits.read_only {
            return Ok(None);
        }
        let fd = Arc::clone(&self.handles[0].fd);
        let mut tries = 0;
        loop {
            match flock(&fd, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Some(Arc::new(Locked(fd)))),
                // As a block device: the rings of a process that was killed let go a little later.
                Err(Errno::WOULDBLOCK) if tries < open::CLAIM_TRIES => {
                    tries += 1;
                    std::thread::sleep(open::CLAIM_PAUSE);
                }
                Err(Errno::WOULDBLOCK) => return Err(DiskTaken),
                // A file system that knows no locks.
                Err(_) => return Ok(None),
            }
        }
    }
}

/// A file that is locked.
struct Locked(Arc<OwnedFd>);

impl Drop for Locked {
    fn drop(&mut self) {
        // It ends with the last descriptor, otherwise.
        let _ = flock(&self.0, FlockOperation::Unlock);
    }
}
