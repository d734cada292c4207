//! The server of one disk: it listens on a Unix socket and serves one machine at a time.

use super::channel::VhostUserChannel;
use super::handover::{DetachedVhostUserFrontEnd, VhostUserSetupMessage};
use super::queue_wait::QueueWait;
use super::session::VhostUserSession;
use crate::nbd::Exports;
use crate::unix_socket::BoundUnixSocket;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use udm_core::DeviceId;
use udm_runtime::ProcessCores;

/// The longest wait of a dropped server for its thread.
const STOP_PAUSE: Duration = Duration::from_millis(50);

/// Pause after a failed `accept`, such as one without a free descriptor.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

struct VhostUserShared {
    core_set: Arc<ProcessCores>,
    exports: Arc<Exports>,
    name: Mutex<Arc<str>>,
    stop: Arc<OwnedFd>,
    event: Arc<OwnedFd>,
    is_connected: AtomicBool,
    /// The session that a stop ends is detached.
    detaches: AtomicBool,
    detached: Mutex<Option<DetachedVhostUserFrontEnd>>,
}

/// A vhost-user-blk back end for one disk. If it is dropped, it stops listening and its session
/// ends; requests in flight are completed, and the drop waits for them for a moment only.
pub struct VhostUserServer {
    shared: Arc<VhostUserShared>,
    socket: Arc<BoundUnixSocket>,
    thread: Option<JoinHandle<()>>,
}

impl VhostUserServer {
    /// Serves the export `name` of `exports` at the Unix socket `path`. The export may be added
    /// later, or be replaced: a machine that connects gets the one of that moment.
    ///
    /// # Errors
    /// The path is not available.
    pub fn start(
        core_set: &Arc<ProcessCores>,
        exports: &Arc<Exports>,
        name: &str,
        path: &Path,
    ) -> io::Result<VhostUserServer> {
        VhostUserServer::start_on(core_set, exports, name, Arc::new(BoundUnixSocket::new(path)?), None)
    }

    /// As [`VhostUserServer::start`], on a listening socket. Serves a front end that another server
    /// has detached, if there is one, until that disconnects.
    ///
    /// # Errors
    /// There are no descriptors or threads.
    pub fn start_on(
        core_set: &Arc<ProcessCores>,
        exports: &Arc<Exports>,
        name: &str,
        socket: Arc<BoundUnixSocket>,
        detached: Option<DetachedVhostUserFrontEnd>,
    ) -> io::Result<VhostUserServer> {
        let shared = VhostUserShared::new(core_set, exports, name)?;
        let thread = {
            let (shared, socket) = (Arc::clone(&shared), Arc::clone(&socket));
            std::thread::Builder::new().name("udm-vhost-user".into()).spawn(move || {
                detached.into_iter().for_each(|one| shared.serve_client(one.socket, one.messages));
                shared.serve(&socket);
            })?
        };
        Ok(VhostUserServer { shared, socket, thread: Some(thread) })
    }

    /// Name of the export.
    #[must_use]
    pub fn name(&self) -> Arc<str> {
        self.shared.name()
    }

    /// Serves the export `name` to machines that connect from now on. A connected machine keeps its
    /// export.
    pub fn set_name(&self, name: &str) {
        *self.shared.name.lock().unwrap_or_else(PoisonError::into_inner) = name.into();
    }

