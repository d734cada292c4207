//! Moves a connection to another core: it is frozen here and thawed there.
//!
//! 1. *Leaving*: the connection takes in no more requests, except for the write whose payload is
//!    arriving. Requests in flight are completed and answered, then the receive is cancelled. If
//!    this takes too long, the move is cancelled without effect.
//! 2. *Frozen*: nothing of it is in flight, in lanes, in the ring, or to the client. The rest is
//!    plain data: the negotiated options and the received bytes that were not handled. The other
//!    core gets it as a message.
//! 3. *Moved*: the rest of the connection on the old core keeps the lane open until the new core
//!    has a lane. If the new core cannot open the device, it sends the connection back.
//!
//! A frozen connection has no range locks, counts for no core's memory and gets no messages. It
//! keeps its export and its slot, so the export stays in use. A server that stops moves no clients.
//! A core that has stopped drops arriving connections; they have nothing in flight.
//!
//! A client that is *detached* moves to another process in the same way (`handover`). Nothing of it
//! stays here, and only its owner cancels the move.

use super::{AcceptedNbdConnection, ConnectionPhase, ConnectionTls, RECV, next_connection_id};
use crate::nbd::NbdServerLimits;
use crate::nbd::admission::AdmittedConnectionSlot;
use crate::nbd::allowed_clients::NbdClientIdentity;
use crate::nbd::balance::ClientLoadBalanceHandle;
use crate::nbd::block_status::BlockStatusWorkerHandle;
use crate::nbd::contexts::{MetaContext, find_contexts};
use crate::nbd::export_geometry::ExportGeometry;
use crate::nbd::exports::{ExportRef, Exports};
use crate::nbd::handover::DetachedNbdClient;
use crate::nbd::receive::{FrozenReceiveBuffer, ReceiveBuffer};
use std::any::Any;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use udm_core::{CoreId, Nanos};
use udm_runtime::{FrontCx, ProcessCores};
use udm_wire::nbd::NbdHeaderStyle;

/// Time limit for leaving. A request that takes longer keeps its connection on this core, so that
/// other requests of the client are not delayed.
const LEAVE_MAX: Nanos = Nanos(50_000_000);

/// Time limit for the last answers of a client that uses TLS before an upgrade.
const TLS_LEAVE_MAX: Nanos = Nanos::from_millis(1000);

/// Time that a client stays if the other core could not open its device.
const REFUSED: Nanos = Nanos(60_000_000_000);

/// The aim of a move.
#[derive(Clone)]
enum ConnectionMoveTarget {
    Core(CoreId),
    /// Another process: the owner of the receiver passes the client on.
    Process(Sender<DetachedNbdClient>),
}

/// A move that has begun.
pub(super) struct PendingConnectionMove {
    to: ConnectionMoveTarget,
    /// Time at which the move is cancelled.
    pub(super) until: Nanos,
    /// Whether the receive was cancelled.
    called_off: bool,
}

/// A connection with nothing in flight and no memory of a core.
pub(in crate::nbd) struct FrozenConnection {
    fd: Arc<OwnedFd>,
    id: u64,
    /// Its slot in the limits of connections.
    admission_slot: AdmittedConnectionSlot,
    client: NbdClientIdentity,
    export: ExportRef,
    /// The geometry that was sent to the client.
    geometry: ExportGeometry,
    header_style: NbdHeaderStyle,
    contexts: Arc<[MetaContext]>,
    unread: FrozenReceiveBuffer,
    tls: Option<Box<ConnectionTls>>,
    /// The core that keeps a lane open meanwhile; `None` for a client of another process.
    from: Option<CoreId>,
    /// Minimum time on the new core.
    stay: Nanos,
    server: ConnectionServerRefs,
}

/// Parts of the server that a connection needs.
pub(in crate::nbd) struct ConnectionServerRefs {
    pub(in crate::nbd) core_set: Arc<ProcessCores>,
    pub(in crate::nbd) block_status_worker: BlockStatusWorkerHandle,
    pub(in crate::nbd) exports: Arc<Exports>,
    pub(in crate::nbd) options: NbdServerLimits,
}

