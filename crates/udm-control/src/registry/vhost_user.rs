//! The sockets of virtual machines, as far as the registry knows them.

use super::DeviceRegistry;
use crate::vhost_user_sockets::{AwaitedVhostUserSocket, VhostUserSockets};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// What serves virtual machines.
#[derive(Default)]
pub(super) struct ServedVhostUserSockets {
    sockets: OnceLock<Arc<dyn VhostUserSockets>>,
    /// Sockets that are added when `sockets` is set.
    awaited: Mutex<Vec<AwaitedVhostUserSocket>>,
}

impl DeviceRegistry {
    /// Sets what serves virtual machines, and adds the sockets of devices that have come back. Only
    /// the first call has an effect. May block on the file system.
    pub fn set_vhost_user_sockets(&self, sockets: Arc<dyn VhostUserSockets>) {
        let _ = self.vhost_user.sockets.set(sockets);
        let awaited = std::mem::take(&mut *self.awaited_vhost_user());
        awaited.into_iter().for_each(|one| self.restore_vhost_user_socket(one));
    }

    /// What serves virtual machines, once it is set.
    pub(crate) fn vhost_user_sockets(&self) -> Option<&Arc<dyn VhostUserSockets>> {
        self.vhost_user.sockets.get()
    }

    /// Adds a socket that a device had, now or when [`DeviceRegistry::set_vhost_user_sockets`] is
    /// called. A socket that is there already stays. An error is logged.
    pub(crate) fn restore_vhost_user_socket(&self, socket: AwaitedVhostUserSocket) {
        let mut awaited = self.awaited_vhost_user();
        let Some(sockets) = self.vhost_user.sockets.get() else { return awaited.push(socket) };
        drop(awaited);
        let AwaitedVhostUserSocket { device, path } = socket;
        let is_there = sockets.list().iter().any(|one| Path::new(&one.path) == path && one.device == device);
        if !is_there && let Err(error) = sockets.add(&device, &path) {
            tracing::error!("{device}: no machine can connect: {}", error.text);
        }
    }

    fn awaited_vhost_user(&self) -> MutexGuard<'_, Vec<AwaitedVhostUserSocket>> {
        self.vhost_user.awaited.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
