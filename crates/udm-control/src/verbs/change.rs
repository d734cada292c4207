//! Making, suspending, resuming and removing devices.

use super::{hold, tables};
use crate::error::VerbError;
use crate::registry::{Mapped, Registry};
use std::sync::Arc;
use tokio::sync::Notify;
use udm_core::Device;
use udm_targets::{Change, TargetError, Wake};

const EBUSY: i32 = 16;

/// Makes a device. With a table it is loaded and resumed, and when that fails the device is gone again, as with dmsetup; without one it has none.
/// Building the table may block on what it opens.
///
/// # Errors
/// EINVAL for a bad name, EBUSY for one that is taken, the table's own otherwise.
pub async fn create(
    registry: &Arc<Registry>,
    name: &str,
    uuid: Option<&str>,
    table: Option<&str>,
) -> Result<(), VerbError> {
    let made = registry.make(name, uuid).map_err(|e| VerbError::new(name, e))?;
    if let Some(table) = table {
        tables::load_into(registry, &made.mapped, name, table)?;
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
/// ENXIO when there is no such device, the device's own otherwise.
pub async fn suspend(registry: &Arc<Registry>, name: &str, noflush: bool) -> Result<(), VerbError> {
    let mapped = registry.find(name)?;
    suspend_one(registry, &mapped, noflush).await.map_err(|e| VerbError::new(name, e))
}

/// Swaps the loaded table in, when there is one, and lets requests go.
///
/// # Errors
/// ENXIO when there is no such device; the table's own when the cores can't use it: the old one is live and running then.
pub async fn resume(registry: &Arc<Registry>, name: &str) -> Result<(), VerbError> {
    let mapped = registry.find(name)?;
    resume_one(registry, &mapped).await.map_err(|e| VerbError::new(name, e))
}

/// Removes a device that nobody uses.
///
/// # Errors
/// ENXIO when there is no such device, EBUSY while clients or tables use it.
pub async fn remove(registry: &Arc<Registry>, name: &str) -> Result<(), VerbError> {
    let mapped = registry.find(name)?;
    let refuse = |error| Err(VerbError::new(name, error));
    let alone = mapped.changing.lock().await;
    let own = mapped.device.name();
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
    let _lane = hold::lane_for_change(registry, device).await;
    let ended = finish(registry, |wake| device.suspend(true, wake)).await;
    drop(alone);
    ended.or_else(refuse)
}

async fn suspend_one(registry: &Registry, mapped: &Mapped, noflush: bool) -> Result<(), TargetError> {
    let _alone = mapped.changing.lock().await;
    let _lane = hold::lane_for_change(registry, &mapped.device).await;
    finish(registry, |wake| mapped.device.suspend(noflush, wake)).await
}

async fn resume_one(registry: &Registry, mapped: &Mapped) -> Result<(), TargetError> {
    let _alone = mapped.changing.lock().await;
    let _lane = hold::lane_for_change(registry, &mapped.device).await;
    finish(registry, |wake| mapped.device.resume(wake)).await
}

/// Begins a change and takes its steps, one whenever the cores have answered.
async fn finish(
    registry: &Registry,
    begin: impl FnOnce(Wake) -> Result<Change, TargetError>,
) -> Result<(), TargetError> {
    // A wake-up that comes before we wait for it is kept, so none is lost between a step and its wait.
    let answered = Arc::new(Notify::new());
    let wake: Wake = {
        let answered = Arc::clone(&answered);
        Arc::new(move || answered.notify_one())
    };
    let mut change = begin(wake)?;
    loop {
        if let Some(done) = change.step(registry.cores()) {
            return done;
        }
        answered.notified().await;
    }
}
