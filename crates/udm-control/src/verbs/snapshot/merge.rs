//! Merging a snapshot into its origin.

use super::remove::restore_linear;
use super::{find, find_again, origin, refuse, report};
use crate::error::VerbError;
use crate::http::api;
use crate::registry::{BaseDir, Mapped, Registry};
use crate::state_folder::file_stamp::StoreFile;
use crate::verbs::cancel::{CancelToken, VerbKind};
use crate::verbs::change::{
    LoadedTable, begin_resume_loaded, reload, resume_devices, run_locked, suspend_devices,
};
use crate::verbs::remove::remove_device;
use crate::verbs::{show, tables, wait};
use std::sync::{Arc, Weak};
use udm_core::Device;
use udm_core::errno::{EBUSY, EINVAL, EIO, ENXIO};
use udm_dm::{SnapshotState, Table, TargetError};

/// A merge that has begun.
#[derive(Clone)]
pub struct PendingMerge {
    /// The origin's device, if it is there, and what it was called.
    origin: Weak<Mapped>,
    name: String,
    /// The table of an origin, for when it is over.
    table: String,
    /// The store, when it was made for the snapshot.
    store: Option<StoreFile>,
}

impl PendingMerge {
    /// Of the merge into `origin`, called `name`, which has `table` when it is over.
    pub(super) fn new(
        origin: &Arc<Mapped>,
        name: &str,
        table: String,
        store: Option<StoreFile>,
    ) -> PendingMerge {
        PendingMerge { origin: Arc::downgrade(origin), name: name.to_owned(), table, store }
    }

    /// The origin's device.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }
}

/// Begins to bring the snapshot `name` back into its origin: the origin's device reads as the
/// snapshot did from now on, and the snapshot's own device is gone. [`finish`] is to be called when
/// [`merge_end`] says that it is over. May block.
///
/// # Errors
/// When it is no snapshot, is invalid, transient or in use; when it has not one origin; what it was
/// called off with.
pub fn merge(
    registry: &Arc<Registry>,
    name: &str,
    cancel_token: &CancelToken,
) -> Result<(api::Snapshot, PendingMerge), VerbError> {
    let (mapped, disk) = find(registry, name).map(|(mapped, _, report)| (mapped, report.origin.number))?;
    let _alone = registry.lock_snapshots(name, [disk])?;
    let found = find_again(registry, name, &mapped)?.1;
    match found.state {
        SnapshotState::Invalid => return Err(refuse(name, EIO, "the snapshot is invalid")),
        state if state.is_merge() => return Err(refuse(name, EBUSY, "it is being merged")),
        _ if found.kind == "N" => return Err(refuse(name, EINVAL, "a transient snapshot can't be merged")),
        _ => {}
    }
    let mut origins = origin::over(registry, disk);
    let Some((own, origin)) = origins.pop().filter(|_| origins.is_empty()) else {
        let why =
            if origins.is_empty() { "it has no origin that is served" } else { "it has several origins" };
        return Err(refuse(name, EINVAL, why));
    };
    origin.is_ours_to_change(&own)?;
    let open = show::open_count(registry, &mapped);
    if open > 0 {
        return Err(refuse(name, EBUSY, format!("it is open {open} times")));
    }
    let len = mapped.device.live().map_or(0, |table| table.limits().size.0);
    if len != origin.len.0 {
        return Err(refuse(name, EINVAL, format!("it has {len} sectors, and {own} {}", origin.len.0)));
    }
    let (store, chunk) = (found.store.number, found.chunk.0);
    let table = format!("0 {len} snapshot-merge {disk} {store} {} {chunk}", found.kind);
    let end = CancelToken::default();
    // What is taken over stands still.
    let itself = [(name.to_owned(), Arc::clone(&mapped))];
    wait(suspend_devices(registry, &itself, false, cancel_token))?;
    let loaded = tables::load_into(registry, &origin.mapped, &own, &table, &BaseDir::none(), cancel_token)
        .map_err(|e| e.at(None));
    let several = [(own.clone(), Arc::clone(&origin.mapped))];
    // Nobody removes what is taken over: the origin would have nothing to read.
    let swap = |table: &Arc<Table>| {
        let ours = [LoadedTable { place: 0, mapped: &origin.mapped, table }];
        wait(run_locked(registry, &several, VerbKind::Resume, cancel_token, |devices, turns, wake| {
            let _linked = registry.linking();
            if !registry.is_active(&mapped) {
                let why = format!("{name} has been removed meanwhile");
                return Err((0, TargetError::errno(ENXIO).because(why)));
            }
            begin_resume_loaded(&ours, devices, turns, wake)
        }))
        .inspect_err(|_| origin.mapped.device.clear_own(table))
    };
    if let Err(error) = loaded.and_then(|table| swap(&table)) {
        wait(resume_devices(registry, &itself, &end))?;
        return Err(error);
    }
    let store = mapped.note().store.take();
    let end_of = PendingMerge::new(&origin.mapped, &own, origin.with_snapshots(), store);
    drop((itself, found));
    // It has nothing any more. A client that came meanwhile has errors, and keeps the name; the
    // merge goes on without it.
    if let Err(error) = wait(remove_device(registry, name, Arc::clone(&mapped), |_| true, &end)) {
        tracing::warn!("{error}: its snapshot is merged, and the device can be removed");
        // It stands still, and its client would wait for ever.
        wait(resume_devices(registry, &[(name.to_owned(), mapped)], &end))?;
    }
    Ok((super::list::of(registry, &own, &origin.mapped)?, end_of))
}

/// How a merge has ended; `None` while it goes on.
#[must_use]
pub fn merge_end(registry: &Registry, merge: &PendingMerge) -> Option<SnapshotState> {
    let origin = merge.origin.upgrade().filter(|origin| registry.is_active(origin));
    let live = origin.and_then(|origin| origin.device.live());
    // With another table it is nobody's merge any more.
    let state = live.and_then(|table| report(&table)).map_or(SnapshotState::Invalid, |found| found.state);
    (state != SnapshotState::Merging).then_some(state)
}

/// Puts the origin's table back when the merge is over, and removes the store that was made for the
/// snapshot. May block.
///
/// # Errors
/// When the table can't be put back: then the device stays a merge that is over. EBUSY while
/// somebody has suspended the device, or loaded a table into it: that is left to him.
pub fn finish(registry: &Arc<Registry>, merge: &PendingMerge) -> Result<(), VerbError> {
    let (name, cancel_token) = (merge.name.as_str(), CancelToken::default());
    let mapped = merge.origin.upgrade().ok_or_else(|| VerbError::missing(name))?;
    let found = find_again(registry, name, &mapped)?.1;
    if found.state != SnapshotState::Merged {
        return Err(refuse(name, EBUSY, format!("the merge is not over: {}", found.state.text())));
    }
    let disk = found.origin.number;
    drop(found);
    let _alone = registry.lock_snapshots(name, [disk])?;
    wait(reload(registry, &mapped, name, &merge.table, &BaseDir::none(), &cancel_token))
        .map_err(|e| e.at(None))?;
    if let Some(store) = &merge.store {
        super::remove::remove_store(name, store);
    }
    restore_linear(registry, disk);
    Ok(())
}
