//! Opens files and block devices: resolves the path, opens descriptors, and finds the limits.

use super::claim::lock_file_for_writing;
use super::disk::{OpenDisk, OpenDisks, PerCoreDescriptors, SyncTrackedDescriptor};
use super::sync::DescriptorSyncTracker;
use super::{DirectAlignment, FileDevice, MAX_RANGE, MAX_SECTORS, inline_io, warnings};
use crate::DiskIdentity;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{
    self, AtFlags, FallocateFlags, FileType, Mode, OFlags, SeekFrom, Stat, StatxFlags, Timespec,
};
use rustix::io::Errno;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use udm_core::errno::{EAGAIN, EBUSY, EINVAL};
use udm_core::{Buf, DeviceControlError, DeviceId, GrowthPolicy, Limits, SECTOR_SIZE, Sectors};
use udm_wire::uri::{FileUri, ImageFormat};

/// Upper limit of retries if the path leads to another disk than a moment ago.
const RACES: usize = 10;

/// The most descriptors of one kind per disk. More cores share them.
const HANDLES_MAX: usize = 8;

/// Retries for a disk that is in use. A disk that was just closed, or whose process was killed, is
/// released a little later.
pub(super) const CLAIM_TRIES: u32 = 25;
pub(super) const CLAIM_PAUSE: Duration = Duration::from_millis(20);

/// Access mode of a descriptor.
#[derive(Clone, Copy)]
struct DescriptorAccessMode {
    write: bool,
    /// No other program may write the disk: a block device is opened with `O_EXCL`, a regular file
    /// is claimed by [`lock_file_for_writing`]. The descriptor that writes is the exclusive one:
    /// through any other, the kernel discards nothing that the page cache of a block device holds.
    alone: bool,
}

impl DescriptorAccessMode {
    fn of(uri: &FileUri) -> DescriptorAccessMode {
        let write = !uri.readonly;
        DescriptorAccessMode { write, alone: write && uri.exclusive }
    }
}

/// A path, with errors that name it.
#[derive(Clone, Copy)]
struct PathWithErrorContext<'a>(&'a Path);

