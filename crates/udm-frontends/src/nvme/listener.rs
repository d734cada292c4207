//! The server: a thread accepts connections and assigns them to cores.

use super::handshake::NvmeHandshake;
use super::host_counters::NvmeHostIoReport;
use super::subsystem::Subsystem;
use super::{NvmeServerLimits, NvmeServerOptions};
use crate::nbd::{
    Exports, NbdServerLimits, Peer, PendingHandshakes, ServerCounters, configure_accepted_socket,
};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};
use std::collections::BTreeSet;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use udm_core::DeviceId;
use udm_runtime::ProcessCores;
use udm_wire::nvme::{AnaState, DISCOVERY_NQN, NqnError, check_nqn};

/// A target for NVMe/TCP hosts. If it is dropped, it accepts no more connections; existing
/// connections continue until the cores stop.
pub struct NvmeServer {
    shared: Arc<NvmeShared>,
    bound: Vec<SocketAddr>,
    thread: Option<JoinHandle<()>>,
}

/// Error: the target listens on other addresses.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the target does not listen on {asked}: its addresses are {known}")]
pub struct NvmePortError {
    asked: SocketAddr,
    known: String,
}

/// Parts of a server that its connections use.
pub(super) struct NvmeShared {
    pub(super) core_set: Arc<ProcessCores>,
    pub(super) subsystem: Arc<Subsystem>,
    pub(super) limits: NvmeServerLimits,
    /// Limits of connections, for [`ServerCounters::place`] and [`AdmittedConnectionSlot::serve`].
    pub(super) admission: NbdServerLimits,
    counters: Arc<ServerCounters>,
    stopping: AtomicBool,
    stop_event: OwnedFd,
}

