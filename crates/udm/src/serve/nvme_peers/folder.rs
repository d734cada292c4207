//! The folder of `--nvme-peers`: one record per server ([`PeerRecord`]), which the server keeps
//! locked for its life.
//!
//! **What a free lock proves.** The lock (`flock(2)`) belongs to the open file. The server has it
//! open, and has registered it with the ring of each core. The kernel closes the file when the
//! process has closed it, which is after the end of its last thread, and when each ring has let go
//! of it, which is after the ring's last operation. So if another process gets the lock, no read or
//! write of the server to a disk of this machine is in flight. A server that is stopped, or has a
//! request at a disk that hangs, still has the lock.
//!
//! **What it does not prove.** A write that the server has passed to another server (NBD, NVMe, a
//! network file system) may still be carried out. So a server appends a line to its record before
//! it uses the first such disk. The record of another boot of the machine proves nothing, and nor
//! does a copy of a record: its device or inode number is another one.
//!
//! The name of a record is the tag that all controllers of the server have in their random numbers.
//! Each life of a server has a tag and a record of its own. Records of lives that have ended stay,
//! because hosts may still ask about their controllers; the oldest are removed.

use anyhow::{Context, Result, bail};
use rustix::fs::{
    self, AtFlags, Dir, FileType, FlockOperation, Mode, OFlags, RenameFlags, Stat, fstat, openat,
    renameat_with, unlinkat,
};
use rustix::io::Errno;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use udm_wire::nvme::{PEER_RECORD_MAX, PeerRecord};

/// Limit of records that stay, of lives that have ended and of running servers.
const RECORDS_MAX: usize = 256;

/// Numbers of controllers are divided among the servers: each has so many.
const CONTROLLERS_EACH: u16 = 2047;

/// Limit of servers at a time.
const SERVERS_MAX: u16 = 32;

/// Limit of waiting for another server that joins at this moment.
const JOIN_MAX: Duration = Duration::from_secs(10);

/// The file that a server locks while it joins.
const JOINING: &str = "lock";

/// End of the name of a record.
const SUFFIX: &str = ".peer";

/// The record of this server, which stays locked until the process has ended.
pub(super) struct OwnRecord {
    /// Numbers for the controllers of this server.
    pub(super) controllers: RangeInclusive<u16>,
    /// The locked file.
    pub(super) file: Arc<OwnedFd>,
    /// Number of other servers that run.
    pub(super) others: usize,
}

/// A record of another server.
pub(super) struct OtherRecord {
    pub(super) file: File,
    pub(super) record: PeerRecord,
}

/// A server that has ended.
struct EndedServer {
    /// Time of the last change of its record in seconds since 1970.
    begun: i64,
    name: std::ffi::CString,
    controllers: RangeInclusive<u16>,
}

/// A folder that the servers of a subsystem share.
#[derive(Debug)]
pub(super) struct PeerFolder {
    path: PathBuf,
    fd: OwnedFd,
    boot_id: String,
}

impl PeerFolder {
    /// Opens the folder; creates it if it does not exist.
    ///
    /// # Errors
    /// Other users may write it, or it is on a file system of which it is not known that its locks
    /// are those of this machine alone.
    pub(super) fn open(path: &Path) -> Result<PeerFolder> {
        let path = std::path::absolute(path)?;
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&path)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = fs::open(&path, flags, Mode::empty())?;
        let about = fstat(&fd)?;
        let own = rustix::process::geteuid().as_raw();
        if ![0, own].contains(&about.st_uid) || about.st_mode & 0o022 != 0 {
            bail!("other users may write this folder: use one of mode 0700 that belongs to this user");
        }
        if !udm_backends::is_on_local_file_system(&path) {
            bail!(
                "it is on a file system whose locks may be shared with other machines, or not shared \
                   between programs: use a folder on tmpfs (/run), ext4, XFS, Btrfs or F2FS"
            );
        }
        let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").context("boot_id")?;
        Ok(PeerFolder { path, fd, boot_id: boot_id.trim().to_owned() })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Creates the record of this server and locks it.
    ///
    /// # Errors
    /// There are too many servers, or the folder cannot be used.
    pub(super) fn join(&self, tag: u32, subsystem: &str, control: &Path) -> Result<OwnRecord> {
        let _joining = self.lock_for_joining()?;
        let (taken, others) = self.clean()?;
        let free = (0..SERVERS_MAX).find(|block| !taken.contains(&controllers_of(*block)));
        let Some(block) = free else { bail!("at most {SERVERS_MAX} servers may share a subsystem") };
        let control = std::path::absolute(control)?;
        let control = control.to_str().context("the path of the control socket is not UTF-8")?.to_owned();
        let (new, name) = (format!(".new-{tag:08x}"), record_name(tag));
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::APPEND;
        let fd = openat(&self.fd, &new, flags, Mode::from_raw_mode(0o600))?;
        // Others see the record only when it is locked and complete.
        fs::flock(&fd, FlockOperation::NonBlockingLockExclusive)?;
        let about = fstat(&fd)?;
        let record = PeerRecord {
            subsystem: subsystem.to_owned(),
            boot_id: self.boot_id.clone(),
            inode: (about.st_dev, about.st_ino),
            controllers: controllers_of(block),
            control,
            remote: None,
        };
        if !record.is_valid() {
            bail!("the path of the control socket has characters that no record can have");
        }
        let mut file = File::from(fd);
        file.write_all(record.to_string().as_bytes())?;
        renameat_with(&self.fd, &new, &self.fd, &name, RenameFlags::NOREPLACE)?;
        Ok(OwnRecord { controllers: record.controllers, file: Arc::new(file.into()), others })
    }

