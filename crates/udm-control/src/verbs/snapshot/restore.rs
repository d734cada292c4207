//! Attaches snapshots that were created by name before a table that can write their disk becomes
//! live.
//!
//! Contract: if the device was linear before it had snapshots, it becomes their origin again, even
//! if they were attached before the device existed. An interrupted merge continues, also the merge
//! of a snapshot that was loaded as a table. While a snapshot can't be attached, its disk can't be
//! written, until the snapshot is given up ([`super::attach`]).

use super::super::ublk::restore_ublk_disk;
use super::super::vhost_user::restore_vhost_user_sockets;
use super::attach::{LostSnapshotPolicy, run_state_folder_work_on_thread, snapshot_not_attached_error};
use super::record_update::record_lost_snapshot;
use super::tables::{WritableDisk, writable_disks};
use super::{SnapshotCreationInfo, merge::PendingMerge};
use crate::error::VerbError;
use crate::registry::{BaseDir, DeviceRegistry, RegisteredDevice};
use crate::state_folder::records::SnapshotRecord;
use crate::verbs::cancel::{CancelToken, CancellableVerbKind};
use crate::verbs::{DeviceSpec, create_device, tables};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant, SystemTime};
use udm_core::errno::EBUSY;
use udm_core::{DevNo, Sector};
use udm_dm::{Table, TargetError};

/// Attaches the snapshots by name of the disks that the inactive tables of `several` write, and
/// replaces those tables by origin or merge tables. Returns the merges that continue.
///
/// # Errors
/// If a snapshot can't be attached.
pub(in crate::verbs) fn attach_recorded_snapshots<'a>(
    registry: &'a DeviceRegistry,
    several: &'a [(String, Arc<RegisteredDevice>)],
    who: CancellableVerbKind,
    cancel_token: &'a CancelToken,
) -> Pin<Box<dyn Future<Output = Result<Vec<PendingMerge>, VerbError>> + Send + 'a>> {
    Box::pin(async move {
        let comes =
            matches!(who, CancellableVerbKind::Create | CancellableVerbKind::Resume) && !registry.is_ending();
        if !comes || registry.state_folder().is_none() {
            return Ok(Vec::new());
        }
        let inactive: Vec<Option<Arc<Table>>> =
            several.iter().map(|(_, mapped)| mapped.device.inactive()).collect();
        let disks = writable_disks(registry, &inactive);
        if disks.is_empty() {
            return Ok(Vec::new());
        }
        let found = run_state_folder_work_on_thread(
            registry,
            &several[0].0,
            cancel_token,
            move |folder| {
                let mut found = folder.unattached()?;
                found.retain(|record| {
                    (record.by_name || record.merging)
                        && !record.is_foreign
                        && record.is_waited_for()
                        && !folder.is_elsewhere(record)
                        && record.stale().is_none()
                });
                // Snapshots attached before their origin exists: an earlier attempt failed for one
                // of several, or the origin was created later.
                let mut attached = folder.attached_here();
                attached.retain(|record| record.by_name && record.was_linear && !record.merging);
                let of = |record: SnapshotRecord| {
                    let writer = disks.iter().find(|writer| record.origin.is(&writer.disk))?;
                    let WritableDisk { place, number, .. } = *writer;
                    Some((place, number, record))
                };
                let of_all = |records: Vec<_>| records.into_iter().filter_map(of).collect::<Vec<_>>();
                Ok((of_all(found), of_all(attached)))
            },
            |_, _| {},
        );
        let (found, attached) = found.await?.unwrap_or_default();
        let (merging, keeping): (Vec<_>, Vec<_>) = found.into_iter().partition(|(.., record)| record.merging);
        for (place, _, record) in &keeping {
            recreate_snapshot_device(registry, &several[*place], record, cancel_token).await?;
        }
        let is_new = |place: usize| several[place].1.device.live().is_none();
        let keeping = keeping.iter().filter(|(.., record)| record.was_linear);
        for (place, number, _) in keeping.chain(attached.iter().filter(|(place, ..)| is_new(*place))) {
            load_origin_table(registry, &several[*place], *number)?;
        }
        let mut ends = Vec::new();
        for (place, number, record) in merging {
            ends.extend(load_merge_table(registry, &several[place], number, &record)?);
        }
        Ok(ends)
    })
}

/// The facts of the snapshot of `record`.
fn creation_info_of_snapshot_record(record: &SnapshotRecord) -> SnapshotCreationInfo {
    let since = SystemTime::UNIX_EPOCH + Duration::from_secs(record.made);
    let age = SystemTime::now().duration_since(since).unwrap_or_default();
    SnapshotCreationInfo {
        made: Instant::now().checked_sub(age),
        store: record.made_store.clone(),
        by_name: true,
        origin_was_linear: record.was_linear,
        ..SnapshotCreationInfo::default()
    }
}

