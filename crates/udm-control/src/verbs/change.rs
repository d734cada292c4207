//! Making, suspending and resuming devices.
//!
//! What is let go, a table that was replaced or the device itself, is closed on a thread of its
//! own: closing files can take long, and neither a core nor the control thread waits for it. The
//! verb does, so that what it closed is closed when it is done.

use super::cancel::{CancelToken, VerbKind};
use super::device_locks::{DeviceLocks, TRIES_MAX};
use super::snapshot::{AttachTransaction, attach_by_name};
use super::{show, tables};
use crate::error::VerbError;
use crate::http::api;
use crate::registry::{BaseDir, Mapped, Registry, RequestQueueParams};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tokio::sync::{Notify, oneshot};
use udm_core::bugs::{self, Bug};
use udm_core::errno::{EBUSY, EINTR, ENXIO};
use udm_dm::{DeviceSetTransition, EventKind, IndexedTargetError, MappedDevice, Table, TargetError, WakeFn};

/// Makes a device. With a table it is loaded and resumed, and when that fails the device is gone
/// again, as with dmsetup; without one it has none. Relative paths in the table count from our own
/// folder; building it may block on what it opens.
///
/// # Errors
/// EINVAL for a bad name, EBUSY for one that is taken, the table's own otherwise.
pub async fn create(
    registry: &Arc<Registry>,
    name: &str,
    uuid: Option<&str>,
    table: Option<&str>,
) -> Result<(), VerbError> {
    create_cancellable(registry, name, uuid, table, &BaseDir::own(), &CancelToken::default()).await.map(drop)
}

/// As [`create`], with paths from another folder; what it has made, as it was then. Where it waits
/// for other devices or for a store, until it is called off.
///
/// # Errors
/// As [`create`]'s, and what it was called off with.
pub async fn create_cancellable(
    registry: &Arc<Registry>,
    name: &str,
    uuid: Option<&str>,
    table: Option<&str>,
    folder: &BaseDir,
    cancel_token: &CancelToken,
) -> Result<api::Device, VerbError> {
    let called = DeviceSpec { name, uuid, ..DeviceSpec::default() };
    create_with(registry, called, |_| Ok(table.map(String::from)), folder, cancel_token).await
}

/// What a device that is to be made is called.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceSpec<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its uuid, if it has one.
    pub uuid: Option<&'a str>,
    /// Its minor number; without one it is the lowest that is free.
    pub minor: Option<u32>,
    /// Clients may not write.
    pub read_only: bool,
    /// Its queue, where it is request-based.
    pub requests: RequestQueueParams,
}

/// As [`create_cancellable`], with the table that `table` says of the device, which is there already and
/// has none.
///
/// # Errors
/// As [`create_cancellable`]'s, and `table`'s; ENXIO for a number that is taken, EINVAL for one that is
/// beyond the kernel's.
pub async fn create_with(
    registry: &Arc<Registry>,
    called: DeviceSpec<'_>,
    table: impl FnOnce(&Arc<Mapped>) -> Result<Option<String>, VerbError>,
    folder: &BaseDir,
    cancel_token: &CancelToken,
) -> Result<api::Device, VerbError> {
    make(registry, called, table, folder, cancel_token).await.map(|made| made.is)
}

/// A device that was made.
pub(crate) struct CreatedDevice {
    /// The device, which others may have changed since.
    pub mapped: Arc<Mapped>,
    /// The table that it was given.
    pub table: Option<Arc<Table>>,
    is: api::Device,
}

/// As [`create_with`].
pub(crate) async fn make(
    registry: &Arc<Registry>,
    called: DeviceSpec<'_>,
    table: impl FnOnce(&Arc<Mapped>) -> Result<Option<String>, VerbError>,
    folder: &BaseDir,
    cancel_token: &CancelToken,
) -> Result<CreatedDevice, VerbError> {
    let DeviceSpec { name, uuid, minor, read_only, requests } = called;
    let made = registry.make(name, uuid, minor).map_err(|e| VerbError::new(name, e))?;
    made.mapped.read_only.store(read_only, Ordering::Relaxed);
    if let Some(by) = registry.queue_by(requests) {
        made.mapped.device.set_queue_factory(by);
    }
    let one = [(name.to_owned(), Arc::clone(&made.mapped))];
    let table = match table(&made.mapped) {
        Err(error) if bugs::on(Bug::RefusedPathKept) => {
            let _ = std::mem::ManuallyDrop::new(made);
            return Err(error);
        }
        table => table?,
    };
    if let Some(table) = table {
        tables::load_into(registry, &made.mapped, name, &table, folder, cancel_token)?;
        run_locked(registry, &one, VerbKind::Create, cancel_token, resume_filtered).await?;
    }
    if let Err(error) = export(registry, &made.mapped) {
        let _ = run_locked(registry, &one, VerbKind::Remove, cancel_token, remove_filtered).await;
        return Err(error);
    }
    // Somebody may rename or remove it as soon as it is complete.
    let is = show::describe(registry, &made.mapped);
    let (mapped, table) = (Arc::clone(&made.mapped), made.mapped.device.live());
    made.complete();
    Ok(CreatedDevice { mapped, table, is })
}

