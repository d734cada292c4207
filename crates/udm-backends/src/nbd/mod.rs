//! `nbd://HOST[:PORT]/EXPORT`, `nbd+unix:///EXPORT?socket=PATH`: an export of an NBD server, over
//! the core's io_uring.
//!
//! * **Connections.** Each lane has its own, so there is one to a device on a core. It is made when
//!   the lane is opened, and again when a request comes and there is none, after a back-off that
//!   doubles up to five seconds. A request that comes before its time, or that is under
//!   way when the connection is lost, ends with a transport error: it blames the path. Nobody looks
//!   for the server while nobody wants anything of it. A lane that has connected ends the wait of
//!   the others.
//! * **Silence.** With a deadline (`deadline=TIME`; a minute over TCP) a connection is given up of
//!   which nothing comes for so long while it has a request, or which keeps one for four times as
//!   long while it answers others.
//!   Whyever one is given up, a write that was sent and not answered ends only when the server
//!   can't deliver it any more ([`fence`]): what lies above may send it elsewhere, and it must not
//!   be written again behind what is written there. All else ends at once: the data of a read are
//!   copies, so what comes late touches nobody's memory.
//! * **Several connections** are used at the same time only where the server says that a flush on
//!   one covers the writes of all (`CAN_MULTI_CONN`), or where nothing is written. Else there is
//!   one for all cores ([`Funnel`]).
//! * **Honest.** A server that comes back with another size, or that can do less than it could, is
//!   not taken back ([`Server::accept`]): what lies above has its limits from before.
//! * **Memory.** Data is copied between a request and the connection's buffers: 256 KiB each way.
//!   So a connection can be given up at any time, and nothing that still arrives on it, or is still
//!   sent, touches the memory of a request that has ended.
//! * **Errors** are the server's, by NBD's eight numbers. EIO is a medium error, since the server
//!   has answered: another path leads to the same disk. ESHUTDOWN blames the path.
//! * **A server that shuts down** says so by ESHUTDOWN and waits for its clients to leave. Nothing
//!   more is asked on that connection; what was is waited for as with one that is given up. The
//!   other lanes leave theirs when nothing is under way on it: what listens there by then may be
//!   another.
//! * A discard is a `TRIM`, a write-zeroes a `WRITE_ZEROES`, a flush a `FLUSH`, where the server
//!   has them; what it has not is refused, but for a flush, which then has nothing to do.

mod client;
mod connection;
mod extents;
mod fence;
mod lane;
mod lingering;
mod outgoing;
mod server;
mod slot;
mod sockets;

pub use client::{AskError, Client};
pub use server::Address;
pub(crate) use server::Servers;
pub use sockets::{Fenced, Sockets};

use extents::Asker;
use server::Server;
use std::sync::Arc;
use udm_core::errno::EOPNOTSUPP;
use udm_core::{Commons, Content, Cx, Device, DeviceId, Extents, Lane, Limits, OpenError, Sector, Sectors};
use udm_queue::Funnel;
use udm_runtime::Ring;
use udm_wire::nbd::client::Export;
use udm_wire::uri::NbdUri;

/// An export of a server.
pub(crate) struct Nbd {
    id: DeviceId,
    server: Arc<Server>,
    direct: Arc<dyn Device>,
    /// For a server that takes one connection alone.
    funnel: Option<Funnel>,
    asker: Asker,
}

impl Nbd {
    pub(crate) fn new(server: Arc<Server>) -> Nbd {
        let direct = Arc::new(Direct { id: DeviceId::new(), server: Arc::clone(&server) });
        let funnel = (!server.takes_many()).then(Funnel::default);
        Nbd { id: DeviceId::new(), direct, funnel, asker: Asker::new(&server), server }
    }
}

/// The export that `uri` names, where somebody else has asked its server at `address` and was told
/// `export`: for a world that is made up, whose lanes get their sockets from `sockets`. It must not
/// be asked for its extents or looked at again: that is asked of the system.
#[must_use]
pub fn made(uri: NbdUri, address: Address, export: Export, sockets: Box<dyn Sockets>) -> Arc<dyn Device> {
    Arc::new(Nbd::new(Arc::new(Server::new(uri, vec![address], export, sockets, Default::default()))))
}

/// An export whose lanes have a connection each.
struct Direct {
    id: DeviceId,
    server: Arc<Server>,
}

impl Device for Direct {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, OpenError> {
        let ring = Ring::of(cx)
            .ok_or_else(|| OpenError::new(EOPNOTSUPP, "an NBD server needs a core with an io_uring"))?;
        Ok(Box::new(lane::NbdLane::new(ring, &self.server, cx)))
    }

    fn limits(&self) -> Limits {
        self.server.limits()
    }
}

impl Device for Nbd {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, OpenError> {
        match &self.funnel {
            Some(funnel) => Ok(funnel.open(&self.direct, cx)),
            None => self.direct.open(cx),
        }
    }

    fn limits(&self) -> Limits {
        self.server.limits()
    }

    fn look_again(&self) {
        self.server.look();
    }

    fn try_again(&self) {
        self.server.try_again();
    }

    fn extents(&self, from: Sector, len: Sectors, out: &mut Extents) {
        if self.asker.extents(from, len, out).is_err() && out.list().is_empty() {
            out.push(len, Content::Data);
        }
    }

    fn commons(&self) -> Option<&Commons> {
        Some(&self.server.commons)
    }

    fn refused(&self) -> Option<String> {
        self.server.refused()
    }

    fn waits(&self) -> Option<String> {
        self.server.fencing.waits(&self.server.uri.silence.fence)
    }
}
