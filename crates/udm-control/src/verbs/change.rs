//! Creating, suspending and resuming devices.
//!
//! A replaced table or a removed device is closed on a thread of its own, because closing files can
//! take long: neither a core nor the control thread waits for it. The verb waits, so the files are
//! closed when the verb returns.

use super::begin_transition::{begin_removal_transition, begin_resume_transition};
use super::cancel::{CancelToken, CancellableVerbKind};
use super::clone::record::follow_live_table;
use super::device_locks::{DeviceChangeLocks, TRIES_MAX};
use super::moves::{continue_move, load_first_table};
use super::show;
use super::snapshot::{SnapshotRecordTransaction, attach_recorded_snapshots};
use super::throttle::apply_throttle_settings;
use crate::api;
use crate::error::VerbError;
use crate::registry::{BaseDir, DeviceRegistry, RegisteredDevice, RequestQueueParams};
use crate::throttle_settings::ThrottleSettings;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tokio::sync::{Notify, oneshot};
use udm_core::Device;
use udm_core::errno::{EBUSY, EINTR};
use udm_dm::{
    DeviceSetTransition, EventKind, IndexedDeviceError, MappedDevice, Table, TargetError, TransitionWakeFn,
};

/// Creates a device. A `table` is loaded and resumed; if that fails, the device is removed again,
/// as with dmsetup. Relative paths in the table are relative to the working directory of the
/// process. Building the table may block when it opens devices.
///
/// # Errors
/// EINVAL for a bad name, EBUSY for a name in use, otherwise the table's error.
pub async fn create_mapped_device(
    registry: &Arc<DeviceRegistry>,
    name: &str,
    uuid: Option<&str>,
    table: Option<&str>,
) -> Result<(), VerbError> {
    create_device_cancellable(registry, name, uuid, table, &BaseDir::own(), &CancelToken::default())
        .await
        .map(drop)
}

/// As [`create_mapped_device`], with relative paths based on `folder` and a cancel token. Returns
/// the device as it was when it was complete. The verb can be cancelled while it waits for other
/// devices or for a store.
///
/// # Errors
/// As [`create_mapped_device`], and the error of the cancel token.
pub async fn create_device_cancellable(
    registry: &Arc<DeviceRegistry>,
    name: &str,
    uuid: Option<&str>,
    table: Option<&str>,
    folder: &BaseDir,
    cancel_token: &CancelToken,
) -> Result<api::DeviceDescription, VerbError> {
    let called = DeviceSpec { name, uuid, ..DeviceSpec::default() };
    create_device_with_table_fn(registry, called, |_| Ok(table.map(String::from)), folder, cancel_token).await
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
    /// Names in the certificates of the NBD clients that may use it; `None` for all clients.
    pub allow: Option<&'a Arc<[String]>>,
    /// What NBD clients can show about it; empty for nothing.
    pub description: &'a str,
    /// Parameters of the device's own queue, if it is request-based.
    pub requests: RequestQueueParams,
    /// Its limits of requests and bytes per second.
    pub throttle: Option<&'a ThrottleSettings>,
}

/// As [`create_device_cancellable`], with a table that the closure `table` returns. The closure
/// gets the device, which exists but has no table yet.
///
/// # Errors
/// As [`create_device_cancellable`], and the error of `table`; ENXIO if the minor number is in use,
/// EINVAL if it exceeds the kernel's maximum.
pub async fn create_device_with_table_fn(
    registry: &Arc<DeviceRegistry>,
    called: DeviceSpec<'_>,
    table: impl FnOnce(&Arc<RegisteredDevice>) -> Result<Option<String>, VerbError>,
    folder: &BaseDir,
    cancel_token: &CancelToken,
) -> Result<api::DeviceDescription, VerbError> {
    create_device(registry, called, table, folder, cancel_token).await.map(|made| made.is)
}

/// Result of creating a device.
pub(crate) struct CreatedDevice {
    /// The device; other verbs may have changed it since.
    pub mapped: Arc<RegisteredDevice>,
    /// The table that it was created with.
    pub table: Option<Arc<Table>>,
    is: api::DeviceDescription,
}