/// Puts it on the list of what clients find, when there is one.
pub(super) fn export(registry: &Registry, mapped: &Mapped) -> Result<(), VerbError> {
    let Some(exporter) = registry.exporter() else { return Ok(()) };
    let name = mapped.device.name();
    let put = exporter.put(&name, mapped);
    put.map_err(|e| VerbError::new(name, TargetError::new(e.to_string())))
}

/// Parks new requests and waits until those in flight are done; with `noflush`, until targets have
/// handed back what they hold. Of several devices all are suspended or none: there is an instant at
/// which none of them has a request in flight. A device that is suspended already stays so.
///
/// # Errors
/// ENXIO when there is no such device, EINTR when a resume or a removal came meanwhile, a device's
/// own otherwise.
pub async fn suspend(registry: &Arc<Registry>, names: &[&str], noflush: bool) -> Result<(), VerbError> {
    suspend_cancellable(registry, names, noflush, &CancelToken::default()).await
}

/// As [`suspend`], until it is called off.
///
/// # Errors
/// As [`suspend`]'s, and what it was called off with: the devices are active then.
pub async fn suspend_cancellable(
    registry: &Arc<Registry>,
    names: &[&str],
    noflush: bool,
    cancel_token: &CancelToken,
) -> Result<(), VerbError> {
    suspend_devices(registry, &find(registry, names)?, noflush, cancel_token).await
}

/// As [`suspend_cancellable`], of devices that were found before, each with what it is called in errors.
pub(super) async fn suspend_devices(
    registry: &Registry,
    several: &[(String, Arc<Mapped>)],
    noflush: bool,
    cancel_token: &CancelToken,
) -> Result<(), VerbError> {
    run_locked(registry, several, VerbKind::Suspend, cancel_token, |devices, _, wake| {
        DeviceSetTransition::suspend(devices, noflush, wake)
    })
    .await
}

/// Swaps the loaded table in, where there is one, and lets requests go. Of several devices all take
/// their new tables or none, while none has a request in flight. A suspend that still waits is
/// called off.
///
/// # Errors
/// ENXIO when there is no such device; a table's own when the cores can't use it: the old ones are
/// live and running then.
pub async fn resume(registry: &Arc<Registry>, names: &[&str]) -> Result<(), VerbError> {
    resume_cancellable(registry, names, &CancelToken::default()).await
}

/// As [`resume`], until it is called off.
///
/// # Errors
/// As [`resume`]'s, and what it was called off with: the tables that were live are live and running
/// then.
pub async fn resume_cancellable(
    registry: &Arc<Registry>,
    names: &[&str],
    cancel_token: &CancelToken,
) -> Result<(), VerbError> {
    resume_devices(registry, &find(registry, names)?, cancel_token).await
}

/// As [`resume_cancellable`], of devices that were found before, each with what it is called in errors.
pub(crate) async fn resume_devices(
    registry: &Registry,
    several: &[(String, Arc<Mapped>)],
    cancel_token: &CancelToken,
) -> Result<(), VerbError> {
    for (_, mapped) in several {
        mapped.pending.cancel(VerbKind::Suspend, "called off by a resume");
    }
    run_locked(registry, several, VerbKind::Resume, cancel_token, resume_filtered).await
}

/// Gives a device that is active, and whose inactive slot is empty, another table: all of that, or
/// nothing. What others do to it meanwhile is left to them; the table, which is live then.
pub(crate) async fn reload(
    registry: &Registry,
    mapped: &Arc<Mapped>,
    name: &str,
    text: &str,
    folder: &BaseDir,
    cancel_token: &CancelToken,
) -> Result<Arc<Table>, VerbError> {
    let is_free = || {
        let info = mapped.device.info();
        if !registry.is_active(mapped) {
            return Err(TargetError::errno(ENXIO).because("it has been removed meanwhile"));
        }
        if info.suspended {
            return Err(busy("it is suspended: resume it first"));
        }
        if info.inactive {
            return Err(busy("a table waits in its inactive slot: resume or clear it first"));
        }
        Ok(())
    };
    is_free().map_err(|e| VerbError::new(name, e))?;
    let loaded = tables::load_if(registry, mapped, name, text, folder, cancel_token, |_| is_free())?;
    let one = [(name.to_owned(), Arc::clone(mapped))];
    let ours = [LoadedTable { place: 0, mapped, table: &loaded }];
    let done = run_locked(registry, &one, VerbKind::Resume, cancel_token, |devices, turns, wake| {
        let _linked = registry.linking();
        begin_resume_loaded(&ours, devices, turns, wake)
    })
    .await;
    let is_live = || mapped.device.live().is_some_and(|live| Arc::ptr_eq(&live, &loaded));
    match done {
        // Somebody else has put it to use.
        Err(_) if is_live() => Ok(loaded),
        Err(error) => {
            if !bugs::on(Bug::RefusedTableKept) {
                mapped.device.clear_own(&loaded);
            }
            Err(error)
        }
        Ok(()) => Ok(loaded),
    }
}

