//! A connection of a lane to a controller, which is an I/O queue, and its stage.

use super::remote_namespace::{Association, RemoteNamespace};
use crate::stream::{DisconnectKind, DisconnectReason, HANDSHAKE_TIMEOUT, StreamConnection};
use std::sync::Arc;
use udm_core::{Cx, Nanos};
use udm_runtime::Ring;
use udm_wire::nvme::host::{HostQueue, IoQueueSetup};

/// Stage of a connection.
pub(super) enum QueueStage {
    /// The socket is being connected.
    Connecting,
    /// The queue is being connected.
    Setup(Box<IoQueueSetup>),
    /// Commands may be sent.
    Ready(Box<HostQueue>),
}

/// An I/O queue.
pub(super) struct QueueConnection {
    pub(super) stream: StreamConnection,
    pub(super) stage: QueueStage,
    pub(super) association: Arc<Association>,
    /// Time at which the queue must be connected.
    deadline: Nanos,
}

impl QueueConnection {
    /// Starts to connect.
    ///
    /// # Errors
    /// No socket is available.
    pub(super) fn begin(
        ring: &Ring,
        namespace: &RemoteNamespace,
        association: Arc<Association>,
        cx: &mut Cx<'_>,
    ) -> Result<QueueConnection, DisconnectReason> {
        let opened = namespace.sockets.open(&association.address);
        let socket =
            opened.map_err(|error| DisconnectReason::new(DisconnectKind::LocalError, error.to_string()))?;
        let timeout = namespace.deadline.unwrap_or(HANDSHAKE_TIMEOUT).min(HANDSHAKE_TIMEOUT);
        let deadline = cx.now() + timeout;
        let stream = StreamConnection::connect(ring, socket, cx);
        Ok(QueueConnection { stream, stage: QueueStage::Connecting, association, deadline })
    }

    /// Returns true once commands may be sent.
    pub(super) fn is_ready(&self) -> bool {
        matches!(self.stage, QueueStage::Ready(_))
    }

    /// Time at which the connection is abandoned if it is not ready; `None` if it is ready.
    pub(super) fn deadline(&self) -> Option<Nanos> {
        (!self.is_ready()).then_some(self.deadline)
    }
}
