//! Block devices of this machine (ublk), added and removed while the server runs.
//!
//! A block device that was added follows a rename of its device and goes over an upgrade. It ends
//! with the server, unless somebody uses it: then the next server takes it over. Those of snapshots
//! and clones that were created by name are recorded, so that they come back with them in any case.

use super::front_ends::{make_front_end_error, record_added};
use crate::api;
use crate::error::VerbError;
use crate::registry::DeviceRegistry;
use crate::ublk_disks::{RecordedUblkDisk, UblkDisks};
use std::sync::Arc;
use udm_core::errno::EOPNOTSUPP;
use udm_dm::TargetError;

/// The block devices of all devices.
#[must_use]
pub fn list_ublk_disks(registry: &DeviceRegistry) -> Vec<api::UblkDiskDescription> {
    registry.ublk_disks().map_or_else(Vec::new, |disks| disks.list())
}

/// Makes a block device of this machine from the device `word`. May block.
///
/// # Errors
/// ENXIO if there is no such device; EBUSY if it is a block device already; EINVAL if it is not
/// exported; what the kernel says, with advice. EIO if the block device is there, but cannot be
/// recorded.
pub fn add_ublk_disk(
    registry: &DeviceRegistry,
    word: &str,
    request: &api::AddUblkDiskRequest,
) -> Result<api::UblkDiskDescription, VerbError> {
    let disks = served_disks(registry, word)?;
    let name = registry.find(word)?.device.name();
    let added = disks.add(&name, request).map_err(|error| make_front_end_error(word, error))?;
    record_added(
        registry,
        word,
        &added.device,
        "the block device is there, but comes back only if it is in use when the server ends",
    )?;
    Ok(added)
}

/// Removes the block device that was added to the device `word`. May block.
///
/// # Errors
/// ENXIO if there is no such device, and as [`UblkDisks::remove`]. EIO if the block device is gone,
/// but still recorded.
pub fn remove_ublk_disk(registry: &DeviceRegistry, word: &str, force: bool) -> Result<(), VerbError> {
    let disks = served_disks(registry, word)?;
    let name = registry.find(word)?.device.name();
    disks.remove(&name, force).map_err(|error| make_front_end_error(word, error))?;
    record_added(
        registry,
        word,
        &name,
        "the block device is gone, but comes back when the server is started again",
    )
}

fn served_disks<'a>(registry: &'a DeviceRegistry, word: &str) -> Result<&'a Arc<dyn UblkDisks>, VerbError> {
    registry.ublk_disks().ok_or_else(|| {
        let why = "this server does not serve block devices";
        VerbError::new(word, TargetError::errno(EOPNOTSUPP).because(why))
    })
}

/// Makes the block device again that a device had which has come back; later, if none are served
/// yet. An error is logged.
pub(in crate::verbs) fn restore_ublk_disk(
    registry: &DeviceRegistry,
    device: &str,
    disk: Option<&RecordedUblkDisk>,
) {
    if let Some(disk) = disk {
        registry.restore_ublk_disk(device.to_owned(), disk.clone());
    }
}
