//! Unix sockets that a server listens on, with exclusive use of their paths.
//!
//! Contract: the socket has mode 0600 from the moment it exists. A socket without a server is
//! replaced. If several servers want one path at the same time, one of them gets it. A socket that
//! is bound but does not listen yet looks like one without a server. So a server holds a lock from
//! its check until it listens: a file `PATH.lock` of mode 0600, which exists only for that moment.
//! [`BoundUnixSocket`] removes the socket file when it is dropped, unless another server has
//! replaced the file meanwhile, or has taken the socket over.

use rustix::fs::{FileType, FlockOperation, Mode, OFlags, Stat, flock};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The longest path of a socket in bytes (`sun_path`, less its NUL).
pub const PATH_MAX: usize = 107;

/// Connections that the kernel keeps until they are accepted.
const BACKLOG: i32 = 1024;

/// The longest wait for another server's lock, which is held only during a bind.
const LOCK_MAX: Duration = Duration::from_secs(5);
const LOCK_PAUSE: Duration = Duration::from_millis(10);

/// A listening socket and its file.
#[derive(Debug)]
pub struct BoundUnixSocket {
    fd: OwnedFd,
    path: PathBuf,
    file: Stat,
    keeps_file: AtomicBool,
}

impl BoundUnixSocket {
    /// Listens at `path`.
    ///
    /// # Errors
    /// * EADDRINUSE if another server answers there.
    /// * EEXIST if the path is not a socket.
    /// * ENAMETOOLONG for more than [`PATH_MAX`] bytes.
    /// * EWOULDBLOCK if another program holds the lock for seconds.
    /// * Otherwise the error of the system.
    pub fn new(path: &Path) -> io::Result<BoundUnixSocket> {
        if path.as_os_str().len() > PATH_MAX {
            let why = format!("the path of a socket has at most {PATH_MAX} bytes: give a shorter one");
            return Err(io::Error::new(io::ErrorKind::InvalidFilename, why));
        }
        let address = SocketAddrUnix::new(path)?;
        let _lock = SocketPathLock::take(path)?;
        remove_stale_socket_file(path, &address)?;
        let fd = create_unix_stream_socket()?;
        // On Linux, the mode of an unbound socket becomes the mode of its path, so others cannot
        // connect at any moment.
        rustix::fs::fchmod(&fd, Mode::RUSR | Mode::WUSR)?;
        rustix::net::bind(&fd, &address)?;
        let bound = BoundUnixSocket::with_file_of(fd, path)?;
        rustix::net::listen(&bound.fd, BACKLOG)?;
        Ok(bound)
    }

    /// Takes over a listening socket that another process bound to a path. The file stays until
    /// [`BoundUnixSocket::keep_file`] says that it is this one's.
    ///
    /// # Errors
    /// ENOENT if the path was removed, EINVAL if the socket has no path, otherwise the error of the
    /// system.
    pub fn taken_over(fd: OwnedFd) -> io::Result<BoundUnixSocket> {
        let address = SocketAddrUnix::try_from(rustix::net::getsockname(&fd)?)?;
        let path = address.path().ok_or(Errno::INVAL)?;
        rustix::io::ioctl_fionbio(&fd, true)?;
        let bound = BoundUnixSocket::with_file_of(fd, Path::new(OsStr::from_bytes(path.to_bytes())))?;
        bound.keep_file(true);
        Ok(bound)
    }

    fn with_file_of(fd: OwnedFd, path: &Path) -> io::Result<BoundUnixSocket> {
        let file = rustix::fs::lstat(path)?;
        Ok(BoundUnixSocket { fd, path: path.to_owned(), file, keeps_file: AtomicBool::new(false) })
    }

    /// Sets whether the socket file stays when this is dropped, because another process uses the
    /// socket.
    pub fn keep_file(&self, keep: bool) {
        self.keeps_file.store(keep, Ordering::Relaxed);
    }

