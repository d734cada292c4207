//! A connection goes on on another core: frozen here, thawed there.
//!
//! 1. *Leaving*: it takes in no more requests, but for the write whose payload is arriving. What is
//!    in flight is finished and answered, then the receive is called off. What takes too long calls
//!    the whole thing off, and nothing has happened.
//! 2. *Frozen*: nothing of it is in flight, in the lanes, in the ring, or on the way to the client.
//!    What is left of it is plain data: what was agreed on with the client, and the bytes that have
//!    arrived and were not looked at. It goes to the other core as a letter.
//! 3. *Moved*: what stays behind keeps the lane open until the other core has one too. A core that
//!    can't open the device sends the connection back.
//!
//! While it is frozen it holds no blocks, counts for no core's memory and asks for no letters; its
//! export and its place are its own all the time, so who asks finds it in use. A server that ends
//! does not move its clients any more; a core that is gone by then drops what comes, and with it
//! the connection, which has nothing in flight.

use super::{Connection, ConnectionPhase, RECV};
use crate::nbd::ServerOptions;
use crate::nbd::admission::AdmissionSlot;
use crate::nbd::balance::BalancedClient;
use crate::nbd::block_status::BlockStatusWorker;
use crate::nbd::contexts::MetaContext;
use crate::nbd::exports::{ExportGeometry, ExportRef, Exports};
use crate::nbd::receive::{ReceiveBuffer, UnreadBytes};
use std::any::Any;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use udm_core::{CoreId, Nanos};
use udm_runtime::{CoreSet, FrontCx};

/// What leaving may take. A request that takes longer keeps its connection where it is, and others
/// of the client are not held up by it.
const LEAVE_MAX: Nanos = Nanos(50_000_000);

/// How long a client stays whose device no other core could open.
const REFUSED: Nanos = Nanos(60_000_000_000);

/// On the way out.
#[derive(Clone, Copy)]
pub(super) struct PendingMove {
    to: CoreId,
    /// When it stays after all.
    pub(super) until: Nanos,
    /// The receive was called off.
    called_off: bool,
}

/// A connection with nothing in flight and no memory of a core.
pub(in crate::nbd) struct FrozenConnection {
    fd: Arc<OwnedFd>,
    id: u64,
    /// Who it is, and where it counts.
    admission_slot: AdmissionSlot,
    export: ExportRef,
    /// What the client was told of the export.
    geometry: ExportGeometry,
    structured: bool,
    contexts: Arc<[MetaContext]>,
    unread: UnreadBytes,
    /// The core that keeps a lane open for it meanwhile.
    from: CoreId,
    /// How long it stays where it goes.
    stay: Nanos,
    server: ServerContext,
}

/// What of the server a connection needs.
struct ServerContext {
    cluster: Arc<CoreSet>,
    block_status_worker: BlockStatusWorker,
    exports: Arc<Exports>,
    options: ServerOptions,
}

/// What connections are told about moving, as letters to their device.
pub(in crate::nbd) enum MoveMessage {
    /// All are to go on on the next core.
    Rotate,
    /// This one goes on elsewhere: what it left behind may go.
    Arrived(u64),
}

impl Connection {
    /// Has it go on on core `to`, as soon as nothing of it is in flight here. Not while the server
    /// ends.
    pub(in crate::nbd) fn start_move(&mut self, to: CoreId, cx: &mut FrontCx<'_, '_>) {
        let may =
            matches!(self.phase, ConnectionPhase::Serving) && !self.ending && self.pending_move.is_none();
        if may && to != cx.core() {
            self.pending_move = Some(PendingMove { to, until: cx.now() + LEAVE_MAX, called_off: false });
        }
    }

    /// True while new requests are left to the core that it leaves for.
    pub(super) fn is_moving_away(&self) -> bool {
        self.pending_move.is_some() && self.arriving.is_none()
    }

    /// What the balance of its core is to know of it.
    pub(super) fn join_balance(&self, cx: &mut FrontCx<'_, '_>) -> Option<BalancedClient> {
        let stay = match self.from {
            // The other core could not have it.
            Some(from) if from == cx.core() => REFUSED,
            _ => self.stay,
        };
        (self.cluster.len() > 1).then(|| BalancedClient::new(cx, stay))
    }

    /// Says what it did since the last call.
    pub(super) fn record_work(&mut self, cx: &mut FrontCx<'_, '_>) {
        if let Some(balanced) = &self.balanced {
            let bytes = self.delta.bytes_in + self.delta.bytes_out;
            balanced.record(self.delta.begun, bytes, self.admission_slot.counters(), cx);
        }
    }

    /// It leaves when its core has found a better one; when leaving has taken too long, it stays.
    pub(super) fn start_or_cancel_move(&mut self, cx: &mut FrontCx<'_, '_>) {
        if let Some(to) = self.balanced.as_ref().and_then(BalancedClient::to) {
            self.start_move(to, cx);
        }
        if self.pending_move.take_if(|pending_move| pending_move.until <= cx.now()).is_some()
            && let Some(balanced) = &self.balanced
        {
            balanced.stays(cx.now());
        }
    }

