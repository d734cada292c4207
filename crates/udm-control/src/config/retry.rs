//! Devices of the file that could not be created and are tried again: what they need may come late.

use super::apply::apply_desired_state;
use super::{DesiredState, LastAppliedConfig, ServerConfigFile};
use crate::api;
use crate::error::VerbError;
use crate::registry::DeviceRegistry;
use crate::verbs::snapshot::LostSnapshotPolicy;
use crate::verbs::{self, CancelToken};
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;
use udm_core::errno::{ENODEV, ENXIO, is_server_down};

/// Interval of attempts to attach a missing snapshot, and the first one of attempts to create other
/// devices.
const WAIT_STEP: Duration = Duration::from_secs(1);

/// The longest interval of attempts to create a device. It doubles up to here: an attempt may wait
/// for a server that does not answer, and no other change of the file runs meanwhile.
const WAIT_MAX: Duration = Duration::from_secs(60);

/// Devices of the file that could not be created because something that they name is not there: a
/// disk, a server, another device.
#[derive(Clone)]
pub(super) struct AbsentDevices {
    /// The file as it was applied; `None` if another process has applied it.
    pub desired: Option<DesiredState>,
    pub names: HashSet<String>,
}

/// True if a device may be created later without a change of the file.
pub(super) fn is_absence(error: &VerbError) -> bool {
    let errno = error.error.errno;
    is_server_down(errno) || errno == ENXIO || errno == ENODEV
}

/// The devices of the file that are tried again, sorted.
pub async fn absent_devices(registry: &DeviceRegistry) -> Vec<String> {
    let Some(config) = registry.config() else { return Vec::new() };
    let applied = config.applied.lock().await;
    let mut names: Vec<String> = applied.absent.iter().flat_map(|absent| absent.names.clone()).collect();
    names.sort();
    names
}

/// Tries devices of the file again: those that need something that is not there, and, if the server
/// is to wait for snapshots, those whose snapshots can't be attached. Calls `made` after each
/// attempt that created some. Never returns.
pub async fn run_config_device_retries(
    registry: &Arc<DeviceRegistry>,
    made: impl Fn(&api::ReconfigureReport),
) {
    let Some(config) = registry.config() else { return std::future::pending().await };
    let mut pause = WAIT_STEP;
    loop {
        match wait_for_work(registry, config).await {
            RetriedDevices::Blocked => pause = WAIT_STEP,
            RetriedDevices::Absent => {}
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(WAIT_MAX);
        let on = Arc::clone(registry);
        // May block when tables open devices.
        let tried = tokio::task::spawn_blocking(move || verbs::block_on_verb(retry_devices(&on)));
        if let Ok(Some(done)) = tried.await
            && done.changes.iter().any(|change| change.error.is_none())
        {
            pause = WAIT_STEP;
            made(&done);
        }
    }
}

/// Why devices are tried again.
enum RetriedDevices {
    /// A snapshot can't be attached.
    Blocked,
    /// Something is not there.
    Absent,
}

fn devices_to_retry(registry: &DeviceRegistry, applied: &LastAppliedConfig) -> Option<RetriedDevices> {
    let waits = registry.lost_snapshots() == LostSnapshotPolicy::Wait;
    match (&applied.blocked, &applied.absent) {
        (Some(_), _) if waits => Some(RetriedDevices::Blocked),
        (_, Some(_)) => Some(RetriedDevices::Absent),
        _ => None,
    }
}

async fn wait_for_work(registry: &DeviceRegistry, config: &ServerConfigFile) -> RetriedDevices {
    loop {
        if let Some(work) = devices_to_retry(registry, &*config.applied.lock().await) {
            return work;
        }
        config.is_waiting.notified().await;
    }
}

async fn retry_devices(registry: &Arc<DeviceRegistry>) -> Option<api::ReconfigureReport> {
    let config = registry.config()?;
    let mut applied = config.applied.lock().await;
    let token = CancelToken::default();
    match devices_to_retry(registry, &applied)? {
        RetriedDevices::Blocked => {
            let desired = applied.blocked.take()?;
            apply_desired_state(registry, &mut applied, &desired, false, None, &token).await.ok()
        }
        RetriedDevices::Absent => {
            let AbsentDevices { desired, names } = applied.absent.clone()?;
            let desired = desired.map_or_else(|| (config.read)(), Ok).ok()?;
            let blocked = applied.blocked.take();
            let done =
                apply_desired_state(registry, &mut applied, &desired, false, Some(&names), &token).await;
            applied.blocked = applied.blocked.take().or(blocked);
            done.ok()
        }
    }
}
