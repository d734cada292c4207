//! Making, suspending, resuming and removing devices.
//!
//! What is let go, a table that was replaced or the device itself, is closed on a thread of its own: closing files can take long, and neither a core
//! nor the control thread waits for it. The verb does, so that what it closed is closed when it is done.

use super::call_off::{CallOff, Waiting, interrupted};
use super::{hold, show, tables};
use crate::error::VerbError;
use crate::registry::{Folder, Mapped, Registry};
use std::sync::Arc;
use tokio::sync::{Notify, oneshot};
use udm_core::Device;
use udm_core::errno::{EBUSY, ENXIO};
use udm_dm::{Change, TargetError, Wake};

/// Makes a device. With a table it is loaded and resumed, and when that fails the device is gone again, as with dmsetup; without one it has none.
/// Relative paths in the table count from our own folder; building it may block on what it opens.
///
/// # Errors
/// EINVAL for a bad name, EBUSY for one that is taken, the table's own otherwise.
pub async fn create(
    registry: &Arc<Registry>,
    name: &str,
    uuid: Option<&str>,
    table: Option<&str>,
) -> Result<(), VerbError> {
    create_from(registry, name, uuid, table, &Folder::own()).await
}

/// As [`create`], with paths from another folder.
///
/// # Errors
/// As [`create`].
pub async fn create_from(
    registry: &Arc<Registry>,
    name: &str,
    uuid: Option<&str>,
    table: Option<&str>,
    folder: &Folder,
) -> Result<(), VerbError> {
    let made = registry.make(name, uuid).map_err(|e| VerbError::new(name, e))?;
    if let Some(table) = table {
        tables::load_into(registry, &made.mapped, name, table, folder)?;
        resume_one(registry, &made.mapped).await.map_err(|e| VerbError::new(name, e))?;
    }
    export(registry, &made.mapped)?;
    made.complete();
    Ok(())
}

fn export(registry: &Registry, mapped: &Mapped) -> Result<(), VerbError> {
    let Some(exporter) = registry.exporter() else { return Ok(()) };
    let name = mapped.device.name();
    let added = exporter.add(&name, Arc::clone(&mapped.device) as Arc<dyn Device>);
    added.map_err(|e| VerbError::new(name, TargetError::new(e.to_string())))
}

/// Parks new requests and waits until those in flight are done; with `noflush`, until targets have handed back what they hold. A device
/// that is suspended already stays so.
///
/// # Errors
/// ENXIO when there is no such device, EINTR when a resume or a removal came meanwhile, the device's own otherwise.
pub async fn suspend(registry: &Arc<Registry>, name: &str, noflush: bool) -> Result<(), VerbError> {
    suspend_until(registry, name, noflush, &CallOff::default()).await
}

/// As [`suspend`], until it is called off.
///
/// # Errors
/// As [`suspend`]'s, and what it was called off with: the device is active then.
pub async fn suspend_until(
    registry: &Arc<Registry>,
    name: &str,
    noflush: bool,
    off: &CallOff,
) -> Result<(), VerbError> {
    let mapped = registry.find(name)?;
    let done = in_turn(registry, &mapped, Waiting::Suspend, off, |wake| mapped.device.suspend(noflush, wake));
    done.await.map_err(|e| VerbError::new(name, e))
}

/// Swaps the loaded table in, when there is one, and lets requests go. A suspend that still waits is called off.
///
/// # Errors
/// ENXIO when there is no such device; the table's own when the cores can't use it: the old one is live and running then.
pub async fn resume(registry: &Arc<Registry>, name: &str) -> Result<(), VerbError> {
    resume_until(registry, name, &CallOff::default()).await
}

/// As [`resume`], until it is called off.
///
/// # Errors
/// As [`resume`]'s, and what it was called off with: the table that was live is live and running then.
pub async fn resume_until(registry: &Arc<Registry>, name: &str, off: &CallOff) -> Result<(), VerbError> {
    let mapped = registry.find(name)?;
    mapped.pending.call_off(Waiting::Suspend, "called off by a resume");
    let done = in_turn(registry, &mapped, Waiting::Resume, off, |wake| mapped.device.resume(wake));
    done.await.map_err(|e| VerbError::new(name, e))
}

/// Calls off every suspend and resume that waits: the server ends.
pub fn call_off_all(registry: &Registry) {
    for mapped in registry.all() {
        for who in [Waiting::Suspend, Waiting::Resume] {
            mapped.pending.call_off(who, "the server ends");
        }
    }
}