    /// The next step on the way out, when its time has come.
    pub(super) fn advance_move(&mut self, cx: &mut FrontCx<'_, '_>) {
        if !matches!(self.phase, ConnectionPhase::Serving) || self.ending {
            self.pending_move = None;
        }
        let Some(pending_move) = &mut self.pending_move else { return };
        if self.arriving.is_some() || !self.pending.is_empty() {
            return;
        }
        if self.receiving && !pending_move.called_off {
            pending_move.called_off = true;
            cx.cancel(RECV);
        }
        if self.receiving || self.sending || !self.tx.is_idle() {
            return;
        }
        let to = pending_move.to;
        if let Some(frozen) = self.freeze(to, cx.core(), cx) {
            debug_assert_eq!((cx.ring_in_flight(), self.open, self.open_bytes), (0, 0, 0));
            send(to, frozen);
        }
    }

    /// What goes to core `to`. What stays keeps the lane of core `from` open, where it has one.
    fn freeze(&mut self, to: CoreId, from: CoreId, cx: &mut FrontCx<'_, '_>) -> Option<FrozenConnection> {
        let (export, geometry) =
            self.export.as_ref().map(|(export, geometry)| (export.clone(), *geometry))?;
        let fd = self.fd.take()?;
        self.pending_move = None;
        self.phase = ConnectionPhase::Moved;
        // It owes nobody anything: no write of it is in flight.
        self.leave_range_locks(cx);
        self.admission_slot.publish(&mut self.delta);
        let unread = self.rx.freeze();
        let stay = self.balanced.take().map_or(Nanos(0), |balanced| balanced.next_stay(self.active_at));
        self.rx.clear(&mut self.writes);
        self.trim();
        (self.has_reusable_memory, self.trim_at) = (false, Nanos::NEVER);
        Some(FrozenConnection {
            fd,
            id: self.id,
            admission_slot: self.admission_slot.hand_over(to),
            export,
            geometry,
            structured: self.structured,
            contexts: std::mem::take(&mut self.contexts),
            unread,
            from,
            stay,
            server: ServerContext {
                cluster: self.cluster.clone(),
                block_status_worker: self.block_status_worker.clone(),
                exports: self.exports.clone(),
                options: self.options.clone(),
            },
        })
    }

    /// The connection that was frozen. It goes on when its core gathers it for the first time.
    fn thaw(frozen: FrozenConnection) -> Connection {
        let ServerContext { cluster, block_status_worker, exports, options } = frozen.server;
        let mut thawed =
            Connection::new(frozen.fd, cluster, block_status_worker, exports, options, frozen.admission_slot);
        thawed.phase = ConnectionPhase::Serving;
        thawed.id = frozen.id;
        thawed.export = Some((frozen.export, frozen.geometry));
        thawed.structured = frozen.structured;
        thawed.contexts = frozen.contexts;
        thawed.rx = ReceiveBuffer::thaw(frozen.unread, thawed.options.bytes_max);
        thawed.from = Some(frozen.from);
        thawed.stay = frozen.stay;
        if frozen.structured {
            thawed.tx.use_structured();
        }
        thawed
    }

    /// Settles on this core, having come from core `from`; or goes back there.
    pub(super) fn settle(&mut self, from: CoreId, cx: &mut FrontCx<'_, '_>) {
        let Some((export, _)) = &self.export else { return };
        let device = export.device().id();
        match cx.open(export.device()) {
            Ok(slot) => {
                self.device = Some(slot);
                (self.client_at, self.active_at) = (cx.now(), cx.now());
                self.attend(cx);
                self.cluster.send_message(from, device, Box::new(MoveMessage::Arrived(self.id)));
            }
            Err(e) if from != cx.core() => {
                tracing::debug!("nbd: a client stays on its core: {e}");
                if let Some(frozen) = self.freeze(from, from, cx) {
                    send(from, frozen);
                }
                self.export = None;
            }
            Err(e) => {
                // Its lane was kept open until the server began to end.
                tracing::warn!("nbd: export {:?}: {e}", export.name());
                self.export = None;
                self.phase = ConnectionPhase::Dead;
            }
        }
    }

    /// Takes part in what concerns the clients of its device on this core.
    pub(super) fn attend(&mut self, cx: &mut FrontCx<'_, '_>) {
        let Some((export, _)) = &self.export else { return };
        let device = export.device().id();
        cx.subscribe(device);
        // Behind that: a change from now on comes as a letter.
        self.failing = export.is_failing();
        self.io_counters = Some(export.served_on(cx.core()));
        if let Some(memory) = &mut self.memory {
            memory.serve(device);
        }
    }

    /// A letter about moving. True when it set something going.
    pub(super) fn on_move_message(&mut self, message: &(dyn Any + Send), cx: &mut FrontCx<'_, '_>) -> bool {
        match message.downcast_ref() {
            Some(MoveMessage::Rotate) => {
                let next = (cx.core().index() + 1) % self.cluster.len();
                self.start_move(CoreId(next as u16), cx);
                self.pending_move.is_some()
            }
            Some(MoveMessage::Arrived(id)) if *id == self.id => {
                self.let_go(cx);
                false
            }
            _ => false,
        }
    }

    /// What stayed behind of a connection that goes on elsewhere ends.
    pub(super) fn let_go(&mut self, cx: &mut FrontCx<'_, '_>) {
        if matches!(self.phase, ConnectionPhase::Moved) {
            if let Some(slot) = self.device.take() {
                cx.close(slot);
            }
            self.export = None;
        }
    }
}

/// Has core `to` go on with a connection.
fn send(to: CoreId, frozen: FrozenConnection) {
    let cluster = frozen.server.cluster.clone();
    cluster.attach(to, Box::new(move || Box::new(Connection::thaw(frozen))));
}
