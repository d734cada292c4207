//! The NBD server.
//!
//! [`NbdServer`] accepts connections and distributes them over the cores; each connection is a
//! front end of its own. [`Exports`] is the list of served devices, which may change; a connection
//! keeps the export that it chose.
//!
//! Supported: the fixed newstyle handshake with `GO`, `INFO`, `LIST`, `STRUCTURED_REPLY`,
//! `EXTENDED_HEADERS`, `LIST_META_CONTEXT`, `SET_META_CONTEXT`, `STARTTLS`, `ABORT` and
//! `EXPORT_NAME`; the commands `READ`, `WRITE`, `FLUSH`, `TRIM`, `WRITE_ZEROES`, `CACHE`,
//! `BLOCK_STATUS` (also with a payload) and `DISC`; FUA, `NO_HOLE`, `FAST_ZERO`, `DF`; block sizes
//! and descriptions; the contexts `base:allocation` and `qemu:dirty-bitmap:NAME`.
//!
//! The parts, in the order in which a request meets them:
//!
//! * `receive`: one receive brings many requests. The payload of a write is cut out of the memory
//!   in which it arrived. A long payload takes memory as it arrives.
//! * `request`: checks each request against its export. An impossible one gets an error reply.
//! * `partial_blocks`, `range_locks`: requests may begin and end at any byte; the device sees whole
//!   blocks. A write of a part of a block reads, changes and writes the block. Meanwhile it locks
//!   the range on all cores, for all exports of the device. Another device over the same disk is
//!   not locked.
//! * `serve`, `connection`: requests become bios, completed bios become replies; the life of a
//!   client.
//! * `reply`: all replies of a turn leave in one send.
//! * `serve/status`, `contexts`, `block_status`: `BLOCK_STATUS`. The device is queried on a thread,
//!   because a file system may block. Unknown parts are reported as data and as changed. An answer
//!   describes a moment after the request arrived, so no acknowledged write is reported as a hole.
//!   A dirty bitmap may report too much and never too little: the map is read first, and its
//!   snapshot is checked after. If its snapshot is gone, everything counts as changed.
//! * `connection/tls`: between the socket and all of the above, if the client has begun TLS.
//! * `connection/migration`: a client moves to another core as a plain value, once none of its
//!   requests or ring operations is in flight. A move that takes longer than 50 ms is cancelled.
//! * `handover`: a client moves to another process in the same way.
//! * `balance`: chooses the client to move. Each core measures the CPU time of its clients in
//!   windows of 10 ms. A client moves if it gains a sixteenth of a CPU in three windows; an idle
//!   core measures nothing.
//! * `io_counters`, `stats`: counters and latencies per device. A core writes its own numbers with
//!   plain stores, and readers add them up. The cost is 4 KiB per device and core.
//!
//! **Bounds** ([`NbdServerLimits`]). The connections of a core share 256 MiB, and each has 640 KiB
//! besides (`memory`). One request at a time may exceed the bound, so one can always be finished:
//! `n` cores with `c` connections use at most `n * 320 MiB + c * 640 KiB`. The clients of one
//! device leave memory to others. A client that holds memory without progress while others wait is
//! closed. `admission` bounds connections: 256 handshakes and 4,096 served clients, of which one
//! peer or one device gets 3,072, and one peer of a device 2,304. At a bound, a connection stops
//! receiving until replies have left. A connection takes in 256 requests per turn. A warm
//! connection allocates nothing.

mod admission;
mod allowed_clients;
mod balance;
mod block_status;
mod connection;
mod contexts;
mod description;
pub(crate) mod export_geometry;
mod exports;
mod handover;
mod handshake;
pub(crate) mod io_counters;
mod listener;
mod memory;
mod partial_blocks;
mod range_locks;
mod receive;
mod reply;
mod request;
mod serve;
mod socket;
mod stats;
mod tls;

pub use allowed_clients::{AllowedClients, MACHINE_PREFIX, USER_PREFIX};
pub use description::ExportDescription;
pub use exports::{Export, ExportNameError, ExportRef, Exports, FailingExportGuard};
pub use handover::{DetachedNbdClient, InheritedListener, NbdHandover};
pub use io_counters::{DeviceIoReport, OpIoCounters};
pub use listener::{BoundAddress, ListenAddress, NbdServer};
pub use stats::{NbdServerStats, ServerCountersHandle};
pub use tls::NbdServerTls;

pub(crate) use admission::{AdmittedConnectionSlot, Peer, PendingHandshakes};
pub(crate) use exports::FailingExportMessage;
pub(crate) use io_counters::{CoreDeviceIoCounters, DeviceIoCounters};
pub(crate) use listener::file_descriptor_limit;
pub(crate) use receive::ReceiveBuffer;
pub(crate) use reply::return_buffers_to_pool;
pub(crate) use socket::configure_accepted_socket;
pub(crate) use stats::ServerCounters;