/// Messages about moves, sent to the connections of a device.
pub(in crate::nbd) enum ConnectionMoveOrder {
    /// All connections move to the next core.
    Rotate,
    /// The connection with this number has arrived: the rest on the old core may be closed.
    Arrived(u64),
    /// All connections are detached.
    Detach(Sender<DetachedNbdClient>),
    /// Connections that are not detached yet stay.
    Stay,
}

impl AcceptedNbdConnection {
    /// Starts a move to core `to`, which completes when nothing is in flight here. Does nothing
    /// while the server stops.
    pub(in crate::nbd) fn start_move(&mut self, to: CoreId, cx: &mut FrontCx<'_, '_>) {
        let may =
            matches!(self.phase, ConnectionPhase::Serving) && !self.ending && self.pending_move.is_none();
        if may && to != cx.core() {
            let (to, until) = (ConnectionMoveTarget::Core(to), cx.now() + LEAVE_MAX);
            self.pending_move = Some(PendingConnectionMove { to, until, called_off: false });
        }
    }

    /// Starts to detach the client, in place of a move to another core. Does nothing while the
    /// server stops.
    fn start_detach(&mut self, to: &Sender<DetachedNbdClient>) -> bool {
        let is_detaching = self.is_detaching();
        if !matches!(self.phase, ConnectionPhase::Serving) || self.ending || is_detaching {
            return false;
        }
        if self.tls.is_some() {
            // Its keys are in this process alone. Requests in flight are answered.
            self.phase = ConnectionPhase::Draining;
            // A client that does not read must not hold the upgrade up.
            self.deadline = self.now + TLS_LEAVE_MAX;
            return true;
        }
        let to = ConnectionMoveTarget::Process(to.clone());
        self.pending_move = Some(PendingConnectionMove { to, until: Nanos::NEVER, called_off: false });
        true
    }

    fn is_detaching(&self) -> bool {
        let to = self.pending_move.as_ref().map(|pending_move| &pending_move.to);
        matches!(to, Some(ConnectionMoveTarget::Process(_)))
    }

    /// Returns true while new requests are left to the new core.
    pub(super) fn is_moving_away(&self) -> bool {
        self.pending_move.is_some() && self.arriving.is_none()
    }

    /// Joins the balance of this core, if there are several cores.
    pub(super) fn join_balance(&self, cx: &mut FrontCx<'_, '_>) -> Option<ClientLoadBalanceHandle> {
        let stay = match self.from {
            // The other core sent the connection back.
            Some(from) if from == cx.core() => REFUSED,
            _ => self.stay,
        };
        (self.core_set.len() > 1).then(|| ClientLoadBalanceHandle::new(cx, stay))
    }

    /// Records the work since the last call for the balance.
    pub(super) fn record_work(&mut self, cx: &mut FrontCx<'_, '_>) {
        if let Some(balanced) = &self.balanced {
            let bytes = self.delta.bytes_in + self.delta.bytes_out;
            balanced.record(self.delta.begun, bytes, self.admission_slot.counters(), cx);
        }
    }

    /// Starts a move if the balance has chosen one. Cancels a move that has taken too long.
    pub(super) fn start_or_cancel_move(&mut self, cx: &mut FrontCx<'_, '_>) {
        if let Some(to) = self.balanced.as_ref().and_then(ClientLoadBalanceHandle::to) {
            self.start_move(to, cx);
        }
        if self.pending_move.take_if(|pending_move| pending_move.until <= cx.now()).is_some()
            && let Some(balanced) = &self.balanced
        {
            balanced.stays(cx.now());
        }
    }

