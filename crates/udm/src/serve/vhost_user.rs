//! The disks of virtual machines (`--vhost-user`).

use super::args::{ServeArgs, VhostUserFdArg};
use anyhow::{Context, Result, bail};
use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;
use udm_control::api::VhostUserSocketDescription;
use udm_control::vhost_user_sockets::VhostUserSockets;
use udm_core::errno::{EBUSY, EINVAL, EIO, ENOENT, EPERM};
use udm_core::{DeviceControlError, DeviceId};
use udm_frontends::nbd::Exports;
use udm_frontends::unix_socket::BoundUnixSocket;
use udm_frontends::vhost_user::{
    DetachedVhostUserFrontEnd, VhostUserConnection, VhostUserRefreshHandle, VhostUserServer,
};
use udm_runtime::ProcessCores;

/// Pause between looks at servers that are stopping.
const RESTART_PAUSE: Duration = Duration::from_millis(10);

/// The maximum number of sockets that verbs may add: each has a thread.
const SOCKETS_MAX: usize = 4096;

/// The socket of a disk, for a server.
pub(super) struct VhostUserDisk {
    /// Name of the device.
    pub(super) name: String,
    /// The listening socket.
    pub(super) socket: Arc<BoundUnixSocket>,
    /// The connected front end, which another server had.
    pub(super) front_end: Option<DetachedVhostUserFrontEnd>,
    /// True if it was added while the server runs: it ends with its device.
    pub(super) is_added: bool,
}

/// The server of a disk.
struct ServedVhostUserDisk {
    server: VhostUserServer,
    is_added: bool,
}

/// The servers of all disks.
pub(super) struct VhostUserDisks {
    core_set: Arc<ProcessCores>,
    exports: Arc<Exports>,
    servers: Mutex<Vec<ServedVhostUserDisk>>,
    /// The servers that look at their devices after a change.
    refreshed: Arc<Mutex<Vec<VhostUserRefreshHandle>>>,
    /// Notified when the machine of an inherited socket has disconnected.
    ended: Arc<Notify>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn detached_disk(ServedVhostUserDisk { server, is_added }: &ServedVhostUserDisk) -> VhostUserDisk {
    let (name, socket) = (server.name().to_string(), Arc::clone(server.socket()));
    VhostUserDisk { name, socket, front_end: server.take_detached(), is_added: *is_added }
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
            sockets.push(VhostUserDisk { name, socket, front_end: None, is_added: false });
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
        let servers = disks.into_iter().map(|disk| self.start_disk(disk)).collect::<Result<Vec<_>>>()?;
        let mut all = lock(&self.servers);
        *all = servers;
        self.set_refreshed(&all);
        Ok(())
    }

    fn start_disk(&self, disk: VhostUserDisk) -> Result<ServedVhostUserDisk> {
        let VhostUserDisk { name, socket, front_end, is_added } = disk;
        let path = socket.path().to_owned();
        let server = VhostUserServer::start_on(&self.core_set, &self.exports, &name, socket, front_end);
        let server = server.with_context(|| format!("vhost-user {}", path.display()))?;
        Ok(ServedVhostUserDisk { server, is_added })
    }

    fn set_refreshed(&self, servers: &[ServedVhostUserDisk]) {
        *lock(&self.refreshed) = servers.iter().map(|one| one.server.refresh_handle()).collect();
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
        let servers = lock(&self.servers);
        servers.iter().map(|one| (one.server.name().to_string(), address(&one.server))).collect()
    }

    /// Accepts no machines, and detaches those that are connected.
    pub(super) fn begin_detach(&self) {
        lock(&self.servers).iter().for_each(|one| one.server.begin_detach());
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
        let (mut left, mut servers) = (0, lock(&self.servers));
        for one in &mut *servers {
            if !one.server.is_detaching() {
                continue;
            }
            if !one.server.is_stopped() {
                left += 1;
                continue;
            }
            match self.start_disk(detached_disk(one)) {
                Ok(server) => *one = server,
                Err(error) => tracing::error!("{error:#}"),
            }
        }
        self.set_refreshed(&servers);
        left
    }

