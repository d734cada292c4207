//! Persistent snapshots and the changes of devices: each change is checked against the records of
//! the state folder ([`crate::state_folder::records`]) before it begins, and written there.
//!
//! Contract, for a server with a state folder:
//!
//! * A persistent snapshot is recorded, durably, before its table is live.
//! * A table through which a disk can be written does not become live while a snapshot of that disk
//!   is recorded and not attached, unless it becomes live in the same change. What was made by name
//!   is brought back first ([`super::restore`]); anything else is refused, or given up if the
//!   server was told to ([`LostSnapshots`]).
//! * A snapshot that is no table's any more is *released* if its origin's disk can still be
//!   written: nobody waits for it, and it is refused later if the origin was written meanwhile.
//!   Otherwise it is *detached*.
//!
//! Not covered: disks that are gone with the program (`mem`, `null`), and what writes past this
//! server.

use super::tables::{Writer, is_live, persistent, record, writers};
use crate::error::VerbError;
use crate::registry::{Mapped, Registry};
use crate::state_folder::records::{RecordState, SnapshotRecord};
use crate::state_folder::stamp::Stamp;
use crate::state_folder::{StateFolder, StoreId};
use crate::verbs::call_off::Waiting;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tokio::sync::oneshot;
use udm_core::Device;
use udm_core::errno::{EBUSY, EIO};
use udm_dm::{MappedDevice, SnapshotState, Table, TargetError};

/// What becomes of a disk that has a snapshot which can't be attached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LostSnapshots {
    /// It is not opened for writing.
    #[default]
    Refuse,
    /// The same; a server that starts waits for the snapshot, and tries again.
    Wait,
    /// The snapshot is lost, for good and in the log, and the disk is opened.
    GiveUp,
}

/// A change that has been checked, and whose snapshots are recorded.
pub(in crate::verbs) struct Attaching<'a> {
    registry: &'a Registry,
    /// The table that each device had in its inactive slot.
    tables: Vec<Option<Arc<Table>>>,
    /// What is recorded of the snapshots that come, and what was before.
    recorded: Vec<(SnapshotRecord, Option<SnapshotRecord>)>,
    /// Snapshots that are live in the devices of the change, which may let go of them.
    leaving: Vec<Leaving>,
    /// What the devices do in the change.
    who: Waiting,
}

/// A snapshot that a device of a change has, and may let go of.
struct Leaving {
    store: StoreId,
    /// Nobody needs it any more.
    is_over: bool,
}

/// Runs `work`, which asks the state folder, beside whoever waits for it.
pub(super) async fn with_folder<T: Send + 'static>(
    registry: &Registry,
    name: &str,
    work: impl FnOnce(&Arc<StateFolder>) -> Result<T, String> + Send + 'static,
) -> Result<Option<T>, VerbError> {
    let Some(folder) = registry.state_folder().cloned() else { return Ok(None) };
    let (tell, told) = oneshot::channel();
    registry.outside().beside(Box::new(move || drop(tell.send(work(&folder)))));
    match told.await {
        Ok(Ok(done)) => Ok(Some(done)),
        Ok(Err(why)) => Err(VerbError::new(name, TargetError::errno(EIO).because(why))),
        Err(_) => Err(VerbError::new(name, TargetError::errno(EBUSY).because("no thread is free"))),
    }
}

/// What a person is told of a disk that has to wait for a snapshot.
pub(super) fn waits(record: &SnapshotRecord, why: &str) -> TargetError {
    let SnapshotRecord { name, origin, store, .. } = record;
    TargetError::errno(EBUSY).because(format!(
        "{} has the snapshot {name} in {}, which {why}: what is written now would be missing in it; attach it \
         first, or give it up with \"udm snapshot remove {name}\"",
        origin.name(),
        store.name()
    ))
}

