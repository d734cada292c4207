//! The update of the state folder for a change of devices: written before the change begins, taken
//! back if it fails. Blocks on files.

use super::attach::snapshot_not_attached_error;
use super::tables::WritableDisk;
use crate::state_folder::file_stamp::FileStamp;
use crate::state_folder::records::{SnapshotRecord, SnapshotRecordState};
use crate::state_folder::{StableDiskId, StateFolder};
use std::collections::HashSet;
use udm_core::errno::EBUSY;
use udm_dm::TargetError;

/// Effect of a change on persistent snapshots and their disks.
#[derive(Default)]
pub(super) struct SnapshotRecordUpdate {
    /// The disks that the new tables can write.
    pub writable_disks: Vec<WritableDisk>,
    /// The snapshots that become live.
    pub attached: Vec<SnapshotRecord>,
    /// The stores of the snapshots that no table has after the change; true if the record can be
    /// deleted.
    pub released: Vec<(StableDiskId, bool)>,
    /// If true, a snapshot that blocks the change is recorded as lost.
    pub gives_up: bool,
    /// True if devices are removed.
    pub is_removal: bool,
    /// The names of the devices of the change.
    pub names: Vec<String>,
    /// If true, tables that bypass an origin are logged. A starting server logs them once all
    /// devices are ready.
    pub warns: bool,
}

/// Records that a change has written, with the previous ones.
#[derive(Default)]
pub(super) struct WrittenSnapshotRecords {
    /// Each new record with its previous version.
    changed: Vec<(SnapshotRecord, Option<SnapshotRecord>)>,
    /// Records of snapshots that no table has after the change.
    released: Vec<SnapshotRecord>,
    /// Records to be deleted after the change.
    over: Vec<SnapshotRecord>,
}

/// Index of a device of the change, and why its change is refused.
pub(super) type IndexedDeviceRefusal = (usize, TargetError);

impl SnapshotRecordUpdate {
    /// Checks the change and writes its records.
    ///
    /// # Errors
    /// A text, if the state folder can't be read or written; nothing is changed then. The inner
    /// error refuses the change.
    pub fn record(
        self,
        folder: &StateFolder,
    ) -> Result<Result<WrittenSnapshotRecords, IndexedDeviceRefusal>, String> {
        if let Some(refused) = self.check(folder)? {
            return Ok(Err(refused));
        }
        let mut recorded = WrittenSnapshotRecords::default();
        match self.write(folder, &mut recorded) {
            Ok(()) => Ok(Ok(recorded)),
            Err(why) => {
                recorded.undo(folder, &[]);
                Err(why)
            }
        }
    }

    /// Refuses the change if a disk must wait for a snapshot, or if a snapshot is not up to date.
    fn check(&self, folder: &StateFolder) -> Result<Option<IndexedDeviceRefusal>, String> {
        if self.writable_disks.is_empty() && self.attached.is_empty() {
            return Ok(None);
        }
        let comes_too = |record: &SnapshotRecord| self.attached.iter().any(|one| one.store.is(&record.store));
        for record in folder.attaching().into_iter().filter(|record| !comes_too(record)) {
            if let Some(writer) = self.writable_disks.iter().find(|writer| record.origin.is(&writer.disk)) {
                return Ok(Some((
                    writer.place,
                    snapshot_not_attached_error(&record, "is just being attached"),
                )));
            }
        }
        for record in folder.unattached()? {
            let writer = self.writable_disks.iter().find(|writer| record.origin.is(&writer.disk));
            let Some(writer) = writer.filter(|_| record.is_waited_for() && !comes_too(&record)) else {
                continue;
            };
            if !record.is_foreign && folder.forget_merged(&record)? {
                continue;
            }
            let why = if record.is_foreign && !self.gives_up {
                let why = "is recorded by another user";
                return Ok(Some((writer.place, snapshot_not_attached_error(&record, why))));
            } else if folder.is_elsewhere(&record) {
                return Ok(Some((writer.place, snapshot_not_attached_error(&record, "another server has"))));
            } else if let Some(why) = record.stale() {
                why
            } else if self.gives_up {
                "it was given up".to_owned()
            } else {
                return Ok(Some((writer.place, snapshot_not_attached_error(&record, "is not attached"))));
            };
            record_lost_snapshot(folder, &record, &why)?;
        }
        if self.warns {
            self.warn_of_bypasses(folder);
        }
        for one in &self.attached {
            // The record may have changed since the table was loaded.
            let known = folder.record_of(&one.store)?;
            if known.as_ref().is_some_and(SnapshotRecord::is_uncertain) {
                tracing::warn!(
                    "{}: its origin {} was in use without it; whether that was written can't be told, and the \
                     snapshot is used as it is",
                    one.name,
                    one.origin.name()
                );
            }
            if let Some(record) = known.as_ref().filter(|known| known.merging && !one.merging) {
                return Ok(Some((0, partly_merged_snapshot_error(record))));
            }
            if let Some(why) = known.as_ref().and_then(stale_snapshot_error) {
                return Ok(Some((0, why)));
            }
        }
        Ok(None)
    }

