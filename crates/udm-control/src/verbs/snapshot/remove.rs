//! Removing snapshots.

use super::{current_snapshot_report, find_snapshot, origin, verb_error_with_errno};
use crate::error::VerbError;
use crate::registry::{BaseDir, DeviceRegistry};
use crate::state_folder::file_stamp::{FileStamp, IdentifiedStoreFile};
use crate::state_folder::records::{SnapshotRecord, SnapshotRecordState};
use crate::verbs::block_on_verb;
use crate::verbs::cancel::CancelToken;
use crate::verbs::reload::reload_live_table;
use crate::verbs::remove::remove_device;
use std::sync::Arc;
use udm_core::DevNo;
use udm_core::errno::{EBUSY, EIO};

/// Removes the snapshot `name`. Its store is removed too if it was created for the snapshot, unless
/// `keep_store`. If this was the last snapshot of an origin that was linear before, the origin
/// becomes linear again. A snapshot that no device has is given up: its origin no longer waits for
/// it. With `keep_store` the record stays, so the snapshot is refused after its origin was written
/// without it. May block.
///
/// # Errors
/// If it is not a snapshot, is in use or is being merged; the error of the cancel token.
pub fn remove_snapshot(
    registry: &Arc<DeviceRegistry>,
    name: &str,
    keep_store: bool,
    cancel_token: &CancelToken,
) -> Result<(), VerbError> {
    let found = match find_snapshot(registry, name) {
        Err(error) if error.missing && forget_unattached_snapshot(registry, name, keep_store)? => {
            return Ok(());
        }
        found => found?,
    };
    let (mapped, disk) = (found.0, found.2.origin.number);
    let _alone = registry.lock_snapshots(name, [disk])?;
    if current_snapshot_report(registry, name, &mapped)?.1.state.is_merge() {
        return Err(verb_error_with_errno(name, EBUSY, "it is being merged"));
    }
    // A file created for the snapshot is removed only if it still is the store.
    let store = current_snapshot_report(registry, name, &mapped)?.1.store;
    let store = registry.disk_id(&store);
    mapped.snapshot_info().is_discarded = !keep_store;
    let removed = block_on_verb(remove_device(registry, name, Arc::clone(&mapped), |_| true, cancel_token));
    removed.inspect_err(|_| mapped.snapshot_info().is_discarded = false)?;
    let made = mapped.snapshot_info().store.take().filter(|_| !keep_store);
    drop(mapped);
    if let Some(made) = made.filter(|made| store.is_some_and(|store| made.is(&store))) {
        remove_store(name, &made);
    }
    restore_linear_origins(registry, disk);
    Ok(())
}

/// Gives up the snapshot `name`, which no device has, and removes the store that was created for it
/// unless `keep_store`. Returns false if there is no record. May block.
fn forget_unattached_snapshot(
    registry: &DeviceRegistry,
    name: &str,
    keep_store: bool,
) -> Result<bool, VerbError> {
    let failed = |why: String| verb_error_with_errno(name, EIO, why);
    let Some(folder) = registry.state_folder() else { return Ok(false) };
    let records = folder.unattached().map_err(failed)?;
    let Some(record) = records.into_iter().find(|record| record.name == name) else { return Ok(false) };
    if folder.is_elsewhere(&record) {
        return Err(verb_error_with_errno(name, EBUSY, "another server has it"));
    }
    let stays = |error| failed(format!("its record stays: {error}"));
    if keep_store {
        let origin = match record.state {
            SnapshotRecordState::Attached { .. } => FileStamp::settled(&record.origin),
            SnapshotRecordState::Detached { origin } => origin,
            SnapshotRecordState::Released { .. } | SnapshotRecordState::Lost { .. } => {
                let why = "its origin does not wait for it: only its store can be removed";
                return Err(verb_error_with_errno(name, EBUSY, why));
            }
        };
        let state = SnapshotRecordState::Released { origin };
        folder.record(&SnapshotRecord { state, ..record }).map_err(stays)?;
        return Ok(true);
    }
    folder.forget_snapshot(&record).map_err(stays)?;
    if let Some(made) = record.made_store {
        remove_store(name, &made);
    }
    Ok(true)
}

/// Removes a store that was created for the snapshot `name`. A missing file is no error.
pub(super) fn remove_store(name: &str, made: &IdentifiedStoreFile) {
    if let Err(error) = made.remove() {
        tracing::warn!("{name}: {}: {error}", made.path.display());
    }
}

/// Makes the origins over `disk` linear again, if they were linear before and have no snapshots. An
/// origin whose table can't be replaced now stays an origin; without snapshots it differs only in
/// discards.
pub(super) fn restore_linear_origins(registry: &Arc<DeviceRegistry>, disk: DevNo) {
    if origin::has_snapshots(registry, disk) {
        return;
    }
    for (name, origin) in origin::origins_over(registry, disk) {
        if !origin.mapped.snapshot_info().was_linear || origin.is_ours_to_change(&name).is_err() {
            continue;
        }
        let (table, cancel_token) = (origin.linear(), CancelToken::default());
        match block_on_verb(reload_live_table(
            registry,
            &origin.mapped,
            &name,
            &table,
            &BaseDir::none(),
            &cancel_token,
        )) {
            Ok(_) => origin.mapped.snapshot_info().was_linear = false,
            Err(error) => tracing::warn!("{error}: it stays an origin without snapshots"),
        }
    }
}