impl<'a> Attaching<'a> {
    /// Checks a change of `several` devices, and records the snapshots that become live in it.
    pub async fn begin(
        registry: &'a Registry,
        several: &[(String, Arc<Mapped>)],
        who: Waiting,
    ) -> Result<Attaching<'a>, VerbError> {
        let comes = matches!(who, Waiting::Create | Waiting::Resume);
        let inactive = |mapped: &Arc<Mapped>| mapped.device.inactive().filter(|_| comes);
        let mut attaching = Attaching {
            registry,
            tables: several.iter().map(|(_, mapped)| inactive(mapped)).collect(),
            recorded: Vec::new(),
            leaving: Vec::new(),
            who,
        };
        if registry.state_folder().is_none() || who == Waiting::Suspend || registry.is_ending() {
            return Ok(attaching);
        }
        for ((_, mapped), table) in several.iter().zip(&attaching.tables) {
            let Some(live) = mapped.device.live().filter(|_| table.is_some() || who == Waiting::Remove)
            else {
                continue;
            };
            let removed = mapped.note().is_discarded;
            let found = persistent(&live).filter_map(|(report, _)| {
                let store = registry.disk_seen(report.store.number)?;
                Some(Leaving { store, is_over: removed || report.state == SnapshotState::Merged })
            });
            attaching.leaving.extend(found);
        }
        if attaching.tables.iter().all(Option::is_none) {
            return Ok(attaching);
        }
        let mut coming = Vec::new();
        for ((_, mapped), table) in several.iter().zip(&attaching.tables) {
            let found = table.iter().flat_map(|table| persistent(table));
            coming.extend(found.filter_map(|(report, len)| record(registry, mapped, &report, len)));
        }
        let writers = writers(registry, &attaching.tables);
        attaching.check(several, writers, coming).await?;
        Ok(attaching)
    }

    async fn check(
        &mut self,
        several: &[(String, Arc<Mapped>)],
        writers: Vec<Writer>,
        coming: Vec<SnapshotRecord>,
    ) -> Result<(), VerbError> {
        let name = several[0].0.as_str();
        let gives_up = self.registry.gives_up_snapshots();
        let done = with_folder(self.registry, name, move |folder| {
            for record in folder.unattached()? {
                let writer = writers.iter().find(|writer| record.origin.is(&writer.disk));
                let comes_too = coming.iter().any(|one| one.store.is(&record.store));
                let Some(writer) = writer.filter(|_| record.is_waited_for() && !comes_too) else { continue };
                if folder.forget_merged(&record)? {
                    continue;
                }
                let why = if folder.is_elsewhere(&record) {
                    return Ok(Err((writer.place, waits(&record, "another server has"))));
                } else if let Some(why) = record.stale() {
                    why
                } else if gives_up {
                    "it was given up".to_owned()
                } else {
                    return Ok(Err((writer.place, waits(&record, "is not attached"))));
                };
                lose(folder, &record, &why)?;
            }
            for one in &coming {
                // It may have changed since the table was loaded.
                let known = folder.record_of(&one.store)?;
                let stale = known.as_ref().and_then(SnapshotRecord::stale);
                if let Some(why) = stale {
                    return Ok(Err((
                        0,
                        TargetError::errno(EBUSY).because(format!("{}: {why}", one.store.name())),
                    )));
                }
            }
            if coming.is_empty() {
                return Ok(Ok(Vec::new()));
            }
            let recorded = merge(folder, coming)?;
            let kept = folder.attach(recorded.iter().map(|(record, _)| record.clone()).collect());
            if let Err(error) = kept {
                tracing::warn!(
                    "no record is kept of persistent snapshots: a server that starts later does not wait for them: {error}"
                );
                return Ok(Ok(Vec::new()));
            }
            for (record, before) in &recorded {
                // The store had a snapshot of another disk, which is written over.
                if let Some(before) = before.as_ref().filter(|before| !before.origin.is(&record.origin)) {
                    folder.forget_snapshot(before).map_err(|error| self::kept(before, &error))?;
                }
            }
            Ok(Ok(recorded))
        });
        match done.await?.unwrap_or_else(|| Ok(Vec::new())) {
            Ok(recorded) => {
                self.recorded = recorded;
                Ok(())
            }
            Err((place, error)) => {
                Err(VerbError { blocked: true, ..VerbError::new(&several[place].0, error) })
            }
        }
    }

    /// True while the devices have the tables in their inactive slots that were checked.
    pub fn still_holds(&self, devices: &[Arc<MappedDevice>]) -> bool {
        let same =
            |(table, device): (&Option<Arc<Table>>, &Arc<MappedDevice>)| match (table, device.inactive()) {
                (None, None) => true,
                (Some(one), Some(other)) => Arc::ptr_eq(one, &other),
                _ => false,
            };
        matches!(self.who, Waiting::Suspend | Waiting::Remove) || self.tables.iter().zip(devices).all(same)
    }

    /// The change has not come about: what was recorded is as it was.
    pub async fn undo(self) {
        let recorded = self.recorded;
        if recorded.is_empty() {
            return;
        }
        let undone = with_folder(self.registry, "", move |folder| {
            for (record, before) in recorded {
                let done = match before {
                    None => folder.forget_snapshot(&record),
                    Some(before) if matches!(before.state, RecordState::Attached { .. }) => {
                        folder.attach(vec![before])
                    }
                    Some(before) => folder.record(&before),
                };
                done.map_err(|error| kept(&record, &error))?;
            }
            Ok(())
        });
        undone.await.err().inspect(|error| tracing::warn!("{error}"));
    }

    /// The change has come about: snapshots that no table has any more are detached.
    pub async fn settle(self, devices: &[Arc<MappedDevice>]) {
        if self.leaving.is_empty() {
            return;
        }
        let goes = |device: &MappedDevice| {
            self.who == Waiting::Remove && devices.iter().any(|gone| gone.id() == device.id())
        };
        let all = self.registry.everything().into_iter().filter(|mapped| !goes(&mapped.device));
        let live: Vec<_> = all.map(|mapped| mapped.device.live()).collect();
        let writers = writers(self.registry, &live);
        let gone = self.leaving.into_iter().filter(|leaving| !is_live(&live, self.registry, &leaving.store));
        let gone: Vec<Leaving> = gone.collect();
        let Some(folder) = self.registry.state_folder().filter(|_| !gone.is_empty()) else { return };
        let attached = folder.attached_here();
        let mut ends = Vec::new();
        for Leaving { store, is_over } in gone {
            for record in attached.iter().filter(|record| record.store.is(&store)) {
                let written = writers.iter().any(|writer| record.origin.is(&writer.disk));
                ends.push((record.clone(), is_over, written));
            }
        }
        let removal = self.who == Waiting::Remove;
        let done = with_folder(self.registry, "", move |folder| {
            ends.iter().try_for_each(|(record, is_over, written)| match is_over {
                true => folder.forget_snapshot(record).map_err(|error| kept(record, &error)),
                false => detach(folder, record, *written, removal),
            })
        });
        done.await.err().inspect(|error| tracing::error!("{error}"));
    }
}

