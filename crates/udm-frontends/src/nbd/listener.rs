//! The server: a thread that accepts connections and deals them to the cores.

use super::admission::HandshakeSlots;
use super::block_status::BlockStatusWorker;
use super::connection::{Connection, MoveMessage};
use super::socket::{ListenSocket, ListenSocketKind, prepare};
use super::stats::{ServerCounters, ServerCountersHandle};
use super::{Exports, NbdServerStats, ServerOptions};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use udm_core::CoreId;
use udm_runtime::CoreSet;

/// Where to listen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ListenAddress {
    /// A path. The socket there has mode 0600; one that a dead server left is replaced, and it is
    /// removed when the server stops.
    Unix(PathBuf),
    /// An address; port 0 picks a free port.
    Tcp(SocketAddr),
}

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BoundAddress {
    /// At a path.
    Unix(PathBuf),
    /// At an address, with the port that was picked.
    Tcp(SocketAddr),
}

/// An NBD server. Dropping it ends the accepting; connections go on until the cores stop.
pub struct NbdServer {
    shared: Arc<ServerShared>,
    bound: Vec<BoundAddress>,
    thread: Option<JoinHandle<()>>,
}

struct ServerShared {
    cluster: Arc<CoreSet>,
    block_status_worker: BlockStatusWorker,
    exports: Arc<Exports>,
    options: ServerOptions,
    counters: Arc<ServerCounters>,
    /// Where the search for a core begins, and who shakes hands; held while a place is taken.
    admission: Mutex<(usize, HandshakeSlots)>,
    stopping: AtomicBool,
    accept_errors: AtomicUsize,
    stop_event: OwnedFd,
}

/// Descriptors that this process may have.
fn descriptor_limit() -> usize {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    limit.map_or(usize::MAX, |n| usize::try_from(n).unwrap_or(usize::MAX))
}

impl NbdServer {
    /// Serves `exports` on the cores of `core_set`, at all places of `listen` (which may be empty:
    /// see [`NbdServer::adopt`]).
    ///
    /// # Errors
    /// When a place to listen can't be had, with its name; nothing listens then.
    pub fn start(
        cluster: &Arc<CoreSet>,
        exports: Arc<Exports>,
        options: ServerOptions,
        listen: &[ListenAddress],
    ) -> io::Result<NbdServer> {
        NbdServer::start_with(cluster, exports, options, listen, Vec::new())
    }

    /// As [`NbdServer::start`], and on sockets that were opened and listen already (`given`). Their
    /// paths stay when the server stops.
    ///
    /// # Errors
    /// As [`NbdServer::start`]'s; and what was given is no socket of one of these kinds.
    pub fn start_with(
        cluster: &Arc<CoreSet>,
        exports: Arc<Exports>,
        options: ServerOptions,
        listen: &[ListenAddress],
        given: Vec<OwnedFd>,
    ) -> io::Result<NbdServer> {
        let made = listen.iter().map(|l| match l {
            ListenAddress::Unix(path) => ListenSocket::unix(path),
            ListenAddress::Tcp(address) => ListenSocket::tcp(*address),
        });
        let all = made.chain(given.into_iter().map(ListenSocket::given));
        let listeners = all.collect::<io::Result<Vec<_>>>()?;
        let bound = listeners
            .iter()
            .map(|l| match &l.kind {
                ListenSocketKind::Unix(path, _) => BoundAddress::Unix(path.clone()),
                ListenSocketKind::Tcp(address) => BoundAddress::Tcp(*address),
            })
            .collect();
        let shared = ServerShared::new(
            cluster,
            BlockStatusWorker::start()?,
            exports,
            options.within(descriptor_limit()),
        )?;
        let thread = if listeners.is_empty() {
            None
        } else {
            let shared = shared.clone();
            let name = "udm-nbd-accept".to_owned();
            Some(std::thread::Builder::new().name(name).spawn(move || shared.accept_loop(&listeners))?)
        };
        Ok(NbdServer { shared, bound, thread })
    }

    /// A server for a world that is made up: it listens nowhere and has no thread. Whoever steps
    /// its cores has its surveys done ([`NbdServer::block_status`]).
    ///
    /// # Errors
    /// When an eventfd can't be had.
    pub fn stepped(
        cluster: &Arc<CoreSet>,
        exports: Arc<Exports>,
        options: ServerOptions,
    ) -> io::Result<NbdServer> {
        let shared = ServerShared::new(cluster, BlockStatusWorker::ByHand(Arc::default()), exports, options)?;
        Ok(NbdServer { shared, bound: Vec::new(), thread: None })
    }

    /// Surveys of a stepped server that wait to be done.
    #[must_use]
    pub fn surveys(&self) -> usize {
        self.shared.block_status_worker.waiting()
    }

    /// Does the `nth` survey of a stepped server; or gives it up, as where there is no room, when
    /// `asks` is false.
    pub fn survey(&self, nth: usize, asks: bool) {
        self.shared.block_status_worker.do_one(nth, asks);
    }

    /// Where it listens, in the order of `listen`, and then of what was given.
    #[must_use]
    pub fn bound(&self) -> &[BoundAddress] {
        &self.bound
    }

