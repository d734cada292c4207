//! The NBD server.
//!
//! [`NbdServer`] accepts connections and deals them to the cores; there each is a front end of its
//! own, which may go on on another core. What it serves is a list of named devices, [`Exports`],
//! which may change while it runs: a connection keeps the export that it chose.
//!
//! Spoken: the fixed newstyle handshake with `GO`, `INFO`, `LIST`, `STRUCTURED_REPLY`,
//! `LIST_META_CONTEXT`, `SET_META_CONTEXT`, `ABORT` and `EXPORT_NAME`; the commands `READ`,
//! `WRITE`, `FLUSH`, `TRIM`, `WRITE_ZEROES`, `CACHE`, `BLOCK_STATUS` and `DISC`; FUA, `NO_HOLE`,
//! `FAST_ZERO`, `DF`; block sizes; the contexts `base:allocation` and `qemu:dirty-bitmap:NAME`.
//! Not spoken: TLS, extended headers.
//!
//! How the data flow (steps by file):
//! * `receive`: one receive brings many requests; the payload of a write is cut out of the memory
//!   it arrived in.
//! * `request`: each request is checked against its export; what can't be done is answered with an
//!   error, and the connection lives.
//! * `unaligned`, `holds`: a request may begin and end at any byte; the device sees whole blocks.
//! * `serve/status`, `contexts`, `survey`: what of a device is allocated, and what has changed,
//!   asked on threads that may block.
//! * `connection`: the life of a client; `serve`: requests become bios, finished bios become
//!   answers.
//! * `connection/moving`: a client goes on on another core; `balance`: which, and when.
//! * `served`: what was asked of a device, and what came of it, for whoever looks.
//! * `reply`: all answers of a turn leave in one send, headers and data gathered.
//!
//! Everything is bounded ([`ServerOptions`]): connections (`places`), requests and bytes in flight
//! on each, the memory of a core (`memory`), the time for a handshake. At a bound the connection
//! stops receiving until answers have gone out. A warm connection allocates nothing.

mod balance;
mod connection;
mod contexts;
mod exports;
mod handshake;
mod holds;
mod listener;
mod memory;
mod places;
mod receive;
mod reply;
mod request;
mod serve;
mod served;
mod socket;
mod stats;
mod survey;
mod unaligned;

pub use exports::{Export, ExportError, ExportUse, Exports, Failing};
pub use listener::{Bound, Listen, NbdServer};
pub use served::{OpServed, ServedReport};
pub use stats::{ServerCounts, Stats};

use std::time::Duration;

/// The bounds of a server.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Clients that have chosen an export; one more is told that there is no room. At least 1.
    /// Those that are gone do not count.
    pub connections_max: usize,
    /// Of these, of one peer: a user on Unix sockets, an address on TCP. At least 1.
    pub peer_connections_max: usize,
    /// Clients of one device, those included that are gone while it still has requests of theirs.
    /// One peer has three quarters of them at the most. At least 1.
    pub device_connections_max: usize,
    /// Connections in the handshake. For one more, the oldest that has said nothing is closed. At
    /// least 1.
    pub handshakes_max: usize,
    /// Requests of one connection that are not answered yet. At least 1.
    pub requests_max: usize,
    /// Bytes of data in the requests of one connection that are not answered yet; passed by one
    /// request at the most. At least 1.
    pub bytes_max: usize,
    /// Bytes of memory that the connections of one core share; each connection has 640 KiB besides,
    /// and one request of a core may pass it. So a server of `n` cores uses
    /// `n * (core_bytes_max + 64 MiB) + connections * 640 KiB` at the most. What a connection keeps
    /// for reuse is part of it, and given back within three seconds of the last request, or as soon
    /// as others need it.
    pub core_bytes_max: usize,
    /// How long a client may take from connecting to choosing an export.
    pub handshake_max: Duration,
    /// How long a client may keep memory without moving a byte while another waits for it; then it
    /// is closed. The more wait the shorter: divided by their number.
    pub stall_max: Duration,
    /// How long a connection may take to deliver its last answers when the server stops.
    pub stop_max: Duration,
}

impl Default for ServerOptions {
    fn default() -> ServerOptions {
        ServerOptions {
            connections_max: 4096,
            peer_connections_max: 3072,
            device_connections_max: 3072,
            handshakes_max: 256,
            requests_max: 1024,
            bytes_max: 64 << 20,
            core_bytes_max: 256 << 20,
            handshake_max: Duration::from_secs(30),
            stall_max: Duration::from_secs(5),
            stop_max: Duration::from_secs(5),
        }
    }
}

/// Descriptors that the server leaves to the rest of the program, the control socket and the files
/// of devices; but a quarter at the most.
const DESCRIPTORS_LEFT: usize = 128;

impl ServerOptions {
    /// Clients of one device that are one peer's.
    fn peer_device_max(&self) -> usize {
        self.device_connections_max * 3 / 4
    }

    /// The same with no more connections than `descriptors` are enough for; a peer and a device
    /// still have a part of them only.
    fn within(mut self, descriptors: usize) -> ServerOptions {
        let room = (descriptors - DESCRIPTORS_LEFT.min(descriptors / 4)).max(4);
        // For a moment there may be twice as many in the handshake.
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
            let o = ServerOptions::default().within(descriptors);
            let limits =
                (o.handshakes_max, o.connections_max, o.peer_connections_max, o.device_connections_max);
            assert_eq!(limits, (handshakes, connections, peer, device), "{descriptors}");
        }
    }
}
