//! What a change of devices writes into the state folder before it begins, and takes back when it
//! does not come about. Blocks on files.

use super::attach::blocked_error;
use super::tables::WritableDisk;
use crate::state_folder::file_stamp::FileStamp;
use crate::state_folder::records::{RecordState, SnapshotRecord};
use crate::state_folder::{StateFolder, StoreId};
use std::collections::HashSet;
use udm_core::bugs::{self, Bug};
use udm_core::errno::EBUSY;
use udm_dm::TargetError;

/// What a change does to persistent snapshots and to their disks.
#[derive(Default)]
pub(super) struct RecordUpdate {
    /// The disks that can be written behind it, by tables that come.
    pub writable_disks: Vec<WritableDisk>,
    /// The snapshots that become live.
    pub coming: Vec<SnapshotRecord>,
    /// The stores of those that are let go, and whether nobody needs them any more.
    pub leaving: Vec<(StoreId, bool)>,
    /// A snapshot that is waited for is lost instead.
    pub gives_up: bool,
    /// Devices are removed.
    pub is_removal: bool,
    /// The names of the devices of the change.
    pub names: Vec<String>,
    /// Writes past an origin are logged. A server that starts does that when all devices are there.
    pub warns: bool,
}

/// What was written.
#[derive(Default)]
pub(super) struct WrittenRecords {
    /// Each record with what was there before.
    changed: Vec<(SnapshotRecord, Option<SnapshotRecord>)>,
    /// Those that are let go.
    released: Vec<SnapshotRecord>,
    /// Those that nobody needs.
    over: Vec<SnapshotRecord>,
}

/// A device of the change, and why it can't have its table.
pub(super) type Refused = (usize, TargetError);

impl RecordUpdate {
    /// Checks the change, and writes what it does.
    ///
    /// # Errors
    /// In words, when the state folder can't be read or written: nothing is changed then. The inner
    /// one is the change's.
    pub fn record(self, folder: &StateFolder) -> Result<Result<WrittenRecords, Refused>, String> {
        if let Some(refused) = self.check(folder)? {
            return Ok(Err(refused));
        }
        let mut recorded = WrittenRecords::default();
        match self.write(folder, &mut recorded) {
            Ok(()) => Ok(Ok(recorded)),
            Err(why) => {
                recorded.undo(folder, &[]);
                Err(why)
            }
        }
    }

    /// Whether nobody has to wait for a snapshot, or has one that is not its instant.
    fn check(&self, folder: &StateFolder) -> Result<Option<Refused>, String> {
        if self.writable_disks.is_empty() && self.coming.is_empty() {
            return Ok(None);
        }
        let comes_too = |record: &SnapshotRecord| self.coming.iter().any(|one| one.store.is(&record.store));
        for record in folder.attaching().into_iter().filter(|record| !comes_too(record)) {
            if let Some(writer) = self.writable_disks.iter().find(|writer| record.origin.is(&writer.disk)) {
                return Ok(Some((writer.place, blocked_error(&record, "is just being attached"))));
            }
        }
        for record in folder.unattached()? {
            let writer = self.writable_disks.iter().find(|writer| record.origin.is(&writer.disk));
            let Some(writer) = writer.filter(|_| record.is_waited_for() && !comes_too(&record)) else {
                continue;
            };
            if folder.forget_merged(&record)? {
                continue;
            }
            let why = if folder.is_elsewhere(&record) {
                return Ok(Some((writer.place, blocked_error(&record, "another server has"))));
            } else if let Some(why) = record.stale() {
                why
            } else if self.gives_up {
                "it was given up".to_owned()
            } else {
                return Ok(Some((writer.place, blocked_error(&record, "is not attached"))));
            };
            if !bugs::on(Bug::GivenUpNotLost) {
                record_lost(folder, &record, &why)?;
            }
        }
        if self.warns {
            self.warn_of_bypasses(folder);
        }
        for one in &self.coming {
            // It may have changed since the table was loaded.
            let known = folder.record_of(&one.store)?;
            if known.as_ref().is_some_and(SnapshotRecord::is_uncertain) {
                tracing::warn!(
                    "{}: its origin {} was in use without it; whether that was written can't be told, and it is \
                     taken as it is",
                    one.name,
                    one.origin.name()
                );
            }
            if let Some(record) = known.as_ref().filter(|known| known.merging && !one.merging) {
                return Ok(Some((0, merging_error(record))));
            }
            if let Some(why) = known.as_ref().and_then(stale) {
                return Ok(Some((0, why)));
            }
        }
        Ok(None)
    }