    /// Logs tables that write a disk and bypass its origin. As in the kernel, this is allowed.
    fn warn_of_bypasses(&self, folder: &StateFolder) {
        for writer in self.writable_disks.iter().filter(|writer| !writer.copies) {
            let attached = folder.attached_here();
            let passed = attached.iter().filter(|record| record.origin.is(&writer.disk) && !record.merging);
            let mut names: Vec<&str> = passed.map(|record| record.name.as_str()).collect();
            names.sort_unstable();
            if !names.is_empty() {
                tracing::warn!(
                    "{}: its writes to {} are not copied for snapshots {}: write through a snapshot-origin",
                    self.names[writer.place],
                    writer.disk.name(),
                    names.join(", ")
                );
            }
        }
    }

    fn write(self, folder: &StateFolder, recorded: &mut WrittenSnapshotRecords) -> Result<(), String> {
        for (store, is_over) in &self.released {
            if self.attached.iter().any(|one| one.store.is(store)) {
                continue;
            }
            for before in folder.attached_here().into_iter().filter(|record| record.store.is(store)) {
                if *is_over && before.merging {
                    recorded.over.push(before);
                    continue;
                }
                let state = SnapshotRecordState::Released { origin: FileStamp::settled(&before.origin) };
                let by_name = before.by_name && !self.is_removal;
                let record = SnapshotRecord { state, by_name, ..before.clone() };
                folder.record(&record).map_err(|error| record_update_failed_text(&record, &error))?;
                recorded.changed.push((record.clone(), Some(before)));
                // The record is deleted only after the change: a server that is killed before has
                // written the origin without the snapshot.
                if *is_over { recorded.over.push(record) } else { recorded.released.push(record) }
            }
        }
        if self.attached.is_empty() {
            return Ok(());
        }
        // If two tables have the same store, the second is refused later.
        let mut stores = HashSet::new();
        let mut attached = self.attached;
        attached.retain(|one| stores.insert(one.file_name()));
        let attached = attached
            .into_iter()
            .map(|one| merge_with_existing_record(folder, one))
            .collect::<Result<Vec<_>, _>>()?;
        if let Err(error) = folder.attach(attached.iter().map(|(record, _)| record.clone()).collect()) {
            tracing::warn!(
                "persistent snapshots are not recorded, so a later server does not wait for them: {error}"
            );
            return Ok(());
        }
        for (record, before) in &attached {
            // The store had a snapshot of another disk, which is overwritten.
            if let Some(before) = before.as_ref().filter(|before| !before.origin.is(&record.origin)) {
                folder.forget_snapshot(before).map_err(|error| record_update_failed_text(before, &error))?;
            }
        }
        recorded.changed.extend(attached);
        Ok(())
    }
}

impl WrittenSnapshotRecords {
    /// File names of the written records.
    pub fn names(&self) -> Vec<String> {
        self.changed.iter().map(|(record, _)| record.file_name()).collect()
    }

    /// True if no record was written.
    pub fn is_empty(&self) -> bool {
        self.changed.is_empty()
    }

    /// The previous records of released snapshots that become live again.
    pub fn were_released(&self) -> Vec<SnapshotRecord> {
        let before = self.changed.iter().filter_map(|(_, before)| before.as_ref());
        before
            .filter(|before| matches!(before.state, SnapshotRecordState::Released { .. }))
            .cloned()
            .collect()
    }

    /// True if the change drops snapshots.
    pub fn has_left(&self) -> bool {
        !self.released.is_empty() || !self.over.is_empty()
    }

    /// Restores the previous records. If one of `writable_disks`, the disks that can be written
    /// now, is an origin, its detached snapshots become released.
    pub fn undo(self, folder: &StateFolder, writable_disks: &[WritableDisk]) {
        for (record, before) in self.changed.into_iter().rev() {
            let done = match before {
                Some(SnapshotRecord { state: SnapshotRecordState::Detached { origin }, .. })
                    if writable_disks.iter().any(|writer| record.origin.is(&writer.disk)) =>
                {
                    // A table that writes the origin became live while the snapshot was recorded as
                    // attached.
                    warn_snapshot_released(&record);
                    folder.record(&SnapshotRecord {
                        state: SnapshotRecordState::Released { origin },
                        ..record.clone()
                    })
                }
                None => folder.forget_snapshot(&record),
                Some(before) if matches!(before.state, SnapshotRecordState::Attached { .. }) => {
                    folder.attach(vec![before])
                }
                Some(before) => folder.record(&before),
            };
            done.err().inspect(|error| tracing::warn!("{}", record_update_failed_text(&record, error)));
        }
    }

