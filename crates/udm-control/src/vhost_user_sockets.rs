//! Sockets of virtual machines, as the program that serves them offers them to the registry.

use crate::api::VhostUserSocketDescription;
use std::path::{Path, PathBuf};
use udm_core::DeviceControlError;

/// Serves devices to virtual machines on sockets that come and go while the server runs.
pub trait VhostUserSockets: Send + Sync {
    /// All sockets, also those of the options.
    fn list(&self) -> Vec<VhostUserSocketDescription>;

    /// Serves the export `device` on a new socket at `path`. May block on the file system.
    ///
    /// # Errors
    /// The error of the system, in one line that names the path.
    fn add(&self, device: &str, path: &Path) -> Result<(), DeviceControlError>;

    /// Removes a socket of `device` that was added. With `force`, its machine is disconnected.
    ///
    /// # Errors
    /// ENOENT if there is no such socket, EBUSY while a machine is connected, EPERM for a socket of
    /// the options.
    fn remove(&self, device: &str, path: &Path, force: bool) -> Result<(), DeviceControlError>;

    /// Removes all added sockets of `device`, which is gone.
    fn remove_all(&self, device: &str);

    /// Serves the device on its added sockets under its new name.
    fn rename(&self, device: &str, to: &str);
}

/// A socket that a device had before, and that is added when the sockets are served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AwaitedVhostUserSocket {
    /// Name of the device.
    pub device: String,
    /// Path of the socket.
    pub path: PathBuf,
}
