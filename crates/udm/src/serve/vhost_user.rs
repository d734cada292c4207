//! The disks of virtual machines (`--vhost-user`).

use super::args::ServeArgs;
use anyhow::{Context, Result, bail};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use udm_frontends::nbd::Exports;
use udm_frontends::unix_socket::BoundUnixSocket;
use udm_frontends::vhost_user::{VhostUserRefreshHandle, VhostUserServer};
use udm_runtime::ProcessCores;

/// The servers of all disks.
pub(super) struct VhostUserDisks {
    core_set: Arc<ProcessCores>,
    exports: Arc<Exports>,
    servers: Mutex<Vec<VhostUserServer>>,
    /// The servers that look at their devices after a change.
    refreshed: Arc<Mutex<Vec<VhostUserRefreshHandle>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl VhostUserDisks {
    /// Binds the sockets of all disks, with the names of their devices.
    ///
    /// # Errors
    /// A path is named twice, a device does not exist, or a path is not available.
    pub(super) fn bind(args: &ServeArgs, exports: &Exports) -> Result<Vec<(String, Arc<BoundUnixSocket>)>> {
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
            sockets.push((disk.name.clone(), Arc::new(bound)));
        }
        Ok(sockets)
    }

    /// Serves the machines that connect to `sockets`.
    ///
    /// # Errors
    /// There are no descriptors or threads.
    pub(super) fn start(
        core_set: &Arc<ProcessCores>,
        exports: &Arc<Exports>,
        sockets: Vec<(String, Arc<BoundUnixSocket>)>,
    ) -> Result<VhostUserDisks> {
        let refreshed: Arc<Mutex<Vec<VhostUserRefreshHandle>>> = Arc::default();
        let machines = Arc::clone(&refreshed);
        let refresh = move |device| lock(&machines).iter().for_each(|machine| machine.refresh_if_of(device));
        exports.on_changed(Arc::new(refresh));
        let (core_set, exports) = (Arc::clone(core_set), Arc::clone(exports));
        let disks = VhostUserDisks { core_set, exports, servers: Mutex::default(), refreshed };
        disks.serve(sockets)?;
        Ok(disks)
    }

    fn serve(&self, sockets: Vec<(String, Arc<BoundUnixSocket>)>) -> Result<()> {
        let start = |(name, socket): (String, Arc<BoundUnixSocket>)| {
            let path = socket.path().to_owned();
            let server = VhostUserServer::start_on(&self.core_set, &self.exports, &name, socket);
            server.with_context(|| format!("vhost-user {}", path.display()))
        };
        let servers = sockets.into_iter().map(start).collect::<Result<Vec<_>>>()?;
        *lock(&self.refreshed) = servers.iter().map(VhostUserServer::refresh_handle).collect();
        *lock(&self.servers) = servers;
        Ok(())
    }

    /// Names and paths of the sockets of all disks.
    pub(super) fn sockets(&self) -> Vec<(String, PathBuf)> {
        lock(&self.servers).iter().map(|one| (one.name().to_owned(), one.path().to_owned())).collect()
    }

    /// Names of the devices.
    pub(super) fn names(&self) -> Vec<String> {
        lock(&self.servers).iter().map(|one| one.name().to_owned()).collect()
    }

    /// The listening sockets, in the order of [`VhostUserDisks::names`].
    pub(super) fn listening(&self) -> Vec<Arc<BoundUnixSocket>> {
        lock(&self.servers).iter().map(|one| Arc::clone(one.socket())).collect()
    }

    /// Accepts no machines, and ends the sessions: machines connect again to whoever listens then.
    pub(super) fn begin_stop(&self) {
        lock(&self.servers).iter().for_each(VhostUserServer::begin_stop);
    }

    /// Number of servers that have not stopped: they have requests in flight.
    pub(super) fn running(&self) -> usize {
        lock(&self.servers).iter().filter(|one| !one.is_stopped()).count()
    }

    /// Sets whether the files of the sockets stay at the end.
    pub(super) fn keep_files(&self, keep: bool) {
        self.listening().iter().for_each(|socket| socket.keep_file(keep));
    }

    /// Serves again after [`VhostUserDisks::begin_stop`].
    pub(super) fn start_again(&self) {
        let sockets = self.names().into_iter().zip(self.listening()).collect();
        lock(&self.servers).clear();
        if let Err(error) = self.serve(sockets) {
            tracing::error!("{error:#}");
        }
    }
}
