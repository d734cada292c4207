//! Sockets on which devices are served to virtual machines, added and removed while the server
//! runs.
//!
//! A socket that was added belongs to its device: it follows a rename, ends with the device, and
//! goes over an upgrade. Those of snapshots and clones that were created by name are recorded, so
//! that they come back with them after a restart.

use super::front_ends::{make_front_end_error, record_added};
use crate::api;
use crate::error::VerbError;
use crate::registry::DeviceRegistry;
use crate::vhost_user_sockets::{AwaitedVhostUserSocket, VhostUserSockets};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use udm_core::errno::{EINVAL, EOPNOTSUPP};
use udm_dm::TargetError;

/// The sockets of all devices.
#[must_use]
pub fn list_vhost_user_sockets(registry: &DeviceRegistry) -> Vec<api::VhostUserSocketDescription> {
    registry.vhost_user_sockets().map_or_else(Vec::new, |sockets| sockets.list())
}

/// Serves the device `word` to a virtual machine on a new socket at `path`. May block.
///
/// # Errors
/// ENXIO if there is no such device; EINVAL if the path is not absolute or the device is not
/// exported; the error of the system for a path that is not available. EIO if the socket is there,
/// but cannot be recorded.
pub fn add_vhost_user_socket(
    registry: &DeviceRegistry,
    word: &str,
    path: &Path,
) -> Result<api::VhostUserSocketDescription, VerbError> {
    let sockets = served_sockets(registry, word)?;
    let name = registry.find(word)?.device.name();
    if !path.is_absolute() {
        let why = format!("{}: expected an absolute path", path.display());
        return Err(VerbError::new(word, TargetError::errno(EINVAL).because(why)));
    }
    sockets.add(&name, path).map_err(|error| make_front_end_error(word, error))?;
    record_added(registry, word, &name, "the socket is there, but only until the server ends")?;
    let path = path.display().to_string();
    Ok(api::VhostUserSocketDescription { device: name, path, connected: false, added: true })
}

/// Removes the socket at `path`, which was added to the device `word`. May block.
///
/// # Errors
/// ENXIO if there is no such device, and as [`VhostUserSockets::remove`]. EIO if the socket is
/// gone, but still recorded.
pub fn remove_vhost_user_socket(
    registry: &DeviceRegistry,
    word: &str,
    path: &Path,
    force: bool,
) -> Result<(), VerbError> {
    let sockets = served_sockets(registry, word)?;
    let name = registry.find(word)?.device.name();
    sockets.remove(&name, path, force).map_err(|error| make_front_end_error(word, error))?;
    record_added(registry, word, &name, "the socket is gone, but comes back when the server is started again")
}

fn served_sockets<'a>(
    registry: &'a DeviceRegistry,
    word: &str,
) -> Result<&'a Arc<dyn VhostUserSockets>, VerbError> {
    registry.vhost_user_sockets().ok_or_else(|| {
        let why = "this server does not serve virtual machines";
        VerbError::new(word, TargetError::errno(EOPNOTSUPP).because(why))
    })
}

/// Serves a device that has come back on the sockets that it had; later, if none are served yet. A
/// socket that cannot be there is logged.
pub(in crate::verbs) fn restore_vhost_user_sockets(
    registry: &DeviceRegistry,
    device: &str,
    paths: &[PathBuf],
) {
    for path in paths {
        let device = device.to_owned();
        registry.restore_vhost_user_socket(AwaitedVhostUserSocket { device, path: path.clone() });
    }
}