impl PathWithErrorContext<'_> {
    fn fail(self, what: &str, e: Errno) -> DeviceControlError {
        let text = std::io::Error::from(e).to_string();
        let text = text.split(" (os error").next().unwrap_or_default();
        DeviceControlError::new(e.raw_os_error(), format!("{}: {what}{text}", self.0.display()))
    }

    fn refuse(self, errno: i32, what: &str) -> DeviceControlError {
        DeviceControlError::new(errno, format!("{}: {what}", self.0.display()))
    }

    /// Returns the identity of the disk at the path. The path is checked before it is opened,
    /// because opening a FIFO or a tape has side effects.
    fn look(self) -> Result<(DiskIdentity, Stat), DeviceControlError> {
        let stat = fs::stat(self.0).map_err(|e| self.fail("", e))?;
        Ok((self.identity(&stat)?, stat))
    }

    fn identity(self, stat: &Stat) -> Result<DiskIdentity, DeviceControlError> {
        DiskIdentity::of(stat).ok_or_else(|| {
            let is = match FileType::from_raw_mode(stat.st_mode) {
                FileType::Directory => "a directory",
                FileType::Fifo => "a FIFO",
                FileType::Socket => "a socket",
                FileType::CharacterDevice => "a character device",
                _ => "something else",
            };
            self.refuse(EINVAL, &format!("neither a regular file nor a block device but {is}"))
        })
    }

    /// Opens the path. Returns `None` if it no longer leads to `identity`.
    fn open(
        self,
        identity: DiskIdentity,
        direct: bool,
        how: DescriptorAccessMode,
    ) -> Result<Option<OwnedFd>, DeviceControlError> {
        let access = if how.write { OFlags::RDWR } else { OFlags::RDONLY };
        let cache = if direct { OFlags::DIRECT } else { OFlags::empty() };
        let is_block = matches!(identity, DiskIdentity::Block { .. });
        let exclusive = if how.alone && is_block { OFlags::EXCL } else { OFlags::empty() };
        // NONBLOCK, in case the name has become a FIFO since. The flag is removed below, because
        // the ring would obey it.
        let flags = access | cache | exclusive | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let mut tries = 0;
        let fd = loop {
            match fs::open(self.0, flags, Mode::empty()) {
                Err(Errno::BUSY) if how.alone && tries < CLAIM_TRIES => {
                    tries += 1;
                    std::thread::sleep(CLAIM_PAUSE);
                }
                opened => break opened,
            }
        };
        let fd = fd.map_err(|e| match e {
            Errno::INVAL if direct => self.fail("this file system does not support direct I/O: ", e),
            Errno::ACCESS | Errno::ROFS | Errno::PERM if how.write => {
                self.fail("can't be opened for writing (readonly=on?): ", e)
            }
            Errno::BUSY if how.alone => {
                let who = "in use: mounted, or open exclusively by another program (exclusive=off?)";
                self.refuse(EBUSY, who)
            }
            _ => self.fail("", e),
        })?;
        fs::fcntl_setfl(&fd, cache).map_err(|e| self.fail("", e))?;
        let stat = fs::fstat(&fd).map_err(|e| self.fail("", e))?;
        Ok((self.identity(&stat)? == identity).then_some(fd))
    }

    /// Claims the regular file that is open as `fd`, if `how` is exclusive.
    fn claim(
        self,
        disk: &OpenDisk,
        fd: &OwnedFd,
        how: DescriptorAccessMode,
    ) -> Result<(), DeviceControlError> {
        if !how.alone || disk.is_block {
            return Ok(());
        }
        for _ in 0..CLAIM_TRIES {
            if lock_file_for_writing(fd.as_fd()) == Ok(()) {
                return Ok(());
            }
            std::thread::sleep(CLAIM_PAUSE);
        }
        let who = "in use: another program writes it or forbids writes, by QEMU's locks (readonly=on? exclusive=off?)";
        lock_file_for_writing(fd.as_fd()).map_err(|_| self.refuse(EBUSY, who))
    }

    /// Opens as many descriptors as are useful; `fd` is the first. Returns `None` if the path no
    /// longer leads to the disk.
    fn handles(
        self,
        disk: &OpenDisk,
        fd: OwnedFd,
        how: DescriptorAccessMode,
        cores: usize,
    ) -> Result<Option<PerCoreDescriptors>, DeviceControlError> {
        // Only syncs through the page cache wait for each other. An exclusive block device has one
        // descriptor.
        self.claim(disk, &fd, how)?;
        let several = how.write && disk.direct.is_none() && !disk.is_block;
        let count = if several { cores.clamp(1, HANDLES_MAX) } else { 1 };
        let mut handles = Vec::with_capacity(count);
        let mut next = Some(fd);
        while let Some(fd) = next.take() {
            let witness = if how.write && disk.direct.is_none() {
                let reads = DescriptorAccessMode { write: false, alone: false };
                let Some(witness) = self.open(disk.identity, false, reads)? else { return Ok(None) };
                Some(Arc::new(witness))
            } else {
                None
            };
            let syncs = Arc::new(DescriptorSyncTracker::new(&disk.failed));
            handles.push(SyncTrackedDescriptor { fd: Arc::new(fd), witness, syncs });
            if handles.len() < count {
                let Some(fd) = self.open(disk.identity, false, how)? else { return Ok(None) };
                next = Some(fd);
            }
        }
        Ok(Some(handles.into()))
    }

    /// Reads the size of an open disk again.
    fn refresh(self, disk: &OpenDisk, block: u32) -> Result<(), DeviceControlError> {
        match disk.refresh().map_err(|e| self.fail("", e))? {
            Sectors::ZERO => Err(self.refuse(EINVAL, &format!("shorter than a block ({block} bytes)"))),
            _ => Ok(()),
        }
    }
}

impl OpenDisks {
    /// Returns the disk that `uri` leads to now. If the disk is open, its size is read again.
    ///
    /// # Errors
    /// As [`OpenDisks::open`].
    pub(crate) fn look(&self, uri: &FileUri) -> Result<DiskIdentity, DeviceControlError> {
        let about = PathWithErrorContext(&uri.path);
        let (identity, _) = about.look()?;
        if let Some(disk) = self.get(identity) {
            about.refresh(&disk, disk.block())?;
        }
        Ok(identity)
    }

