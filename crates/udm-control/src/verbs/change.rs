//! Creating, suspending and resuming devices.
//!
//! A replaced table or a removed device is closed on a thread of its own, because closing files can
//! take long: neither a core nor the control thread waits for it. The verb waits, so the files are
//! closed when the verb returns.

use super::cancel::{CancelToken, VerbKind};
use super::device_locks::{DeviceLocks, TRIES_MAX};
use super::snapshot::{AttachTransaction, attach_by_name};
use super::{show, tables};
use crate::api;
use crate::error::VerbError;
use crate::registry::{BaseDir, RegisteredDevice, Registry, RequestQueueParams};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tokio::sync::{Notify, oneshot};
use udm_core::errno::{EBUSY, EINTR, ENXIO};
use udm_dm::{DeviceSetTransition, EventKind, IndexedTargetError, MappedDevice, Table, TargetError, WakeFn};

/// Creates a device. A `table` is loaded and resumed; if that fails, the device is removed again,
/// as with dmsetup. Relative paths in the table are relative to the working directory of the
/// process. Building the table may block when it opens devices.
///
/// # Errors
/// EINVAL for a bad name, EBUSY for a name in use, otherwise the table's error.
pub async fn create(
    registry: &Arc<Registry>,
    name: &str,
    uuid: Option<&str>,
    table: Option<&str>,
) -> Result<(), VerbError> {
    create_cancellable(registry, name, uuid, table, &BaseDir::own(), &CancelToken::default()).await.map(drop)
}

/// As [`create`], with relative paths based on `folder` and a cancel token. Returns the device as
/// it was when it was complete. The verb can be cancelled while it waits for other devices or for a
/// store.
///
/// # Errors
/// As [`create`], and the error of the cancel token.
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

/// Name and properties of a device to be created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceSpec<'a> {
    /// Device name.
    pub name: &'a str,
    /// UUID, if any.
    pub uuid: Option<&'a str>,
    /// Minor number; `None` takes the lowest free one.
    pub minor: Option<u32>,
    /// If true, clients may not write.
    pub read_only: bool,
    /// Parameters of the device's own queue, if it is request-based.
    pub requests: RequestQueueParams,
}

/// As [`create_cancellable`], with a table that the closure `table` returns. The closure gets the
/// device, which exists but has no table yet.
///
/// # Errors
/// As [`create_cancellable`], and the error of `table`; ENXIO if the minor number is in use, EINVAL
/// if it exceeds the kernel's maximum.
pub async fn create_with(
    registry: &Arc<Registry>,
    called: DeviceSpec<'_>,
    table: impl FnOnce(&Arc<RegisteredDevice>) -> Result<Option<String>, VerbError>,
    folder: &BaseDir,
    cancel_token: &CancelToken,
) -> Result<api::Device, VerbError> {
    create_device(registry, called, table, folder, cancel_token).await.map(|made| made.is)
}

/// Result of creating a device.
pub(crate) struct CreatedDevice {
    /// The device; other verbs may have changed it since.
    pub mapped: Arc<RegisteredDevice>,
    /// The table that it was created with.
    pub table: Option<Arc<Table>>,
    is: api::Device,
}

/// As [`create_with`], but returns the device itself.
pub(crate) async fn create_device(
    registry: &Arc<Registry>,
    called: DeviceSpec<'_>,
    table: impl FnOnce(&Arc<RegisteredDevice>) -> Result<Option<String>, VerbError>,
    folder: &BaseDir,
    cancel_token: &CancelToken,
) -> Result<CreatedDevice, VerbError> {
    let DeviceSpec { name, uuid, minor, read_only, requests } = called;
    let made = registry.begin_create(name, uuid, minor).map_err(|e| VerbError::new(name, e))?;
    made.mapped.read_only.store(read_only, Ordering::Relaxed);
    if let Some(by) = registry.queue_by(requests) {
        made.mapped.device.set_queue_factory(by);
    }
    let one = [(name.to_owned(), Arc::clone(&made.mapped))];
    if let Some(table) = table(&made.mapped)? {
        tables::load_into(registry, &made.mapped, name, &table, folder, cancel_token)?;
        run_locked(registry, &one, VerbKind::Create, cancel_token, resume_filtered).await?;
    }
    if let Err(error) = export_device(registry, &made.mapped) {
        let _ = run_locked(registry, &one, VerbKind::Remove, cancel_token, remove_filtered).await;
        return Err(error);
    }
    // Described first: others may rename or remove the device as soon as it is complete.
    let is = show::describe(registry, &made.mapped);
    let (mapped, table) = (Arc::clone(&made.mapped), made.mapped.device.live());
    made.complete();
    Ok(CreatedDevice { mapped, table, is })
}

/// Exports the device to clients, if there is an exporter.
pub(super) fn export_device(registry: &Registry, mapped: &RegisteredDevice) -> Result<(), VerbError> {
    let Some(exporter) = registry.exporter() else { return Ok(()) };
    let name = mapped.device.name();
    let put = exporter.put(&name, mapped);
    put.map_err(|e| VerbError::new(name, TargetError::new(e.to_string())))
}

