//! The server: a thread accepts connections and assigns them to cores.

use super::handshake::NvmeHandshake;
use super::subsystem::Subsystem;
use super::{NvmeServerLimits, NvmeServerOptions};
use crate::nbd::{Exports, configure_accepted_socket};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use udm_core::{CoreId, DeviceId};
use udm_runtime::ProcessCores;
use udm_wire::nvme::{AnaState, DISCOVERY_NQN, NqnError, check_nqn};

/// A target for NVMe/TCP hosts. If it is dropped, it accepts no more connections; existing
/// connections continue until the cores stop.
pub struct NvmeServer {
    shared: Arc<NvmeShared>,
    bound: Vec<SocketAddr>,
    thread: Option<JoinHandle<()>>,
}

/// Parts of a server that its connections use.
pub(super) struct NvmeShared {
    pub(super) core_set: Arc<ProcessCores>,
    pub(super) subsystem: Arc<Subsystem>,
    pub(super) limits: NvmeServerLimits,
    counts: Arc<NvmeConnectionCounts>,
    /// Core of the next connection, until it is a queue.
    next_core: AtomicU16,
    stopping: AtomicBool,
    stop_event: OwnedFd,
}

#[derive(Default)]
struct NvmeConnectionCounts {
    connections: AtomicUsize,
    handshakes: AtomicUsize,
}

/// Current state of a server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NvmeServerStats {
    /// Open connections, one per queue, including handshakes.
    pub connections: usize,
    /// Connections that are not connected to a queue yet.
    pub handshakes: usize,
    /// Controllers, one per association with a host.
    pub controllers: usize,
}

/// A place among the connections of a server, while it exists.
pub(super) struct NvmeConnectionSlot {
    counts: Arc<NvmeConnectionCounts>,
    in_handshake: AtomicBool,
}

