//! The server: a thread accepts connections and assigns them to cores.

use super::admission::{AdmittedConnectionSlot, Peer, PendingHandshakes};
use super::block_status::BlockStatusWorkerHandle;
use super::connection::{
    AcceptedNbdConnection, ConnectionMoveOrder, ConnectionServerRefs, attach_detached_client,
};
use super::handover::{DetachedNbdClient, InheritedListener, send_to_clients};
use super::socket::{ListenSocket, ListenSocketKind, configure_accepted_socket};
use super::stats::{ServerCounters, ServerCountersHandle};
use super::tls::NbdServerTlsHandle;
use super::{Exports, NbdServerLimits, NbdServerStats, NbdServerTls};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use udm_runtime::ProcessCores;

/// Address on which a server is to listen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ListenAddress {
    /// A path. The socket has mode 0600. A socket without a server is replaced. The path is removed
    /// when the server stops.
    Unix(PathBuf),
    /// An address; port 0 selects a free port.
    Tcp(SocketAddr),
    /// A port of vsock, for virtual machines of this host and for this host itself.
    Vsock(u32),
}

/// Address on which a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BoundAddress {
    /// At a path.
    Unix(PathBuf),
    /// An address, with the selected port.
    Tcp(SocketAddr),
    /// A port of vsock.
    Vsock(u32),
}

/// An NBD server. If it is dropped, it accepts no more connections; existing connections continue
/// until the cores stop.
pub struct NbdServer {
    shared: Arc<NbdServerShared>,
    bound: Vec<BoundAddress>,
    listeners: Arc<[ListenSocket]>,
    thread: Option<JoinHandle<()>>,
}

struct NbdServerShared {
    core_set: Arc<ProcessCores>,
    block_status_worker: BlockStatusWorkerHandle,
    exports: Arc<Exports>,
    options: NbdServerLimits,
    tls: Option<NbdServerTlsHandle>,
    counters: Arc<ServerCounters>,
    /// Core at which the search begins, and connections in the handshake. Locked while a slot is
    /// taken.
    admission: Mutex<(usize, PendingHandshakes)>,
    stopping: AtomicBool,
    /// True while no connections are accepted. Locked while some are.
    pauses: Mutex<bool>,
    accept_errors: AtomicUsize,
    stop_event: OwnedFd,
}

/// Limit of descriptors of this process.
pub(crate) fn file_descriptor_limit() -> usize {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    limit.map_or(usize::MAX, |n| usize::try_from(n).unwrap_or(usize::MAX))
}

impl NbdServer {
    /// Serves `exports` on the cores of `core_set` and listens on all addresses of `listen`, which
    /// may be empty ([`NbdServer::adopt`]).
    ///
    /// # Errors
    /// An address is not available; the error names it. Then nothing listens.
    pub fn start(
        core_set: &Arc<ProcessCores>,
        exports: Arc<Exports>,
        options: NbdServerLimits,
        listen: &[ListenAddress],
    ) -> io::Result<NbdServer> {
        NbdServer::start_with(core_set, exports, options, None, listen, Vec::new(), true)
    }

    /// As [`NbdServer::start`], with TLS, and also on the listening sockets `given` of another
    /// process. Unless `accepts`, it accepts nothing before [`NbdServer::resume_accepting`].
    ///
    /// # Errors
    /// As [`NbdServer::start`]; also if a descriptor is not a socket of one of these kinds.
    pub fn start_with(
        core_set: &Arc<ProcessCores>,
        exports: Arc<Exports>,
        options: NbdServerLimits,
        tls: Option<NbdServerTls>,
        listen: &[ListenAddress],
        given: Vec<InheritedListener>,
        accepts: bool,
    ) -> io::Result<NbdServer> {
        let made = listen.iter().map(|l| match l {
            ListenAddress::Unix(path) => ListenSocket::unix(path),
            ListenAddress::Tcp(address) => ListenSocket::tcp(*address),
            ListenAddress::Vsock(port) => ListenSocket::vsock(*port),
        });
        let all = made.chain(given.into_iter().map(ListenSocket::inherited));
        let listeners: Arc<[ListenSocket]> = all.collect::<io::Result<_>>()?;
        let bound = listeners
            .iter()
            .map(|l| match &l.kind {
                ListenSocketKind::Unix(path, _) => BoundAddress::Unix(path.clone()),
                ListenSocketKind::Tcp(address) => BoundAddress::Tcp(*address),
                ListenSocketKind::Vsock(port) => BoundAddress::Vsock(*port),
            })
            .collect();
        let options = options.within(file_descriptor_limit());
        // For a moment, twice as many connections may be in the handshake.
        let handshakes_max = 2 * options.handshakes_max.max(1);
        let tls = tls.map(|tls| NbdServerTlsHandle::start(tls, handshakes_max)).transpose()?;
        let shared =
            NbdServerShared::new(core_set, BlockStatusWorkerHandle::start()?, exports, options, tls)?;
        *shared.pauses() = !accepts;
        let thread = if listeners.is_empty() {
            None
        } else {
            let (shared, listeners) = (shared.clone(), listeners.clone());
            let name = "udm-nbd-accept".to_owned();
            Some(std::thread::Builder::new().name(name).spawn(move || shared.accept_loop(&listeners))?)
        };
        Ok(NbdServer { shared, bound, listeners, thread })
    }

