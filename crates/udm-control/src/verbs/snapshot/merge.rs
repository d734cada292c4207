//! Merging a snapshot into its origin.

use super::remove::restore_linear_origins;
use super::{current_snapshot_report, find_snapshot, origin, snapshot_report, verb_error_with_errno};
use crate::api;
use crate::error::VerbError;
use crate::registry::{BaseDir, DeviceRegistry, RegisteredDevice};
use crate::state_folder::file_stamp::IdentifiedStoreFile;
use crate::verbs::begin_transition::{LoadedTable, begin_resume_if_still_loaded};
use crate::verbs::cancel::{CancelToken, CancellableVerbKind};
use crate::verbs::change::{resume_devices, run_change_with_device_locks, suspend_devices};
use crate::verbs::reload::reload_live_table;
use crate::verbs::remove::remove_device;
use crate::verbs::{block_on_verb, show, tables};
use std::sync::{Arc, Weak};
use udm_core::Device;
use udm_core::errno::{EBUSY, EINVAL, EIO, ENXIO};
use udm_dm::{SnapshotState, Table, TargetError};

/// A running merge, with the facts that are needed to finish it.
#[derive(Clone)]
pub struct PendingMerge {
    /// The origin's device, if it still exists, and its name at the begin of the merge.
    origin: Weak<RegisteredDevice>,
    name: String,
    /// The origin's table after the merge.
    table: String,
    /// The store, if it was created for the snapshot.
    store: Option<IdentifiedStoreFile>,
}

impl PendingMerge {
    /// A merge into the device `origin`, which gets `table` after the merge.
    pub(super) fn new(
        origin: &Arc<RegisteredDevice>,
        name: &str,
        table: String,
        store: Option<IdentifiedStoreFile>,
    ) -> PendingMerge {
        PendingMerge { origin: Arc::downgrade(origin), name: name.to_owned(), table, store }
    }

    /// Name of the origin's device.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }
}

