//! Connections to servers through the core's io_uring, for any protocol: sockets, the operations in
//! flight, TLS, and why a connection ends. The clients of NBD and NVMe use them.

mod address;
mod connection;
mod reachability;
mod sockets;
mod tls;

pub use address::ServerAddress;
pub(crate) use connection::{
    DisconnectKind, DisconnectReason, HANDSHAKE_TIMEOUT, StreamConnection, StreamEvent,
};
pub(crate) use reachability::{BACK_OFF, BACK_OFF_MAX, ServerReachability};
pub use sockets::SocketOps;
pub(crate) use sockets::{SystemSockets, connect_socket_with_timeout, set_socket_timeouts};
pub(crate) use tls::RECORD_MAX;