    /// Opens the disk that `uri` leads to.
    ///
    /// # Errors
    /// * The error of the system, with the path.
    /// * EINVAL if the path is neither a regular file nor a block device, or is shorter than a
    ///   block.
    /// * EBUSY if another program uses the disk exclusively, or if it is open with another
    ///   `direct`.
    pub(crate) fn open(&self, uri: &FileUri) -> Result<(DiskIdentity, FileDevice), DeviceControlError> {
        let about = PathWithErrorContext(&uri.path);
        for _ in 0..RACES {
            let (identity, stat) = about.look()?;
            let disk = match self.get(identity) {
                Some(disk) => Some(disk),
                None => match self.make(about, uri, identity, &stat) {
                    // Another thread of this process has opened the disk.
                    Err(e) if e.errno == EBUSY && self.get(identity).is_some() => continue,
                    made => made?,
                },
            };
            let Some(disk) = disk else { continue };
            if let Some(file) = create_device_on_open_disk(about, uri, &disk, &stat, self.cores)? {
                return Ok((identity, file));
            }
        }
        Err(about.refuse(EAGAIN, "leads to another disk at each attempt"))
    }

    /// Opens a disk that is not open yet. Returns `None` if the path leads elsewhere by now, or
    /// another thread has opened the disk.
    fn make(
        &self,
        about: PathWithErrorContext<'_>,
        uri: &FileUri,
        identity: DiskIdentity,
        stat: &Stat,
    ) -> Result<Option<Arc<OpenDisk>>, DeviceControlError> {
        let is_block = matches!(identity, DiskIdentity::Block { .. });
        let direct = uri.direct.unwrap_or(is_block);
        self.closing.wait(identity);
        let how = DescriptorAccessMode::of(uri);
        let Some(fd) = about.open(identity, direct, how)? else { return Ok(None) };
        let system = |e: Errno| about.fail("", e);
        let direct = if direct { Some(direct_alignment(fd.as_fd()).map_err(system)?) } else { None };
        let block = query_disk_limits(fd.as_fd(), stat, direct, false).map_err(system)?.logical_block;
        if uri.format == ImageFormat::Raw {
            warnings::log_opened_file_warnings(&uri.path, fd.as_fd(), stat, block);
        }
        let in_memory = inline_io::is_on_memory_filesystem(fd.as_fd());
        let closing = Arc::clone(&self.closing);
        let disk = Arc::new(OpenDisk::new(identity, uri.path.clone(), direct, in_memory, block, closing));
        let Some(handles) = about.handles(&disk, fd, how, self.cores)? else { return Ok(None) };
        disk.fds().put(handles, how.write, how.alone);
        Ok(self.put(&disk).then_some(disk))
    }
}

/// Creates a device for one name of an open disk. Returns `None` if the path leads elsewhere by
/// now.
fn create_device_on_open_disk(
    about: PathWithErrorContext<'_>,
    uri: &FileUri,
    disk: &Arc<OpenDisk>,
    stat: &Stat,
    cores: usize,
) -> Result<Option<FileDevice>, DeviceControlError> {
    let is_direct = disk.direct.is_some();
    if uri.direct.is_some_and(|direct| direct != is_direct) {
        let (is, path) = (if is_direct { "on" } else { "off" }, disk.path.display());
        let what = format!("open with direct={is} already, as {path}: all names of a disk need the same");
        return Err(about.refuse(EBUSY, &what));
    }
    let how = DescriptorAccessMode::of(uri);
    let known = disk.fds().get(how.write, how.alone);
    let handles = match known {
        Some(handles) => handles,
        None => {
            let Some(fd) = about.open(disk.identity, is_direct, how)? else { return Ok(None) };
            let handles = match about.handles(disk, fd, how, cores) {
                // Another thread of this process has opened the descriptors.
                Err(e) if e.errno == EBUSY && disk.fds().get(how.write, how.alone).is_some() => {
                    return Ok(None);
                }
                handles => handles?,
            };
            let Some(handles) = handles else { return Ok(None) };
            disk.fds().put(Arc::clone(&handles), how.write, how.alone);
            handles
        }
    };
    let fd = &handles[0].fd;
    let mut limits =
        query_disk_limits(fd.as_fd(), stat, disk.direct, uri.readonly).map_err(|e| about.fail("", e))?;
    about.refresh(disk, limits.logical_block)?;
    if !uri.readonly && !can_discard(fd.as_fd(), stat) {
        limits.max_discard = Sectors::ZERO;
    }
    let growth = uri.grow.map(|step| GrowthPolicy {
        step: Sectors(step.div_ceil(SECTOR_SIZE)),
        max: Sectors(uri.grow_max.unwrap_or(u64::MAX) / SECTOR_SIZE),
    });
    Ok(Some(FileDevice { id: DeviceId::new(), disk: Arc::clone(disk), handles, limits, growth }))
}