    /// Performs the next steps of a move, if possible.
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
        let is_sent = self.tx.is_idle() && self.tls.as_ref().is_none_or(|tls| tls.is_idle());
        if self.receiving || self.sending || !is_sent {
            return;
        }
        debug_assert_eq!((cx.ring_in_flight(), self.open, self.open_bytes), (0, 0, 0));
        match pending_move.to.clone() {
            ConnectionMoveTarget::Core(to) => {
                if let Some(frozen) = self.freeze(to, cx.core(), cx) {
                    send_frozen_connection(to, frozen);
                }
            }
            ConnectionMoveTarget::Process(to) => self.detach(&to, cx),
        }
    }

    /// Detaches the client. The rest is closed at once.
    fn detach(&mut self, to: &Sender<DetachedNbdClient>, cx: &mut FrontCx<'_, '_>) {
        self.pending_move = None;
        let (Some((export, _)), Some(fd)) = (&self.export, self.fd.take()) else { return };
        let socket = match Arc::try_unwrap(fd).or_else(|shared| shared.try_clone()) {
            Ok(socket) => socket,
            Err(error) => {
                tracing::warn!(
                    "nbd: the client {} is disconnected, because it cannot be handed over: {error}",
                    self.admission_slot.peer()
                );
                self.phase = ConnectionPhase::Dead;
                return self.advance_shutdown(cx);
            }
        };
        let contexts = self.contexts.iter().map(|context| (context.id, context.name())).collect();
        let (export, header_style) = (export.name().to_string(), self.header_style);
        let (unread, skip) = self.leave(cx).into_parts();
        // The receiver is gone if the upgrade was given up: the client is disconnected then.
        let _ = to.send(DetachedNbdClient { socket, export, header_style, contexts, unread, skip });
        self.balanced = None;
        self.close_moved(cx);
    }

    /// Ends the part of the connection on this core, and returns the received bytes.
    fn leave(&mut self, cx: &mut FrontCx<'_, '_>) -> FrozenReceiveBuffer {
        self.pending_move = None;
        self.phase = ConnectionPhase::Moved;
        // No write is in flight, so no other connection waits for it.
        self.leave_range_locks(cx);
        self.admission_slot.publish(&mut self.delta);
        let unread = self.rx.freeze();
        self.rx.clear(&mut self.writes);
        self.trim();
        (self.has_reusable_memory, self.trim_at) = (false, Nanos::NEVER);
        unread
    }

    /// Freezes the connection for core `to`. The rest keeps the lane of core `from` open, if it has
    /// one.
    fn freeze(&mut self, to: CoreId, from: CoreId, cx: &mut FrontCx<'_, '_>) -> Option<FrozenConnection> {
        let (export, geometry) =
            self.export.as_ref().map(|(export, geometry)| (export.clone(), *geometry))?;
        let fd = self.fd.take()?;
        let unread = self.leave(cx);
        let stay = self.balanced.take().map_or(Nanos(0), |balanced| balanced.next_stay(self.active_at));
        Some(FrozenConnection {
            fd,
            id: self.id,
            admission_slot: self.admission_slot.hand_over(to),
            client: std::mem::take(&mut self.client),
            export,
            geometry,
            header_style: self.header_style,
            contexts: std::mem::take(&mut self.contexts),
            unread,
            tls: self.tls.take(),
            from: Some(from),
            stay,
            server: ConnectionServerRefs {
                core_set: self.core_set.clone(),
                block_status_worker: self.block_status_worker.clone(),
                exports: self.exports.clone(),
                options: self.options.clone(),
            },
        })
    }

    /// Creates a connection from a frozen one. It continues when its core first gathers it.
    fn thaw(frozen: FrozenConnection) -> AcceptedNbdConnection {
        let ConnectionServerRefs { core_set, block_status_worker, exports, options } = frozen.server;
        let mut thawed = AcceptedNbdConnection::new(
            frozen.fd,
            core_set,
            block_status_worker,
            exports,
            options,
            None,
            frozen.admission_slot,
        );
        thawed.phase = ConnectionPhase::Serving;
        thawed.id = frozen.id;
        thawed.client = frozen.client;
        thawed.export = Some((frozen.export, frozen.geometry));
        thawed.header_style = frozen.header_style;
        thawed.contexts = frozen.contexts;
        thawed.rx = ReceiveBuffer::thaw(frozen.unread, thawed.options.bytes_max);
        thawed.tls = frozen.tls;
        thawed.from = frozen.from;
        thawed.stay = frozen.stay;
        thawed.tx.use_header_style(frozen.header_style);
        thawed
    }

    /// Completes a move: opens a lane here, or sends the connection back to its core.
    pub(super) fn settle(&mut self, cx: &mut FrontCx<'_, '_>) {
        let from = self.from.take();
        let Some((export, _)) = &self.export else { return };
        let device = export.device().id();
        match cx.open(export.device()) {
            Ok(slot) => {
                self.device = Some(slot);
                (self.client_at, self.active_at) = (cx.now(), cx.now());
                self.attend(cx);
                // The list may have changed while the connection got no messages.
                self.disconnect_if_not_allowed();
                if let Some(from) = from {
                    let arrived = ConnectionMoveOrder::Arrived(self.id);
                    self.core_set.send_message(from, device, Box::new(arrived));
                }
            }
            Err(e) => match from.filter(|from| *from != cx.core()) {
                Some(from) => {
                    tracing::debug!("nbd: a client stays on its core: {e}");
                    if let Some(frozen) = self.freeze(from, from, cx) {
                        send_frozen_connection(from, frozen);
                    }
                    self.export = None;
                }
                None => {
                    // The lane was kept open until the server began to stop.
                    tracing::warn!("nbd: export {:?}: {e}", export.name());
                    self.export = None;
                    self.phase = ConnectionPhase::Dead;
                }
            },
        }
    }

    /// Subscribes to messages for the device's clients, and joins their counters and memory share.
    pub(super) fn attend(&mut self, cx: &mut FrontCx<'_, '_>) {
        let Some((export, _)) = &self.export else { return };
        let device = export.device().id();
        cx.subscribe(device);
        // Read after the subscription: later changes arrive as messages.
        self.failing = export.is_failing();
        self.io_counters = Some(export.io_counters_on(cx.core()));
        if let Some(memory) = &mut self.memory {
            memory.serve(device);
        }
    }

    /// Handles a message about moves. Returns true if a move has begun.
    pub(super) fn on_move_message(&mut self, message: &(dyn Any + Send), cx: &mut FrontCx<'_, '_>) -> bool {
        match message.downcast_ref() {
            Some(ConnectionMoveOrder::Rotate) => {
                let next = (cx.core().index() + 1) % self.core_set.len();
                self.start_move(CoreId(next as u16), cx);
                self.pending_move.is_some()
            }
            Some(ConnectionMoveOrder::Arrived(id)) if *id == self.id => {
                self.close_moved(cx);
                false
            }
            Some(ConnectionMoveOrder::Detach(to)) => self.start_detach(to),
            Some(ConnectionMoveOrder::Stay) if self.is_detaching() => {
                self.pending_move = None;
                true
            }
            _ => false,
        }
    }

    /// Closes the rest of a connection that has moved.
    pub(super) fn close_moved(&mut self, cx: &mut FrontCx<'_, '_>) {
        if matches!(self.phase, ConnectionPhase::Moved) {
            if let Some(slot) = self.device.take() {
                cx.close(slot);
            }
            self.export = None;
        }
    }
}

