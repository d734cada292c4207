//! The NBD server.
//!
//! [`NbdServer`] accepts connections and deals them to the cores; there each is a front end of its own, for life. What it serves is a
//! list of named devices, [`Exports`], which may change while it runs: a connection keeps the export that it chose.
//!
//! Spoken: the fixed newstyle handshake with `GO`, `INFO`, `LIST`, `STRUCTURED_REPLY`, `ABORT` and `EXPORT_NAME`; the commands
//! `READ`, `WRITE`, `FLUSH`, `TRIM`, `WRITE_ZEROES`, `CACHE` and `DISC`; FUA, `NO_HOLE`, `FAST_ZERO`, `DF`; block sizes. Not spoken: TLS,
//! metadata contexts, extended headers.
//!
//! How the data flow (steps by file):
//! * `receive`: one receive brings many requests; the payload of a write is cut out of the memory it arrived in.
//! * `request`: each request is checked against its export; what can't be done is answered with an error, and the connection lives.
//! * `connection`: the life of a client; `serve`: requests become bios, finished bios become answers.
//! * `reply`: all answers of a turn leave in one send, headers and data gathered.
//!
//! Everything is bounded: connections, requests and bytes in flight on each ([`ServerOptions`]), the time for a handshake. At a bound the
//! connection stops receiving until answers have gone out. A warm connection allocates nothing.

mod connection;
mod exports;
mod handshake;
mod listener;
mod receive;
mod reply;
mod request;
mod serve;
mod socket;
mod stats;

pub use exports::{Export, ExportError, Exports};
pub use listener::{Bound, Listen, NbdServer};
pub use stats::Stats;

use std::time::Duration;

/// The bounds of a server.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Open connections; one more is closed at once. At least 1.
    pub connections_max: usize,
    /// Requests of one connection that are not answered yet. At least 1.
    pub requests_max: usize,
    /// Bytes of data in the requests of one connection that are not answered yet; passed by one request at the most. At least 1. A
    /// connection keeps for reuse as much at the most for reads, for long writes, and for what it receives into.
    pub bytes_max: usize,
    /// How long a client may take from connecting to choosing an export.
    pub handshake_max: Duration,
    /// How long a connection may take to deliver its last answers when the server stops.
    pub stop_max: Duration,
}

impl Default for ServerOptions {
    fn default() -> ServerOptions {
        ServerOptions {
            connections_max: 1024,
            requests_max: 1024,
            bytes_max: 64 << 20,
            handshake_max: Duration::from_secs(30),
            stop_max: Duration::from_secs(5),
        }
    }
}