fn busy(why: &str) -> TargetError {
    TargetError::errno(EBUSY).because(why)
}

/// The devices of `names`.
fn find(registry: &Registry, names: &[&str]) -> Result<Vec<(String, Arc<Mapped>)>, VerbError> {
    names.iter().map(|name| Ok(((*name).to_owned(), registry.find(name)?))).collect()
}

/// Calls off every verb that waits: the server ends.
pub fn cancel_all(registry: &Registry) {
    registry.config().inspect(|config| config.end());
    for mapped in registry.all_with_pending() {
        for who in [VerbKind::Create, VerbKind::Suspend, VerbKind::Resume, VerbKind::Remove] {
            mapped.pending.cancel(who, "the server ends");
        }
    }
}

/// [`DeviceSetTransition::resume`] of devices whose turn it is.
pub(super) fn resume_filtered(
    devices: &[Arc<MappedDevice>],
    turns: &DeviceLocks<'_>,
    wake: &WakeFn,
) -> Result<DeviceSetTransition, IndexedTargetError> {
    DeviceSetTransition::resume_filtered(devices, true, wake, |device| turns.has(device))
}

/// A table that a verb has loaded, and is about to make live.
pub(super) struct LoadedTable<'a> {
    /// The place of its device among those of the change.
    pub place: usize,
    /// The device.
    pub mapped: &'a Mapped,
    /// The table.
    pub table: &'a Arc<Table>,
}

impl LoadedTable<'_> {
    /// Checks that nobody has suspended the device meanwhile, or put another table into its slot.
    fn is_as_it_was(&self) -> Result<(), TargetError> {
        let device = &self.mapped.device;
        let is_own = |table: Option<Arc<Table>>| table.is_some_and(|table| Arc::ptr_eq(&table, self.table));
        if device.is_suspended() {
            return Err(busy("it is suspended: resume it first"));
        }
        // Somebody else may have resumed it.
        match is_own(device.inactive().or_else(|| device.live())) {
            true => Ok(()),
            false => Err(busy("somebody else has loaded or cleared a table meanwhile")),
        }
    }
}