/// Starts merging the snapshot `name` into its origin. From now on the origin's device reads as the
/// snapshot did, and the snapshot's own device is removed. The caller calls
/// [`finish_completed_merge`] once [`final_merge_state`] reports the end. May block.
///
/// # Errors
/// If it is not a snapshot, or is invalid, transient or in use; if it does not have exactly one
/// origin; the error of the cancel token.
pub fn start_snapshot_merge(
    registry: &Arc<DeviceRegistry>,
    name: &str,
    cancel_token: &CancelToken,
) -> Result<(api::SnapshotDescription, PendingMerge), VerbError> {
    let (mapped, disk) =
        find_snapshot(registry, name).map(|(mapped, _, report)| (mapped, report.origin.number))?;
    let _alone = registry.lock_snapshots(name, [disk])?;
    let found = current_snapshot_report(registry, name, &mapped)?.1;
    match found.state {
        SnapshotState::Invalid => return Err(verb_error_with_errno(name, EIO, "the snapshot is invalid")),
        state if state.is_merge() => return Err(verb_error_with_errno(name, EBUSY, "it is being merged")),
        _ if found.kind == "N" => {
            return Err(verb_error_with_errno(name, EINVAL, "a transient snapshot can't be merged"));
        }
        _ => {}
    }
    let mut origins = origin::origins_over(registry, disk);
    let Some((own, origin)) = origins.pop().filter(|_| origins.is_empty()) else {
        let why = if origins.is_empty() { "no device is its origin" } else { "it has several origins" };
        return Err(verb_error_with_errno(name, EINVAL, why));
    };
    origin.is_ours_to_change(&own)?;
    let open = show::open_count(registry, &mapped);
    if open > 0 {
        return Err(verb_error_with_errno(name, EBUSY, format!("it is open {open} times")));
    }
    let len = mapped.device.live().map_or(0, |table| table.limits().size.0);
    if len != origin.len.0 {
        return Err(verb_error_with_errno(
            name,
            EINVAL,
            format!("it has {len} sectors, and {own} {}", origin.len.0),
        ));
    }
    let (store, chunk) = (found.store.number, found.chunk.0);
    let table = format!("0 {len} snapshot-merge {disk} {store} {} {chunk}", found.kind);
    let end = CancelToken::default();
    // The snapshot must be suspended when its store is taken over.
    let itself = [(name.to_owned(), Arc::clone(&mapped))];
    block_on_verb(suspend_devices(registry, &itself, false, cancel_token))?;
    let loaded = tables::load_into(registry, &origin.mapped, &own, &table, &BaseDir::none(), cancel_token)
        .map_err(|e| e.at(None));
    let several = [(own.clone(), Arc::clone(&origin.mapped))];
    // Fails if the snapshot was removed meanwhile: the origin would have no store to read.
    let swap = |table: &Arc<Table>| {
        let ours = [LoadedTable { place: 0, mapped: &origin.mapped, table }];
        block_on_verb(run_change_with_device_locks(
            registry,
            &several,
            CancellableVerbKind::Resume,
            cancel_token,
            |devices, turns, wake| {
                let _linked = registry.linking();
                if !registry.is_active(&mapped) {
                    let why = format!("{name} has been removed meanwhile");
                    return Err((0, TargetError::errno(ENXIO).because(why)));
                }
                begin_resume_if_still_loaded(&ours, devices, turns, wake)
            },
        ))
        .inspect_err(|_| origin.mapped.device.clear_own(table))
    };
    if let Err(error) = loaded.and_then(|table| swap(&table)) {
        block_on_verb(resume_devices(registry, &itself, &end))?;
        return Err(error);
    }
    let store = mapped.snapshot_info().store.take();
    let end_of = PendingMerge::new(&origin.mapped, &own, origin.with_snapshots(), store);
    drop((itself, found));
    // The snapshot's device has no data any more. If a client has opened it meanwhile, the device
    // stays and the client gets errors; the merge continues without it.
    if let Err(error) = block_on_verb(remove_device(registry, name, Arc::clone(&mapped), |_| true, &end)) {
        tracing::warn!("{error}: its snapshot is merged, and the device can be removed");
        // Without a resume, requests to the suspended device would never complete.
        block_on_verb(resume_devices(registry, &[(name.to_owned(), mapped)], &end))?;
    }
    Ok((super::list::describe_snapshot_device(registry, &own, &origin.mapped)?, end_of))
}

/// The final state of a merge; `None` while it runs.
#[must_use]
pub fn final_merge_state(registry: &DeviceRegistry, merge: &PendingMerge) -> Option<SnapshotState> {
    let origin = merge.origin.upgrade().filter(|origin| registry.is_active(origin));
    let live = origin.and_then(|origin| origin.device.live());
    // If the origin got another table, the merge is lost.
    let state =
        live.and_then(|table| snapshot_report(&table)).map_or(SnapshotState::Invalid, |found| found.state);
    (state != SnapshotState::Merging).then_some(state)
}

/// Restores the origin's table after a merge, and removes the store if it was created for the
/// snapshot. May block.
///
/// # Errors
/// If the table can't be restored; the device then keeps the table of the completed merge. EBUSY if
/// another client has suspended the device or loaded a table into it.
pub fn finish_completed_merge(registry: &Arc<DeviceRegistry>, merge: &PendingMerge) -> Result<(), VerbError> {
    let (name, cancel_token) = (merge.name.as_str(), CancelToken::default());
    let mapped = merge.origin.upgrade().ok_or_else(|| VerbError::missing(name))?;
    let found = current_snapshot_report(registry, name, &mapped)?.1;
    if found.state != SnapshotState::Merged {
        return Err(verb_error_with_errno(
            name,
            EBUSY,
            format!("the merge is not over: {}", found.state.text()),
        ));
    }
    let disk = found.origin.number;
    drop(found);
    let _alone = registry.lock_snapshots(name, [disk])?;
    block_on_verb(reload_live_table(registry, &mapped, name, &merge.table, &BaseDir::none(), &cancel_token))
        .map_err(|e| e.at(None))?;
    if let Some(store) = &merge.store {
        super::remove::remove_store(name, store);
    }
    restore_linear_origins(registry, disk);
    Ok(())
}
