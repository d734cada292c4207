//! Where lanes get the sockets of their connections from: the system, or a world that is made up.

use super::server::Address;
use rustix::fd::OwnedFd;
use rustix::net::{AddressFamily, SocketAddrAny, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use std::io;

/// See the module's documentation. All else that a lane does with a socket it asks of its core's
/// ring.
pub trait Sockets: Send + Sync {
    /// A socket for a connection to `address`, set up, and what it is to be connected to.
    ///
    /// # Errors
    /// There is none to be had.
    fn open(&self, address: &Address) -> io::Result<(OwnedFd, SocketAddrAny)>;
}

/// The system's.
pub(super) struct Real;

impl Sockets for Real {
    fn open(&self, address: &Address) -> io::Result<(OwnedFd, SocketAddrAny)> {
        /// Room for a deep queue of 4 KiB writes; the kernel cuts it to what it allows.
        const UNIX_SEND_BUFFER: usize = 4 << 20;
        let open = |family| rustix::net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None);
        match address {
            Address::Unix(path) => {
                let fd = open(AddressFamily::UNIX)?;
                sockopt::set_socket_send_buffer_size(&fd, UNIX_SEND_BUFFER)?;
                Ok((fd, SocketAddrUnix::new(path)?.into()))
            }
            Address::Tcp(address) => {
                let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
                let fd = open(family)?;
                sockopt::set_tcp_nodelay(&fd, true)?;
                sockopt::set_socket_keepalive(&fd, true)?;
                Ok((fd, (*address).into()))
            }
        }
    }
}
