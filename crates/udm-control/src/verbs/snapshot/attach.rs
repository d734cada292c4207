//! Persistent snapshots in changes of devices. Before a change begins, it is checked against the
//! records of the state folder ([`crate::state_folder::records`]), and its effect is recorded
//! there.
//!
//! Contract, for a server with a state folder:
//!
//! * A persistent snapshot is recorded, durably, before its table is live.
//! * If a disk has a recorded snapshot that is not attached, no table that can write the disk
//!   becomes live, except in the same change as the snapshot. Snapshots created by name are
//!   attached first ([`super::restore`]). For any other snapshot the change is refused, or the
//!   snapshot is given up if the server is configured so ([`LostSnapshotPolicy`]).
//! * If no table has a snapshot any more, and its origin's disk can still be written, the snapshot
//!   is *released*: no device waits for it, and it is refused later if the origin was written
//!   meanwhile. If the disk can't be written, the snapshot is *detached*. The size and time of
//!   change of the origin are recorded before the change, so writes that were not copied are
//!   detected.
//!
//! Not covered: disks that end with the process (`mem`, `null`), and writes by other programs.

use super::record_update::{
    IndexedDeviceRefusal, SnapshotRecordUpdate, WrittenSnapshotRecords, stale_snapshot_error,
};
use super::tables::{build_snapshot_record, is_snapshot_in_tables, persistent_snapshots, writable_disks};
use crate::error::VerbError;
use crate::registry::{DeviceRegistry, RegisteredDevice};
use crate::state_folder::records::SnapshotRecord;
use crate::state_folder::{StableDiskId, StateFolder};
use crate::verbs::cancel::{CancelToken, CancellableVerbKind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tokio::sync::{OwnedMutexGuard, oneshot};
use udm_core::errno::{EBUSY, EIO};
use udm_dm::{MappedDevice, SnapshotReport, SnapshotState, Table, TargetError};

/// Policy for a disk with a snapshot that can't be attached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LostSnapshotPolicy {
    /// The disk is not opened for writing.
    #[default]
    Refuse,
    /// As `Refuse`; a starting server also waits for the snapshot and retries.
    Wait,
    /// The snapshot is recorded and logged as lost, and the disk is opened.
    GiveUp,
}

/// A checked change whose snapshots are recorded.
pub(in crate::verbs) struct SnapshotRecordTransaction<'a> {
    registry: &'a DeviceRegistry,
    /// The table in the inactive slot of each device, if the change makes it live.
    tables: Vec<Option<Arc<Table>>>,
    recorded: WrittenSnapshotRecords,
    /// The kind of the change.
    who: CancellableVerbKind,
    /// The stores of the valid snapshots that become live.
    valid: Vec<StableDiskId>,
    /// Until this is dropped, changes that write the origins of these snapshots are refused.
    _attach_guard: AttachingSnapshotsGuard,
    /// Locks of the stores: no other change updates the records of these snapshots.
    _stores: Vec<OwnedMutexGuard<()>>,
}

/// Marks snapshots as being attached until dropped.
#[derive(Default)]
struct AttachingSnapshotsGuard {
    folder: Option<Arc<StateFolder>>,
    names: Vec<String>,
}

impl Drop for AttachingSnapshotsGuard {
    fn drop(&mut self) {
        self.folder.iter().for_each(|folder| folder.finish_attach(&self.names));
    }
}

/// Runs `work`, which uses the state folder, on another thread. If cancelled meanwhile, its effect
/// is reverted by `undone`.
pub(super) async fn run_state_folder_work_on_thread<T: Send + 'static>(
    registry: &DeviceRegistry,
    name: &str,
    cancel_token: &CancelToken,
    work: impl FnOnce(&Arc<StateFolder>) -> Result<T, String> + Send + 'static,
    undone: impl FnOnce(&Arc<StateFolder>, T) + Send + 'static,
) -> Result<Option<T>, VerbError> {
    let Some(folder) = registry.state_folder().cloned() else { return Ok(None) };
    let (sender, receiver) = oneshot::channel();
    registry.opener().spawn_blocking(Box::new(move || {
        if let Err(Ok(done)) = sender.send(work(&folder)) {
            undone(&folder, done);
        }
    }));
    tokio::select! {
        biased;
        done = receiver => match done {
            Ok(Ok(done)) => Ok(Some(done)),
            Ok(Err(why)) => Err(VerbError::new(name, TargetError::errno(EIO).because(why))),
            Err(_) => Err(VerbError::new(name, TargetError::errno(EBUSY).because("no thread is free"))),
        },
        why = cancel_token.cancelled() => Err(VerbError::new(name, why)),
    }
}

