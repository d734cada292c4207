//! Locks a regular file against other writers, with QEMU's locks.
//!
//! QEMU (`block/file-posix.c`) locks single bytes of an image, at offsets that other programs do
//! not lock. A lock of byte 100 + n means that the holder uses permission n. A lock of byte 200 + n
//! means that the holder does not share permission n. All locks are shared locks of an open file
//! description (`F_OFD_SETLK`), so they end with the last descriptor, even if the program is
//! killed. A program checks the byte that forbids its planned use (`F_OFD_GETLK`). If udm writes a
//! file, it uses CONSISTENT_READ and WRITE, and does not share WRITE. So a second udm and QEMU's
//! programs are refused. Programs that do not use these locks are not. If udm reads an image with a
//! format, it uses CONSISTENT_READ, and shares neither WRITE nor RESIZE.

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use rustix::fd::BorrowedFd;

/// The holder reads and needs consistent data.
const USES_CONSISTENT_READ: i64 = 100;
/// The holder writes.
const USES_WRITE: i64 = 101;
/// The holder does not allow others to read (byte 200) or to write (byte 201).
const FORBIDS_CONSISTENT_READ: i64 = 200;
const FORBIDS_WRITE: i64 = 201;
/// The holder does not allow others to change the size.
const FORBIDS_RESIZE: i64 = 203;

/// Another open file description has a conflicting lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FileLockConflict;

/// Claims the file for writing, as long as the open file description of `fd` exists. If the file
/// system has no such locks, nothing is claimed, as with QEMU's `locking=auto`.
///
/// # Errors
/// Another description has a conflicting lock. Then `fd` keeps no lock.
pub(super) fn lock_file_for_writing(fd: BorrowedFd<'_>) -> Result<(), FileLockConflict> {
    // Of two that claim at once, at least one sees the other.
    let theirs = [FORBIDS_CONSISTENT_READ, FORBIDS_WRITE, USES_WRITE];
    lock_file_bytes(fd, &[USES_CONSISTENT_READ, USES_WRITE, FORBIDS_WRITE], &theirs)
}

/// As [`lock_file_for_writing`], for a reader of an image that nobody may change.
///
/// # Errors
/// Another description writes the file, or does not allow readers.
pub(crate) fn lock_file_against_writers(fd: BorrowedFd<'_>) -> Result<(), FileLockConflict> {
    let mine = [USES_CONSISTENT_READ, FORBIDS_WRITE, FORBIDS_RESIZE];
    lock_file_bytes(fd, &mine, &[FORBIDS_CONSISTENT_READ, USES_WRITE])
}

/// Locks the bytes `mine`, unless another description holds a lock of one of `theirs`.
fn lock_file_bytes(fd: BorrowedFd<'_>, mine: &[i64], theirs: &[i64]) -> Result<(), FileLockConflict> {
    for &byte in mine {
        match fcntl(fd, FcntlArg::F_OFD_SETLK(&make_byte_lock_request(libc::F_RDLCK, byte))) {
            Ok(_) => {}
            Err(Errno::EAGAIN | Errno::EACCES) => return Err(unlock_file_bytes(fd, mine)),
            // The file system has no such locks.
            Err(_) => return Ok(()),
        }
    }
    // The locks are set before the check.
    if theirs.iter().any(|&byte| is_byte_locked_by_others(fd, byte)) {
        return Err(unlock_file_bytes(fd, mine));
    }
    Ok(())
}

/// Returns true if another description holds a lock of `byte`.
fn is_byte_locked_by_others(fd: BorrowedFd<'_>, byte: i64) -> bool {
    let mut lock = make_byte_lock_request(libc::F_WRLCK, byte);
    fcntl(fd, FcntlArg::F_OFD_GETLK(&mut lock)).is_ok() && i32::from(lock.l_type) != libc::F_UNLCK
}

fn unlock_file_bytes(fd: BorrowedFd<'_>, bytes: &[i64]) -> FileLockConflict {
    for &byte in bytes {
        // A lock that cannot be released is not held.
        let _ = fcntl(fd, FcntlArg::F_OFD_SETLK(&make_byte_lock_request(libc::F_UNLCK, byte)));
    }
    FileLockConflict
}

/// A lock request for one byte. `kind` is F_RDLCK, F_WRLCK or F_UNLCK.
fn make_byte_lock_request(kind: i32, byte: i64) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: byte,
        l_len: 1,
        l_pid: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{File, OpenOptions};
    use std::os::fd::AsFd;

    fn open(path: &std::path::Path) -> File {
        OpenOptions::new().read(true).write(true).open(path).unwrap()
    }

    #[test]
    fn a_file_is_claimed_once_and_again_when_it_was_closed() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let (one, other) = (open(file.path()), open(file.path()));
        assert_eq!(lock_file_for_writing(one.as_fd()), Ok(()));
        assert_eq!(lock_file_for_writing(other.as_fd()), Err(FileLockConflict));
        // A refused claim keeps no lock.
        assert_eq!(lock_file_for_writing(one.as_fd()), Ok(()));
        drop(one);
        assert_eq!(lock_file_for_writing(other.as_fd()), Ok(()));
    }

    /// Readers share an image; a writer and a reader exclude each other.
    #[test]
    fn a_reader_of_an_image_excludes_writers() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let (one, other, writer) = (open(file.path()), open(file.path()), open(file.path()));
        assert_eq!(lock_file_against_writers(one.as_fd()), Ok(()));
        assert_eq!(lock_file_against_writers(other.as_fd()), Ok(()));
        assert_eq!(lock_file_for_writing(writer.as_fd()), Err(FileLockConflict));
        drop((one, other));
        assert_eq!(lock_file_for_writing(writer.as_fd()), Ok(()));
        assert_eq!(lock_file_against_writers(open(file.path()).as_fd()), Err(FileLockConflict));
    }

    /// The locks of a QEMU reader: it uses reads and forbids writes.
    #[test]
    fn a_holder_that_forbids_writes_is_respected() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let (reader, writer) = (open(file.path()), open(file.path()));
        for byte in [USES_CONSISTENT_READ, FORBIDS_WRITE] {
            fcntl(reader.as_fd(), FcntlArg::F_OFD_SETLK(&make_byte_lock_request(libc::F_RDLCK, byte)))
                .unwrap();
        }
        assert_eq!(lock_file_for_writing(writer.as_fd()), Err(FileLockConflict));
    }
}