use ipnet::IpNet;
use std::sync::Arc;
use std::time::Duration;

/// Limits of a server.
#[derive(Clone, Debug)]
pub struct NbdServerLimits {
    /// Limit of connected clients that have chosen an export. A client over the limit is refused
    /// with an error. At least 1. Clients that have disconnected do not count.
    pub connections_max: usize,
    /// Limit of these per peer: a user on Unix sockets, an address on TCP. At least 1.
    pub peer_connections_max: usize,
    /// Limit of clients per device. Disconnected clients count as long as the device has requests
    /// of theirs. One peer gets three quarters of this at most. At least 1.
    pub device_connections_max: usize,
    /// Limit of connections in the handshake. If one more connects, the oldest that has sent
    /// nothing is closed. At least 1.
    pub handshakes_max: usize,
    /// Limit of unanswered requests per connection. At least 1.
    pub requests_max: usize,
    /// Limit of data bytes in the unanswered requests of a connection. One request may exceed it.
    /// At least 1.
    pub bytes_max: usize,
    /// Limit of memory in bytes that the connections of one core share. Each connection has 640 KiB
    /// besides, and one request per core may exceed the limit. So a server with `n` cores uses at
    /// most `n * (core_bytes_max + 64 MiB) + connections * 640 KiB`. Memory that a connection keeps
    /// for reuse is included. It is freed within three seconds of the last request, or as soon as
    /// others need it.
    pub core_bytes_max: usize,
    /// Time limit from the connection of a client to its choice of an export.
    pub handshake_max: Duration,
    /// Time without a request after which a client is disconnected; `None` for never.
    pub idle_max: Option<Duration>,
    /// Time for which a client may hold memory without transferring a byte while another waits for
    /// memory. Then it is closed. The time is divided by the number of waiting clients.
    pub stall_max: Duration,
    /// Time limit for a connection to deliver its last answers when the server stops.
    pub stop_max: Duration,
    /// The networks from which TCP clients may come; `None` for all. Connections of others are
    /// closed at once.
    pub networks: Option<Arc<[IpNet]>>,
}

impl Default for NbdServerLimits {
    fn default() -> NbdServerLimits {
        NbdServerLimits {
            connections_max: 4096,
            peer_connections_max: 3072,
            device_connections_max: 3072,
            handshakes_max: 256,
            requests_max: 1024,
            bytes_max: 64 << 20,
            core_bytes_max: 256 << 20,
            handshake_max: Duration::from_secs(30),
            idle_max: None,
            stall_max: Duration::from_secs(5),
            stop_max: Duration::from_secs(5),
            networks: None,
        }
    }
}

/// Descriptors that the server leaves for the control socket and the files of devices, but at most
/// a quarter of all.
const DESCRIPTORS_LEFT: usize = 128;

impl NbdServerLimits {
    /// True if a client at the other end of a connection may come from there.
    pub(crate) fn admits(&self, peer: &admission::Peer) -> bool {
        match (peer, &self.networks) {
            (admission::Peer::User(_) | admission::Peer::Machine(_), _) | (_, None) => true,
            // On a socket for both families, IPv4 clients have mapped addresses.
            (admission::Peer::Address(address), Some(networks)) => {
                networks.iter().any(|network| network.contains(&address.to_canonical()))
            }
            (admission::Peer::Unknown, Some(_)) => false,
        }
    }

    /// Limit of clients per device and peer.
    fn peer_device_max(&self) -> usize {
        self.device_connections_max * 3 / 4
    }

    /// Returns the options with no more connections than `descriptors` allow. A peer and a device
    /// still get only a part of them.
    pub(crate) fn within(mut self, descriptors: usize) -> NbdServerLimits {
        let room = (descriptors - DESCRIPTORS_LEFT.min(descriptors / 4)).max(4);
        // For a moment, twice as many connections may be in the handshake.
        self.handshakes_max = self.handshakes_max.min(room / 8).max(1);
        let connections = (room - 2 * self.handshakes_max).max(1);
        if connections < self.connections_max {
            self.connections_max = connections;
            self.peer_connections_max = self.peer_connections_max.min(connections * 3 / 4).max(1);
            self.device_connections_max = self.device_connections_max.min(connections * 3 / 4).max(1);
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_descriptors_mean_few_connections() {
        for (descriptors, handshakes, connections, peer, device) in [
            (0, 1, 2, 1, 1),
            (100, 9, 57, 42, 42),
            (1024, 112, 672, 504, 504),
            (1 << 20, 256, 4096, 3072, 3072),
        ] {
            let o = NbdServerLimits::default().within(descriptors);
            let limits =
                (o.handshakes_max, o.connections_max, o.peer_connections_max, o.device_connections_max);
            assert_eq!(limits, (handshakes, connections, peer, device), "{descriptors}");
        }
    }
}