/// As [`create_device_with_table_fn`], but returns the device itself.
pub(crate) async fn create_device(
    registry: &Arc<DeviceRegistry>,
    called: DeviceSpec<'_>,
    table: impl FnOnce(&Arc<RegisteredDevice>) -> Result<Option<String>, VerbError>,
    folder: &BaseDir,
    cancel_token: &CancelToken,
) -> Result<CreatedDevice, VerbError> {
    let DeviceSpec { name, uuid, minor, read_only, allow, description, requests, throttle } = called;
    let made = registry.begin_create(name, uuid, minor).map_err(|e| VerbError::new(name, e))?;
    made.mapped.read_only.store(read_only, Ordering::Relaxed);
    made.mapped.allowed_clients.set(allow.cloned());
    made.mapped.description.set(description);
    made.mapped.set_requests(requests);
    apply_throttle_settings(registry, &made.mapped, throttle)?;
    if let Some(by) = registry.queue_by(requests) {
        made.mapped.device.set_queue_factory(by);
    }
    let one = [(name.to_owned(), Arc::clone(&made.mapped))];
    if let Some(table) = table(&made.mapped)? {
        load_first_table(registry, &made.mapped, name, &table, folder, cancel_token)?;
        run_change_with_device_locks(
            registry,
            &one,
            CancellableVerbKind::Create,
            cancel_token,
            begin_resume_transition,
        )
        .await?;
    }
    if let Err(error) = export_device(registry, &made.mapped) {
        let _ = run_change_with_device_locks(
            registry,
            &one,
            CancellableVerbKind::Remove,
            cancel_token,
            begin_removal_transition,
        )
        .await;
        return Err(error);
    }
    // Described first: others may rename or remove the device as soon as it is complete.
    let is = show::describe_mapped_device(registry, &made.mapped);
    let (mapped, table) = (Arc::clone(&made.mapped), made.mapped.device.live());
    made.complete();
    continue_move(registry, &mapped);
    Ok(CreatedDevice { mapped, table, is })
}