    /// Creates a server for the simulator: it does not listen and has no thread. The simulator
    /// executes its block-status queries ([`NbdServer::run_query`]).
    ///
    /// # Errors
    /// No eventfd is available.
    pub fn stepped(
        core_set: &Arc<ProcessCores>,
        exports: Arc<Exports>,
        options: NbdServerLimits,
    ) -> io::Result<NbdServer> {
        let shared = NbdServerShared::new(
            core_set,
            BlockStatusWorkerHandle::ByHand(Arc::default()),
            exports,
            options,
            None,
        )?;
        Ok(NbdServer { shared, bound: Vec::new(), listeners: Arc::default(), thread: None })
    }

    /// Number of waiting block-status queries of a stepped server.
    #[must_use]
    pub fn pending_queries(&self) -> usize {
        self.shared.block_status_worker.waiting()
    }

    /// Executes the `nth` waiting block-status query of a stepped server. If `asks` is false, drops
    /// it, as if the queue were full.
    pub fn run_query(&self, nth: usize, asks: bool) {
        self.shared.block_status_worker.do_one(nth, asks);
    }

    /// Addresses on which the server listens: those of `listen` in order, then the given ones.
    #[must_use]
    pub fn bound(&self) -> &[BoundAddress] {
        &self.bound
    }

    /// Serves a client on a connected socket, for example one half of a pair or an inherited one.
    ///
    /// # Errors
    /// The descriptor is not a socket, or there are too many connections (EBUSY).
    pub fn adopt(&self, fd: OwnedFd) -> io::Result<()> {
        configure_accepted_socket(&fd)?;
        if self.shared.assign_to_core(fd) { Ok(()) } else { Err(Errno::BUSY.into()) }
    }

    /// Current state and counters.
    #[must_use]
    pub fn stats(&self) -> NbdServerStats {
        self.shared.counters.read()
    }

    /// Number of answered requests of each core.
    #[must_use]
    pub fn requests_by_core(&self) -> Vec<u64> {
        self.shared.counters.requests()
    }

    /// Handle to the counters of the server.
    #[must_use]
    pub fn counts(&self) -> ServerCountersHandle {
        ServerCountersHandle(Arc::clone(&self.shared.counters))
    }

    /// Moves each served client to the next core, without effects that it can see. A client whose
    /// request takes too long stays on its core.
    pub fn rotate(&self) {
        let (exports, core_set) = self.parts();
        send_to_clients(exports, core_set, || ConnectionMoveOrder::Rotate);
    }

    /// The exports, and the cores that serve them.
    pub(super) fn parts(&self) -> (&Exports, &ProcessCores) {
        (&self.shared.exports, &self.shared.core_set)
    }

    /// Accepts no more connections: new ones wait in the backlog of their socket. When this
    /// returns, none is being accepted.
    pub fn pause_accepting(&self) {
        *self.shared.pauses() = true;
        self.shared.wake_accept_loop();
    }

    /// Accepts connections again.
    pub fn resume_accepting(&self) {
        *self.shared.pauses() = false;
        self.shared.wake_accept_loop();
    }

    /// The listening sockets for a server that takes over.
    ///
    /// # Errors
    /// The system error, if no file descriptor is available.
    pub fn handed_over_listeners(&self) -> io::Result<Vec<InheritedListener>> {
        self.listeners.iter().map(ListenSocket::handed_over).collect()
    }

    /// Sets whether the files of the listening sockets stay when this server stops.
    pub fn keep_socket_files(&self, keep: bool) {
        self.listeners.iter().for_each(|listener| listener.keep_file(keep));
    }

    /// Serves a client that another server has detached.
    ///
    /// # Errors
    /// Why it cannot be served: it is disconnected then.
    pub fn attach_detached(&self, client: DetachedNbdClient) -> Result<(), String> {
        let shared = &self.shared;
        configure_accepted_socket(&client.socket).map_err(|e| e.to_string())?;
        let export = shared.exports.acquire(&client.export);
        let export = export.filter(|export| *export.name() == *client.export);
        let export = export.ok_or("there is no such export")?;
        let fd = Arc::new(client.socket.try_clone().map_err(|e| e.to_string())?);
        let mut slot = shared.take_slot(&fd).ok_or("there are too many connections")?;
        slot.serve(export.device().id(), &shared.options)?;
        let server = ConnectionServerRefs {
            core_set: shared.core_set.clone(),
            block_status_worker: shared.block_status_worker.clone(),
            exports: shared.exports.clone(),
            options: shared.options.clone(),
        };
        attach_detached_client(client, export, fd, slot, server)
    }

    /// Stops accepting and removes the socket files. Connections continue until the cores stop.
    pub fn stop(self) {
        drop(self);
    }
}