    /// Path of the socket.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl AsFd for BoundUnixSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for BoundUnixSocket {
    fn drop(&mut self) {
        // The socket still answers during the check, so no server takes it for stale.
        if self.keeps_file.load(Ordering::Relaxed) {
            return;
        }
        let is_ours = |now: Stat| (now.st_dev, now.st_ino) == (self.file.st_dev, self.file.st_ino);
        if rustix::fs::lstat(&self.path).is_ok_and(is_ours) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// The lock on a path, released when dropped.
struct SocketPathLock {
    path: PathBuf,
    _file: File,
}

impl SocketPathLock {
    fn take(socket: &Path) -> io::Result<SocketPathLock> {
        let mut path = socket.as_os_str().to_owned();
        path.push(".lock");
        let path = PathBuf::from(path);
        let begun = Instant::now();
        let explain = |error: Errno| {
            let error = io::Error::from(error);
            io::Error::new(error.kind(), format!("{}: {error}", path.display()))
        };
        loop {
            let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let file = File::from(rustix::fs::open(&path, flags, Mode::RUSR | Mode::WUSR).map_err(explain)?);
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                // The previous holder has removed the file meanwhile.
                Ok(()) if rustix::fs::fstat(&file)?.st_nlink == 0 => {}
                Ok(()) => return Ok(SocketPathLock { path, _file: file }),
                Err(Errno::WOULDBLOCK) if begun.elapsed() < LOCK_MAX => std::thread::sleep(LOCK_PAUSE),
                Err(Errno::WOULDBLOCK) => {
                    let why =
                        format!("another program holds {}: end that, or choose another path", path.display());
                    return Err(io::Error::new(io::ErrorKind::WouldBlock, why));
                }
                Err(error) => return Err(explain(error)),
            }
        }
    }
}

impl Drop for SocketPathLock {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

fn create_unix_stream_socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?)
}

/// Removes a socket file without a server.
fn remove_stale_socket_file(path: &Path, address: &SocketAddrUnix) -> io::Result<()> {
    let found = match rustix::fs::lstat(path) {
        Err(Errno::NOENT) => return Ok(()),
        found => found?,
    };
    if FileType::from_raw_mode(found.st_mode) != FileType::Socket {
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, "it exists and is not a socket"));
    }
    match rustix::net::connect(create_unix_stream_socket()?, address) {
        // A server whose backlog is full is alive, too.
        Ok(()) | Err(Errno::AGAIN) => {
            Err(io::Error::new(io::ErrorKind::AddrInUse, "it is in use: another server answers there"))
        }
        Err(Errno::CONNREFUSED) => std::fs::remove_file(path),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::{UnixListener, UnixStream};

    /// A socket that is bound but does not listen yet is not taken for stale: its server holds the
    /// lock.
    #[test]
    fn one_that_does_not_listen_yet_is_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let lock = SocketPathLock::take(&path).unwrap();
        let address = SocketAddrUnix::new(&path).unwrap();
        let first = create_unix_stream_socket().unwrap();
        rustix::net::bind(&first, &address).unwrap();
        let second = std::thread::scope(|scope| {
            let second = scope.spawn(|| BoundUnixSocket::new(&path));
            std::thread::sleep(Duration::from_millis(50));
            rustix::net::listen(&first, 1).unwrap();
            drop(lock);
            second.join().unwrap()
        });
        assert_eq!(second.unwrap_err().kind(), io::ErrorKind::AddrInUse);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "no lock is left");
    }

    /// A user who can only read the folder cannot block the socket.
    #[test]
    fn a_lock_on_the_folder_is_nobodys_business() {
        let folder = tempfile::tempdir().unwrap();
        let other = File::open(folder.path()).unwrap();
        flock(&other, FlockOperation::LockExclusive).unwrap();
        let path = folder.path().join("s");
        let bound = BoundUnixSocket::new(&path).unwrap();
        UnixStream::connect(&path).unwrap();
        drop(bound);
        drop(UnixListener::bind(&path).unwrap());
        drop(BoundUnixSocket::new(&path).unwrap());
        assert!(!path.exists());
    }
}
