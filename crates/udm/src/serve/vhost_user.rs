//! The disks of virtual machines (`--vhost-user`).

use super::args::{ServeArgs, VhostUserFdArg};
use anyhow::{Context, Result, bail};
use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;
use udm_core::DeviceId;
use udm_frontends::nbd::Exports;
use udm_frontends::unix_socket::BoundUnixSocket;
use udm_frontends::vhost_user::{
    DetachedVhostUserFrontEnd, VhostUserConnection, VhostUserRefreshHandle, VhostUserServer,
};
use udm_runtime::ProcessCores;

/// Pause between looks at servers that are stopping.
const RESTART_PAUSE: Duration = Duration::from_millis(10);

/// The socket of a disk, for a server.
pub(super) struct VhostUserDisk {
    /// Name of the device.
    pub(super) name: String,
    /// The listening socket.
    pub(super) socket: Arc<BoundUnixSocket>,
    /// The connected front end, which another server had.
    pub(super) front_end: Option<DetachedVhostUserFrontEnd>,
}

/// The servers of all disks.
pub(super) struct VhostUserDisks {
    core_set: Arc<ProcessCores>,
    exports: Arc<Exports>,
    servers: Mutex<Vec<VhostUserServer>>,
    /// The servers that look at their devices after a change.
    refreshed: Arc<Mutex<Vec<VhostUserRefreshHandle>>>,
    /// Notified when the machine of an inherited socket has disconnected.
    ended: Arc<Notify>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn detached_disk(server: &VhostUserServer) -> VhostUserDisk {
    let (name, socket) = (server.name().to_owned(), Arc::clone(server.socket()));
    VhostUserDisk { name, socket, front_end: server.take_detached() }
}

impl VhostUserDisks {
    /// Binds the sockets of all disks, with the names of their devices.
    ///
    /// # Errors
    /// A path is named twice, a device does not exist, or a path is not available.
    pub(super) fn bind(args: &ServeArgs, exports: &Exports) -> Result<Vec<VhostUserDisk>> {
        let mut sockets = Vec::new();
        for (at, disk) in args.vhost_user.iter().enumerate() {
            if args.vhost_user[..at].iter().any(|other| other.path == disk.path) {
                bail!("vhost-user {}: the path is given twice: each disk has its own", disk.path.display());
            }
            if exports.get(&disk.name).is_none_or(|export| *export.name() != *disk.name) {
                bail!("vhost-user {}: there is no --device of that name, or it is not exported", disk.name);
            }
            let bound = std::path::absolute(&disk.path).and_then(|path| BoundUnixSocket::new(&path));
            let bound = bound.with_context(|| format!("vhost-user {}", disk.path.display()))?;
            let (name, socket) = (disk.name.clone(), Arc::new(bound));
            sockets.push(VhostUserDisk { name, socket, front_end: None });
        }
        Ok(sockets)
    }

    /// Serves the machines that connect to the sockets of `disks`.
    ///
    /// # Errors
    /// There are no descriptors or threads.
    pub(super) fn start(
        core_set: &Arc<ProcessCores>,
        exports: &Arc<Exports>,
        disks: Vec<VhostUserDisk>,
    ) -> Result<VhostUserDisks> {
        let refreshed: Arc<Mutex<Vec<VhostUserRefreshHandle>>> = Arc::default();
        let (core_set, exports) = (Arc::clone(core_set), Arc::clone(exports));
        let all =
            VhostUserDisks { core_set, exports, servers: Mutex::default(), refreshed, ended: Arc::default() };
        all.serve(disks)?;
        Ok(all)
    }

    fn serve(&self, disks: Vec<VhostUserDisk>) -> Result<()> {
        let start = |VhostUserDisk { name, socket, front_end }| {
            let path = socket.path().to_owned();
            let server = VhostUserServer::start_on(&self.core_set, &self.exports, &name, socket, front_end);
            server.with_context(|| format!("vhost-user {}", path.display()))
        };
        let servers = disks.into_iter().map(start).collect::<Result<Vec<_>>>()?;
        *lock(&self.refreshed) = servers.iter().map(VhostUserServer::refresh_handle).collect();
        *lock(&self.servers) = servers;
        Ok(())
    }