/// Exports the device to clients, if there is an exporter.
pub(super) fn export_device(registry: &DeviceRegistry, mapped: &RegisteredDevice) -> Result<(), VerbError> {
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
pub async fn suspend_mapped_devices(
    registry: &Arc<DeviceRegistry>,
    names: &[&str],
    noflush: bool,
) -> Result<(), VerbError> {
    suspend_devices_cancellable(registry, names, noflush, &CancelToken::default()).await
}

/// As [`suspend_mapped_devices`], with a cancel token.
///
/// # Errors
/// As [`suspend_mapped_devices`], and the error of the cancel token; the devices are active then.
pub async fn suspend_devices_cancellable(
    registry: &Arc<DeviceRegistry>,
    names: &[&str],
    noflush: bool,
    cancel_token: &CancelToken,
) -> Result<(), VerbError> {
    suspend_devices(registry, &find_devices_by_names(registry, names)?, noflush, cancel_token).await
}

/// As [`suspend_devices_cancellable`], for devices already looked up. Each comes with the name to
/// use in errors.
pub(super) async fn suspend_devices(
    registry: &DeviceRegistry,
    several: &[(String, Arc<RegisteredDevice>)],
    noflush: bool,
    cancel_token: &CancelToken,
) -> Result<(), VerbError> {
    run_change_with_device_locks(
        registry,
        several,
        CancellableVerbKind::Suspend,
        cancel_token,
        |devices, _, wake| DeviceSetTransition::suspend(devices, noflush, wake),
    )
    .await
}

/// Makes the loaded table live, if there is one, and lets requests continue. Either all of the
/// devices take their new tables or none, at an instant when none has a request in flight. A
/// pending suspend is cancelled.
///
/// # Errors
/// ENXIO if there is no such device; the table's error if the cores can't use it. In that case the
/// old tables stay live and run.
pub async fn resume_mapped_devices(registry: &Arc<DeviceRegistry>, names: &[&str]) -> Result<(), VerbError> {
    resume_devices_cancellable(registry, names, &CancelToken::default()).await
}

/// As [`resume_mapped_devices`], with a cancel token.
///
/// # Errors
/// As [`resume_mapped_devices`], and the error of the cancel token; the old tables stay live and
/// run then.
pub async fn resume_devices_cancellable(
    registry: &Arc<DeviceRegistry>,
    names: &[&str],
    cancel_token: &CancelToken,
) -> Result<(), VerbError> {
    resume_devices(registry, &find_devices_by_names(registry, names)?, cancel_token).await
}

/// As [`resume_devices_cancellable`], for devices already looked up. Each comes with the name to
/// use in errors.
pub(crate) async fn resume_devices(
    registry: &DeviceRegistry,
    several: &[(String, Arc<RegisteredDevice>)],
    cancel_token: &CancelToken,
) -> Result<(), VerbError> {
    for (_, mapped) in several {
        mapped.pending.cancel(CancellableVerbKind::Suspend, "cancelled by a resume");
    }
    run_change_with_device_locks(
        registry,
        several,
        CancellableVerbKind::Resume,
        cancel_token,
        begin_resume_transition,
    )
    .await
}

pub(super) fn busy_error(why: &str) -> TargetError {
    TargetError::errno(EBUSY).because(why)
}

/// Looks up the devices of `names`.
fn find_devices_by_names(
    registry: &DeviceRegistry,
    names: &[&str],
) -> Result<Vec<(String, Arc<RegisteredDevice>)>, VerbError> {
    names.iter().map(|name| Ok(((*name).to_owned(), registry.find(name)?))).collect()
}

/// Cancels all pending verbs; called at shutdown.
pub fn cancel_all_pending_verbs(registry: &DeviceRegistry) {
    registry.config().inspect(|config| config.end());
    for mapped in registry.all_with_pending() {
        for who in [
            CancellableVerbKind::Create,
            CancellableVerbKind::Suspend,
            CancellableVerbKind::Resume,
            CancellableVerbKind::Remove,
        ] {
            mapped.pending.cancel(who, "the server ends");
        }
    }
}

/// Runs a change with its devices and their partners locked, so that changes of one device run one
/// after the other. Retries if the partners or the loaded tables change before the locks are taken.
pub(super) async fn run_change_with_device_locks(
    registry: &DeviceRegistry,
    several: &[(String, Arc<RegisteredDevice>)],
    who: CancellableVerbKind,
    cancel_token: &CancelToken,
    mut begin: impl FnMut(
        &[Arc<MappedDevice>],
        &DeviceChangeLocks<'_>,
        &TransitionWakeFn,
    ) -> Result<DeviceSetTransition, IndexedDeviceError>,
) -> Result<(), VerbError> {
    let mut entered: Vec<_> =
        several.iter().map(|(_, mapped)| mapped.pending.enter(who, cancel_token)).collect();
    let devices: Vec<_> = several.iter().map(|(_, mapped)| Arc::clone(&mapped.device)).collect();
    let blame = |(place, error): IndexedDeviceError| VerbError::new(&several[place].0, error);
    let merges = attach_recorded_snapshots(registry, several, who, cancel_token).await?;
    for _ in 0..TRIES_MAX {
        let turns = DeviceChangeLocks::take(registry, several, who, cancel_token).await?;
        let attaching = SnapshotRecordTransaction::begin(registry, several, who, cancel_token).await?;
        // `Notify` stores a wake-up that arrives before the wait, so none is lost between a step
        // and its wait.
        let answered = Arc::new(Notify::new());
        let wake: TransitionWakeFn = {
            let answered = Arc::clone(&answered);
            Arc::new(move || answered.notify_one())
        };
        let moves: Vec<bool> = several.iter().map(|(_, mapped)| verb_changes_device(mapped, who)).collect();
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
            if who == CancellableVerbKind::Resume {
                several.iter().for_each(|(_, mapped)| follow_live_table(registry, mapped));
            }
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
    let error =
        TargetError::errno(EBUSY).because("other changes of devices on the same disk interfere: try again");
    Err(blame((0, error)))
}

/// True if this suspend or resume changes the device. Create and remove report their own events.
fn verb_changes_device(mapped: &RegisteredDevice, who: CancellableVerbKind) -> bool {
    let info = mapped.device.info();
    match who {
        CancellableVerbKind::Suspend => !info.suspended,
        CancellableVerbKind::Resume => info.suspended || info.inactive,
        CancellableVerbKind::Create | CancellableVerbKind::Remove => false,
    }
}

/// Sends the event of a completed suspend or resume.
fn publish_change(registry: &DeviceRegistry, mapped: &Arc<RegisteredDevice>, who: CancellableVerbKind) {
    let (kind, line) = match who {
        CancellableVerbKind::Suspend => (EventKind::Suspended, "suspended"),
        CancellableVerbKind::Resume => (EventKind::Resumed, "resumed"),
        CancellableVerbKind::Create | CancellableVerbKind::Remove => return,
    };
    if !registry.is_being_created(mapped) {
        mapped.publish(kind, line);
    }
    if let Some(exporter) = registry.exporter() {
        exporter.device_changed(mapped.device.id());
    }
}

/// Steps a change each time the cores answer, until it ends or is cancelled. If the change is
/// paused, it continues with the result of `check`.
async fn drive_change(
    registry: &DeviceRegistry,
    cancel_token: &CancelToken,
    answered: &Notify,
    changes: &mut DeviceSetTransition,
    check: Option<impl Future<Output = Result<(), IndexedDeviceError>>>,
) -> Result<(), IndexedDeviceError> {
    let mut cancelled = None;
    let mut check = std::pin::pin!(check);
    loop {
        if let Some(done) = changes.step(registry.cores()) {
            // The change may be done, or have failed for another reason; only EINTR is replaced by
            // the reason of the cancellation.
            let interrupted = |(_, e): &IndexedDeviceError| e.errno == EINTR;
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
    registry: &DeviceRegistry,
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
