//! Listening sockets.

use super::handover::InheritedListener;
use crate::unix_socket::BoundUnixSocket;
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily as NixAddressFamily, Backlog, SockFlag, SockType, VsockAddr, bind, getsockname, listen,
    socket,
};
use rustix::net::{AddressFamily, SocketAddrUnix, sockopt};
use std::ffi::OsStr;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A listening socket. When dropped, it is closed and its path is removed.
pub(super) struct ListenSocket {
    pub(super) fd: OwnedFd,
    pub(super) kind: ListenSocketKind,
}

pub(super) enum ListenSocketKind {
    /// The path, and the socket file if this server removes it.
    Unix(PathBuf, Option<BoundUnixSocket>),
    Tcp(SocketAddr),
    Vsock(u32),
}

fn add_io_error_context(e: impl Into<io::Error>, what: &str) -> io::Error {
    let e = e.into();
    io::Error::new(e.kind(), format!("{what}: {e}"))
}

impl ListenSocket {
    /// Creates a Unix socket at `path` that only this user can connect to. A socket without a
    /// server is replaced.
    pub(super) fn unix(path: &Path) -> io::Result<ListenSocket> {
        let bound =
            BoundUnixSocket::new(path).map_err(|e| add_io_error_context(e, &path.display().to_string()))?;
        ListenSocket::of_bound(bound)
    }

    fn of_bound(bound: BoundUnixSocket) -> io::Result<ListenSocket> {
        // `bound` removes the file.
        let fd = bound.as_fd().try_clone_to_owned()?;
        Ok(ListenSocket { fd, kind: ListenSocketKind::Unix(bound.path().to_owned(), Some(bound)) })
    }

    /// The socket for a server that takes over from this one.
    pub(super) fn handed_over(&self) -> io::Result<InheritedListener> {
        let removes_file = matches!(&self.kind, ListenSocketKind::Unix(_, Some(_)));
        Ok(InheritedListener { socket: self.fd.try_clone()?, removes_file })
    }

    /// Sets whether the socket file stays when this is dropped.
    pub(super) fn keep_file(&self, keep: bool) {
        if let ListenSocketKind::Unix(_, Some(bound)) = &self.kind {
            bound.keep_file(keep);
        }
    }

    /// Creates a TCP socket; port 0 selects a free one.
    pub(super) fn tcp(address: SocketAddr) -> io::Result<ListenSocket> {
        let listener =
            TcpListener::bind(address).map_err(|e| add_io_error_context(e, &address.to_string()))?;
        let address = listener.local_addr()?;
        listener.set_nonblocking(true)?;
        Ok(ListenSocket { fd: listener.into(), kind: ListenSocketKind::Tcp(address) })
    }

    /// Creates a socket on a port of vsock.
    pub(super) fn vsock(port: u32) -> io::Result<ListenSocket> {
        let context = |e: Errno| add_io_error_context(e, &format!("vsock port {port}"));
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let fd = socket(NixAddressFamily::Vsock, SockType::Stream, flags, None).map_err(context)?;
        bind(fd.as_raw_fd(), &VsockAddr::new(nix::libc::VMADDR_CID_ANY, port)).map_err(context)?;
        listen(&fd, Backlog::MAXALLOWABLE).map_err(context)?;
        Ok(ListenSocket { fd, kind: ListenSocketKind::Vsock(port) })
    }

    /// Uses a socket that listens already.
    pub(super) fn inherited(
        InheritedListener { socket: fd, removes_file }: InheritedListener,
    ) -> io::Result<ListenSocket> {
        if removes_file {
            let bound = BoundUnixSocket::taken_over(fd)?;
            return ListenSocket::of_bound(bound);
        }
        rustix::io::ioctl_fionbio(&fd, true)?;
        if sockopt::socket_domain(fd.as_fd())? == AddressFamily::VSOCK {
            let address: VsockAddr = getsockname(fd.as_raw_fd())?;
            return Ok(ListenSocket { fd, kind: ListenSocketKind::Vsock(address.port()) });
        }
        let address = rustix::net::getsockname(&fd)?;
        let kind = match SocketAddr::try_from(address.clone()) {
            Ok(address) => ListenSocketKind::Tcp(address),
            Err(_) => {
                let unix = SocketAddrUnix::try_from(address)?;
                let path = unix.path().ok_or_else(|| io::Error::other("a socket without a path"))?;
                ListenSocketKind::Unix(PathBuf::from(OsStr::from_bytes(path.to_bytes())), None)
            }
        };
        Ok(ListenSocket { fd, kind })
    }
}

/// Configures an accepted socket for many short messages, and for the ring, which needs it in
/// blocking mode.
pub(crate) fn configure_accepted_socket(fd: &OwnedFd) -> rustix::io::Result<()> {
    /// Space for a deep queue of 4 KiB answers; the kernel limits it to its maximum.
    const UNIX_SEND_BUFFER: usize = 4 << 20;
    const KEEP_IDLE: Duration = Duration::from_secs(60);
    const KEEP_INTERVAL: Duration = Duration::from_secs(15);
    const KEEP_COUNT: u32 = 8;
    rustix::io::ioctl_fionbio(fd, false)?;
    match sockopt::socket_domain(fd.as_fd())? {
        // The buffer of a Unix socket does not grow automatically, unlike that of TCP.
        AddressFamily::UNIX => sockopt::set_socket_send_buffer_size(fd, UNIX_SEND_BUFFER)?,
        // The kernel resets connections of a machine that ends.
        AddressFamily::VSOCK => {}
        _ => {
            sockopt::set_tcp_nodelay(fd, true)?;
            // If the host of a client is lost, its slot is freed after three minutes.
            sockopt::set_socket_keepalive(fd, true)?;
            sockopt::set_tcp_keepidle(fd, KEEP_IDLE)?;
            sockopt::set_tcp_keepintvl(fd, KEEP_INTERVAL)?;
            sockopt::set_tcp_keepcnt(fd, KEEP_COUNT)?;
        }
    }
    Ok(())
}