    /// The disks with the machines that were detached, once no server is running any more.
    pub(super) fn take_detached(&self) -> Vec<VhostUserDisk> {
        lock(&self.servers).iter().map(detached_disk).collect()
    }

    /// Number of servers that have not stopped: they have requests in flight.
    pub(super) fn running(&self) -> usize {
        lock(&self.servers).iter().filter(|one| !one.server.is_stopped()).count()
    }

    /// Sets whether the files of the sockets stay at the end.
    pub(super) fn keep_files(&self, keep: bool) {
        lock(&self.servers).iter().for_each(|one| one.server.socket().keep_file(keep));
    }

    /// Serves `disks`, which come from [`VhostUserDisks::take_detached`], again.
    pub(super) fn start_again(&self, disks: Vec<VhostUserDisk>) {
        lock(&self.servers).clear();
        if let Err(error) = self.serve(disks) {
            tracing::error!("{error:#}");
        }
    }
}

impl VhostUserSockets for VhostUserDisks {
    fn list(&self) -> Vec<VhostUserSocketDescription> {
        let describe = |ServedVhostUserDisk { server, is_added }: &ServedVhostUserDisk| {
            let (device, path) = (server.name().to_string(), server.path().display().to_string());
            VhostUserSocketDescription { device, path, connected: server.is_connected(), added: *is_added }
        };
        lock(&self.servers).iter().map(describe).collect()
    }

    fn add(&self, device: &str, path: &Path) -> Result<(), DeviceControlError> {
        if self.exports.get(device).is_none_or(|export| *export.name() != *device) {
            return Err(DeviceControlError::new(EINVAL, "it is not exported (--export)"));
        }
        if lock(&self.servers).len() >= SOCKETS_MAX {
            return Err(DeviceControlError::new(EBUSY, format!("{SOCKETS_MAX} sockets is the maximum")));
        }
        let refused = |error: io::Error| {
            let is_in_use = error.kind() == io::ErrorKind::AddrInUse;
            let errno = error.raw_os_error().unwrap_or(if is_in_use { EBUSY } else { EIO });
            DeviceControlError::new(errno, format!("{}: {error}", path.display()))
        };
        let socket = Arc::new(BoundUnixSocket::new(path).map_err(refused)?);
        let server = VhostUserServer::start_on(&self.core_set, &self.exports, device, socket, None);
        let server = ServedVhostUserDisk { server: server.map_err(refused)?, is_added: true };
        lock(&self.refreshed).push(server.server.refresh_handle());
        lock(&self.servers).push(server);
        Ok(())
    }

    fn remove(&self, device: &str, path: &Path, force: bool) -> Result<(), DeviceControlError> {
        let refused =
            |errno, why: &str| Err(DeviceControlError::new(errno, format!("{}: {why}", path.display())));
        let mut servers = lock(&self.servers);
        let is_wanted =
            |one: &ServedVhostUserDisk| *one.server.name() == *device && one.server.path() == path;
        let Some(at) = servers.iter().position(is_wanted) else {
            return refused(ENOENT, "the device has no such socket");
        };
        if !servers[at].is_added {
            return refused(EPERM, "it is one of the server's options, and ends with the server");
        }
        if servers[at].server.is_connected() && !force {
            return refused(EBUSY, "a machine is connected: stop it first, or disconnect it with --force");
        }
        let removed = servers.remove(at);
        self.set_refreshed(&servers);
        drop(servers);
        drop(removed);
        Ok(())
    }

    fn remove_all(&self, device: &str) {
        let mut servers = lock(&self.servers);
        let is_gone = |one: &mut ServedVhostUserDisk| one.is_added && *one.server.name() == *device;
        let gone: Vec<_> = servers.extract_if(.., is_gone).collect();
        self.set_refreshed(&servers);
        drop(servers);
        // A machine that connects meanwhile is turned away: the device is gone.
        drop(gone);
    }

    fn rename(&self, device: &str, to: &str) {
        let servers = lock(&self.servers);
        let of_device = servers.iter().filter(|one| one.is_added && *one.server.name() == *device);
        of_device.for_each(|one| one.server.set_name(to));
    }
}
