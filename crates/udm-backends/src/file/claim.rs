//! A regular file that is written has one program that writes it: the lock that QEMU takes.
//!
//! QEMU (`block/file-posix.c`) locks single bytes of an image, far behind those that anybody else
//! locks: byte 100 + n says that the holder uses permission n, byte 200 + n that it shares
//! permission n with nobody. All locks are shared ones, held through an open file description
//! (`F_OFD_SETLK`), so they end with the last descriptor, whatever ended the program. A program
//! looks for the byte that forbids what it is about to do (`F_OFD_GETLK`). A udm that writes a file
//! uses CONSISTENT_READ and WRITE, and shares WRITE with nobody. So a second udm, and QEMU's
//! programs, are refused; programs that know nothing of these locks are not.

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use rustix::fd::BorrowedFd;

/// The holder reads, and relies on what it reads.
const USES_CONSISTENT_READ: i64 = 100;
/// The holder writes.
const USES_WRITE: i64 = 101;
/// The holder relies on nobody else writing.
const FORBIDS_CONSISTENT_READ: i64 = 200;
const FORBIDS_WRITE: i64 = 201;

/// Why a file was not claimed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ClaimConflict;

/// Claims the file for writing, for as long as the description of `fd` is open. A file system that
/// knows no such locks claims nothing, as with QEMU's `locking=auto`.
///
/// # Errors
/// Another description has it: this one keeps no lock then.
pub(super) fn claim(fd: BorrowedFd<'_>) -> Result<(), ClaimConflict> {
    let mine = [USES_CONSISTENT_READ, USES_WRITE, FORBIDS_WRITE];
    for byte in mine {
        match fcntl(fd, FcntlArg::F_OFD_SETLK(&lock(libc::F_RDLCK, byte))) {
            Ok(_) => {}
            Err(Errno::EAGAIN | Errno::EACCES) => return Err(release(fd, &mine)),
            // No locks here.
            Err(_) => return Ok(()),
        }
    }
    // Set before looked for: of two that claim at once at least one sees the other.
    let theirs = [FORBIDS_CONSISTENT_READ, FORBIDS_WRITE, USES_WRITE];
    if theirs.iter().any(|&byte| is_locked(fd, byte)) {
        return Err(release(fd, &mine));
    }
    Ok(())
}

/// True if another description holds a lock of `byte`.
fn is_locked(fd: BorrowedFd<'_>, byte: i64) -> bool {
    let mut lock = lock(libc::F_WRLCK, byte);
    fcntl(fd, FcntlArg::F_OFD_GETLK(&mut lock)).is_ok() && i32::from(lock.l_type) != libc::F_UNLCK
}

fn release(fd: BorrowedFd<'_>, bytes: &[i64]) -> ClaimConflict {
    for &byte in bytes {
        // Nothing is held that could not be released.
        let _ = fcntl(fd, FcntlArg::F_OFD_SETLK(&lock(libc::F_UNLCK, byte)));
    }
    ClaimConflict
}

/// A lock of one byte, of `kind` F_RDLCK, F_WRLCK or F_UNLCK.
fn lock(kind: i32, byte: i64) -> libc::flock {
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
        assert_eq!(claim(one.as_fd()), Ok(()));
        assert_eq!(claim(other.as_fd()), Err(ClaimConflict));
        // One that was refused keeps nothing.
        assert_eq!(claim(one.as_fd()), Ok(()));
        drop(one);
        assert_eq!(claim(other.as_fd()), Ok(()));
    }

    /// As a reader of QEMU's holds it: it uses reads, and forbids writes.
    #[test]
    fn a_holder_that_forbids_writes_is_respected() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let (reader, writer) = (open(file.path()), open(file.path()));
        for byte in [USES_CONSISTENT_READ, FORBIDS_WRITE] {
            fcntl(reader.as_fd(), FcntlArg::F_OFD_SETLK(&lock(libc::F_RDLCK, byte))).unwrap();
        }
        assert_eq!(claim(writer.as_fd()), Err(ClaimConflict));
    }
}