fn kept(record: &SnapshotRecord, error: &std::io::Error) -> String {
    format!("{}: its record stays: {error}", record.name)
}

/// Records that nobody has this snapshot any more.
fn detach(folder: &StateFolder, record: &SnapshotRecord, written: bool, removal: bool) -> Result<(), String> {
    let origin = Stamp::settled(&record.origin);
    let after = if written { RecordState::Released { origin } } else { RecordState::Detached { origin } };
    let by_name = record.by_name && !removal;
    let done = folder.record(&SnapshotRecord { state: after, by_name, ..record.clone() });
    done.map_err(|error| kept(record, &error))?;
    if written {
        tracing::warn!(
            "{}: no longer attached: what is written to {} from now on is not kept in {}",
            record.name,
            record.origin.name(),
            record.store.name()
        );
    }
    Ok(())
}

/// Records, durably and in the log, that a snapshot is not its instant any more.
pub(super) fn lose(folder: &StateFolder, record: &SnapshotRecord, why: &str) -> Result<(), String> {
    let state = RecordState::Lost { why: why.to_owned() };
    let kept = folder.record(&SnapshotRecord { state, ..record.clone() });
    kept.map_err(|error| format!("{}: that it is lost is not kept: {error}", record.name))?;
    tracing::error!("{}: the snapshot in {} is lost: {why}", record.name, record.store.name());
    Ok(())
}

/// `coming` with what is known of the same snapshots already, and that.
fn merge(
    folder: &StateFolder,
    coming: Vec<SnapshotRecord>,
) -> Result<Vec<(SnapshotRecord, Option<SnapshotRecord>)>, String> {
    let one = |new: SnapshotRecord| {
        let before = folder.record_of(&new.store)?;
        let Some(was) = before.clone().filter(|was| was.origin.is(&new.origin)) else {
            return Ok((new, before));
        };
        let made_store = new.made_store.clone().or(was.made_store);
        let merged = SnapshotRecord {
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
        Ok((merged, before))
    };
    coming.into_iter().map(one).collect()
}

impl Registry {
    /// True where a snapshot that can't be attached is lost and its disk opened.
    fn gives_up_snapshots(&self) -> bool {
        self.lost_snapshots() == LostSnapshots::GiveUp && !self.is_starting.load(Ordering::Relaxed)
    }
}