/// Holds back new requests and waits for those in flight. With `noflush`, targets hand back the
/// requests that they hold. Either all of the devices are suspended or none: at one instant none of
/// them has a request in flight. A suspended device stays suspended.
///
/// # Errors
/// ENXIO if there is no such device, EINTR if a resume or a removal cancels the suspend, otherwise
/// a device's error.
pub async fn suspend(registry: &Arc<Registry>, names: &[&str], noflush: bool) -> Result<(), VerbError> {
    suspend_cancellable(registry, names, noflush, &CancelToken::default()).await
}

/// As [`suspend`], with a cancel token.
///
/// # Errors
/// As [`suspend`], and the error of the cancel token; the devices are active then.
pub async fn suspend_cancellable(
    registry: &Arc<Registry>,
    names: &[&str],
    noflush: bool,
    cancel_token: &CancelToken,
) -> Result<(), VerbError> {
    suspend_devices(registry, &find_all(registry, names)?, noflush, cancel_token).await
}

/// As [`suspend_cancellable`], for devices already looked up. Each comes with the name to use in
/// errors.
pub(super) async fn suspend_devices(
    registry: &Registry,
    several: &[(String, Arc<RegisteredDevice>)],
    noflush: bool,
    cancel_token: &CancelToken,
) -> Result<(), VerbError> {
    run_locked(registry, several, VerbKind::Suspend, cancel_token, |devices, _, wake| {
        DeviceSetTransition::suspend(devices, noflush, wake)
    })
    .await
}

/// Makes the loaded table live, if there is one, and lets requests continue. Either all of the
/// devices take their new tables or none, at an instant when none has a request in flight. A
/// pending suspend is cancelled.
///
/// # Errors
/// ENXIO if there is no such device; the table's error if the cores can't use it. In that case the
/// old tables stay live and run.
pub async fn resume(registry: &Arc<Registry>, names: &[&str]) -> Result<(), VerbError> {
    resume_cancellable(registry, names, &CancelToken::default()).await
}

/// As [`resume`], with a cancel token.
///
/// # Errors
/// As [`resume`], and the error of the cancel token; the old tables stay live and run then.
pub async fn resume_cancellable(
    registry: &Arc<Registry>,
    names: &[&str],
    cancel_token: &CancelToken,
) -> Result<(), VerbError> {
    resume_devices(registry, &find_all(registry, names)?, cancel_token).await
}

/// As [`resume_cancellable`], for devices already looked up. Each comes with the name to use in
/// errors.
pub(crate) async fn resume_devices(
    registry: &Registry,
    several: &[(String, Arc<RegisteredDevice>)],
    cancel_token: &CancelToken,
) -> Result<(), VerbError> {
    for (_, mapped) in several {
        mapped.pending.cancel(VerbKind::Suspend, "cancelled by a resume");
    }
    run_locked(registry, several, VerbKind::Resume, cancel_token, resume_filtered).await
}

/// Loads a table into an active device whose inactive slot is empty, and makes it live: both or
/// neither. If another verb suspends the device or changes the slot meanwhile, the reload fails.
/// Returns the live table.
pub(crate) async fn reload(
    registry: &Registry,
    mapped: &Arc<RegisteredDevice>,
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
        // Another verb has made the table live.
        Err(_) if is_live() => Ok(loaded),
        Err(error) => {
            mapped.device.clear_own(&loaded);
            Err(error)
        }
        Ok(()) => Ok(loaded),
    }
}

fn busy(why: &str) -> TargetError {
    TargetError::errno(EBUSY).because(why)
}

/// Looks up the devices of `names`.
fn find_all(registry: &Registry, names: &[&str]) -> Result<Vec<(String, Arc<RegisteredDevice>)>, VerbError> {
    names.iter().map(|name| Ok(((*name).to_owned(), registry.find(name)?))).collect()
}

/// Cancels all pending verbs; called at shutdown.
pub fn cancel_all(registry: &Registry) {
    registry.config().inspect(|config| config.end());
    for mapped in registry.all_with_pending() {
        for who in [VerbKind::Create, VerbKind::Suspend, VerbKind::Resume, VerbKind::Remove] {
            mapped.pending.cancel(who, "the server ends");
        }
    }
}

/// [`DeviceSetTransition::resume_filtered`] for the locked devices.
pub(super) fn resume_filtered(
    devices: &[Arc<MappedDevice>],
    turns: &DeviceLocks<'_>,
    wake: &WakeFn,
) -> Result<DeviceSetTransition, IndexedTargetError> {
    DeviceSetTransition::resume_filtered(devices, true, wake, |device| turns.has(device))
}

/// A table that a verb has loaded and will make live.
pub(super) struct LoadedTable<'a> {
    /// Index of its device in the list of devices to change.
    pub place: usize,
    /// The device.
    pub mapped: &'a RegisteredDevice,
    /// The loaded table.
    pub table: &'a Arc<Table>,
}

