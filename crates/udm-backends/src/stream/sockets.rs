//! Sockets of connections to servers, and the interface through which lanes get them.

use super::address::ServerAddress;
use rustix::fd::OwnedFd;
use rustix::net::{AddressFamily, SocketAddrAny, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use std::fs::File;
use std::io;
use std::net::TcpStream;
use std::time::Duration;

/// Time until the first keep-alive probe on an idle connection, and between probes. A machine that
/// was rebooted does not know the connection and resets it. That proves that nothing sent on it
/// will be written any more.
const KEEPALIVE: Duration = Duration::from_secs(15);

/// Time in ms until the system drops a connection whose peer does not acknowledge: the maximum, 24
/// days. Such a drop proves nothing, and the lane itself decides when a path is silent for too
/// long. While the server's window is full, the system still uses `tcp_retries2`.
const USER_TIMEOUT: u32 = i32::MAX as u32;

/// Operations on sockets that do not go through a core's ring: of the real system or of a
/// simulation.
pub trait SocketOps: Send + Sync {
    /// Creates a configured socket for a connection to `address`. Also returns the address to
    /// connect it to.
    ///
    /// # Errors
    /// No socket is available.
    fn open(&self, address: &ServerAddress) -> io::Result<(OwnedFd, SocketAddrAny)>;

    /// Makes a later close of `socket` discard data that has not left yet.
    fn reset(&self, socket: &OwnedFd);
}

/// The sockets of the operating system.
pub(crate) struct SystemSockets;

impl SocketOps for SystemSockets {
    fn open(&self, address: &ServerAddress) -> io::Result<(OwnedFd, SocketAddrAny)> {
        open_socket(address)
    }

    fn reset(&self, socket: &OwnedFd) {
        // Has no effect on a Unix socket: sent data is already at the other end.
        let _ = sockopt::set_socket_linger(socket, Some(Duration::ZERO));
    }
}

fn open_socket(address: &ServerAddress) -> io::Result<(OwnedFd, SocketAddrAny)> {
    /// Space for a deep queue of 4 KiB writes; the kernel limits it to its maximum.
    const UNIX_SEND_BUFFER: usize = 4 << 20;
    let open = |family| rustix::net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None);
    match address {
        ServerAddress::Unix(path) => {
            let fd = open(AddressFamily::UNIX)?;
            sockopt::set_socket_send_buffer_size(&fd, UNIX_SEND_BUFFER)?;
            Ok((fd, SocketAddrUnix::new(path)?.into()))
        }
        ServerAddress::Tcp(address) => {
            let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
            let fd = open(family)?;
            sockopt::set_tcp_nodelay(&fd, true)?;
            sockopt::set_socket_keepalive(&fd, true)?;
            sockopt::set_tcp_keepidle(&fd, KEEPALIVE)?;
            sockopt::set_tcp_keepintvl(&fd, KEEPALIVE)?;
            sockopt::set_tcp_user_timeout(&fd, USER_TIMEOUT)?;
            Ok((fd, (*address).into()))
        }
    }
}

/// Opens a socket and connects it within `timeout`.
pub(crate) fn connect_socket_with_timeout(address: &ServerAddress, timeout: Duration) -> io::Result<File> {
    let fd: OwnedFd = match address {
        ServerAddress::Unix(path) => {
            let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
            let fd = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
            // If a server is stopped and its backlog is full, `connect` blocks.
            sockopt::set_socket_timeout(&fd, sockopt::Timeout::Send, Some(timeout))?;
            rustix::net::connect(&fd, &SocketAddrUnix::new(path)?)?;
            fd
        }
        ServerAddress::Tcp(address) => {
            let stream = TcpStream::connect_timeout(address, timeout)?;
            stream.set_nodelay(true)?;
            stream.into()
        }
    };
    Ok(File::from(fd))
}

/// Sets the timeout of each receive and send.
pub(crate) fn set_socket_timeouts(stream: &File, timeout: Duration) -> io::Result<()> {
    // Zero would mean no timeout.
    let timeout = Some(timeout.max(Duration::from_millis(1)));
    sockopt::set_socket_timeout(stream, sockopt::Timeout::Recv, timeout)?;
    Ok(sockopt::set_socket_timeout(stream, sockopt::Timeout::Send, timeout)?)
}