    /// Path of the socket.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.socket.path()
    }

    /// True while a machine is connected.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.shared.is_connected.load(Ordering::Relaxed)
    }

    /// A handle that makes the session look at its device, whose size or limits may have changed.
    #[must_use]
    pub fn refresh_handle(&self) -> VhostUserRefreshHandle {
        VhostUserRefreshHandle(Arc::clone(&self.shared))
    }

    /// Stops accepting and detaches the front end. Returns at once; see
    /// [`VhostUserServer::is_stopped`].
    pub fn begin_detach(&self) {
        self.shared.detaches.store(true, Ordering::Relaxed);
        signal(&self.shared.stop);
    }

    /// True after [`VhostUserServer::begin_detach`].
    #[must_use]
    pub fn is_detaching(&self) -> bool {
        self.shared.detaches.load(Ordering::Relaxed)
    }

    /// The front end that was detached, once. `None` if none was connected, or if it was in the
    /// middle of a message: it is disconnected then.
    #[must_use]
    pub fn take_detached(&self) -> Option<DetachedVhostUserFrontEnd> {
        self.shared.detached.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// True if the server has stopped, and none of its requests is in flight.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// The listening socket, which others can use after this server has stopped.
    #[must_use]
    pub fn socket(&self) -> &Arc<BoundUnixSocket> {
        &self.socket
    }

    /// Stops listening, ends the session, and waits until none of its requests is in flight.
    pub fn stop(mut self) {
        signal(&self.shared.stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The service of one machine that is connected already. If it is dropped, its session ends.
pub struct VhostUserConnection(Arc<VhostUserShared>);

impl VhostUserConnection {
    /// Serves the export `name` to the machine at the other end of `socket`. When the machine has
    /// disconnected, `ended` is called on a thread.
    ///
    /// # Errors
    /// There are no descriptors or threads.
    pub fn start(
        core_set: &Arc<ProcessCores>,
        exports: &Arc<Exports>,
        name: &str,
        socket: OwnedFd,
        ended: impl FnOnce() + Send + 'static,
    ) -> io::Result<VhostUserConnection> {
        let shared = VhostUserShared::new(core_set, exports, name)?;
        let served = Arc::clone(&shared);
        std::thread::Builder::new().name("udm-vhost-user".into()).spawn(move || {
            served.serve_client(socket, Vec::new());
            ended();
        })?;
        Ok(VhostUserConnection(shared))
    }

    /// As [`VhostUserServer::refresh_handle`].
    #[must_use]
    pub fn refresh_handle(&self) -> VhostUserRefreshHandle {
        VhostUserRefreshHandle(Arc::clone(&self.0))
    }
}

impl Drop for VhostUserConnection {
    fn drop(&mut self) {
        signal(&self.0.stop);
    }
}

/// Makes the session of a server look at its device.
pub struct VhostUserRefreshHandle(Arc<VhostUserShared>);

impl VhostUserRefreshHandle {
    /// Makes the session look at its device, if that is `device`.
    pub fn refresh_if_of(&self, device: DeviceId) {
        let export = self.0.exports.get(&self.0.name());
        if self.0.is_connected.load(Ordering::Relaxed) && export.is_some_and(|e| e.device().id() == device) {
            signal(&self.0.event);
        }
    }
}

impl Drop for VhostUserServer {
    fn drop(&mut self) {
        signal(&self.shared.stop);
        // The thread removes the socket. It may be waiting for a disk that does not answer.
        let end = Instant::now() + STOP_PAUSE;
        while self.thread.as_ref().is_some_and(|thread| !thread.is_finished()) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Makes an eventfd readable.
fn signal(eventfd: &OwnedFd) {
    // Fails only if it is readable already.
    let _ = rustix::io::write(eventfd, &1u64.to_ne_bytes());
}

impl VhostUserShared {
    fn new(
        core_set: &Arc<ProcessCores>,
        exports: &Arc<Exports>,
        name: &str,
    ) -> io::Result<Arc<VhostUserShared>> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Arc::new(VhostUserShared {
            core_set: Arc::clone(core_set),
            exports: Arc::clone(exports),
            name: Mutex::new(name.into()),
            stop: Arc::new(eventfd(0, flags)?),
            event: Arc::new(eventfd(0, flags)?),
            is_connected: AtomicBool::new(false),
            detaches: AtomicBool::new(false),
            detached: Mutex::default(),
        }))
    }

    fn name(&self) -> Arc<str> {
        Arc::clone(&self.name.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn serve(&self, socket: &BoundUnixSocket) {
        loop {
            let fd = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
            let mut fds = [fd(socket.as_fd()), fd(self.stop.as_fd())];
            match poll(&mut fds, None) {
                Ok(_) if !fds[1].revents().is_empty() => return,
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return tracing::error!("vhost-user {}: {error}", self.name()),
            }
            match accept_with(socket, SocketFlags::CLOEXEC) {
                Ok(client) => self.serve_client(client, Vec::new()),
                Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => {}
                Err(error) => {
                    tracing::warn!("vhost-user {}: {error}", self.name());
                    std::thread::sleep(ACCEPT_PAUSE);
                }
            }
        }
    }

    /// Serves a connected front end, which has sent `messages` to another server.
    fn serve_client(&self, socket: OwnedFd, messages: Vec<VhostUserSetupMessage>) {
        let name = self.name();
        let Some(export) = self.exports.acquire(&name).filter(|export| *export.name() == *name) else {
            return tracing::warn!("vhost-user {name}: there is no such device: a machine is turned away");
        };
        if messages.is_empty() {
            tracing::info!("vhost-user {name}: a machine has connected");
        }
        self.is_connected.store(true, Ordering::Relaxed);
        let channel =
            VhostUserChannel { socket, stop: Arc::clone(&self.stop), event: Arc::clone(&self.event) };
        let mut session =
            VhostUserSession::new(channel, Arc::clone(&self.core_set), export, QueueWait::Block);
        match session.run(messages) {
            Ok(true) if self.detaches.load(Ordering::Relaxed) => match session.detach() {
                Ok(detached) => {
                    *self.detached.lock().unwrap_or_else(PoisonError::into_inner) = Some(detached);
                }
                Err(error) => {
                    tracing::warn!("vhost-user {name}: the machine is disconnected: {error}");
                }
            },
            Ok(_) => tracing::info!("vhost-user {name}: the machine has disconnected"),
            Err(error) => tracing::warn!("vhost-user {name}: the machine is disconnected: {error}"),
        }
        self.is_connected.store(false, Ordering::Relaxed);
    }
}