    /// The lock under which servers join one after the other.
    fn lock_for_joining(&self) -> Result<OwnedFd> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let fd = openat(&self.fd, JOINING, flags, Mode::from_raw_mode(0o600))?;
        let end = Instant::now() + JOIN_MAX;
        while let Err(error) = fs::flock(&fd, FlockOperation::NonBlockingLockExclusive) {
            if error != Errno::WOULDBLOCK {
                return Err(error.into());
            }
            if Instant::now() >= end {
                bail!("another server has begun to join and does not end: is it stopped?");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(fd)
    }

    /// Removes what nobody needs: files of servers that ended while they joined, damaged records,
    /// records of other boots, and the oldest of lives that have ended. Returns the numbers that
    /// controllers of the remaining records have, and the number of running servers.
    fn clean(&self) -> Result<(Vec<RangeInclusive<u16>>, usize)> {
        let (mut running, mut ended) = (Vec::new(), Vec::new());
        for entry in Dir::read_from(&self.fd)? {
            let entry = entry?;
            let name = entry.file_name();
            let text = name.to_str().unwrap_or_default();
            if !text.ends_with(SUFFIX) && !text.starts_with(".new-") {
                continue;
            }
            // What cannot be opened is no record.
            let Ok(file) = self.open_file(name) else { continue };
            let is_locked = !is_released(&file)?;
            let record = if text.ends_with(SUFFIX) { self.read(file) } else { None };
            match (record, is_locked) {
                (Some(other), true) => running.push(other.record.controllers),
                (Some(other), false) => {
                    let begun = fstat(&other.file).map_or(0, |about| about.st_mtime);
                    ended.push(EndedServer {
                        begun,
                        name: name.to_owned(),
                        controllers: other.record.controllers,
                    });
                }
                // A server of another version that runs: its numbers are not known, but it keeps
                // its record.
                (None, true) => {}
                (None, false) => _ = unlinkat(&self.fd, name, AtFlags::empty()),
            }
        }
        ended.sort_by_key(|one| std::cmp::Reverse(one.begun));
        let others = running.len();
        let mut taken = running;
        for one in ended {
            // One block must be left for this server.
            let is_known = taken.contains(&one.controllers);
            if taken.len() + 1 >= RECORDS_MAX || !is_known && count_blocks(&taken) + 1 >= SERVERS_MAX.into() {
                unlinkat(&self.fd, &*one.name, AtFlags::empty())?;
            } else {
                taken.push(one.controllers);
            }
        }
        Ok((taken, others))
    }

    /// The record of the server with this tag; `None` if there is none that proves anything.
    pub(super) fn find(&self, tag: u32) -> Option<OtherRecord> {
        self.read(self.open_file(std::ffi::CString::new(record_name(tag)).ok()?.as_c_str()).ok()?)
    }

    fn open_file(&self, name: &std::ffi::CStr) -> Result<File, Errno> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        openat(&self.fd, name, flags, Mode::empty()).map(File::from)
    }

    /// Reads a record. One of another boot, and a copy, is none.
    fn read(&self, file: File) -> Option<OtherRecord> {
        let Stat { st_mode, st_dev, st_ino, .. } = fstat(&file).ok()?;
        let record =
            (FileType::from_raw_mode(st_mode) == FileType::RegularFile).then(|| read_record(&file))??;
        (record.inode == (st_dev, st_ino) && record.boot_id == self.boot_id)
            .then_some(OtherRecord { file, record })
    }
}

impl OtherRecord {
    /// The complete record if the server has ended.
    pub(super) fn of_ended_server(&self) -> Option<PeerRecord> {
        // The server appends nothing more once its lock is free, so it is read again.
        is_released(&self.file).ok().filter(|is| *is).and_then(|_| read_record(&self.file))
    }
}

impl OwnRecord {
    /// Appends that the server uses a disk of another server. If there is no room for the line, the
    /// record is emptied instead, so that it proves nothing.
    pub(super) fn append_remote(file: &OwnedFd, uri: &str) -> std::io::Result<()> {
        let mut file = File::from(file.try_clone()?);
        let written = file.write_all(PeerRecord::remote_line(uri).as_bytes());
        written.or_else(|_| file.set_len(0))
    }
}

fn read_record(mut file: &File) -> Option<PeerRecord> {
    let mut bytes = Vec::new();
    file.seek(SeekFrom::Start(0)).ok()?;
    file.take(PEER_RECORD_MAX as u64 + 1).read_to_end(&mut bytes).ok()?;
    PeerRecord::parse(&bytes).ok()
}

