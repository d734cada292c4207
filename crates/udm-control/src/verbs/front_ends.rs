//! What the verbs that add and remove disks of machines and of this machine have in common.
//!
//! What was added to a snapshot or a clone that was created by name is recorded, so that it comes
//! back with it after a restart.

use super::{block_on_verb, list_vhost_user_sockets};
use crate::error::VerbError;
use crate::registry::DeviceRegistry;
use crate::state_folder::clones::CloneRecord;
use std::path::PathBuf;
use udm_core::DeviceControlError;
use udm_core::errno::EIO;
use udm_dm::TargetError;

/// The error of a front end, about the device `word`.
pub(super) fn make_front_end_error(word: &str, error: DeviceControlError) -> VerbError {
    VerbError::new(word, TargetError::errno(error.errno).because(error.text))
}

/// Records what was added to `name`, if it is a snapshot or a clone that was created by name. May
/// block.
///
/// # Errors
/// EIO if it cannot be recorded; `consequence` says what that means.
pub(super) fn record_added(
    registry: &DeviceRegistry,
    word: &str,
    name: &str,
    consequence: &str,
) -> Result<(), VerbError> {
    record_added_disks(registry, name).map_err(|error| {
        VerbError::new(word, TargetError::errno(EIO).because(format!("{consequence}: {error}")))
    })
}

fn record_added_disks(registry: &DeviceRegistry, name: &str) -> std::io::Result<()> {
    let Some(folder) = registry.state_folder() else { return Ok(()) };
    // Called with the lock of the record, so that of two verbs at once the last one records all.
    let added = || {
        let sockets = list_vhost_user_sockets(registry).into_iter();
        let sockets = sockets.filter(|socket| socket.added && socket.device == name);
        let vhost_user: Vec<PathBuf> = sockets.map(|socket| socket.path.into()).collect();
        (vhost_user, registry.ublk_disks().and_then(|disks| disks.recorded(name)))
    };
    let records = folder.attached_here().into_iter();
    for record in records.filter(|record| record.by_name && record.name == name) {
        let lock = registry.store_locks.lock(std::slice::from_ref(&record.store));
        let _lock = block_on_verb(lock);
        let (vhost_user, ublk) = added();
        folder.record_disks(&record.file_name(), vhost_user, ublk)?;
    }
    folder.change_clone(name, |was| {
        let (vhost_user, ublk) = added();
        CloneRecord { vhost_user, ublk, ..was }
    })
}
