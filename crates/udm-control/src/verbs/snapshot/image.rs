//! Snapshots directly over a clone: the disks of machines that start from an image which is still
//! being copied.
//!
//! Contract: a clone has no device through which writes are copied to its snapshots. So it is
//! read-only for its clients as long as the server has it, from before its first snapshot on. Its
//! regions may still be copied in the background, because that changes no content.
//!
//! Snapshots that were created by name return when the clone has returned.

use super::restore::recreate_snapshot_device;
use super::verb_error_with_errno;
use crate::error::VerbError;
use crate::registry::{DeviceRegistry, RegisteredDevice};
use crate::state_folder::StableDiskId;
use crate::state_folder::records::SnapshotRecord;
use crate::verbs::change::export_device;
use crate::verbs::clone::is_clone;
use crate::verbs::{CancelToken, block_on_verb};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use udm_core::Device;
use udm_core::errno::EBUSY;

/// Makes a clone read-only for its clients. Returns false if it was so before.
///
/// # Errors
/// EBUSY if clients use it, which may write at any time.
pub(super) fn make_read_only(
    registry: &DeviceRegistry,
    name: &str,
    mapped: &RegisteredDevice,
) -> Result<bool, VerbError> {
    if mapped.read_only.swap(true, Ordering::Relaxed) {
        return Ok(false);
    }
    let Some(exporter) = registry.exporter() else { return Ok(true) };
    let id = mapped.device.id();
    // New clients cannot open it while those that have it are counted.
    exporter.remove(id);
    if exporter.users(id) > 0 {
        mapped.read_only.store(false, Ordering::Relaxed);
        export_device(registry, mapped)?;
        let sectors = mapped.device.limits().size.0;
        let why = format!(
            "clients use it, and a clone with snapshots is read-only: disconnect them, or create a device \"0 {sectors} snapshot-origin @{name}\" that they can write, and a snapshot of that"
        );
        return Err(verb_error_with_errno(name, EBUSY, why));
    }
    exporter.forget(id);
    export_device(registry, mapped).map(|()| true)
}

/// Ends [`make_read_only`], for clients that connect from now on.
pub(super) fn make_writable(registry: &DeviceRegistry, mapped: &RegisteredDevice) {
    mapped.read_only.store(false, Ordering::Relaxed);
    if let Some(exporter) = registry.exporter() {
        exporter.remove(mapped.device.id());
        exporter.forget(mapped.device.id());
        if let Err(error) = export_device(registry, mapped) {
            tracing::warn!("{error}");
        }
    }
}

/// Attaches the snapshots by name whose origins are clones of this server. Those that cannot be
/// attached stay as they are; `udm snapshot list` shows them. May block.
pub(crate) fn attach_snapshots_of_clones(registry: &Arc<DeviceRegistry>) {
    let Some(folder) = registry.state_folder() else { return };
    // Whoever could not read the records has said so.
    let Ok(records) = folder.unattached() else { return };
    let waits = |record: &SnapshotRecord| {
        record.by_name
            && !record.merging
            && !record.is_foreign
            && record.is_waited_for()
            && !folder.is_elsewhere(record)
            && record.stale().is_none()
    };
    for record in records.into_iter().filter(waits) {
        let Some(name) = record.origin.name().strip_prefix('@') else { continue };
        let Ok(mapped) = registry.find(name) else { continue };
        if record.origin != StableDiskId::mapped(&mapped.device.name()) || !is_clone(registry, &mapped) {
            continue;
        }
        let origin = (name.to_owned(), mapped);
        let attach = || {
            make_read_only(registry, name, &origin.1)?;
            block_on_verb(recreate_snapshot_device(registry, &origin, &record, &CancelToken::default()))
        };
        if let Err(error) = attach() {
            tracing::warn!("{error}");
        }
    }
}
