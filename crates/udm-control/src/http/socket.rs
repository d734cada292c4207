//! The socket's file: who owns the path, and since when.
//!
//! Contract: the socket has mode 0600 from the moment it exists; a stale one is replaced only when
//! nobody answers on it; of several servers that want one path at the same time one gets it.
//! Removing the file is the dropped [`Socket`]'s work, where it has made it.

use rustix::fs::{FlockOperation, Mode, fchmod, flock};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};
use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The longest path of a socket in bytes (`sun_path`, less its NUL).
pub const PATH_MAX: usize = 107;

/// How many peers may wait to be accepted.
const BACKLOG: i32 = 1024;

/// How long somebody else may hold the lock on the folder: it is held for the moment of a bind.
const LOCK_MAX: Duration = Duration::from_secs(5);
const LOCK_PAUSE: Duration = Duration::from_millis(10);

/// A bound control socket. Dropping it removes its file, unless another server has put its own
/// there meanwhile.
#[derive(Debug)]
pub struct Socket {
    pub(super) listener: UnixListener,
    path: PathBuf,
    /// Device and inode; nothing where the file is somebody else's.
    file: Option<(u64, u64)>,
}

impl Socket {
    /// Binds `path`, and makes its folder (mode 0700) when only that is missing.
    ///
    /// # Errors
    /// EADDRINUSE when somebody answers there, EEXIST when it is something else than a socket,
    /// ENAMETOOLONG for more than [`PATH_MAX`] bytes, the system's own otherwise.
    pub fn bind(path: &Path) -> io::Result<Socket> {
        let address = address(path)?;
        let folder = path.parent().filter(|f| !f.as_os_str().is_empty()).unwrap_or(Path::new("."));
        match fs::create_dir(folder) {
            Ok(()) => fs::set_permissions(folder, fs::Permissions::from_mode(0o700))?,
            // It was there, or another server was faster.
            Err(_) if folder.is_dir() => {}
            Err(error) => return Err(error),
        }
        // Two servers that find the same stale socket must not both replace it.
        let _alone = lock(folder)?;
        clear_stale(path, &address)?;
        let socket = stream_socket()?;
        // The file takes its mode from the socket: nobody can open it before it has it.
        fchmod(&socket, Mode::from_raw_mode(0o600))?;
        bind(&socket, &address)?;
        listen(&socket, BACKLOG)?;
        let meta = fs::symlink_metadata(path)?;
        Ok(Socket { listener: socket.into(), path: path.into(), file: Some((meta.dev(), meta.ino())) })
    }

    /// A socket that listens already. Its file is whoever's made it, with the mode that it has; who
    /// may use it is asked of each peer all the same.
    ///
    /// # Errors
    /// The system's own; and a socket without a path.
    pub fn given(listener: UnixListener) -> io::Result<Socket> {
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let path = address.as_pathname().ok_or_else(|| io::Error::other("a socket without a path"))?;
        Ok(Socket { path: path.into(), listener, file: None })
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        // It still answers while its file is looked at, so nobody takes it for stale.
        if fs::symlink_metadata(&self.path).is_ok_and(|meta| Some((meta.dev(), meta.ino())) == self.file) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn address(path: &Path) -> io::Result<SocketAddrUnix> {
    if path.as_os_str().len() > PATH_MAX {
        let why = format!("the path of a socket has at most {PATH_MAX} bytes: give a shorter one");
        return Err(io::Error::new(io::ErrorKind::InvalidFilename, why));
    }
    Ok(SocketAddrUnix::new(path)?)
}

fn stream_socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?)
}

/// Locks `folder` against other servers until the file is dropped.
fn lock(folder: &Path) -> io::Result<File> {
    let file = File::open(folder)?;
    let begun = Instant::now();
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            Err(Errno::WOULDBLOCK) if begun.elapsed() < LOCK_MAX => std::thread::sleep(LOCK_PAUSE),
            Err(Errno::WOULDBLOCK) => {
                let why = "another program holds a lock on its folder: end that, or choose another folder";
                return Err(io::Error::new(io::ErrorKind::WouldBlock, why));
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Removes a socket file on which nobody answers.
fn clear_stale(path: &Path, address: &SocketAddrUnix) -> io::Result<()> {
    let meta = match fs::symlink_metadata(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    if !meta.file_type().is_socket() {
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, "it exists and is no socket"));
    }
    match connect(stream_socket()?, address) {
        // With its queue full it is alive, too.
        Ok(()) | Err(Errno::AGAIN) => {
            Err(io::Error::new(io::ErrorKind::AddrInUse, "another udm answers there"))
        }
        Err(Errno::CONNREFUSED) => fs::remove_file(path),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    #[test]
    fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new/udm.sock");
        let first = Socket::bind(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(fs::metadata(path.parent().unwrap()).unwrap().mode() & 0o777, 0o700);
        assert_eq!(Socket::bind(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        drop(first);
        assert!(!path.exists(), "the file goes with the socket");

        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists(), "a stale file");
        let second = Socket::bind(&path).unwrap();
        fs::remove_file(&path).unwrap();
        fs::write(&path, "something else").unwrap();
        drop(second);
        assert!(path.exists(), "what is not ours stays");
        assert_eq!(Socket::bind(&path).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
    }

    #[test]
    fn of_servers_that_want_one_path_one_gets_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("udm.sock");
        for round in 0..50 {
            if round % 2 == 0 {
                drop(UnixListener::bind(&path).unwrap());
            }
            assert_eq!(bind_at_once(&[&path; 6]).len(), 1, "round {round}");
        }
    }

    fn bind_at_once(paths: &[&PathBuf]) -> Vec<Socket> {
        let start = std::sync::Barrier::new(paths.len());
        let bind = |path: &Path| {
            start.wait();
            Socket::bind(path)
        };
        thread::scope(|scope| {
            let wanting: Vec<_> = paths.iter().map(|path| scope.spawn(|| bind(path))).collect();
            wanting.into_iter().filter_map(|one| one.join().unwrap().ok()).collect()
        })
    }

    /// Servers that are started together make their folder together.
    #[test]
    fn a_folder_that_another_server_makes_is_as_good() {
        let top = tempfile::tempdir().unwrap();
        for round in 0..50 {
            let paths: Vec<PathBuf> = (0..6).map(|i| top.path().join(format!("{round}/{i}.sock"))).collect();
            let bound = bind_at_once(&paths.iter().collect::<Vec<_>>());
            assert_eq!(bound.len(), 6, "round {round}");
        }
    }

    #[test]
    fn a_path_may_be_as_long_as_the_system_takes() {
        let folder = tempfile::tempdir().unwrap();
        for length in [100, PATH_MAX, PATH_MAX + 1] {
            let name = "x".repeat(length - folder.path().as_os_str().len() - 1);
            let path = folder.path().join(name);
            let bound = Socket::bind(&path);
            assert_eq!(bound.is_ok(), length <= PATH_MAX, "{length}: {bound:?}");
            assert_eq!(std::os::unix::net::UnixStream::connect(&path).is_ok(), length <= PATH_MAX);
        }
    }
}