    /// Warns of tables that write a disk past its origin's device, as the kernel lets them.
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

    fn write(self, folder: &StateFolder, recorded: &mut WrittenRecords) -> Result<(), String> {
        for (store, is_over) in &self.leaving {
            if self.coming.iter().any(|one| one.store.is(store)) {
                continue;
            }
            for before in folder.attached_here().into_iter().filter(|record| record.store.is(store)) {
                if *is_over && before.merging {
                    recorded.over.push(before);
                    continue;
                }
                let state = RecordState::Released { origin: FileStamp::settled(&before.origin) };
                let by_name = before.by_name && !self.is_removal;
                let record = SnapshotRecord { state, by_name, ..before.clone() };
                folder.record(&record).map_err(|error| stale_record_text(&record, &error))?;
                recorded.changed.push((record.clone(), Some(before)));
                // A server that is killed before it is forgotten has written its origin without it.
                if *is_over { recorded.over.push(record) } else { recorded.released.push(record) }
            }
        }
        if self.coming.is_empty() {
            return Ok(());
        }
        // Two that have one store are refused later.
        let mut stores = HashSet::new();
        let mut coming = self.coming;
        coming.retain(|one| stores.insert(one.file_name()));
        let coming = coming.into_iter().map(|one| known(folder, one)).collect::<Result<Vec<_>, _>>()?;
        if let Err(error) = folder.attach(coming.iter().map(|(record, _)| record.clone()).collect()) {
            tracing::warn!(
                "no record is kept of persistent snapshots: a server that starts later does not wait for them: {error}"
            );
            return Ok(());
        }
        for (record, before) in &coming {
            // The store had a snapshot of another disk, which is written over.
            if let Some(before) = before.as_ref().filter(|before| !before.origin.is(&record.origin)) {
                folder.forget_snapshot(before).map_err(|error| stale_record_text(before, &error))?;
            }
        }
        recorded.changed.extend(coming);
        Ok(())
    }
}

impl WrittenRecords {
    /// The files of the records that were written.
    pub fn names(&self) -> Vec<String> {
        self.changed.iter().map(|(record, _)| record.file_name()).collect()
    }

    /// True when nothing was written.
    pub fn is_empty(&self) -> bool {
        self.changed.is_empty()
    }

    /// Those that become live again after they were released, as they were recorded.
    pub fn were_released(&self) -> Vec<SnapshotRecord> {
        let before = self.changed.iter().filter_map(|(_, before)| before.as_ref());
        before.filter(|before| matches!(before.state, RecordState::Released { .. })).cloned().collect()
    }

    /// True when snapshots are let go.
    pub fn has_left(&self) -> bool {
        !self.released.is_empty() || !self.over.is_empty()
    }

    /// Puts everything back as it was, but for what `writable_disks`, all that can write disks by now,
    /// do not wait for any more.
    pub fn undo(self, folder: &StateFolder, writable_disks: &[WritableDisk]) {
        for (record, before) in self.changed.into_iter().rev() {
            let done = match before {
                Some(SnapshotRecord { state: RecordState::Detached { origin }, .. })
                    if writable_disks.iter().any(|writer| record.origin.is(&writer.disk)) =>
                {
                    // One became live while this was recorded as attached.
                    warn_released(&record);
                    folder
                        .record(&SnapshotRecord { state: RecordState::Released { origin }, ..record.clone() })
                }
                None => folder.forget_snapshot(&record),
                Some(before) if matches!(before.state, RecordState::Attached { .. }) => {
                    folder.attach(vec![before])
                }
                Some(before) => folder.record(&before),
            };
            done.err().inspect(|error| tracing::warn!("{}", stale_record_text(&record, error)));
        }
    }

