//! The control socket: bound by the server, or inherited.

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use tokio::sync::watch;
use udm_frontends::unix_socket::BoundUnixSocket;
pub use udm_frontends::unix_socket::PATH_MAX;

/// A control socket. Dropping it removes the socket file if this process created it, unless another
/// server has replaced it.
#[derive(Debug)]
pub struct ControlSocket {
    pub(super) listener: UnixListener,
    path: PathBuf,
    /// `None` if the socket was inherited.
    bound: Option<BoundUnixSocket>,
    /// True while no connections are accepted.
    pauses: watch::Sender<bool>,
    has_readers: bool,
}

impl ControlSocket {
    /// Binds `path`. Creates its folder (mode 0700) if only that is missing.
    ///
    /// # Errors
    /// As [`BoundUnixSocket::new`].
    pub fn bind(path: &Path) -> io::Result<ControlSocket> {
        let folder = path.parent().filter(|f| !f.as_os_str().is_empty()).unwrap_or(Path::new("."));
        match fs::DirBuilder::new().mode(0o700).create(folder) {
            Ok(()) => {}
            // The folder existed, or another server created it first.
            Err(_) if folder.is_dir() => {}
            Err(error) => return Err(error),
        }
        let bound = BoundUnixSocket::new(path)?;
        let listener = UnixListener::from(bound.as_fd().try_clone_to_owned()?);
        Ok(ControlSocket {
            listener,
            path: path.into(),
            bound: Some(bound),
            pauses: watch::Sender::new(false),
            has_readers: false,
        })
    }

    /// Takes an inherited listening socket. Its file, with its mode, belongs to the process that
    /// created it; peers are checked all the same.
    ///
    /// # Errors
    /// The system's error, and a socket without a path.
    pub fn given(listener: UnixListener) -> io::Result<ControlSocket> {
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let path = address.as_pathname().ok_or_else(|| io::Error::other("a socket without a path"))?;
        Ok(ControlSocket {
            path: path.into(),
            listener,
            bound: None,
            pauses: watch::Sender::new(false),
            has_readers: false,
        })
    }

    /// Takes over the socket of another server. If `removes_file`, its file is removed at the end,
    /// unless [`ControlSocket::keep_file`] says otherwise; at first it stays.
    ///
    /// # Errors
    /// As [`ControlSocket::given`] and [`BoundUnixSocket::taken_over`].
    pub fn taken_over(listener: UnixListener, removes_file: bool) -> io::Result<ControlSocket> {
        let bound = listener.as_fd().try_clone_to_owned()?;
        let bound = removes_file.then(|| BoundUnixSocket::taken_over(bound)).transpose()?;
        Ok(ControlSocket { bound, ..ControlSocket::given(listener)? })
    }

    /// Lets other users, if the permissions of the file let them in, use the verbs that change
    /// nothing.
    #[must_use]
    pub fn with_readers(self, has_readers: bool) -> ControlSocket {
        ControlSocket { has_readers, ..self }
    }

    /// True if peers of other users may use the verbs that change nothing.
    pub(super) fn has_readers(&self) -> bool {
        self.has_readers
    }

    /// Sets whether the file stays when this is dropped.
    pub fn keep_file(&self, keep: bool) {
        self.bound.iter().for_each(|bound| bound.keep_file(keep));
    }

    /// True if the file is removed when this is dropped.
    #[must_use]
    pub fn removes_file(&self) -> bool {
        self.bound.is_some()
    }

    /// Accepts no connections while `pause` is true: they wait in the backlog.
    pub fn pause(&self, pause: bool) {
        self.pauses.send_replace(pause);
    }

    /// Completes when the socket is paused, or when it is not.
    pub(super) async fn is_paused(&self, paused: bool) {
        // Fails only if the sender is gone.
        let _ = self.pauses.subscribe().wait_for(|now| *now == paused).await;
    }

    /// Path of the socket.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl AsFd for ControlSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;
    use std::thread;

    #[test]
    fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new/udm.sock");
        let first = ControlSocket::bind(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(fs::metadata(path.parent().unwrap()).unwrap().mode() & 0o777, 0o700);
        assert_eq!(ControlSocket::bind(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        drop(first);
        assert!(!path.exists(), "the file goes with the socket");

        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists(), "a stale file");
        let second = ControlSocket::bind(&path).unwrap();
        fs::remove_file(&path).unwrap();
        fs::write(&path, "something else").unwrap();
        drop(second);
        assert!(path.exists(), "what is not ours stays");
        assert_eq!(ControlSocket::bind(&path).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
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

    fn bind_at_once(paths: &[&PathBuf]) -> Vec<ControlSocket> {
        let start = std::sync::Barrier::new(paths.len());
        let bind = |path: &Path| {
            start.wait();
            ControlSocket::bind(path)
        };
        thread::scope(|scope| {
            let wanting: Vec<_> = paths.iter().map(|path| scope.spawn(|| bind(path))).collect();
            wanting.into_iter().filter_map(|one| one.join().unwrap().ok()).collect()
        })
    }

    /// Servers that are started together create their folder together.
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
            let bound = ControlSocket::bind(&path);
            assert_eq!(bound.is_ok(), length <= PATH_MAX, "{length}: {bound:?}");
            assert_eq!(std::os::unix::net::UnixStream::connect(&path).is_ok(), length <= PATH_MAX);
        }
    }
}