/// As [`resume_filtered`], if all that the verb has `loaded` is still there. To be called with the
/// registry's `linking` lock held, so that nobody loads meanwhile.
pub(super) fn begin_resume_loaded(
    loaded: &[LoadedTable<'_>],
    devices: &[Arc<MappedDevice>],
    turns: &DeviceLocks<'_>,
    wake: &WakeFn,
) -> Result<DeviceSetTransition, IndexedTargetError> {
    for one in loaded {
        one.is_as_it_was().map_err(|why| (one.place, why))?;
    }
    resume_filtered(devices, turns, wake)
}

/// [`DeviceSetTransition::leave`] of devices whose turn it is.
pub(super) fn remove_filtered(
    devices: &[Arc<MappedDevice>],
    turns: &DeviceLocks<'_>,
    wake: &WakeFn,
) -> Result<DeviceSetTransition, IndexedTargetError> {
    DeviceSetTransition::remove_filtered(devices, wake, |device| turns.has(device))
}

/// A change of devices that others may change too: one after the other.
pub(super) async fn run_locked(
    registry: &Registry,
    several: &[(String, Arc<Mapped>)],
    who: VerbKind,
    cancel_token: &CancelToken,
    mut begin: impl FnMut(
        &[Arc<MappedDevice>],
        &DeviceLocks<'_>,
        &WakeFn,
    ) -> Result<DeviceSetTransition, IndexedTargetError>,
) -> Result<(), VerbError> {
    let mut entered: Vec<_> =
        several.iter().map(|(_, mapped)| mapped.pending.enter(who, cancel_token)).collect();
    let devices: Vec<_> = several.iter().map(|(_, mapped)| Arc::clone(&mapped.device)).collect();
    let blame = |(place, error): IndexedTargetError| VerbError::new(&several[place].0, error);
    let merges = attach_by_name(registry, several, who, cancel_token).await?;
    for _ in 0..TRIES_MAX {
        let turns = DeviceLocks::take(registry, several, who, cancel_token).await?;
        let attaching = AttachTransaction::begin(registry, several, who, cancel_token).await?;
        // A wake-up that comes before we wait for it is kept, so none is lost between a step and
        // its wait.
        let answered = Arc::new(Notify::new());
        let wake: WakeFn = {
            let answered = Arc::clone(&answered);
            Arc::new(move || answered.notify_one())
        };
        let moves: Vec<bool> = several.iter().map(|(_, mapped)| changes_device(mapped, who)).collect();
        let mut changes = match begin(&devices, &turns, &wake) {
            Ok(changes) => changes,
            Err(refused) => {
                attaching.undo().await;
                return Err(blame(refused));
            }
        };
        if !attaching.still_holds(&devices) {
            // Somebody has loaded another table meanwhile.
            drop(changes);
            attaching.undo().await;
            continue;
        }
        let check = attaching.check_at_rest();
        if check.is_some() {
            changes.pause_when_quiesced();
        }
        let done = step(registry, &turns.cancel_token(cancel_token), &answered, &mut changes, check).await;
        let must_retry = changes.must_retry();
        if done.is_ok() && !must_retry {
            attaching.settle(several).await;
            registry.merges.go_on(&merges);
            // Before anybody else has a turn.
            let moved = several.iter().zip(moves).filter(|(_, moves)| *moves).map(|((_, mapped), _)| mapped);
            moved.for_each(|mapped| tell(registry, mapped, who));
        } else {
            attaching.undo().await;
        }
        drop(turns);
        if !must_retry {
            entered.clear();
        }
        let tables = changes.take_released();
        if !tables.is_empty() {
            drop_on_thread(registry, tables, cancel_token).await;
        }
        if !must_retry {
            return done.map_err(blame);
        }
    }
    let error = TargetError::errno(EBUSY).because("others change what lies on the same disk all the time");
    Err(blame((0, error)))
}

/// True when a device is another behind a suspend or a resume. What comes or goes says so itself.
fn changes_device(mapped: &Mapped, who: VerbKind) -> bool {
    let info = mapped.device.info();
    match who {
        VerbKind::Suspend => !info.suspended,
        VerbKind::Resume => info.suspended || info.inactive,
        VerbKind::Create | VerbKind::Remove => false,
    }
}

/// Has who listens told of a change that is done.
fn tell(registry: &Registry, mapped: &Arc<Mapped>, who: VerbKind) {
    let (kind, line) = match who {
        VerbKind::Suspend => (EventKind::Suspended, "suspended"),
        VerbKind::Resume => (EventKind::Resumed, "resumed"),
        VerbKind::Create | VerbKind::Remove => return,
    };
    if !registry.is_being_created(mapped) {
        mapped.tell(kind, line);
    }
}

/// Takes the steps of a change, one whenever the cores have answered, until it is over or called
/// off. With a `check` it goes on from its pause if that says so.
async fn step(
    registry: &Registry,
    cancel_token: &CancelToken,
    answered: &Notify,
    changes: &mut DeviceSetTransition,
    check: Option<impl Future<Output = Result<(), IndexedTargetError>>>,
) -> Result<(), IndexedTargetError> {
    let mut called = None;
    let mut check = std::pin::pin!(check);
    loop {
        if let Some(done) = changes.step(registry.cores()) {
            // Too late, it is done; or it failed for a reason of its own.
            let interrupted = |(_, e): &IndexedTargetError| e.errno == EINTR;
            let why = called.filter(|_| done.as_ref().is_err_and(interrupted));
            return why.map_or(done, |why| Err((0, why)));
        }
        let checked = async {
            match check.as_mut().as_pin_mut().filter(|_| changes.is_paused()) {
                Some(check) => check.await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = answered.notified() => {}
            checked = checked => changes.go_on(checked, registry.cores()),
            why = cancel_token.called(), if called.is_none() => {
                changes.cancel(registry.cores());
                called = Some(why);
            }
        }
    }
}

/// Drops `what` on a thread of its own and waits for that, until called off.
pub(super) async fn drop_on_thread<T: Send + 'static>(
    registry: &Registry,
    what: T,
    cancel_token: &CancelToken,
) {
    let (gone, wait) = oneshot::channel();
    registry.outside().beside(Box::new(move || {
        drop(what);
        let _ = gone.send(());
    }));
    if bugs::on(Bug::LetGoUnwaited) {
        return;
    }
    // Without a thread to be had it is dropped by now, and so is `gone`.
    tokio::select! {
        biased;
        _ = wait => {}
        _ = cancel_token.called() => {}
    }
}