/// Serves a client that another process has detached, on the core of its slot.
///
/// # Errors
/// Why it cannot be served.
pub(in crate::nbd) fn attach_detached_client(
    client: DetachedNbdClient,
    export: ExportRef,
    fd: Arc<OwnedFd>,
    admission_slot: AdmittedConnectionSlot,
    server: ConnectionServerRefs,
) -> Result<(), String> {
    let contexts = find_contexts(&**export.device(), &client.contexts)?.into();
    let unread = FrozenReceiveBuffer::from_parts(client.unread, client.skip);
    let unread = unread.ok_or("it has sent more than a client may")?;
    let (core, geometry) = (admission_slot.core(), export.geometry());
    let frozen = FrozenConnection {
        fd,
        id: next_connection_id(),
        client: NbdClientIdentity::of_peer(admission_slot.peer()),
        admission_slot,
        export,
        geometry,
        header_style: client.header_style,
        contexts,
        unread,
        tls: None,
        from: None,
        stay: Nanos(0),
        server,
    };
    send_frozen_connection(core, frozen);
    Ok(())
}

/// Sends a frozen connection to core `to`.
fn send_frozen_connection(to: CoreId, frozen: FrozenConnection) {
    let core_set = frozen.server.core_set.clone();
    core_set.attach(to, Box::new(move || Box::new(AcceptedNbdConnection::thaw(frozen))));
}
