//! `nbd://HOST[:PORT]/EXPORT`, `nbd+unix:///EXPORT?socket=PATH`: an export of an NBD server,
//! through the core's io_uring.
//!
//! The protocol is a state machine without I/O (`udm_wire::nbd::client`) that accepts bytes cut
//! anywhere and trusts none of them.
//!
//! * **Connections.** Each lane has its own. It connects when the lane is opened, and again when a
//!   request comes and there is no connection. The back-off doubles up to five seconds. A request
//!   before that time, or in flight when the connection is lost, fails with a transport error,
//!   which is a path error. An idle lane does not reconnect. A lane that has connected ends the
//!   back-off of the others. A lane watches its idle connection (`Ring::watcher`).
//! * **End of a connection.** A connection is abandoned if
//!   * the server or the system closes it;
//!   * the server violates the protocol;
//!   * the server answers ESHUTDOWN;
//!   * no data arrives for the deadline while a request of that age waits (`deadline=TIME`, one
//!     minute over TCP), or a request waits four times as long;
//!   * the handshake takes as long as the deadline, or ten seconds if that is shorter.
//!
//!   A core that was stopped counts the deadline from its return
//!   ([`PauseAwareReplyDeadline`](udm_core::PauseAwareReplyDeadline)).
//! * **Unanswered writes.** All other requests fail at once. A write that was sent stays *held*
//!   until the server cannot carry it out any more ([`fence`]): an answer, a close, a time, or a
//!   command, as the URI says. Otherwise multipath could write elsewhere and this write could undo
//!   it later. The abandoned connection is still read, because a late answer completes a write. The
//!   rest of a partly sent write is still sent, so that the server can answer.
//!   `Device::stall_reason` reports writes that wait.
//! * **TCP** is configured not to close a connection after a timeout: a local timeout proves
//!   nothing.
//! * **Several connections** at once are used only if the server says that a flush on one covers
//!   writes on all (`CAN_MULTI_CONN`), or if nothing is written. Otherwise a task owns one
//!   connection for all cores ([`SingleOwnerForwarder`]).
//! * **Another export.** A server that returns with another size, or with fewer abilities, is
//!   refused ([`RemoteExport::accept`]): the layers above have their limits from before.
//! * **Memory.** Data is copied between requests and the connection's buffers, 256 KiB each way. So
//!   a connection can be abandoned at any time, and late bytes touch no memory of a finished
//!   request.
//! * **Errors** are the server's, by NBD's eight numbers. EIO is a medium error, because the server
//!   has answered, unless another block cannot be read either. ESHUTDOWN is a path error.
//! * **Shutdown.** After ESHUTDOWN the lane sends nothing more on that connection and waits for its
//!   answers. Other lanes close theirs when they are idle, as the next server may be another.
//! * A discard is `TRIM`, a write-zeroes `WRITE_ZEROES`, a flush `FLUSH`. If the server does not
//!   support one, it is not sent: a discard or write-zeroes is refused, and a flush succeeds at
//!   once.

mod abandoned;
mod client;
mod connection;
mod extents;
mod fence;
mod lane;
mod remote_export;
mod request;
mod send_queue;
mod sockets;
mod tls;

pub use crate::stream::{ServerAddress, SocketOps};
pub use client::{BlockingNbdClient, NbdClientError};
pub(crate) use remote_export::{RemoteExport, RemoteExports};
pub use sockets::{FenceDone, NbdSocketAndFenceOps};

use extents::BlockStatusClient;
use std::sync::Arc;
use udm_core::errno::EOPNOTSUPP;
use udm_core::{
    Cx, Device, DeviceControlError, DeviceId, ExtentKind, Extents, Lane, Limits, Sector, Sectors,
    SharedDiskState,
};
use udm_queue::SingleOwnerForwarder;
use udm_runtime::Ring;
use udm_wire::nbd::client::NegotiatedExportInfo;
use udm_wire::uri::NbdUri;

pub(crate) struct NbdDevice {
    id: DeviceId,
    server: Arc<RemoteExport>,
    direct: Arc<dyn Device>,
    /// Set if the server supports only one connection at a time.
    single_owner: Option<SingleOwnerForwarder>,
    block_status: BlockStatusClient,
}

impl NbdDevice {
    pub(crate) fn new(server: Arc<RemoteExport>) -> NbdDevice {
        let direct = Arc::new(PerLaneExport { id: DeviceId::new(), server: Arc::clone(&server) });
        let single_owner = (!server.takes_many()).then(SingleOwnerForwarder::default);
        NbdDevice {
            id: DeviceId::new(),
            direct,
            single_owner,
            block_status: BlockStatusClient::new(&server),
            server,
        }
    }
}

/// Creates the export `uri` for a simulated world. The caller has negotiated `export` with the
/// server at `address`, and lanes get their sockets from `sockets`. `extents` and `refresh_size`
/// must not be called, because they use the sockets of the system.
#[must_use]
pub fn create_simulated_nbd_device(
    uri: NbdUri,
    address: ServerAddress,
    export: NegotiatedExportInfo,
    sockets: Box<dyn NbdSocketAndFenceOps>,
) -> Arc<dyn Device> {
    Arc::new(NbdDevice::new(Arc::new(RemoteExport::new(
        uri,
        vec![address],
        export,
        sockets,
        Default::default(),
    ))))
}

/// An export with one connection per lane.
struct PerLaneExport {
    id: DeviceId,
    server: Arc<RemoteExport>,
}

impl Device for PerLaneExport {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        let ring = Ring::of(cx).ok_or_else(|| {
            DeviceControlError::new(EOPNOTSUPP, "an NBD server needs a core with an io_uring")
        })?;
        Ok(Box::new(lane::NbdLane::new(ring, &self.server, cx)))
    }

    fn limits(&self) -> Limits {
        self.server.limits()
    }
}

impl Device for NbdDevice {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        match &self.single_owner {
            Some(single_owner) => Ok(single_owner.open(&self.direct, cx)),
            None => self.direct.open(cx),
        }
    }

    fn limits(&self) -> Limits {
        self.server.limits()
    }

    fn refresh_size(&self) {
        self.server.refresh_size();
    }

    fn retry_now(&self) {
        self.server.retry_now();
    }

    fn extents(&self, from: Sector, len: Sectors, out: &mut Extents) {
        if self.block_status.extents(from, len, out).is_err() && out.list().is_empty() {
            out.push(len, ExtentKind::Data);
        }
    }

    fn shared_disk_state(&self) -> Option<&SharedDiskState> {
        Some(&self.server.shared_disk_state)
    }

    fn rejection_reason(&self) -> Option<String> {
        self.server.rejection_reason()
    }

    fn stall_reason(&self) -> Option<String> {
        self.server.fencing.stall_reason(&self.server.uri.silence.fence)
    }
}