impl Drop for NbdServer {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::Release);
        self.shared.wake_accept_loop();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl NbdServerShared {
    fn new(
        core_set: &Arc<ProcessCores>,
        block_status_worker: BlockStatusWorkerHandle,
        exports: Arc<Exports>,
        options: NbdServerLimits,
        tls: Option<NbdServerTlsHandle>,
    ) -> io::Result<Arc<NbdServerShared>> {
        exports.set_core_set(core_set);
        Ok(Arc::new(NbdServerShared {
            core_set: core_set.clone(),
            block_status_worker,
            exports,
            options,
            tls,
            counters: ServerCounters::new(core_set.len()),
            admission: Mutex::default(),
            stopping: AtomicBool::new(false),
            pauses: Mutex::default(),
            accept_errors: AtomicUsize::new(0),
            stop_event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        }))
    }

    fn pauses(&self) -> MutexGuard<'_, bool> {
        self.pauses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the accepting thread look at `stopping` and `pauses`.
    fn wake_accept_loop(&self) {
        // Fails only if it is readable already.
        let _ = rustix::io::write(&self.stop_event, &1u64.to_ne_bytes());
    }

    /// Waits for connections until the server stops.
    fn accept_loop(&self, listeners: &[ListenSocket]) {
        let mut fds: Vec<PollFd<'_>> = vec![PollFd::new(&self.stop_event, PollFlags::IN)];
        fds.extend(listeners.iter().map(|l| PollFd::new(&l.fd, PollFlags::IN)));
        while !self.stopping.load(Ordering::Acquire) {
            let polled = if *self.pauses() { 1 } else { fds.len() };
            if let Err(e) = poll(&mut fds[..polled], None)
                && e != Errno::INTR
            {
                tracing::error!("nbd: waiting for connections: {e}");
                return;
            }
            if !fds[0].revents().is_empty() {
                // The state is read again.
                let _ = rustix::io::read(&self.stop_event, &mut [0; 8]);
                continue;
            }
            let pauses = self.pauses();
            if !*pauses {
                listeners.iter().for_each(|listener| self.accept_all(listener));
            }
        }
    }

    /// Accepts waiting connections of `listener`, up to a limit, so that other listeners get a
    /// turn.
    fn accept_all(&self, listener: &ListenSocket) {
        for _ in 0..64 {
            if self.counters.is_full(&self.options) {
                // Evicted connections are about to close. New ones wait for a moment and are not
                // refused.
                let mut stop_event = [PollFd::new(&self.stop_event, PollFlags::IN)];
                let _ = poll(&mut stop_event, Some(&Timespec { tv_sec: 0, tv_nsec: 1_000_000 }));
                return;
            }
            match accept_with(&listener.fd, SocketFlags::CLOEXEC) {
                Ok(fd) if !self.options.admits(&Peer::of(&fd)) => {
                    self.counters.refused.fetch_add(1, Ordering::Relaxed);
                    // The log limits the lines of one place.
                    tracing::warn!("nbd: a client {} is not allowed to connect", Peer::of(&fd));
                }
                Ok(fd) => {
                    // Without these settings the connection works, but more slowly.
                    if let Err(e) = configure_accepted_socket(&fd) {
                        tracing::debug!("nbd: setting a connection up: {e}");
                    }
                    if !self.assign_to_core(fd) {
                        tracing::warn!("nbd: too many connections; one was closed");
                    }
                }
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(e) => {
                    // Out of descriptors or memory: the connection keeps waiting, and the loop must
                    // not spin.
                    if self.accept_errors.fetch_add(1, Ordering::Relaxed).is_multiple_of(100) {
                        tracing::warn!("nbd: accepting a connection: {e}");
                    }
                    let mut stop_event = [PollFd::new(&self.stop_event, PollFlags::IN)];
                    let _ = poll(&mut stop_event, Some(&Timespec { tv_sec: 0, tv_nsec: 100_000_000 }));
                    return;
                }
            }
        }
    }

    /// Assigns a connection to a core. If there are too many, closes it and returns false.
    fn assign_to_core(&self, fd: OwnedFd) -> bool {
        let fd = Arc::new(fd);
        let Some(place) = self.take_slot(&fd) else { return false };
        let (core_set, block_status_worker) = (self.core_set.clone(), self.block_status_worker.clone());
        let (exports, options, tls) = (self.exports.clone(), self.options.clone(), self.tls.clone());
        let core = place.core();
        let make = Box::new(move || {
            let connection =
                AcceptedNbdConnection::new(fd, core_set, block_status_worker, exports, options, tls, place);
            Box::new(connection) as _
        });
        self.core_set.attach(core, make);
        true
    }

    /// Takes a slot for the connection `fd`; `None` if there are too many.
    fn take_slot(&self, fd: &Arc<OwnedFd>) -> Option<AdmittedConnectionSlot> {
        let mut admission = self.admission.lock().unwrap_or_else(PoisonError::into_inner);
        let (turn, handshake_slots) = &mut *admission;
        *turn = turn.wrapping_add(1);
        self.counters.place(fd, handshake_slots, &self.options, *turn)
    }
}