/// Removes a device that nobody uses.
///
/// # Errors
/// ENXIO when there is no such device, EBUSY while clients or tables use it.
pub async fn remove(registry: &Arc<Registry>, name: &str) -> Result<(), VerbError> {
    let mapped = registry.find(name)?;
    let refuse = |error| Err(VerbError::new(name, error));
    let own = mapped.device.name();
    // Who uses it is told of at once, whatever is under way.
    let open = show::open_count(registry, &mapped, &own);
    if open > 0 {
        return refuse(TargetError::errno(EBUSY).because(format!("it is open {open} times")));
    }
    for who in [Waiting::Suspend, Waiting::Resume] {
        mapped.pending.call_off(who, "called off by a removal");
    }
    let alone = mapped.changing.lock().await;
    let leaving = match registry.take_away(&mapped) {
        Ok(leaving) => leaving,
        Err(error) => return refuse(error),
    };
    if let Some(exporter) = registry.exporter() {
        exporter.remove(&own);
        // Nobody can come any more; who came before has it open.
        let users = exporter.users(&own);
        if users > 0 {
            export(registry, &mapped)?;
            return refuse(TargetError::errno(EBUSY).because(format!("it is open {users} times")));
        }
        exporter.forget(&own);
    }
    leaving.gone();
    // Targets are told that they are not in use any more; there is nothing in flight to wait for.
    let device = &mapped.device;
    let lane = hold::lane_for_change(registry, device).await;
    let ended = step(registry, &CallOff::default(), |wake| device.suspend(true, wake)).await;
    drop((alone, lane));
    let ended = match ended {
        Ok((done, change)) => {
            let_go((change, mapped), &CallOff::default()).await;
            done
        }
        Err(error) => Err(error),
    };
    ended.or_else(refuse)
}

/// The resume of a device that nobody knows yet.
async fn resume_one(registry: &Registry, mapped: &Mapped) -> Result<(), TargetError> {
    let _lane = hold::lane_for_change(registry, &mapped.device).await;
    let (done, _) = step(registry, &CallOff::default(), |wake| mapped.device.resume(wake)).await?;
    done
}

/// A change of a device that others may change too: one after the other.
async fn in_turn(
    registry: &Registry,
    mapped: &Arc<Mapped>,
    who: Waiting,
    off: &CallOff,
    begin: impl FnOnce(Wake) -> Result<Change, TargetError>,
) -> Result<(), TargetError> {
    let entered = mapped.pending.enter(who, off);
    let turn = tokio::select! {
        biased;
        why = off.called() => return Err(why),
        turn = mapped.changing.lock() => turn,
    };
    if !registry.is_there(mapped) {
        return Err(TargetError::errno(ENXIO).because("it has been removed meanwhile"));
    }
    let lane = hold::lane_for_change(registry, &mapped.device).await;
    let (done, mut change) = step(registry, off, begin).await?;
    drop((turn, entered, lane));
    let tables = change.take_let_go();
    if !tables.is_empty() {
        let_go(tables, off).await;
    }
    done
}

/// Begins a change and takes its steps, one whenever the cores have answered, until it is over or called off. The change comes back with its outcome:
/// dropping it may close what it let go.
async fn step(
    registry: &Registry,
    off: &CallOff,
    begin: impl FnOnce(Wake) -> Result<Change, TargetError>,
) -> Result<(Result<(), TargetError>, Change), TargetError> {
    // A wake-up that comes before we wait for it is kept, so none is lost between a step and its wait.
    let answered = Arc::new(Notify::new());
    let wake: Wake = {
        let answered = Arc::clone(&answered);
        Arc::new(move || answered.notify_one())
    };
    let mut change = begin(wake)?;
    let mut called = None;
    loop {
        if let Some(done) = change.step(registry.cores()) {
            // Too late, it is done; or it failed for a reason of its own.
            let interrupted = done.as_ref().is_err_and(|e| e.errno == interrupted("").errno);
            let why = called.filter(|_| interrupted);
            return Ok((why.map_or(done, Err), change));
        }
        tokio::select! {
            biased;
            () = answered.notified() => {}
            why = off.called(), if called.is_none() => {
                change.cancel(registry.cores());
                called = Some(why);
            }
        }
    }
}

/// Drops `what` on a thread of its own and waits for that, until called off.
async fn let_go<T: Send + 'static>(what: T, off: &CallOff) {
    let (gone, wait) = oneshot::channel();
    let close = move || {
        drop(what);
        let _ = gone.send(());
    };
    // Without a thread to be had it is dropped here.
    if std::thread::Builder::new().name("udm-close".into()).spawn(close).is_ok() {
        tokio::select! {
            _ = wait => {}
            _ = off.called() => {}
        }
    }
}
