//! A connection of a lane to an NBD server, and its stage.

use super::remote_export::RemoteExport;
use crate::stream::{DisconnectKind, DisconnectReason, HANDSHAKE_TIMEOUT, StreamConnection};
use std::ops::{Deref, DerefMut};
use udm_core::{BufPool, Cx, Nanos};
use udm_runtime::Ring;
use udm_wire::nbd::client::{ClientHandshake, HandshakeOptions, NbdRequestParams, ReplyParser};
use udm_wire::nbd::{CommandFlags, NbdCommand};

/// Stage of a connection.
pub(super) enum ConnectionStage {
    /// The socket is being connected.
    Connecting,
    /// The handshake is in progress.
    Handshaking(Box<ClientHandshake>),
    /// Requests may be sent.
    Ready(Box<ReplyParser>),
}

/// A connection of a lane to its server.
pub(super) struct NbdClientConnection {
    stream: StreamConnection,
    pub(super) stage: ConnectionStage,
    /// Time at which connecting began.
    pub(super) begun: Nanos,
    /// Number of runs of the fence command when the handshake ended.
    pub(super) fenced: u64,
    /// Time at which the handshake must have ended.
    deadline: Nanos,
}

impl NbdClientConnection {
    /// Starts to connect.
    ///
    /// # Errors
    /// No socket is available.
    pub(super) fn begin(
        ring: &Ring,
        server: &RemoteExport,
        turn: usize,
        cx: &mut Cx<'_>,
    ) -> Result<NbdClientConnection, DisconnectReason> {
        let address = &server.addresses[turn % server.addresses.len()];
        let socket = server
            .sockets
            .open(address)
            .map_err(|e| DisconnectReason::new(DisconnectKind::LocalError, e.to_string()))?;
        let (now, timeout) = (cx.now(), server.deadline.unwrap_or(HANDSHAKE_TIMEOUT));
        Ok(NbdClientConnection {
            stream: StreamConnection::connect(ring, socket, cx),
            stage: ConnectionStage::Connecting,
            begun: now,
            fenced: 0,
            deadline: now + timeout.min(HANDSHAKE_TIMEOUT),
        })
    }

    /// Returns true once requests may be sent.
    pub(super) fn is_ready(&self) -> bool {
        matches!(self.stage, ConnectionStage::Ready(_))
    }

    /// Time at which the connection is abandoned if it is not ready; `None` if it is ready.
    pub(super) fn deadline(&self) -> Option<Nanos> {
        (!self.is_ready()).then_some(self.deadline)
    }

    /// Starts the handshake after the socket was connected.
    pub(super) fn shake(&mut self, server: &RemoteExport, pool: &mut BufPool) {
        let (export, tls) = (server.uri.export.clone(), server.uri.tls.is_some());
        let wish = HandshakeOptions { export, structured: true, tls, ..HandshakeOptions::default() };
        self.stage = ConnectionStage::Handshaking(Box::new(ClientHandshake::new(wish)));
        self.receive(None, pool);
    }
}

impl Deref for NbdClientConnection {
    type Target = StreamConnection;
    fn deref(&self) -> &StreamConnection {
        &self.stream
    }
}

impl DerefMut for NbdClientConnection {
    fn deref_mut(&mut self) -> &mut StreamConnection {
        &mut self.stream
    }
}

impl Drop for NbdClientConnection {
    /// If the connection is ready and idle, a disconnect request is sent first. Answers to it are
    /// ignored.
    fn drop(&mut self) {
        if let ConnectionStage::Ready(replies) = &mut self.stage
            && replies.in_flight() == 0
            && self.stream.may_send()
        {
            let asked = NbdRequestParams {
                command: NbdCommand::Disconnect,
                flags: CommandFlags::empty(),
                offset: 0,
                len: 0,
            };
            self.stream.send_last(&replies.ask(0, asked));
        }
    }
}
