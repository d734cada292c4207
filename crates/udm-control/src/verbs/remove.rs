//! Removing devices: those that nobody uses, or when nobody does any more (`--deferred_removals`), or with
//! everything that they still get failing (`--force`).

use super::cancel::{CancelToken, VerbKind};
use super::change::{drop_on_thread, export, remove_filtered, resume_filtered, run_locked};
use super::{show, tables};
use crate::error::VerbError;
use crate::http::api;
use crate::registry::{BaseDir, Mapped, Registry};
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use udm_core::Device;
use udm_core::bugs::{self, Bug};
use udm_core::errno::EBUSY;
use udm_dm::TargetError;

/// How a device is removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RemoveOptions {
    /// Its table is replaced by one that fails all requests first.
    pub force: bool,
    /// If somebody has it open it is removed when nobody has it any more.
    pub deferred: bool,
}

/// Removes a device that nobody uses.
///
/// # Errors
/// ENXIO when there is no such device, EBUSY while clients or tables use it.
pub async fn remove(registry: &Arc<Registry>, name: &str) -> Result<(), VerbError> {
    remove_cancellable(registry, name, RemoveOptions::default(), &CancelToken::default()).await
}

/// As [`remove`], as `how` says. Where it waits for requests in flight or for other devices, until
/// it is called off.
///
/// # Errors
/// As [`remove`]'s, and what it was called off with: the device is there as it was then. With
/// `force` it has the table that fails everything all the same, when it was only the removal that
/// could not be; with `deferred_removals` it is no error that somebody uses it.
pub async fn remove_cancellable(
    registry: &Arc<Registry>,
    name: &str,
    how: RemoveOptions,
    cancel_token: &CancelToken,
) -> Result<(), VerbError> {
    let mapped = registry.find(name)?;
    if how.force {
        load_error_table(registry, name, &mapped, cancel_token).await?;
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
    // It is not because of who uses it, and nobody would try again.
    left.defer(before);
    Err(error)
}

fn is_open(registry: &Registry, mapped: &Mapped) -> bool {
    show::open_count(registry, mapped) > 0
}

/// Removes the devices whose removal was deferred as they are closed, for ever.
pub async fn run_deferred_removals(registry: &Arc<Registry>) -> std::convert::Infallible {
    // Beside each other: one may wait for other devices.
    let mut removals: Vec<Pin<Box<dyn Future<Output = ()> + Send + '_>>> = Vec::new();
    loop {
        tokio::select! {
            biased;
            () = registry.closed() => {
                let due = registry.all().into_iter();
                let due = due.filter(|mapped| mapped.is_deferred() && !is_open(registry, mapped));
                due.for_each(|mapped| removals.push(Box::pin(remove_deferred(registry, mapped))));
            }
            () = wait_any(&mut removals) => {}
        }
    }
}

async fn remove_deferred(registry: &Arc<Registry>, mapped: Arc<Mapped>) {
    let (name, left) = (mapped.device.name(), Arc::downgrade(&mapped));
    let done = remove_device(registry, &name, mapped, Mapped::is_deferred, &CancelToken::default()).await;
    let (Err(error), Some(left)) = (done, left.upgrade()) else { return };
    // Who has opened it meanwhile will close it.
    if left.is_deferred() && registry.is_active(&left) && !is_open(registry, &left) {
        tracing::warn!("{error}: it is not removed, though its removal was deferred");
    }
}

/// Lets all of `list` go on, until some have ended, which are taken out.
async fn wait_any<F: Future<Output = ()> + Unpin>(list: &mut Vec<F>) {
    poll_fn(|cx| {
        let before = list.len();
        list.retain_mut(|one| Pin::new(one).poll(cx).is_pending());
        if list.len() < before { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

/// Gives the device a table that fails all requests, as large as the one that it has.
async fn load_error_table(
    registry: &Arc<Registry>,
    name: &str,
    mapped: &Arc<Mapped>,
    cancel_token: &CancelToken,
) -> Result<(), VerbError> {
    let sectors = mapped.device.limits().size.0;
    if sectors == 0 {
        return Ok(());
    }
    let table = format!("0 {sectors} error");
    let loaded = tables::load_into(registry, mapped, name, &table, &BaseDir::none(), cancel_token)?;
    cancel_others(mapped);
    // Storage that hangs keeps what it has; no client waits for that.
    let _failing = registry.exporter().and_then(|exporter| exporter.fail(mapped.device.id()));
    let one = [(name.to_owned(), Arc::clone(mapped))];
    let done = run_locked(registry, &one, VerbKind::Resume, cancel_token, resume_filtered).await;
    if done.is_err() {
        mapped.device.clear_own(&loaded);
    }
    done
}

fn cancel_others(mapped: &Mapped) {
    for who in [VerbKind::Suspend, VerbKind::Resume] {
        mapped.pending.cancel(who, "called off by a removal");
    }
}

/// Removes what `may` be removed when its turn has come.
pub(super) async fn remove_device(
    registry: &Arc<Registry>,
    name: &str,
    mapped: Arc<Mapped>,
    may: impl Fn(&Mapped) -> bool,
    cancel_token: &CancelToken,
) -> Result<(), VerbError> {
    let id = mapped.device.id();
    let busy = |open| TargetError::errno(EBUSY).because(format!("it is open {open} times"));
    // Who uses it is told of at once, whatever is under way.
    let open = show::open_count(registry, &mapped);
    if open > 0 {
        return Err(VerbError::new(name, busy(open)));
    }
    cancel_others(&mapped);
    let exporter = registry.exporter();
    let mut leaving = None;
    let one = [(name.to_owned(), Arc::clone(&mapped))];
    let left = run_locked(registry, &one, VerbKind::Remove, cancel_token, |devices, turns, wake| {
        if leaving.is_none() {
            let taken = registry.begin_removal(&mapped, &may).map_err(|error| (0, error))?;
            leaving = Some((taken, show::describe(registry, &mapped)));
            // Nobody can come any more; who came before has it open.
            exporter.inspect(|exporter| exporter.remove(id));
        }
        let users = exporter.map_or(0, |exporter| exporter.users(id));
        if users > 0 {
            return Err((0, busy(users as u64)));
        }
        // Targets are told that they are not in use any more.
        remove_filtered(devices, turns, wake)
    });
    let left = left.await;
    let Some((leaving, last)) = leaving else { return left };
    if left.is_err() {
        if bugs::on(Bug::ExportLost) {
            return left;
        }
        export(registry, &mapped)?;
        return left;
    }
    exporter.inspect(|exporter| exporter.forget(id));
    leaving.gone();
    mapped.waiters.gone(api::Device { event_nr: mapped.device.event_nr(), ..last });
    drop(one);
    drop_on_thread(registry, mapped, &CancelToken::default()).await;
    Ok(())
}
