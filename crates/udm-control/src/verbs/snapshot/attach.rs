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
//!   Otherwise it is *detached*. How the origin is then is kept before the change: what is written
//!   from then on, and is not copied, shows.
//!
//! Not covered: disks that are gone with the program (`mem`, `null`), and what writes past this
//! server.

use super::recording::{Recorded, Recording};
use super::tables::{is_live, persistent, record, writers};
use crate::error::VerbError;
use crate::registry::{Mapped, Registry};
use crate::state_folder::StateFolder;
use crate::state_folder::records::SnapshotRecord;
use crate::verbs::call_off::{CallOff, Waiting};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tokio::sync::oneshot;
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
    recorded: Recorded,
    /// What the devices do in the change.
    who: Waiting,
}

/// Runs `work`, which asks the state folder, beside whoever waits for it, until called off: then
/// what it has done is `undone`.
pub(super) async fn with_folder<T: Send + 'static>(
    registry: &Registry,
    name: &str,
    off: &CallOff,
    work: impl FnOnce(&Arc<StateFolder>) -> Result<T, String> + Send + 'static,
    undone: impl FnOnce(&Arc<StateFolder>, T) + Send + 'static,
) -> Result<Option<T>, VerbError> {
    let Some(folder) = registry.state_folder().cloned() else { return Ok(None) };
    let (tell, told) = oneshot::channel();
    registry.outside().beside(Box::new(move || {
        if let Err(Ok(done)) = tell.send(work(&folder)) {
            undone(&folder, done);
        }
    }));
    tokio::select! {
        biased;
        done = told => match done {
            Ok(Ok(done)) => Ok(Some(done)),
            Ok(Err(why)) => Err(VerbError::new(name, TargetError::errno(EIO).because(why))),
            Err(_) => Err(VerbError::new(name, TargetError::errno(EBUSY).because("no thread is free"))),
        },
        why = off.called() => Err(VerbError::new(name, why)),
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
    /// Checks a change of `several` devices, and records the snapshots that become live in it, and
    /// those that it lets go of.
    pub async fn begin(
        registry: &'a Registry,
        several: &[(String, Arc<Mapped>)],
        who: Waiting,
        off: &CallOff,
    ) -> Result<Attaching<'a>, VerbError> {
        let comes = matches!(who, Waiting::Create | Waiting::Resume);
        let inactive = |mapped: &Arc<Mapped>| mapped.device.inactive().filter(|_| comes);
        let tables: Vec<_> = several.iter().map(|(_, mapped)| inactive(mapped)).collect();
        let mut attaching = Attaching { registry, tables, recorded: Recorded::default(), who };
        let is_change = who == Waiting::Remove || attaching.tables.iter().any(Option::is_some);
        if registry.state_folder().is_none() || !is_change || registry.is_ending() {
            return Ok(attaching);
        }
        let mut recording = Recording {
            writers: writers(registry, &attaching.tables),
            gives_up: registry.gives_up_snapshots(),
            is_removal: who == Waiting::Remove,
            ..Recording::default()
        };
        for ((_, mapped), table) in several.iter().zip(&attaching.tables) {
            let found = table.iter().flat_map(|table| persistent(table));
            recording.coming.extend(found.filter_map(|(report, len)| record(registry, mapped, &report, len)));
            let leaves = table.is_some() || who == Waiting::Remove;
            let Some(live) = mapped.device.live().filter(|_| leaves) else { continue };
            let removed = mapped.note().is_discarded;
            recording.leaving.extend(persistent(&live).filter_map(|(report, _)| {
                let store = registry.disk_seen(report.store.number)?;
                Some((store, removed || report.state == SnapshotState::Merged))
            }));
        }
        if !recording.leaving.is_empty() {
            // Another device may have taken it over.
            let others = attaching.others(several);
            recording.leaving.retain(|(store, _)| !is_live(&others, registry, store));
        }
        let name = several[0].0.as_str();
        let done = with_folder(
            registry,
            name,
            off,
            |folder| recording.record(folder),
            |folder, done| {
                done.unwrap_or_default().undo(folder);
            },
        );
        match done.await?.unwrap_or_else(|| Ok(Recorded::default())) {
            Ok(recorded) => attaching.recorded = recorded,
            Err((place, error)) => {
                return Err(VerbError { blocked: true, ..VerbError::new(&several[place].0, error) });
            }
        }
        Ok(attaching)
    }

    /// The live tables of all devices but `several`.
    fn others(&self, several: &[(String, Arc<Mapped>)]) -> Vec<Option<Arc<Table>>> {
        let is_other = |mapped: &Arc<Mapped>| !several.iter().any(|(_, one)| Arc::ptr_eq(one, mapped));
        let all = self.registry.everything().into_iter().filter(is_other);
        all.map(|mapped| mapped.device.live()).collect()
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
        if !recorded.is_empty() {
            let undo = move |folder: &Arc<StateFolder>| {
                recorded.undo(folder);
                Ok(())
            };
            let _ = with_folder(self.registry, "", &CallOff::default(), undo, |_, ()| {}).await;
        }
    }

    /// The change of `several` has come about.
    pub async fn settle(self, several: &[(String, Arc<Mapped>)]) {
        if !self.recorded.has_left() {
            return;
        }
        let mut live = self.others(several);
        if self.who != Waiting::Remove {
            live.extend(several.iter().map(|(_, mapped)| mapped.device.live()));
        }
        let (writers, recorded) = (writers(self.registry, &live), self.recorded);
        let settle = move |folder: &Arc<StateFolder>| recorded.settle(folder, &writers);
        let off = CallOff::default();
        let done = with_folder(self.registry, "", &off, settle, |_, ()| {});
        done.await.err().inspect(|error| tracing::error!("{error}"));
    }
}

impl Registry {
    /// True where a snapshot that can't be attached is lost and its disk opened.
    fn gives_up_snapshots(&self) -> bool {
        self.lost_snapshots() == LostSnapshots::GiveUp && !self.is_starting.load(Ordering::Relaxed)
    }
}