/// Gives `mapped`, the device of the snapshot `name`, the facts of its record.
///
/// # Errors
/// The state folder cannot be read, or has no such record.
pub(in crate::verbs) fn restore_creation_info(
    registry: &DeviceRegistry,
    name: &str,
    mapped: &RegisteredDevice,
) -> Result<(), VerbError> {
    let records = registry.state_folder().map_or(Ok(Vec::new()), |folder| folder.unattached());
    let refused = |why: String| VerbError::new(name, TargetError::errno(EBUSY).because(why));
    let record = records.map_err(refused)?.into_iter().find(|record| record.by_name && record.name == name);
    let record = record.ok_or_else(|| refused("the state folder has no record of this snapshot".into()))?;
    *mapped.snapshot_info() = creation_info_of_snapshot_record(&record);
    Ok(())
}

/// Creates the device of `record` again.
pub(super) async fn recreate_snapshot_device(
    registry: &DeviceRegistry,
    (origin, mapped_origin): &(String, Arc<RegisteredDevice>),
    record: &SnapshotRecord,
    cancel_token: &CancelToken,
) -> Result<(), VerbError> {
    let Some(registry) = registry.weak_self.upgrade() else { return Ok(()) };
    let (name, uuid, throttle) = (&*record.name, record.uuid.as_deref(), record.throttle.as_ref());
    let called = DeviceSpec { name, uuid, throttle, ..DeviceSpec::default() };
    let table = |mapped: &Arc<RegisteredDevice>| {
        mapped.allowed_clients.follow(&mapped_origin.allowed_clients);
        *mapped.snapshot_info() = creation_info_of_snapshot_record(record);
        Ok(Some(record.table.clone()))
    };
    let Err(error) = create_device(&registry, called, table, &BaseDir::none(), cancel_token).await else {
        tracing::info!("{}: attached again, a snapshot of {}", record.name, record.origin.name());
        restore_vhost_user_sockets(&registry, &record.name, &record.vhost_user);
        restore_ublk_disk(&registry, &record.name, record.ublk.as_ref());
        return Ok(());
    };
    let why = format!("can't be attached ({})", error.error);
    if registry.lost_snapshots() != LostSnapshotPolicy::GiveUp || registry.is_starting.load(Ordering::Relaxed)
    {
        return Err(VerbError {
            blocked: true,
            ..VerbError::new(origin, snapshot_not_attached_error(record, &why))
        });
    }
    let (record, why) = (record.clone(), format!("it {why}, and was given up"));
    run_state_folder_work_on_thread(
        &registry,
        origin,
        cancel_token,
        move |folder| record_lost_snapshot(folder, &record, &why),
        |_, ()| {},
    )
    .await
    .map(|_| ())
}

/// If the inactive table of `mapped` is one line over all of the disk `number`, linear or an
/// origin: its length, and true if it is linear.
fn match_whole_disk_table(mapped: &RegisteredDevice, number: DevNo) -> Option<(u64, bool)> {
    let table = mapped.device.inactive()?;
    let [entry] = table.targets() else { return None };
    let is_linear = entry.target.type_name() == "linear";
    let over = match entry.target.data_path().into_linear().filter(|_| is_linear) {
        Some((disk, Sector(0))) => disk.number == number,
        _ => entry.target.type_name() == "snapshot-origin",
    };
    over.then_some((entry.len.0, is_linear))
}

/// Replaces a linear table by that of an origin.
fn load_origin_table(
    registry: &DeviceRegistry,
    (name, mapped): &(String, Arc<RegisteredDevice>),
    number: DevNo,
) -> Result<(), VerbError> {
    let Some((len, true)) = match_whole_disk_table(mapped, number) else { return Ok(()) };
    load_replacement_table(registry, name, mapped, &format!("0 {len} snapshot-origin {number}"))?;
    mapped.snapshot_info().was_linear = true;
    Ok(())
}

/// Replaces a linear or origin table by that of a merge.
fn load_merge_table(
    registry: &DeviceRegistry,
    (name, mapped): &(String, Arc<RegisteredDevice>),
    number: DevNo,
    record: &SnapshotRecord,
) -> Result<Option<PendingMerge>, VerbError> {
    let Some((len, _)) = match_whole_disk_table(mapped, number) else { return Ok(None) };
    let merge = record.table.replacen(" snapshot ", " snapshot-merge ", 1);
    if let Err(error) = load_replacement_table(registry, name, mapped, &merge) {
        let why = format!("is being merged, and can't be attached ({})", error.error);
        return Err(VerbError {
            blocked: true,
            ..VerbError::new(name, snapshot_not_attached_error(record, &why))
        });
    }
    mapped.snapshot_info().was_linear = record.was_linear;
    tracing::info!("{name}: the merge of snapshot {} continues", record.name);
    let table = format!("0 {len} snapshot-origin {number}");
    Ok(Some(PendingMerge::new(mapped, name, table, record.made_store.clone())))
}

fn load_replacement_table(
    registry: &DeviceRegistry,
    name: &str,
    mapped: &Arc<RegisteredDevice>,
    table: &str,
) -> Result<(), VerbError> {
    let loaded = tables::load_into(registry, mapped, name, table, &BaseDir::none(), &CancelToken::default());
    loaded.map(drop).map_err(|e| e.at(None))
}
