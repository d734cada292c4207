//! Making, suspending, resuming and removing devices.
//!
//! What is let go, a table that was replaced or the device itself, is closed on a thread of its
//! own: closing files can take long, and neither a core nor the control thread waits for it. The
//! verb does, so that what it closed is closed when it is done.

use super::call_off::{CallOff, Waiting, interrupted};
use super::{hold, show, tables};
use crate::error::VerbError;
use crate::registry::{Folder, Mapped, Registry};
use std::sync::Arc;
use tokio::sync::{Notify, oneshot};
use udm_core::Device;
use udm_core::errno::{EBUSY, ENXIO};
use udm_dm::{Changes, MappedDevice, Refused, TargetError, Wake};

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

/// Parks new requests and waits until those in flight are done; with `noflush`, until targets have
/// handed back what they hold. Of several devices all are suspended or none: there is an instant at
/// which none of them has a request in flight. A device that is suspended already stays so.
///
/// # Errors
/// ENXIO when there is no such device, EINTR when a resume or a removal came meanwhile, a device's
/// own otherwise.
pub async fn suspend(registry: &Arc<Registry>, names: &[&str], noflush: bool) -> Result<(), VerbError> {
    suspend_until(registry, names, noflush, &CallOff::default()).await
}

/// As [`suspend`], until it is called off.
///
/// # Errors
/// As [`suspend`]'s, and what it was called off with: the devices are active then.
pub async fn suspend_until(
    registry: &Arc<Registry>,
    names: &[&str],
    noflush: bool,
    off: &CallOff,
) -> Result<(), VerbError> {
    let several = find(registry, names)?;
    in_turn(registry, &several, Waiting::Suspend, off, |devices, wake| {
        Changes::suspend(devices, noflush, &wake)
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
    resume_until(registry, names, &CallOff::default()).await
}

/// As [`resume`], until it is called off.
///
/// # Errors
/// As [`resume`]'s, and what it was called off with: the tables that were live are live and running
/// then.
pub async fn resume_until(registry: &Arc<Registry>, names: &[&str], off: &CallOff) -> Result<(), VerbError> {
    let several = find(registry, names)?;
    for (_, mapped) in &several {
        mapped.pending.call_off(Waiting::Suspend, "called off by a resume");
    }
    in_turn(registry, &several, Waiting::Resume, off, |devices, wake| Changes::resume(devices, true, &wake))
        .await
}

/// The devices of `names`, each once, in the order in which changes of several take their turns:
/// two that have devices in common do not wait for each other.
fn find(registry: &Registry, names: &[&str]) -> Result<Vec<(String, Arc<Mapped>)>, VerbError> {
    let mut found = Vec::with_capacity(names.len());
    for name in names {
        found.push(((*name).to_owned(), registry.find(name)?));
    }
    found.sort_by_key(|(_, mapped)| mapped.device.number());
    found.dedup_by_key(|(_, mapped)| mapped.device.number());
    Ok(found)
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
    let one = std::slice::from_ref(device);
    let ended = step(registry, &CallOff::default(), |wake| Changes::suspend(one, true, &wake)).await;
    drop((alone, lane));
    let ended = match ended {
        Ok((done, change)) => {
            let_go((change, mapped), &CallOff::default()).await;
            done
        }
        Err(refused) => Err(refused),
    };
    ended.or_else(|(_, error)| refuse(error))
}

/// The resume of a device that nobody knows yet.
async fn resume_one(registry: &Registry, mapped: &Mapped) -> Result<(), TargetError> {
    let _lane = hold::lane_for_change(registry, &mapped.device).await;
    let device = std::slice::from_ref(&mapped.device);
    let stepped = step(registry, &CallOff::default(), |wake| Changes::resume(device, true, &wake)).await;
    stepped.and_then(|(done, _)| done).map_err(|(_, error)| error)
}

/// A change of devices that others may change too: one after the other.
async fn in_turn(
    registry: &Registry,
    several: &[(String, Arc<Mapped>)],
    who: Waiting,
    off: &CallOff,
    begin: impl FnOnce(&[Arc<MappedDevice>], Wake) -> Result<Changes, Refused>,
) -> Result<(), VerbError> {
    let entered: Vec<_> = several.iter().map(|(_, mapped)| mapped.pending.enter(who, off)).collect();
    let (mut turns, mut lanes) = (Vec::with_capacity(several.len()), Vec::new());
    for (name, mapped) in several {
        turns.push(tokio::select! {
            biased;
            why = off.called() => return Err(VerbError::new(name, why)),
            turn = mapped.changing.lock() => turn,
        });
        if !registry.is_there(mapped) {
            let error = TargetError::errno(ENXIO).because("it has been removed meanwhile");
            return Err(VerbError::new(name, error));
        }
    }
    for (_, mapped) in several {
        lanes.extend(hold::lane_for_change(registry, &mapped.device).await);
    }
    let devices: Vec<_> = several.iter().map(|(_, mapped)| Arc::clone(&mapped.device)).collect();
    let blame = |(place, error): Refused| VerbError::new(&several[place].0, error);
    let (done, mut changes) = step(registry, off, |wake| begin(&devices, wake)).await.map_err(blame)?;
    drop((turns, entered, lanes));
    let tables = changes.take_let_go();
    if !tables.is_empty() {
        let_go(tables, off).await;
    }
    done.map_err(blame)
}

/// Begins a change and takes its steps, one whenever the cores have answered, until it is over or
/// called off. The change comes back with its outcome: dropping it may close what it let go.
async fn step(
    registry: &Registry,
    off: &CallOff,
    begin: impl FnOnce(Wake) -> Result<Changes, Refused>,
) -> Result<(Result<(), Refused>, Changes), Refused> {
    // A wake-up that comes before we wait for it is kept, so none is lost between a step and its
    // wait.
    let answered = Arc::new(Notify::new());
    let wake: Wake = {
        let answered = Arc::clone(&answered);
        Arc::new(move || answered.notify_one())
    };
    let mut changes = begin(wake)?;
    let mut called = None;
    loop {
        if let Some(done) = changes.step(registry.cores()) {
            // Too late, it is done; or it failed for a reason of its own.
            let interrupted = |(_, e): &Refused| e.errno == interrupted("").errno;
            let why = called.filter(|_| done.as_ref().is_err_and(interrupted));
            return Ok((why.map_or(done, |why| Err((0, why))), changes));
        }
        tokio::select! {
            biased;
            () = answered.notified() => {}
            why = off.called(), if called.is_none() => {
                changes.cancel(registry.cores());
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