impl NvmeConnectionSlot {
    /// Notes that the connection is a queue now.
    pub(super) fn end_handshake(&self) {
        if self.in_handshake.swap(false, Ordering::Relaxed) {
            self.counts.handshakes.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Drop for NvmeConnectionSlot {
    fn drop(&mut self) {
        self.end_handshake();
        self.counts.connections.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The address at the other end of a connection.
pub(super) fn peer_address(fd: &Arc<OwnedFd>) -> Option<SocketAddr> {
    rustix::net::getpeername(fd).ok().flatten().and_then(|address| SocketAddr::try_from(address).ok())
}

/// The address at this end of a connection.
pub(super) fn local_address(fd: &Arc<OwnedFd>) -> Option<SocketAddr> {
    rustix::net::getsockname(fd).ok().and_then(|address| SocketAddr::try_from(address).ok())
}

impl NvmeServer {
    /// Serves `exports` as the namespaces of one subsystem on the cores of `core_set`, and listens
    /// on all addresses of `listen`.
    ///
    /// # Errors
    /// An address is not available, or a name is not valid; the error names it.
    pub fn start(
        core_set: &Arc<ProcessCores>,
        exports: &Arc<Exports>,
        options: NvmeServerOptions,
        listen: &[SocketAddr],
    ) -> io::Result<NvmeServer> {
        let invalid = |name: &str, error: NqnError| {
            io::Error::new(io::ErrorKind::InvalidInput, format!("{name:?}: {error}"))
        };
        for name in [&options.subsystem].into_iter().chain(options.allowed_hosts.iter().flatten()) {
            check_nqn(name).map_err(|error| invalid(name, error))?;
        }
        if options.subsystem == DISCOVERY_NQN {
            let why = format!("{DISCOVERY_NQN} is the name of the discovery subsystem: choose another one");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        let named = |address: &SocketAddr, error: io::Error| {
            io::Error::new(error.kind(), format!("{address}: {error}"))
        };
        let mut listeners = Vec::new();
        for address in listen {
            let listener = TcpListener::bind(address).map_err(|error| named(address, error))?;
            listener.set_nonblocking(true)?;
            listeners.push(listener);
        }
        let bound = listeners.iter().map(TcpListener::local_addr).collect::<io::Result<Vec<_>>>()?;
        let subsystem = Subsystem::new(
            options.subsystem,
            options.allowed_hosts,
            options.last_controller,
            exports,
            core_set,
        );
        let shared = Arc::new(NvmeShared {
            core_set: Arc::clone(core_set),
            subsystem: Arc::new(subsystem),
            limits: options.limits,
            counts: Arc::default(),
            next_core: AtomicU16::new(0),
            stopping: AtomicBool::new(false),
            stop_event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        });
        exports.set_core_set(core_set);
        let refresh = shared.refresh_hook();
        exports.on_list_changed(Arc::new(move || refresh(None)));
        let thread = {
            let shared = Arc::clone(&shared);
            let name = "udm-nvme-accept".to_owned();
            std::thread::Builder::new().name(name).spawn(move || shared.accept_loop(&listeners))?
        };
        Ok(NvmeServer { shared, bound, thread: Some(thread) })
    }

    /// Addresses on which the server listens, in the order of `listen`.
    #[must_use]
    pub fn bound(&self) -> &[SocketAddr] {
        &self.bound
    }

    /// Name of the subsystem.
    #[must_use]
    pub fn subsystem(&self) -> &str {
        &self.shared.subsystem.nqn
    }

    /// Current state.
    #[must_use]
    pub fn stats(&self) -> NvmeServerStats {
        let counts = &self.shared.counts;
        NvmeServerStats {
            connections: counts.connections.load(Ordering::Relaxed),
            handshakes: counts.handshakes.load(Ordering::Relaxed),
            controllers: self.shared.subsystem.associations(),
        }
    }

    /// Sets the ANA state of all namespaces; hosts get an event.
    pub fn set_ana_state(&self, state: AnaState) {
        self.shared.subsystem.set_ana_state(state);
    }

    /// A function to call with the id of a device whose size or limits may have changed. Hosts get
    /// an event.
    pub fn refresh_hook(&self) -> impl Fn(DeviceId) + Send + Sync + use<> {
        let refresh = self.shared.refresh_hook();
        move |device| refresh(Some(device))
    }
}

impl Drop for NvmeServer {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::Release);
        // Fails only if it is readable already.
        let _ = rustix::io::write(&self.shared.stop_event, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl NvmeShared {
    /// A function that compares the namespaces with the exports.
    fn refresh_hook(&self) -> impl Fn(Option<DeviceId>) + Send + Sync + use<> {
        let subsystem = Arc::downgrade(&self.subsystem);
        move |device| {
            subsystem.upgrade().inspect(|subsystem| subsystem.refresh(device));
        }
    }

    /// Waits for connections until the server stops.
    fn accept_loop(self: &Arc<Self>, listeners: &[TcpListener]) {
        let mut fds: Vec<PollFd<'_>> = vec![PollFd::new(&self.stop_event, PollFlags::IN)];
        fds.extend(listeners.iter().map(|one| PollFd::new(one, PollFlags::IN)));
        while !self.stopping.load(Ordering::Acquire) {
            match poll(&mut fds, None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return tracing::error!("nvme: waiting for connections: {error}"),
            }
            listeners.iter().for_each(|listener| self.accept_all(listener));
        }
    }

    /// Accepts waiting connections of `listener`, up to a limit, so that other listeners get a
    /// turn.
    fn accept_all(self: &Arc<Self>, listener: &TcpListener) {
        for _ in 0..64 {
            match accept_with(listener.as_fd(), SocketFlags::CLOEXEC) {
                Ok(fd) => self.accepted(fd),
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(error) => {
                    // Out of descriptors or memory: the connection keeps waiting, and the loop must
                    // not spin.
                    tracing::warn!("nvme: accepting a connection: {error}");
                    let mut stop_event = [PollFd::new(&self.stop_event, PollFlags::IN)];
                    let _ = poll(&mut stop_event, Some(&Timespec { tv_sec: 0, tv_nsec: 100_000_000 }));
                    return;
                }
            }
        }
    }

    fn accepted(self: &Arc<Self>, fd: OwnedFd) {
        let fd = Arc::new(fd);
        let peer = peer_address(&fd).map(|address| address.ip());
        if !self.admits(peer) {
            // The log limits the lines of one place.
            return tracing::warn!("nvme: a host at {} is not allowed to connect", peer_text(peer));
        }
        let Some(slot) = self.take_slot() else {
            return tracing::warn!("nvme: too many connections; one of {} was closed", peer_text(peer));
        };
        // Without these settings the connection works, but more slowly.
        if let Err(error) = configure_accepted_socket(&fd) {
            tracing::debug!("nvme: setting a connection up: {error}");
        }
        let Some(fd) = Arc::into_inner(fd) else { unreachable!("nobody else has the descriptor") };
        let core = self.next_core.fetch_add(1, Ordering::Relaxed) % self.core_set.len() as u16;
        let server = Arc::clone(self);
        let make = Box::new(move || Box::new(NvmeHandshake::new(server, fd, slot)) as _);
        self.core_set.attach(CoreId(core), make);
    }

    /// True if a host may connect from this address.
    fn admits(&self, peer: Option<IpAddr>) -> bool {
        match (&self.limits.networks, peer) {
            (None, _) => true,
            // On a socket for both families, IPv4 hosts have mapped addresses.
            (Some(networks), Some(peer)) => networks.iter().any(|one| one.contains(&peer.to_canonical())),
            (Some(_), None) => false,
        }
    }

    /// Takes a slot for a connection; `None` if there are too many.
    fn take_slot(&self) -> Option<NvmeConnectionSlot> {
        let counts = &self.counts;
        // Only the accepting thread adds connections.
        let is_full = counts.connections.load(Ordering::Relaxed) >= self.limits.connections_max
            || counts.handshakes.load(Ordering::Relaxed) >= self.limits.handshakes_max;
        (!is_full).then(|| {
            counts.connections.fetch_add(1, Ordering::Relaxed);
            counts.handshakes.fetch_add(1, Ordering::Relaxed);
            NvmeConnectionSlot { counts: Arc::clone(counts), in_handshake: AtomicBool::new(true) }
        })
    }
}

fn peer_text(peer: Option<IpAddr>) -> String {
    peer.map_or_else(|| "an unknown address".into(), |peer| peer.to_string())
}
