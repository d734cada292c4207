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

use super::recording::{Recorded, Recording, Refused, stale};
use super::tables::{is_live, persistent, record, writers};
use crate::error::VerbError;
use crate::registry::{Mapped, Registry};
use crate::state_folder::records::SnapshotRecord;
use crate::state_folder::{StateFolder, StoreId};
use crate::verbs::call_off::{CallOff, Waiting};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tokio::sync::{OwnedMutexGuard, oneshot};
use udm_core::bugs::{self, Bug};
use udm_core::errno::{EBUSY, EIO};
use udm_dm::{MappedDevice, SnapshotReport, SnapshotState, Table, TargetError};

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
    /// The stores of the snapshots that become live, and are valid.
    valid: Vec<StoreId>,
    /// Whoever writes their origins waits until it is over.
    _coming: ComingGuard,
    /// Nobody else changes what is recorded of their snapshots.
    _stores: Vec<OwnedMutexGuard<()>>,
}

/// Snapshots that are recorded as attached and become live. Dropped when that is over.
#[derive(Default)]
struct ComingGuard {
    folder: Option<Arc<StateFolder>>,
    names: Vec<String>,
}

impl Drop for ComingGuard {
    fn drop(&mut self) {
        self.folder.iter().for_each(|folder| folder.came(&self.names));
    }
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
        let is_valid = |report: &SnapshotReport| report.state != SnapshotState::Invalid;
        let valid = stores(registry, &tables, is_valid);
        let recorded = Recorded::default();
        let mut attaching = Attaching {
            registry,
            tables,
            recorded,
            who,
            valid,
            _coming: ComingGuard::default(),
            _stores: Vec::new(),
        };
        let is_change = who == Waiting::Remove || attaching.tables.iter().any(Option::is_some);
        if registry.state_folder().is_none() || !is_change || registry.is_ending() {
            return Ok(attaching);
        }
        let name = several[0].0.as_str();
        attaching._stores = tokio::select! {
            biased;
            locked = attaching.lock_stores(several) => locked,
            why = off.called() => return Err(VerbError::new(name, why)),
        };
        let mut recording = Recording {
            writers: writers(registry, &attaching.tables),
            gives_up: registry.gives_up_snapshots(),
            is_removal: who == Waiting::Remove,
            warns: !registry.is_starting.load(Ordering::Relaxed),
            names: several.iter().map(|(name, _)| name.clone()).collect(),
            ..Recording::default()
        };
        for ((_, mapped), table) in several.iter().zip(&attaching.tables) {
            let found = table.iter().flat_map(|table| persistent(table));
            if !bugs::on(Bug::SnapshotNotRecorded) {
                recording
                    .coming
                    .extend(found.filter_map(|(report, len)| record(registry, mapped, &report, len)));
            }
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
        let done = with_folder(
            registry,
            name,
            off,
            |folder| recording.record(folder),
            |folder, done| {
                done.unwrap_or_default().undo(folder, &[]);
            },
        );
        match done.await?.unwrap_or_else(|| Ok(Recorded::default())) {
            Ok(recorded) => {
                attaching._coming =
                    ComingGuard { folder: registry.state_folder().cloned(), names: recorded.names() };
                attaching.recorded = recorded;
            }
            Err((place, error)) => {
                return Err(VerbError { blocked: true, ..VerbError::new(&several[place].0, error) });
            }
        }
        Ok(attaching)
    }

    /// Locks the stores of all snapshots that `several` have, or are to have.
    async fn lock_stores(&self, several: &[(String, Arc<Mapped>)]) -> Vec<OwnedMutexGuard<()>> {
        let live = several.iter().map(|(_, mapped)| mapped.device.live());
        let all: Vec<_> = self.tables.iter().cloned().chain(live).collect();
        let stores = stores(self.registry, &all, |_| true);
        self.registry.store_locks.lock(&stores).await
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

    /// Looks once more at the origins of snapshots that were released and become live in the
    /// change, for when these stand still: until then they were written without them. `None` when
    /// there are none.
    pub fn check_at_rest(&self) -> Option<impl Future<Output = Result<(), Refused>> + use<'a>> {
        let released = self.recorded.were_released();
        if released.is_empty() {
            return None;
        }
        let (tell, told) = oneshot::channel();
        let outside = self.registry.outside();
        Some(async move {
            outside.beside(Box::new(move || {
                let _ = tell.send(released.iter().find_map(stale));
            }));
            match told.await {
                Ok(None) => Ok(()),
                Ok(Some(why)) => Err((0, why)),
                Err(_) => Err((0, TargetError::errno(EBUSY).because("no thread is free"))),
            }
        })
    }

    /// The change has not come about: what was recorded is as it was.
    pub async fn undo(self) {
        let (recorded, _guard) = (self.recorded, self._coming);
        if !recorded.is_empty() {
            let writers = writers(self.registry, &in_use(&self.registry.everything()));
            let undo = move |folder: &Arc<StateFolder>| {
                recorded.undo(folder, &writers);
                Ok(())
            };
            let _ = with_folder(self.registry, "", &CallOff::default(), undo, |_, ()| {}).await;
        }
    }

    /// The change of `several` has come about.
    pub async fn settle(self, several: &[(String, Arc<Mapped>)]) {
        // A handover whose source had gone is called off as it becomes live.
        let is_invalid = |report: &SnapshotReport| report.state == SnapshotState::Invalid;
        let called_off = stores(self.registry, &self.tables, is_invalid);
        let called_off: Vec<StoreId> =
            called_off.into_iter().filter(|store| self.valid.iter().any(|valid| valid.is(store))).collect();
        if !self.recorded.has_left() && called_off.is_empty() {
            return;
        }
        let is_gone = |mapped: &Arc<Mapped>| {
            self.who == Waiting::Remove && several.iter().any(|(_, one)| Arc::ptr_eq(one, mapped))
        };
        let tables = in_use(self.registry.everything().iter().filter(|mapped| !is_gone(mapped)));
        let (writers, mut recorded, _guard) = (writers(self.registry, &tables), self.recorded, self._coming);
        let settle = move |folder: &Arc<StateFolder>| {
            recorded.call_off(folder, &called_off, &writers);
            recorded.settle(folder, &writers)
        };
        let off = CallOff::default();
        let done = with_folder(self.registry, "", &off, settle, |_, ()| {});
        done.await.err().inspect(|error| tracing::error!("{error}"));
    }
}

/// The tables of devices that are live, or are about to be.
fn in_use<'a>(devices: impl IntoIterator<Item = &'a Arc<Mapped>>) -> Vec<Option<Arc<Table>>> {
    let of = |mapped: &Arc<Mapped>| {
        let coming = mapped.device.inactive().filter(|_| mapped.pending.is_coming());
        [mapped.device.live(), coming]
    };
    devices.into_iter().flat_map(of).collect()
}

/// The stores of the persistent snapshots in `tables` that are `wanted`.
fn stores(
    registry: &Registry,
    tables: &[Option<Arc<Table>>],
    wanted: impl Fn(&SnapshotReport) -> bool,
) -> Vec<StoreId> {
    let all = tables.iter().flatten().flat_map(|table| persistent(table)).map(|(report, _)| report);
    all.filter(wanted).filter_map(|report| registry.disk_seen(report.store.number)).collect()
}

impl Registry {
    /// True where a snapshot that can't be attached is lost and its disk opened.
    fn gives_up_snapshots(&self) -> bool {
        self.lost_snapshots() == LostSnapshots::GiveUp && !self.is_starting.load(Ordering::Relaxed)
    }
}