impl LoadedTable<'_> {
    /// Fails if another verb has suspended the device or changed its inactive slot.
    fn is_as_it_was(&self) -> Result<(), TargetError> {
        let device = &self.mapped.device;
        let is_own = |table: Option<Arc<Table>>| table.is_some_and(|table| Arc::ptr_eq(&table, self.table));
        if device.is_suspended() {
            return Err(busy("it is suspended: resume it first"));
        }
        // Another verb may have resumed the device, so the table may be live already.
        match is_own(device.inactive().or_else(|| device.live())) {
            true => Ok(()),
            false => Err(busy("somebody else has loaded or cleared a table meanwhile")),
        }
    }
}

/// As [`resume_filtered`], if all `loaded` tables are still in their slots. The caller holds the
/// registry's `linking` lock, so that nothing is loaded meanwhile.
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

/// [`DeviceSetTransition::remove_filtered`] for the locked devices.
pub(super) fn remove_filtered(
    devices: &[Arc<MappedDevice>],
    turns: &DeviceLocks<'_>,
    wake: &WakeFn,
) -> Result<DeviceSetTransition, IndexedTargetError> {
    DeviceSetTransition::remove_filtered(devices, wake, |device| turns.has(device))
}

/// Runs a change with its devices and their partners locked, so that changes of one device run one
/// after the other. Retries if the partners or the loaded tables change before the locks are taken.
pub(super) async fn run_locked(
    registry: &Registry,
    several: &[(String, Arc<RegisteredDevice>)],
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
        // `Notify` stores a wake-up that arrives before the wait, so none is lost between a step
        // and its wait.
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
        if !attaching.is_unchanged(&devices) {
            // Another table was loaded meanwhile.
            drop(changes);
            attaching.undo().await;
            continue;
        }
        let check = attaching.check_at_rest();
        if check.is_some() {
            changes.pause_when_quiesced();
        }
        let done =
            drive_change(registry, &turns.cancel_token(cancel_token), &answered, &mut changes, check).await;
        let must_retry = changes.must_retry();
        if done.is_ok() && !must_retry {
            attaching.commit(several).await;
            registry.merges.go_on(&merges);
            // Events are sent before the locks are released.
            let moved = several.iter().zip(moves).filter(|(_, moves)| *moves).map(|((_, mapped), _)| mapped);
            moved.for_each(|mapped| publish_change(registry, mapped, who));
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

/// True if this suspend or resume changes the device. Create and remove report their own events.
fn changes_device(mapped: &RegisteredDevice, who: VerbKind) -> bool {
    let info = mapped.device.info();
    match who {
        VerbKind::Suspend => !info.suspended,
        VerbKind::Resume => info.suspended || info.inactive,
        VerbKind::Create | VerbKind::Remove => false,
    }
}

/// Sends the event of a completed suspend or resume.
fn publish_change(registry: &Registry, mapped: &Arc<RegisteredDevice>, who: VerbKind) {
    let (kind, line) = match who {
        VerbKind::Suspend => (EventKind::Suspended, "suspended"),
        VerbKind::Resume => (EventKind::Resumed, "resumed"),
        VerbKind::Create | VerbKind::Remove => return,
    };
    if !registry.is_being_created(mapped) {
        mapped.publish(kind, line);
    }
}

/// Steps a change each time the cores answer, until it ends or is cancelled. If the change is
/// paused, it continues with the result of `check`.
async fn drive_change(
    registry: &Registry,
    cancel_token: &CancelToken,
    answered: &Notify,
    changes: &mut DeviceSetTransition,
    check: Option<impl Future<Output = Result<(), IndexedTargetError>>>,
) -> Result<(), IndexedTargetError> {
    let mut cancelled = None;
    let mut check = std::pin::pin!(check);
    loop {
        if let Some(done) = changes.step(registry.cores()) {
            // The change may be done, or have failed for another reason; only EINTR is replaced by
            // the reason of the cancellation.
            let interrupted = |(_, e): &IndexedTargetError| e.errno == EINTR;
            let why = cancelled.filter(|_| done.as_ref().is_err_and(interrupted));
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
            checked = checked => changes.continue_after_pause(checked, registry.cores()),
            why = cancel_token.cancelled(), if cancelled.is_none() => {
                changes.cancel(registry.cores());
                cancelled = Some(why);
            }
        }
    }
}

/// Drops `what` on a thread of its own and waits for that, until cancelled.
pub(super) async fn drop_on_thread<T: Send + 'static>(
    registry: &Registry,
    what: T,
    cancel_token: &CancelToken,
) {
    let (gone, wait) = oneshot::channel();
    registry.opener().spawn_blocking(Box::new(move || {
        drop(what);
        let _ = gone.send(());
    }));
    // If no thread can be started, the closure is dropped here, and `wait` completes at once.
    tokio::select! {
        biased;
        _ = wait => {}
        _ = cancel_token.cancelled() => {}
    }
}