    /// Serves the machine at the other end of an inherited socket, until it disconnects
    /// ([`VhostUserDisks::connection_ended`]).
    ///
    /// # Errors
    /// There is no such device or descriptor, or there are no threads.
    pub(super) fn serve_connected(&self, arg: &VhostUserFdArg) -> Result<VhostUserConnection> {
        let VhostUserFdArg { name, fd } = arg;
        let own = || format!("vhost-user {name}: descriptor {fd}");
        let this = pidfd_open(getpid(), PidfdFlags::empty()).with_context(own)?;
        let socket = pidfd_getfd(&this, *fd, PidfdGetfdFlags::empty()).with_context(own)?;
        rustix::net::getpeername(&socket).with_context(own)?;
        let ended = Arc::clone(&self.ended);
        let then = move || ended.notify_one();
        let connection = VhostUserConnection::start(&self.core_set, &self.exports, name, socket, then);
        let connection = connection.with_context(own)?;
        lock(&self.refreshed).push(connection.refresh_handle());
        Ok(connection)
    }

    /// Completes when the machine of [`VhostUserDisks::serve_connected`] has disconnected.
    pub(super) async fn connection_ended(&self) {
        self.ended.notified().await;
    }

    /// A function for [`Exports::on_changed`].
    pub(super) fn change_hook(&self) -> impl Fn(DeviceId) + Send + Sync + use<> {
        let machines = Arc::clone(&self.refreshed);
        move |device| lock(&machines).iter().for_each(|machine| machine.refresh_if_of(device))
    }

    /// Names and addresses of all disks.
    pub(super) fn addresses(&self) -> Vec<(String, String)> {
        let address = |one: &VhostUserServer| format!("vhost-user:{}", one.path().display());
        lock(&self.servers).iter().map(|one| (one.name().to_owned(), address(one))).collect()
    }

    /// Accepts no machines, and detaches those that are connected.
    pub(super) fn begin_detach(&self) {
        lock(&self.servers).iter().for_each(VhostUserServer::begin_detach);
    }

    /// Serves each machine again as soon as none of its requests is in flight: the detaching of all
    /// was given up.
    pub(super) fn start_again_when_stopped(self: &Arc<Self>) {
        if self.restart_stopped() == 0 {
            return;
        }
        let weak = Arc::downgrade(self);
        let wait = move || {
            while weak.upgrade().is_some_and(|disks| disks.restart_stopped() > 0) {
                std::thread::sleep(RESTART_PAUSE);
            }
        };
        if let Err(error) = std::thread::Builder::new().name("udm-vhost-user".into()).spawn(wait) {
            tracing::error!("vhost-user: {error}");
        }
    }

    /// Starts the servers again that were stopped. Returns the number of those that are still
    /// stopping.
    fn restart_stopped(&self) -> usize {
        let mut left = 0;
        for one in &mut *lock(&self.servers) {
            if !one.is_detaching() {
                continue;
            }
            if !one.is_stopped() {
                left += 1;
                continue;
            }
            let disk = detached_disk(one);
            match VhostUserServer::start_on(
                &self.core_set,
                &self.exports,
                &disk.name,
                disk.socket,
                disk.front_end,
            ) {
                Ok(server) => *one = server,
                Err(error) => tracing::error!("vhost-user {}: {error}", one.path().display()),
            }
        }
        *lock(&self.refreshed) = lock(&self.servers).iter().map(VhostUserServer::refresh_handle).collect();
        left
    }

    /// The disks with the machines that were detached, once no server is running any more.
    pub(super) fn take_detached(&self) -> Vec<VhostUserDisk> {
        lock(&self.servers).iter().map(detached_disk).collect()
    }

    /// Number of servers that have not stopped: they have requests in flight.
    pub(super) fn running(&self) -> usize {
        lock(&self.servers).iter().filter(|one| !one.is_stopped()).count()
    }

    /// Sets whether the files of the sockets stay at the end.
    pub(super) fn keep_files(&self, keep: bool) {
        lock(&self.servers).iter().for_each(|one| one.socket().keep_file(keep));
    }

    /// Serves `disks`, which come from [`VhostUserDisks::take_detached`], again.
    pub(super) fn start_again(&self, disks: Vec<VhostUserDisk>) {
        lock(&self.servers).clear();
        if let Err(error) = self.serve(disks) {
            tracing::error!("{error:#}");
        }
    }
}