    /// Restores the previous records of snapshots whose handover was cancelled as the change
    /// succeeded: no table has the snapshots in `stores`.
    pub fn cancel(&mut self, folder: &StateFolder, stores: &[StableDiskId], writable_disks: &[WritableDisk]) {
        let is_off = |record: &SnapshotRecord| stores.iter().any(|store| record.store.is(store));
        let (off, changed) =
            std::mem::take(&mut self.changed).into_iter().partition(|(record, _)| is_off(record));
        self.changed = changed;
        WrittenSnapshotRecords { changed: off, ..WrittenSnapshotRecords::default() }
            .undo(folder, writable_disks);
    }

    /// Completes the records after the change. `writable_disks` are all disks that can be written
    /// now.
    pub fn commit(self, folder: &StateFolder, writable_disks: &[WritableDisk]) -> Result<(), String> {
        for record in &self.over {
            folder.forget_snapshot(record).map_err(|error| record_update_failed_text(record, &error))?;
        }
        for record in self.released {
            if writable_disks.iter().any(|writer| record.origin.is(&writer.disk)) {
                warn_snapshot_released(&record);
            } else if let SnapshotRecordState::Released { origin } = record.state {
                let record = SnapshotRecord { state: SnapshotRecordState::Detached { origin }, ..record };
                folder.record(&record).map_err(|error| record_update_failed_text(&record, &error))?;
            }
        }
        Ok(())
    }
}

/// The error for loading a snapshot whose origin was written without it; `None` if the snapshot is
/// up to date.
pub(super) fn stale_snapshot_error(record: &SnapshotRecord) -> Option<TargetError> {
    let why = record.stale()?;
    Some(TargetError::errno(EBUSY).because(format!("{}: {why}", record.store.name())))
}

/// The error for loading a snapshot that is partly merged.
fn partly_merged_snapshot_error(record: &SnapshotRecord) -> TargetError {
    let (origin, store) = (record.origin.name(), record.store.name());
    TargetError::errno(EBUSY).because(format!(
        "{store} is being merged into {origin}: the merge continues in the device over all of {origin}; this table \
         is no longer needed"
    ))
}

fn warn_snapshot_released(record: &SnapshotRecord) {
    tracing::warn!(
        "{}: no longer attached: later writes to {} are not copied to {}",
        record.name,
        record.origin.name(),
        record.store.name()
    );
}

fn record_update_failed_text(record: &SnapshotRecord, error: &std::io::Error) -> String {
    format!("{}: its record stays as it was: {error}", record.name)
}

/// Records and logs that a snapshot is lost.
pub(super) fn record_lost_snapshot(
    folder: &StateFolder,
    record: &SnapshotRecord,
    why: &str,
) -> Result<(), String> {
    let state = SnapshotRecordState::Lost { why: why.to_owned() };
    let kept = folder.record(&SnapshotRecord { state, ..record.clone() });
    kept.map_err(|error| format!("{}: can't record that it is lost: {error}", record.name))?;
    tracing::error!("{}: the snapshot in {} is lost: {why}", record.name, record.store.name());
    Ok(())
}

/// `new`, completed with the facts of an existing record of the same snapshot; also returns that
/// record.
fn merge_with_existing_record(
    folder: &StateFolder,
    new: SnapshotRecord,
) -> Result<(SnapshotRecord, Option<SnapshotRecord>), String> {
    let before = folder.record_of(&new.store)?;
    let Some(was) = before.clone().filter(|was| was.origin.is(&new.origin)) else {
        return Ok((new, before));
    };
    let made_store = new.made_store.clone().or(was.made_store);
    let known = SnapshotRecord {
        // The device of a merge has the origin's name; the record keeps the snapshot's.
        name: if new.merging { was.name } else { new.name },
        uuid: if new.merging { was.uuid } else { new.uuid },
        made: was.made,
        by_name: was.by_name || new.by_name,
        was_linear: was.was_linear || new.was_linear,
        made_store,
        throttle: was.throttle,
        vhost_user: was.vhost_user,
        ublk: was.ublk,
        // The same disks under their previous names, so that the file name of the record stays.
        origin: was.origin,
        store: was.store,
        ..new
    };
    Ok((known, before))
}