/// True if nobody has locked `file`. The shared lock that shows it stays until the file is closed.
fn is_released(file: &File) -> Result<bool, Errno> {
    match fs::flock(file.as_fd(), FlockOperation::NonBlockingLockShared) {
        Ok(()) => Ok(true),
        Err(Errno::WOULDBLOCK) => Ok(false),
        Err(error) => Err(error),
    }
}

fn record_name(tag: u32) -> String {
    format!("{tag:08x}{SUFFIX}")
}

/// Number of different blocks.
fn count_blocks(taken: &[RangeInclusive<u16>]) -> usize {
    taken.iter().map(RangeInclusive::start).collect::<std::collections::BTreeSet<_>>().len()
}

fn controllers_of(block: u16) -> RangeInclusive<u16> {
    block * CONTROLLERS_EACH + 1..=(block + 1) * CONTROLLERS_EACH
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;
    use tempfile::TempDir;

    const SUBSYSTEM: &str = "nqn.2026-11.org.example:disks";

    fn shared() -> (TempDir, PeerFolder) {
        let parent = TempDir::new().unwrap();
        let folder = PeerFolder::open(&parent.path().join("peers")).unwrap();
        (parent, folder)
    }

    fn join(folder: &PeerFolder, tag: u32) -> OwnRecord {
        folder.join(tag, SUBSYSTEM, Path::new("/run/x")).unwrap()
    }

    /// A server that runs proves nothing; one that has ended does, for good.
    #[test]
    fn a_free_lock_is_the_end() {
        let (_parent, folder) = shared();
        let own = join(&folder, 7);
        assert!(folder.find(8).is_none());
        let found = folder.find(7).unwrap();
        assert_eq!(found.record.controllers, own.controllers);
        assert_eq!(found.of_ended_server(), None);
        drop(own);
        assert_eq!(found.of_ended_server(), Some(found.record.clone()));
        assert!(folder.find(7).unwrap().of_ended_server().is_some(), "others see it too");
        assert!(folder.join(7, SUBSYSTEM, Path::new("/run/x")).is_err(), "a tag is used once");
    }

    /// What is appended until the end of a server is seen.
    #[test]
    fn the_last_line_counts() {
        let (_parent, folder) = shared();
        let own = join(&folder, 7);
        let found = folder.find(7).unwrap();
        OwnRecord::append_remote(&own.file, "nbd://host/disk").unwrap();
        drop(own);
        assert_eq!(found.of_ended_server().unwrap().remote.as_deref(), Some("nbd://host/disk"));
    }

    /// A copy of a record that nobody has locked, and a record of another boot, prove nothing.
    #[test]
    fn copies_and_old_records_prove_nothing() {
        let (_parent, mut folder) = shared();
        let own = join(&folder, 7);
        fs::copy(folder.path.join("00000007.peer"), folder.path.join("00000008.peer")).unwrap();
        assert!(folder.find(8).is_none());
        drop(own);
        assert!(folder.find(7).is_some());
        folder.boot_id = "another".into();
        assert!(folder.find(7).is_none());
        join(&folder, 9);
        let names = fs::read_dir(&folder.path).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<_> = names.map(|name| name.into_string().unwrap()).collect();
        names.sort_unstable();
        assert_eq!(names, ["00000009.peer", JOINING], "they are removed");
    }

    /// Lives have numbers of their own as long as there are enough; the oldest record makes room.
    /// There are never two servers with the same numbers.
    #[test]
    fn numbers_are_divided() {
        let (_parent, folder) = shared();
        let mut blocks: Vec<u16> =
            (0..u32::from(SERVERS_MAX)).map(|tag| *join(&folder, tag).controllers.start()).collect();
        assert!(blocks.iter().all(|first| first + CONTROLLERS_EACH - 1 <= udm_wire::nvme::CONTROLLER_MAX));
        blocks.sort_unstable();
        blocks.dedup();
        assert_eq!(blocks.len(), usize::from(SERVERS_MAX));
        let all: Vec<OwnRecord> = (100..100 + u32::from(SERVERS_MAX)).map(|tag| join(&folder, tag)).collect();
        assert_eq!(all.last().unwrap().others, usize::from(SERVERS_MAX) - 1);
        let mut blocks: Vec<u16> = all.iter().map(|own| *own.controllers.start()).collect();
        blocks.sort_unstable();
        blocks.dedup();
        assert_eq!(blocks.len(), usize::from(SERVERS_MAX));
        assert!(folder.join(200, SUBSYSTEM, Path::new("/run/x")).is_err(), "there are too many");
    }

    #[test]
    fn a_folder_that_others_may_write_is_refused() {
        let parent = TempDir::new().unwrap();
        fs::set_permissions(parent.path(), Permissions::from_mode(0o770)).unwrap();
        assert!(PeerFolder::open(parent.path()).unwrap_err().to_string().contains("other users"));
        assert!(PeerFolder::open(Path::new("/proc/self")).is_err());
        fs::set_permissions(parent.path(), Permissions::from_mode(0o700)).unwrap();
        let folder = PeerFolder::open(parent.path()).unwrap();
        assert!(folder.join(1, SUBSYSTEM, Path::new("/run/a\nb")).is_err());
    }
}