    /// Serves a client on a socket that is connected already: a pair's half, or one inherited.
    ///
    /// # Errors
    /// When it is no socket, or when there are too many connections (EBUSY).
    pub fn adopt(&self, fd: OwnedFd) -> io::Result<()> {
        prepare(&fd)?;
        if self.shared.assign_to_core(fd) { Ok(()) } else { Err(Errno::BUSY.into()) }
    }

    /// What it is doing and has done.
    #[must_use]
    pub fn stats(&self) -> NbdServerStats {
        self.shared.counters.read()
    }

    /// Requests answered so far by each core.
    #[must_use]
    pub fn requests_by_core(&self) -> Vec<u64> {
        self.shared.counters.requests()
    }

    /// What it counts.
    #[must_use]
    pub fn counts(&self) -> ServerCountersHandle {
        ServerCountersHandle(Arc::clone(&self.shared.counters))
    }

    /// Has each client that is served go on on the next core: what a core takes in no more is done,
    /// answered, and the rest left to the other. No client notices. One with a request that takes
    /// long stays where it is.
    pub fn rotate(&self) {
        let cluster = &self.shared.cluster;
        let mut devices: Vec<_> = self.shared.exports.all().iter().map(|e| e.device().id()).collect();
        devices.sort_unstable();
        devices.dedup();
        for (device, core) in devices.into_iter().flat_map(|d| (0..cluster.len()).map(move |c| (d, c))) {
            cluster.send_message(CoreId(core as u16), device, Box::new(MoveMessage::Rotate));
        }
    }

    /// Ends the accepting and removes the socket files. Connections go on until the cores stop.
    pub fn stop(self) {
        drop(self);
    }
}

impl Drop for NbdServer {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::Release);
        let _ = rustix::io::write(&self.shared.stop_event, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl ServerShared {
    fn new(
        cluster: &Arc<CoreSet>,
        block_status_worker: BlockStatusWorker,
        exports: Arc<Exports>,
        options: ServerOptions,
    ) -> io::Result<Arc<ServerShared>> {
        exports.served_on(cluster);
        Ok(Arc::new(ServerShared {
            cluster: cluster.clone(),
            block_status_worker,
            exports,
            options,
            counters: ServerCounters::new(cluster.len()),
            admission: Mutex::default(),
            stopping: AtomicBool::new(false),
            accept_errors: AtomicUsize::new(0),
            stop_event: eventfd(0, EventfdFlags::CLOEXEC)?,
        }))
    }

    /// Sleeps until somebody connects or the bell rings.
    fn accept_loop(&self, listeners: &[ListenSocket]) {
        let mut fds: Vec<PollFd<'_>> = listeners.iter().map(|l| PollFd::new(&l.fd, PollFlags::IN)).collect();
        fds.push(PollFd::new(&self.stop_event, PollFlags::IN));
        while !self.stopping.load(Ordering::Acquire) {
            if let Err(e) = poll(&mut fds, None)
                && e != Errno::INTR
            {
                tracing::error!("nbd: waiting for connections: {e}");
                return;
            }
            for listener in listeners {
                self.accept_all(listener);
            }
        }
    }

    /// Accepts what has come in on `listener`; a bounded number, so that the others get their turn.
    fn accept_all(&self, listener: &ListenSocket) {
        for _ in 0..64 {
            if self.counters.is_full(&self.options) {
                // Those that were shown out are on their way: who comes now waits for a moment, and
                // is not refused.
                let mut stop_event = [PollFd::new(&self.stop_event, PollFlags::IN)];
                let _ = poll(&mut stop_event, Some(&Timespec { tv_sec: 0, tv_nsec: 1_000_000 }));
                return;
            }
            match accept_with(&listener.fd, SocketFlags::CLOEXEC) {
                Ok(fd) => {
                    // Without these settings it would work as well, only slower.
                    if let Err(e) = prepare(&fd) {
                        tracing::debug!("nbd: setting a connection up: {e}");
                    }
                    if !self.assign_to_core(fd) {
                        tracing::warn!("nbd: too many connections; one was closed");
                    }
                }
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(e) => {
                    // Out of files or memory: what waits stays where it is, and we must not spin on
                    // it.
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

    /// Gives a connection to a core. False when there are too many; then it is closed.
    fn assign_to_core(&self, fd: OwnedFd) -> bool {
        let fd = Arc::new(fd);
        let place = {
            let mut admission = self.admission.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            let (turn, handshake_slots) = &mut *admission;
            *turn = turn.wrapping_add(1);
            self.counters.place(&fd, handshake_slots, &self.options, *turn)
        };
        let Some(place) = place else { return false };
        let (cluster, block_status_worker) = (self.cluster.clone(), self.block_status_worker.clone());
        let (exports, options) = (self.exports.clone(), self.options.clone());
        let core = place.core();
        let make = Box::new(move || {
            Box::new(Connection::new(fd, cluster, block_status_worker, exports, options, place)) as _
        });
        self.cluster.attach(core, make);
        true
    }
}