/// Size of `fd` in bytes.
pub(super) fn query_fd_size_bytes(fd: BorrowedFd<'_>, stat: &Stat) -> Result<u64, Errno> {
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::BlockDevice => fs::seek(fd, SeekFrom::End(0)),
        _ => Ok(stat.st_size.max(0) as u64),
    }
}

/// Limits of the disk without its size, which [`OpenDisk`] keeps.
fn query_disk_limits(
    fd: BorrowedFd<'_>,
    stat: &Stat,
    direct: Option<DirectAlignment>,
    read_only: bool,
) -> Result<Limits, Errno> {
    let is_block = FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice;
    let (logical, physical) = if is_block {
        (fs::ioctl_blksszget(fd)?, fs::ioctl_blkpbszget(fd)?)
    } else {
        (512, stat.st_blksize.clamp(512, 65536) as u32)
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
        private_cache: is_block && direct.is_none(),
        ..Limits::new(Sectors::ZERO)
    })
}

/// Returns the alignment that direct I/O on `fd` requires. The kernel reports it (`STATX_DIOALIGN`,
/// Linux 6.1). Otherwise it is 512 if a read of 512 bytes succeeds, else 4096.
fn direct_alignment(fd: BorrowedFd<'_>) -> Result<DirectAlignment, Errno> {
    const DIOALIGN: StatxFlags = StatxFlags::from_bits_retain(0x2000);
    if let Ok(x) = fs::statx(fd, "", AtFlags::EMPTY_PATH, DIOALIGN) {
        let (memory, offset) = (x.stx_dio_mem_align, x.stx_dio_offset_align);
        let sane = |n: u32| n.is_power_of_two() && n <= 65536;
        if x.stx_mask & DIOALIGN.bits() != 0 && sane(memory) && sane(offset) {
            return Ok(DirectAlignment { memory: memory as usize, offset: u64::from(offset).max(512) });
        }
    }
    let mut probe = Buf::zeroed(512);
    let align = match rustix::io::pread(fd, &mut probe[..], 0) {
        Err(Errno::INVAL) => 4096,
        Ok(_) => 512,
        Err(e) => return Err(e),
    };
    Ok(DirectAlignment { memory: align as usize, offset: align })
}

/// Distances in bytes after the end of a file at which holes are tried. Another program may be
/// extending the file and must not get there meanwhile. The second value is for file systems with
/// shorter files.
const FAR: [u64; 2] = [1 << 40, 1 << 30];

/// Returns whether holes can be punched. In a regular file, a block far after the end is tried,
/// where no data can be lost. Then its modification time is restored, so that the open does not
/// look like a write. A block device reports it in sysfs, as support of write-zeroes.
pub(super) fn can_discard(fd: BorrowedFd<'_>, stat: &Stat) -> bool {
    if FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile {
        let end = (stat.st_size as u64).next_multiple_of(65536);
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let before = fs::fstat(fd);
        let tried = FAR.map(|far| fs::fallocate(fd, punch, end.saturating_add(far), 4096));
        if let Ok(before) = before {
            let last_modification =
                Timespec { tv_sec: before.st_mtime as _, tv_nsec: before.st_mtime_nsec as _ };
            let last_access = Timespec { tv_sec: 0, tv_nsec: fs::UTIME_OMIT };
            // A file of another user keeps the new time.
            let _ = fs::futimens(fd, &fs::Timestamps { last_access, last_modification });
        }
        let result = tried.into_iter().find(|tried| *tried != Err(Errno::FBIG));
        return result != Some(Err(Errno::OPNOTSUPP));
    }
    let (major, minor) = (fs::major(stat.st_rdev), fs::minor(stat.st_rdev));
    let device = format!("/sys/dev/block/{major}:{minor}");
    // A partition has the queue of its disk. Without sysfs, the first discard shows it.
    ["queue", "../queue"]
        .iter()
        .find_map(|queue| std::fs::read_to_string(format!("{device}/{queue}/write_zeroes_max_bytes")).ok())
        .is_none_or(|bytes| bytes.trim() != "0")
}
