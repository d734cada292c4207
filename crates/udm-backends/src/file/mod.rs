//! `file:PATH?direct=on&readonly=on`, or a path alone: a regular file or a block device, by the core's io_uring.
//!
//! * A regular file is as large as it was when it was opened, rounded down to sectors (with `direct=on` to its block of direct I/O); a block
//!   device as large as it says. A file that was cut since gives an error where it is missing, and is not extended by reads.
//! * The volatile cache is the page cache, so a flush is `fdatasync`, and FUA is `RWF_DSYNC`.
//! * A discard punches a hole; so does a write-zeroes, unless it must keep its blocks (`ZERO_RANGE`). Where the file system can do neither,
//!   zeroes are written.
//! * With `direct=on` the page cache is left out. Data whose memory is not aligned for that goes through a buffer that is.
//!
//! Opening a file twice is legal: two paths may lead to one disk. There is no lock on it.

mod lane;
mod slot;
#[cfg(test)]
mod tests;

use rustix::fd::{AsFd, BorrowedFd};
use rustix::fs::{self, AtFlags, FallocateFlags, FileType, Mode, OFlags, SeekFrom, Stat, StatxFlags};
use rustix::io::Errno;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use udm_core::{Buf, Cx, Device, DeviceId, Lane, Limits, OpenError, Sectors};
use udm_runtime::Ring;

/// The longest read or write in sectors (32 MiB): the most that an NBD client may ask for.
const MAX_SECTORS: Sectors = Sectors(32 << 11);

/// The longest discard or write-zeroes in sectors (256 MiB): where the file system can't, it is a write of so many zeroes.
const MAX_RANGE: Sectors = Sectors(256 << 11);

/// What direct I/O asks for, in bytes, both powers of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Direct {
    /// Alignment of memory.
    memory: usize,
    /// Alignment of offsets and lengths.
    offset: u64,
}

/// A file or block device.
pub(crate) struct File {
    id: DeviceId,
    fd: Arc<OwnedFd>,
    limits: Limits,
    direct: Option<Direct>,
}

impl File {
    /// Opens `path`.
    ///
    /// # Errors
    /// What the system says, with the path; EINVAL for what is neither a regular file nor a block device, or is shorter than a block.
    pub(crate) fn open(path: &Path, direct: bool, readonly: bool) -> Result<File, OpenError> {
        let fail = |what: &str, e: Errno| {
            let text = std::io::Error::from(e).to_string();
            let text = text.split(" (os error").next().unwrap_or_default();
            OpenError::new(e.raw_os_error(), format!("{}: {what}{text}", path.display()))
        };
        let refuse = |what: &str| OpenError::new(22, format!("{}: {what}", path.display()));
        // Looked at before it is opened: opening a FIFO or a tape is not without effect.
        check_type(&fs::stat(path).map_err(|e| fail("", e))?).map_err(|what| refuse(&what))?;
        let access = if readonly { OFlags::RDONLY } else { OFlags::RDWR };
        let cache = if direct { OFlags::DIRECT } else { OFlags::empty() };
        // NONBLOCK, in case the name has become a FIFO since; it is taken off below, since the ring would obey it.
        let flags = access | cache | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let fd = fs::open(path, flags, Mode::empty()).map_err(|e| match e {
            Errno::INVAL if direct => fail("no direct I/O on this file system: ", e),
            Errno::ACCESS | Errno::ROFS | Errno::PERM if !readonly => {
                fail("not for writing (readonly=on?): ", e)
            }
            _ => fail("", e),
        })?;
        fs::fcntl_setfl(&fd, cache).map_err(|e| fail("", e))?;
        let stat = fs::fstat(&fd).map_err(|e| fail("", e))?;
        check_type(&stat).map_err(|what| refuse(&what))?;
        let system = |e: Errno| fail("", e);
        let direct = if direct { Some(direct_alignment(fd.as_fd()).map_err(system)?) } else { None };
        let mut limits = limits(fd.as_fd(), &stat, direct, readonly).map_err(system)?;
        if limits.size == Sectors::ZERO {
            return Err(refuse(&format!("shorter than a block ({} bytes)", limits.logical_block)));
        }
        if !readonly && !can_discard(fd.as_fd(), &stat) {
            limits.max_discard = Sectors::ZERO;
        }
        Ok(File { id: DeviceId::new(), fd: Arc::new(fd), limits, direct })
    }
}

