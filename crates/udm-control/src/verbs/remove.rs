//! Removing devices: unused devices at once, used ones after their last close (`--deferred`), or
//! with all their requests failed first (`--force`).

use super::begin_transition::{begin_removal_transition, begin_resume_transition};
use super::cancel::{CancelToken, CancellableVerbKind};
use super::change::{drop_on_thread, export_device, run_change_with_device_locks};
use super::{clone, show, snapshot, tables};
use crate::api;
use crate::error::VerbError;
use crate::registry::{BaseDir, DeviceRegistry, RegisteredDevice};
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use udm_core::Device;
use udm_core::errno::EBUSY;
use udm_dm::TargetError;

/// Options of a removal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RemoveOptions {
    /// First replace the table by one that fails all requests.
    pub force: bool,
    /// If the device is open, remove it after its last close.
    pub deferred: bool,
}

/// Removes a device that is not in use.
///
/// # Errors
/// ENXIO if there is no such device, EBUSY while clients or tables use it.
pub async fn remove_mapped_device(registry: &Arc<DeviceRegistry>, name: &str) -> Result<(), VerbError> {
    remove_device(registry, name, registry.find(name)?, |_| true, &CancelToken::default()).await
}

/// As [`remove_mapped_device`], with the options `how` and a cancel token. The verb can be
/// cancelled while it waits for requests in flight or for other devices. Without `force`, an origin
/// of snapshots that were created by name is in use.
///
/// # Errors
/// As [`remove_mapped_device`], and the error of the cancel token; the device stays as it was then.
/// With `force`, the table that fails all requests stays if only the removal failed. With
/// `deferred`, a device in use is no error.
pub async fn remove_device_cancellable(
    registry: &Arc<DeviceRegistry>,
    name: &str,
    how: RemoveOptions,
    cancel_token: &CancelToken,
) -> Result<(), VerbError> {
    let mapped = registry.find(name)?;
    if how.force {
        load_error_table(registry, name, &mapped, cancel_token).await?;
    } else {
        snapshot::check_has_no_snapshots_by_name(registry, name, &mapped)?;
    }
    if !how.deferred {
        return remove_device(registry, name, mapped, |_| true, cancel_token).await;
    }
    let (before, left) = (mapped.defer(true), Arc::downgrade(&mapped));
    let Err(error) = remove_device(registry, name, mapped, |_| true, cancel_token).await else {
        return Ok(());
    };
    let Some(left) = left.upgrade() else { return Err(error) };
    if error.error.errno == EBUSY && is_open(registry, &left) {
        return Ok(());
    }
    // The failure has another cause than users of the device, so no later close would retry.
    left.defer(before);
    Err(error)
}

fn is_open(registry: &DeviceRegistry, mapped: &RegisteredDevice) -> bool {
    show::open_count(registry, mapped) > 0
}

/// Removes devices with a deferred removal when they are closed. Never returns.
pub async fn run_deferred_removals(registry: &Arc<DeviceRegistry>) -> std::convert::Infallible {
    // The removals run concurrently, because one may wait for other devices.
    let mut removals: Vec<Pin<Box<dyn Future<Output = ()> + Send + '_>>> = Vec::new();
    loop {
        tokio::select! {
            biased;
            () = registry.closed() => {
                let due = registry.all().into_iter();
                let due = due.filter(|mapped| mapped.is_deferred() && !is_open(registry, mapped));
                due.for_each(|mapped| removals.push(Box::pin(finish_deferred_removal(registry, mapped))));
            }
            () = wait_for_completed_futures(&mut removals) => {}
        }
    }
}

async fn finish_deferred_removal(registry: &Arc<DeviceRegistry>, mapped: Arc<RegisteredDevice>) {
    let (name, left) = (mapped.device.name(), Arc::downgrade(&mapped));
    let may = RegisteredDevice::is_deferred;
    let done = remove_device(registry, &name, mapped, may, &CancelToken::default()).await;
    let (Err(error), Some(left)) = (done, left.upgrade()) else { return };
    // If a client has opened the device meanwhile, its close retries.
    if left.is_deferred() && registry.is_active(&left) && !is_open(registry, &left) {
        tracing::warn!("{error}: it is not removed, though its removal was deferred");
    }
}