/// Error for a disk that can't be written before a snapshot is attached.
pub(super) fn snapshot_not_attached_error(record: &SnapshotRecord, why: &str) -> TargetError {
    let SnapshotRecord { name, origin, store, .. } = record;
    TargetError::errno(EBUSY).because(format!(
        "{} has the snapshot {name} in {}, which {why}: what is written now would be missing in it; attach it \
         first, or give it up with \"udm snapshot remove {name}\"",
        origin.name(),
        store.name()
    ))
}

impl<'a> SnapshotRecordTransaction<'a> {
    /// Checks a change of `several` devices. Records the snapshots that become live in it, and
    /// those that no table has after it.
    pub async fn begin(
        registry: &'a DeviceRegistry,
        several: &[(String, Arc<RegisteredDevice>)],
        who: CancellableVerbKind,
        cancel_token: &CancelToken,
    ) -> Result<SnapshotRecordTransaction<'a>, VerbError> {
        let comes = matches!(who, CancellableVerbKind::Create | CancellableVerbKind::Resume);
        let inactive = |mapped: &Arc<RegisteredDevice>| mapped.device.inactive().filter(|_| comes);
        let tables: Vec<_> = several.iter().map(|(_, mapped)| inactive(mapped)).collect();
        let is_valid = |report: &SnapshotReport| report.state != SnapshotState::Invalid;
        let valid = store_ids(registry, &tables, is_valid);
        let recorded = WrittenSnapshotRecords::default();
        let mut attaching = SnapshotRecordTransaction {
            registry,
            tables,
            recorded,
            who,
            valid,
            _attach_guard: AttachingSnapshotsGuard::default(),
            _stores: Vec::new(),
        };
        let is_change = who == CancellableVerbKind::Remove || attaching.tables.iter().any(Option::is_some);
        if registry.state_folder().is_none() || !is_change || registry.is_ending() {
            return Ok(attaching);
        }
        let name = several[0].0.as_str();
        attaching._stores = tokio::select! {
            biased;
            locked = attaching.lock_stores(several) => locked,
            why = cancel_token.cancelled() => return Err(VerbError::new(name, why)),
        };
        let mut recording = SnapshotRecordUpdate {
            writable_disks: writable_disks(registry, &attaching.tables),
            gives_up: registry.gives_up_snapshots(),
            is_removal: who == CancellableVerbKind::Remove,
            warns: !registry.is_starting.load(Ordering::Relaxed),
            names: several.iter().map(|(name, _)| name.clone()).collect(),
            ..SnapshotRecordUpdate::default()
        };
        for ((_, mapped), table) in several.iter().zip(&attaching.tables) {
            let found = table.iter().flat_map(|table| persistent_snapshots(table));
            recording.attached.extend(
                found.filter_map(|(report, len)| build_snapshot_record(registry, mapped, &report, len)),
            );
            let leaves = table.is_some() || who == CancellableVerbKind::Remove;
            let Some(live) = mapped.device.live().filter(|_| leaves) else { continue };
            let removed = mapped.snapshot_info().is_discarded;
            recording.released.extend(persistent_snapshots(&live).filter_map(|(report, _)| {
                let store = registry.disk_id_cached(report.store.number)?;
                Some((store, removed || report.state == SnapshotState::Merged))
            }));
        }
        if !recording.released.is_empty() {
            // Another device may have taken the snapshot over.
            let others = attaching.others(several);
            recording.released.retain(|(store, _)| !is_snapshot_in_tables(&others, registry, store));
        }
        let done = run_state_folder_work_on_thread(
            registry,
            name,
            cancel_token,
            |folder| recording.record(folder),
            |folder, done| {
                done.unwrap_or_default().undo(folder, &[]);
            },
        );
        match done.await?.unwrap_or_else(|| Ok(WrittenSnapshotRecords::default())) {
            Ok(recorded) => {
                attaching._attach_guard = AttachingSnapshotsGuard {
                    folder: registry.state_folder().cloned(),
                    names: recorded.names(),
                };
                attaching.recorded = recorded;
            }
            Err((place, error)) => {
                return Err(VerbError { blocked: true, ..VerbError::new(&several[place].0, error) });
            }
        }
        Ok(attaching)
    }

    /// Locks the stores of the snapshots in the live tables of `several` and in the tables that
    /// become live.
    async fn lock_stores(&self, several: &[(String, Arc<RegisteredDevice>)]) -> Vec<OwnedMutexGuard<()>> {
        let live = several.iter().map(|(_, mapped)| mapped.device.live());
        let all: Vec<_> = self.tables.iter().cloned().chain(live).collect();
        let stores = store_ids(self.registry, &all, |_| true);
        self.registry.store_locks.lock(&stores).await
    }

    /// The live tables of all devices except `several`.
    fn others(&self, several: &[(String, Arc<RegisteredDevice>)]) -> Vec<Option<Arc<Table>>> {
        let is_other =
            |mapped: &Arc<RegisteredDevice>| !several.iter().any(|(_, one)| Arc::ptr_eq(one, mapped));
        let all = self.registry.all_with_pending().into_iter().filter(is_other);
        all.map(|mapped| mapped.device.live()).collect()
    }

    /// True while the inactive slots hold the tables that were checked.
    pub fn is_unchanged(&self, devices: &[Arc<MappedDevice>]) -> bool {
        let same =
            |(table, device): (&Option<Arc<Table>>, &Arc<MappedDevice>)| match (table, device.inactive()) {
                (None, None) => true,
                (Some(one), Some(other)) => Arc::ptr_eq(one, &other),
                _ => false,
            };
        matches!(self.who, CancellableVerbKind::Suspend | CancellableVerbKind::Remove)
            || self.tables.iter().zip(devices).all(same)
    }

    /// A second check of the origins of released snapshots that become live, to be run while all
    /// devices are suspended: until then the origins were written without copies. `None` if there
    /// are no such snapshots.
    pub fn check_at_rest(&self) -> Option<impl Future<Output = Result<(), IndexedDeviceRefusal>> + use<'a>> {
        let released = self.recorded.were_released();
        if released.is_empty() {
            return None;
        }
        let (sender, receiver) = oneshot::channel();
        let opener = self.registry.opener();
        Some(async move {
            opener.spawn_blocking(Box::new(move || {
                let _ = sender.send(released.iter().find_map(stale_snapshot_error));
            }));
            match receiver.await {
                Ok(None) => Ok(()),
                Ok(Some(why)) => Err((0, why)),
                Err(_) => Err((0, TargetError::errno(EBUSY).because("no thread is free"))),
            }
        })
    }

    /// Restores the previous records after the change has failed.
    pub async fn undo(self) {
        let (recorded, _guard) = (self.recorded, self._attach_guard);
        if !recorded.is_empty() {
            let writable_disks =
                writable_disks(self.registry, &live_or_resuming_tables(&self.registry.all_with_pending()));
            let undo = move |folder: &Arc<StateFolder>| {
                recorded.undo(folder, &writable_disks);
                Ok(())
            };
            let _ =
                run_state_folder_work_on_thread(self.registry, "", &CancelToken::default(), undo, |_, ()| {})
                    .await;
        }
    }

    /// Updates the records after the change of `several` has succeeded.
    pub async fn commit(self, several: &[(String, Arc<RegisteredDevice>)]) {
        // If the source of a handover is gone, the handover is cancelled as the table becomes live.
        let is_invalid = |report: &SnapshotReport| report.state == SnapshotState::Invalid;
        let invalidated = store_ids(self.registry, &self.tables, is_invalid);
        let invalidated: Vec<StableDiskId> =
            invalidated.into_iter().filter(|store| self.valid.iter().any(|valid| valid.is(store))).collect();
        if !self.recorded.has_left() && invalidated.is_empty() {
            return;
        }
        let is_gone = |mapped: &Arc<RegisteredDevice>| {
            self.who == CancellableVerbKind::Remove && several.iter().any(|(_, one)| Arc::ptr_eq(one, mapped))
        };
        let tables = live_or_resuming_tables(
            self.registry.all_with_pending().iter().filter(|mapped| !is_gone(mapped)),
        );
        let (writable_disks, mut recorded, _guard) =
            (writable_disks(self.registry, &tables), self.recorded, self._attach_guard);
        let commit = move |folder: &Arc<StateFolder>| {
            recorded.cancel(folder, &invalidated, &writable_disks);
            recorded.commit(folder, &writable_disks)
        };
        let cancel_token = CancelToken::default();
        let done = run_state_folder_work_on_thread(self.registry, "", &cancel_token, commit, |_, ()| {});
        done.await.err().inspect(|error| tracing::error!("{error}"));
    }
}

/// The tables of `devices` that are live or are becoming live.
fn live_or_resuming_tables<'a>(
    devices: impl IntoIterator<Item = &'a Arc<RegisteredDevice>>,
) -> Vec<Option<Arc<Table>>> {
    let of = |mapped: &Arc<RegisteredDevice>| {
        let attached = mapped.device.inactive().filter(|_| mapped.pending.is_resuming());
        [mapped.device.live(), attached]
    };
    devices.into_iter().flat_map(of).collect()
}

/// The stores of the persistent snapshots in `tables` for which `wanted` is true.
fn store_ids(
    registry: &DeviceRegistry,
    tables: &[Option<Arc<Table>>],
    wanted: impl Fn(&SnapshotReport) -> bool,
) -> Vec<StableDiskId> {
    let all = tables.iter().flatten().flat_map(|table| persistent_snapshots(table)).map(|(report, _)| report);
    all.filter(wanted).filter_map(|report| registry.disk_id_cached(report.store.number)).collect()
}

impl DeviceRegistry {
    /// True if snapshots that can't be attached are given up.
    fn gives_up_snapshots(&self) -> bool {
        self.lost_snapshots() == LostSnapshotPolicy::GiveUp && !self.is_starting.load(Ordering::Relaxed)
    }
}