    /// The change has come about, and handovers of the snapshots in `stores` were called off: no
    /// table has them. They are as they were.
    pub fn cancel(&mut self, folder: &StateFolder, stores: &[StoreId], writable_disks: &[WritableDisk]) {
        let is_off = |record: &SnapshotRecord| stores.iter().any(|store| record.store.is(store));
        let (off, changed) =
            std::mem::take(&mut self.changed).into_iter().partition(|(record, _)| is_off(record));
        self.changed = changed;
        WrittenRecords { changed: off, ..WrittenRecords::default() }.undo(folder, writable_disks);
    }

    /// The change has come about, and `writable_disks` are all that can write disks from now on.
    pub fn settle(self, folder: &StateFolder, writable_disks: &[WritableDisk]) -> Result<(), String> {
        for record in &self.over {
            folder.forget_snapshot(record).map_err(|error| stale_record_text(record, &error))?;
        }
        for record in self.released {
            if writable_disks.iter().any(|writer| record.origin.is(&writer.disk)) {
                warn_released(&record);
            } else if let RecordState::Released { origin } = record.state {
                let record = SnapshotRecord { state: RecordState::Detached { origin }, ..record };
                folder.record(&record).map_err(|error| stale_record_text(&record, &error))?;
            }
        }
        Ok(())
    }
}

/// What a person is told who loads a snapshot that is not its instant any more; `None` when nothing
/// speaks against it.
pub(super) fn stale(record: &SnapshotRecord) -> Option<TargetError> {
    let why = record.stale()?;
    Some(TargetError::errno(EBUSY).because(format!("{}: {why}", record.store.name())))
}

/// What a person is told who loads a snapshot of which a part is back in its origin.
fn merging_error(record: &SnapshotRecord) -> TargetError {
    let (origin, store) = (record.origin.name(), record.store.name());
    TargetError::errno(EBUSY).because(format!(
        "{store} is being merged into {origin}: the merge goes on with the device of all of {origin}, and this table \
         is not needed any more"
    ))
}

fn warn_released(record: &SnapshotRecord) {
    tracing::warn!(
        "{}: no longer attached: what is written to {} from now on is not kept in {}",
        record.name,
        record.origin.name(),
        record.store.name()
    );
}

fn stale_record_text(record: &SnapshotRecord, error: &std::io::Error) -> String {
    format!("{}: its record stays as it was: {error}", record.name)
}

/// Records, durably and in the log, that a snapshot is not its instant any more.
pub(super) fn record_lost(folder: &StateFolder, record: &SnapshotRecord, why: &str) -> Result<(), String> {
    let state = RecordState::Lost { why: why.to_owned() };
    let kept = folder.record(&SnapshotRecord { state, ..record.clone() });
    kept.map_err(|error| format!("{}: that it is lost is not kept: {error}", record.name))?;
    tracing::error!("{}: the snapshot in {} is lost: {why}", record.name, record.store.name());
    Ok(())
}

/// `new` with what is known of the same snapshot already, and that.
fn known(
    folder: &StateFolder,
    new: SnapshotRecord,
) -> Result<(SnapshotRecord, Option<SnapshotRecord>), String> {
    let before = folder.record_of(&new.store)?;
    let Some(was) = before.clone().filter(|was| was.origin.is(&new.origin)) else {
        return Ok((new, before));
    };
    let made_store = new.made_store.clone().or(was.made_store);
    let known = SnapshotRecord {
        // A merge has the name of its origin's device.
        name: if new.merging { was.name } else { new.name },
        uuid: if new.merging { was.uuid } else { new.uuid },
        made: was.made,
        by_name: was.by_name || new.by_name,
        was_linear: was.was_linear || new.was_linear,
        made_store,
        // The same names of the same disks: the record keeps its place.
        origin: was.origin,
        store: was.store,
        ..new
    };
    Ok((known, before))
}