/// Polls all futures of `list` until some have completed, and takes those out.
async fn wait_for_completed_futures<F: Future<Output = ()> + Unpin>(list: &mut Vec<F>) {
    poll_fn(|cx| {
        let before = list.len();
        list.retain_mut(|one| Pin::new(one).poll(cx).is_pending());
        if list.len() < before { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

/// Replaces the table by one of the same size that fails all requests.
async fn load_error_table(
    registry: &Arc<DeviceRegistry>,
    name: &str,
    mapped: &Arc<RegisteredDevice>,
    cancel_token: &CancelToken,
) -> Result<(), VerbError> {
    let sectors = mapped.device.limits().size.0;
    if sectors == 0 {
        return Ok(());
    }
    let table = format!("0 {sectors} error");
    let loaded = tables::load_into(registry, mapped, name, &table, &BaseDir::none(), cancel_token)?;
    cancel_suspend_and_resume(mapped);
    // Requests on storage that hangs may never complete; clients get errors without waiting for
    // them.
    let _failing = registry.exporter().and_then(|exporter| exporter.fail(mapped.device.id()));
    mapped.device.lift_throttle(true, registry.cores());
    let one = [(name.to_owned(), Arc::clone(mapped))];
    let done = run_change_with_device_locks(
        registry,
        &one,
        CancellableVerbKind::Resume,
        cancel_token,
        begin_resume_transition,
    )
    .await;
    mapped.device.lift_throttle(false, registry.cores());
    if done.is_err() {
        mapped.device.clear_own(&loaded);
    }
    done
}

fn cancel_suspend_and_resume(mapped: &RegisteredDevice) {
    for who in [CancellableVerbKind::Suspend, CancellableVerbKind::Resume] {
        mapped.pending.cancel(who, "cancelled by a removal");
    }
}

/// Removes a device, if `may` allows it once the device is locked.
pub(super) async fn remove_device(
    registry: &Arc<DeviceRegistry>,
    name: &str,
    mapped: Arc<RegisteredDevice>,
    may: impl Fn(&RegisteredDevice) -> bool,
    cancel_token: &CancelToken,
) -> Result<(), VerbError> {
    let removed = remove_described_device(registry, name, mapped, may, |_| {}, cancel_token).await?;
    // By its own name: `name` may be a UUID or a number.
    let gone = removed.device.name();
    let forgotten = clone::record::forget_removed_clone(registry, &gone);
    registry.vhost_user_sockets().inspect(|sockets| sockets.remove_all(&gone));
    drop_on_thread(registry, removed, &CancelToken::default()).await;
    forgotten
}

/// As [`remove_device`], and returns the device, which may block when it is dropped. `begun` gets
/// it when no verb can find it any more; its table is still live.
pub(super) async fn remove_described_device(
    registry: &Arc<DeviceRegistry>,
    name: &str,
    mapped: Arc<RegisteredDevice>,
    may: impl Fn(&RegisteredDevice) -> bool,
    mut begun: impl FnMut(&RegisteredDevice),
    cancel_token: &CancelToken,
) -> Result<Arc<RegisteredDevice>, VerbError> {
    let id = mapped.device.id();
    let busy = |open| TargetError::errno(EBUSY).because(format!("it is open {open} times"));
    // Users are reported at once, even while another change runs.
    let open = show::open_count(registry, &mapped);
    if open > 0 {
        return Err(VerbError::new(name, busy(open)));
    }
    cancel_suspend_and_resume(&mapped);
    let exporter = registry.exporter();
    let mut removal = None;
    let one = [(name.to_owned(), Arc::clone(&mapped))];
    let left = run_change_with_device_locks(
        registry,
        &one,
        CancellableVerbKind::Remove,
        cancel_token,
        |devices, turns, wake| {
            if removal.is_none() {
                let taken = registry.begin_removal(&mapped, &may).map_err(|error| (0, error))?;
                removal = Some((taken, show::describe_mapped_device(registry, &mapped)));
                begun(&mapped);
                // New clients can't open the device any more; clients from before still have it
                // open.
                exporter.inspect(|exporter| exporter.remove(id));
            }
            let users = exporter.map_or(0, |exporter| exporter.users(id));
            if users > 0 {
                return Err((0, busy(users as u64)));
            }
            // The hooks tell the targets that they are no longer in use.
            begin_removal_transition(devices, turns, wake)
        },
    );
    let left = left.await;
    let Some((removal, last)) = removal else { return left.map(|()| mapped) };
    if let Err(error) = left {
        export_device(registry, &mapped)?;
        return Err(error);
    }
    exporter.inspect(|exporter| exporter.forget(id));
    removal.commit();
    mapped.waiters.gone(api::DeviceDescription { event_nr: mapped.device.event_nr(), ..last });
    Ok(mapped)
}
