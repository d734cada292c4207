//! The address of a server, resolved.

use std::net::SocketAddr;
use std::path::PathBuf;

/// Address of a server.
#[derive(Clone, Debug)]
pub enum ServerAddress {
    /// Over TCP.
    Tcp(SocketAddr),
    /// Over a Unix socket at this path.
    Unix(PathBuf),
}
