//! Hands the clients of a server over to another process, without effects that they can see.
//!
//! 1. [`NbdServer::pause_accepting`]: new connections wait in the backlog of their socket. Those in
//!    the handshake go on.
//! 2. [`NbdHandover::start`]: each served client leaves its core, as for a move to another core
//!    (`connection::migration`): requests in flight are completed and answered, others are left in
//!    the socket. What is left is a socket and plain data, a [`DetachedNbdClient`].
//! 3. The other process attaches them ([`NbdServer::attach_detached`]) to its exports of the same
//!    names. If it cannot, this process attaches them again.
//!
//! A client keeps the size that it was told; all else that the handshake settled is in
//! [`DetachedNbdClient`].

use super::connection::ConnectionMoveOrder;
use super::{Exports, NbdServer};
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, Sender, channel};
use udm_core::CoreId;
use udm_runtime::ProcessCores;
use udm_wire::nbd::NbdHeaderStyle;

/// A listening socket of another process.
#[derive(Debug)]
pub struct InheritedListener {
    /// The socket.
    pub socket: OwnedFd,
    /// If true, the server removes the file of the socket at its end.
    pub removes_file: bool,
}

/// A served client that no server has: nothing of it is in flight.
#[derive(Debug)]
pub struct DetachedNbdClient {
    /// The connected socket.
    pub socket: OwnedFd,
    /// Name of the export.
    pub export: String,
    /// The headers that the client has negotiated.
    pub header_style: NbdHeaderStyle,
    /// Number on the wire and name of each metadata context.
    pub contexts: Vec<(u32, String)>,
    /// Received bytes that were not handled, at most 256 KiB. They begin with a request.
    pub unread: Vec<u8>,
    /// Number of bytes to discard when they arrive.
    pub skip: u64,
}

/// Detaches the clients of a server while it exists. If it is dropped, clients that are not
/// detached yet stay.
pub struct NbdHandover<'a> {
    server: &'a NbdServer,
    sender: Sender<DetachedNbdClient>,
    detached: Receiver<DetachedNbdClient>,
}

impl<'a> NbdHandover<'a> {
    /// Begins to detach all served clients of `server`.
    #[must_use]
    pub fn start(server: &'a NbdServer) -> NbdHandover<'a> {
        let (sender, detached) = channel();
        let handover = NbdHandover { server, sender, detached };
        handover.repeat();
        handover
    }

    /// Asks clients again. A client that was on its way between cores has not heard the last time.
    pub fn repeat(&self) {
        let (exports, core_set) = self.server.parts();
        send_to_clients(exports, core_set, || ConnectionMoveOrder::Detach(self.sender.clone()));
    }

    /// The clients that are detached by now.
    pub fn detached(&self) -> impl Iterator<Item = DetachedNbdClient> + '_ {
        self.detached.try_iter()
    }
}

impl Drop for NbdHandover<'_> {
    fn drop(&mut self) {
        let (exports, core_set) = self.server.parts();
        send_to_clients(exports, core_set, || ConnectionMoveOrder::Stay);
    }
}

/// Sends a message to all clients of each exported device, on each core.
pub(super) fn send_to_clients(
    exports: &Exports,
    core_set: &ProcessCores,
    message: impl Fn() -> ConnectionMoveOrder,
) {
    let mut devices: Vec<_> = exports.all().iter().map(|e| e.device().id()).collect();
    devices.sort_unstable();
    devices.dedup();
    for (device, core) in devices.into_iter().flat_map(|d| (0..core_set.len()).map(move |c| (d, c))) {
        core_set.send_message(CoreId(core as u16), device, Box::new(message()));
    }
}