/// Current state of a server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NvmeServerStats {
    /// Open connections, one per queue, including handshakes.
    pub connections: usize,
    /// Connections that are not connected to a queue yet.
    pub handshakes: usize,
    /// Queues whose host is gone while the device still has requests of it.
    pub orphans: usize,
    /// Connections accepted so far.
    pub accepted: u64,
    /// Connections and queues that were refused because there were too many.
    pub refused: u64,
    /// Controllers, one per association with a host.
    pub controllers: usize,
    /// Hosts, by name and identifier.
    pub hosts: usize,
    /// Queues whose requests stayed at a device for longer than the quiesce time.
    pub late_quiesces: u64,
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
        let shared = NvmeShared::new(core_set, exports, options, bound.len())?;
        let thread = {
            let shared = Arc::clone(&shared);
            let name = "udm-nvme-accept".to_owned();
            std::thread::Builder::new().name(name).spawn(move || shared.accept_loop(&listeners))?
        };
        Ok(NvmeServer { shared, bound, thread: Some(thread) })
    }

    /// Creates a server with one port for the simulator: it does not listen and has no thread.
    ///
    /// # Errors
    /// No eventfd is available.
    pub fn stepped(
        core_set: &Arc<ProcessCores>,
        exports: &Arc<Exports>,
        options: NvmeServerOptions,
    ) -> io::Result<NvmeServer> {
        let bound = vec![SocketAddr::from(([0, 0, 0, 0], 0))];
        let shared = NvmeShared::new(core_set, exports, options, bound.len())?;
        Ok(NvmeServer { shared, bound, thread: None })
    }

    /// Serves a connection of a stepped server.
    ///
    /// # Errors
    /// There are too many connections.
    pub fn adopt(&self, fd: OwnedFd) -> io::Result<()> {
        match self.shared.accepted(fd, 0, &mut PendingHandshakes::default()) {
            true => Ok(()),
            false => Err(Errno::BUSY.into()),
        }
    }

    /// Addresses on which the server listens, in the order of `listen`.
    #[must_use]
    pub fn bound(&self) -> &[SocketAddr] {
        &self.bound
    }

    pub(super) fn subsystem_state(&self) -> &Subsystem {
        &self.shared.subsystem
    }

    /// I/O counters of hosts, by name. They are recent, but not of one instant.
    #[must_use]
    pub fn host_reports(&self) -> Vec<NvmeHostIoReport> {
        self.shared.subsystem.host_counters.reports()
    }

    /// Name of the subsystem.
    #[must_use]
    pub fn subsystem(&self) -> &str {
        &self.shared.subsystem.nqn
    }

    /// Current state.
    #[must_use]
    pub fn stats(&self) -> NvmeServerStats {
        let counters = self.shared.counters.read();
        let associations = self.shared.subsystem.all_associations();
        let hosts: BTreeSet<_> = associations.iter().map(|one| (&one.host, one.host_id)).collect();
        NvmeServerStats {
            connections: counters.connections,
            handshakes: counters.handshakes,
            orphans: counters.orphans,
            accepted: counters.accepted,
            refused: counters.refused,
            controllers: associations.len(),
            hosts: hosts.len(),
            late_quiesces: self.shared.subsystem.late_quiesces(),
        }
    }

    /// Sets the ANA state of a device, or of all, on the port with this address, or on all. Hosts
    /// get an event. The state belongs to the name: the device may be created later, or again.
    ///
    /// # Errors
    /// There is no such port.
    pub fn set_ana_state(
        &self,
        port: Option<SocketAddr>,
        device: Option<&str>,
        state: AnaState,
    ) -> Result<(), NvmePortError> {
        let is_meant = |address: &SocketAddr| port.is_none_or(|port| port == *address);
        let ports = self.bound.iter().enumerate().filter(|(_, address)| is_meant(address));
        let ports: Vec<usize> = ports.map(|(index, _)| index).collect();
        if let (Some(port), true) = (port, ports.is_empty()) {
            let known: Vec<String> = self.bound.iter().map(SocketAddr::to_string).collect();
            return Err(NvmePortError { asked: port, known: known.join(", ") });
        }
        self.shared.subsystem.set_ana_state(&ports, device, state);
        Ok(())
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
    fn new(
        core_set: &Arc<ProcessCores>,
        exports: &Arc<Exports>,
        options: NvmeServerOptions,
        ports: usize,
    ) -> io::Result<Arc<NvmeShared>> {
        let limits = options.limits.clone();
        let subsystem = Subsystem::new(options, ports, exports, core_set);
        let admission = limits.admission();
        let shared = Arc::new(NvmeShared {
            core_set: Arc::clone(core_set),
            subsystem: Arc::new(subsystem),
            limits,
            admission,
            counters: ServerCounters::new(core_set.len()),
            stopping: AtomicBool::new(false),
            stop_event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        });
        exports.set_core_set(core_set);
        let refresh = shared.refresh_hook();
        exports.on_list_changed(Arc::new(move || refresh(None)));
        Ok(shared)
    }

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
        let mut pending = PendingHandshakes::default();
        while !self.stopping.load(Ordering::Acquire) {
            match poll(&mut fds, None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return tracing::error!("nvme: waiting for connections: {error}"),
            }
            for (port, listener) in listeners.iter().enumerate() {
                self.accept_all(listener, port, &mut pending);
            }
        }
    }

    /// Accepts waiting connections of `listener`, up to a limit, so that other listeners get a
    /// turn.
    fn accept_all(self: &Arc<Self>, listener: &TcpListener, port: usize, pending: &mut PendingHandshakes) {
        for _ in 0..64 {
            match accept_with(listener.as_fd(), SocketFlags::CLOEXEC) {
                Ok(fd) => _ = self.accepted(fd, port, pending),
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

    /// Serves a connection. Returns false if it was closed instead.
    fn accepted(self: &Arc<Self>, fd: OwnedFd, port: usize, pending: &mut PendingHandshakes) -> bool {
        let fd = Arc::new(fd);
        let peer = Peer::of(&fd);
        if !self.admission.admits(&peer) {
            // The log limits the lines of one place.
            tracing::warn!("nvme: a host {peer} is not allowed to connect");
            return false;
        }
        let Some(slot) = self.counters.place(&fd, pending, &self.admission, 0) else {
            tracing::warn!("nvme: too many connections; one of a host {peer} was closed");
            return false;
        };
        // Without these settings the connection works, but more slowly.
        if let Err(error) = configure_accepted_socket(&fd) {
            tracing::debug!("nvme: setting a connection up: {error}");
        }
        let (core, server) = (slot.core(), Arc::clone(self));
        let make = Box::new(move || Box::new(NvmeHandshake::new(server, fd, port, slot)) as _);
        self.core_set.attach(core, make);
        true
    }
}