impl Device for File {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, OpenError> {
        let ring = Ring::of(cx).ok_or_else(|| OpenError::new(95, "a file needs a core with an io_uring"))?;
        Ok(Box::new(lane::FileLane::new(ring.client(), Arc::clone(&self.fd), self.limits, self.direct)))
    }

    fn limits(&self) -> Limits {
        self.limits
    }
}

fn check_type(stat: &Stat) -> Result<(), String> {
    let is = match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile | FileType::BlockDevice => return Ok(()),
        FileType::Directory => "a directory",
        FileType::Fifo => "a FIFO",
        FileType::Socket => "a socket",
        FileType::CharacterDevice => "a character device",
        _ => "something else",
    };
    Err(format!("neither a regular file nor a block device but {is}"))
}

fn limits(fd: BorrowedFd<'_>, stat: &Stat, direct: Option<Direct>, read_only: bool) -> Result<Limits, Errno> {
    let device = FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice;
    let (bytes, logical, physical) = if device {
        (fs::seek(fd, SeekFrom::End(0))?, fs::ioctl_blksszget(fd)?, fs::ioctl_blkpbszget(fd)?)
    } else {
        (stat.st_size.max(0) as u64, 512, stat.st_blksize.clamp(512, 65536) as u32)
    };
    let logical = logical.max(direct.map_or(512, |d| d.offset as u32));
    let physical = if physical.is_power_of_two() { physical.max(logical) } else { logical };
    Ok(Limits {
        logical_block: logical,
        physical_block: physical,
        io_min: physical,
        max_sectors: MAX_SECTORS,
        max_discard: MAX_RANGE,
        max_write_zeroes: MAX_RANGE,
        write_cache: true,
        fua: true,
        read_only,
        ..Limits::new(Sectors::from_bytes(bytes / u64::from(logical) * u64::from(logical)))
    })
}

/// What direct I/O on `fd` asks for: as the kernel says (`STATX_DIOALIGN`, Linux 6.1), or the smaller of 512 and 4096 that a read gets
/// away with.
fn direct_alignment(fd: BorrowedFd<'_>) -> Result<Direct, Errno> {
    const DIOALIGN: StatxFlags = StatxFlags::from_bits_retain(0x2000);
    if let Ok(x) = fs::statx(fd, "", AtFlags::EMPTY_PATH, DIOALIGN) {
        let (memory, offset) = (x.stx_dio_mem_align, x.stx_dio_offset_align);
        let sane = |n: u32| n.is_power_of_two() && n <= 65536;
        if x.stx_mask & DIOALIGN.bits() != 0 && sane(memory) && sane(offset) {
            return Ok(Direct { memory: memory as usize, offset: u64::from(offset).max(512) });
        }
    }
    let mut probe = Buf::zeroed(512);
    let align = match rustix::io::pread(fd, &mut probe[..], 0) {
        Err(Errno::INVAL) => 4096,
        Ok(_) => 512,
        Err(e) => return Err(e),
    };
    Ok(Direct { memory: align as usize, offset: align })
}

/// Whether holes can be punched. On a regular file a block behind its end is tried, where there is nothing to lose; a block device says
/// so in sysfs, where a hole is called a write-zeroes.
fn can_discard(fd: BorrowedFd<'_>, stat: &Stat) -> bool {
    if FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile {
        let behind = (stat.st_size as u64).next_multiple_of(65536);
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        return fs::fallocate(fd, punch, behind, 4096) != Err(Errno::OPNOTSUPP);
    }
    let (major, minor) = (fs::major(stat.st_rdev), fs::minor(stat.st_rdev));
    let device = format!("/sys/dev/block/{major}:{minor}");
    // A partition's queue is its disk's. Where there is no sysfs the first discard will tell.
    ["queue", "../queue"]
        .iter()
        .find_map(|queue| std::fs::read_to_string(format!("{device}/{queue}/write_zeroes_max_bytes")).ok())
        .is_none_or(|bytes| bytes.trim() != "0")
}
