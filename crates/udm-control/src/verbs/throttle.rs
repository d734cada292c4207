//! Limits of the requests and bytes per second of devices, and of groups of devices.
//!
//! A group has no entry of its own: it is the devices that name it, which share one `Throttle`. It
//! begins with its first device and ends with its last one.

use super::block_on_verb;
use crate::api;
use crate::error::VerbError;
use crate::registry::{DeviceRegistry, RegisteredDevice};
use crate::state_folder::clones::CloneRecord;
use crate::throttle_settings::ThrottleSettings;
use std::sync::{Arc, PoisonError};
use udm_core::errno::{EINVAL, EIO, ENOENT};
use udm_dm::TargetError;
use udm_dm::throttle::Throttle;
use udm_wire::throttle::{GROUP_NAME_MAX, ThrottleLimits, is_throttle_group_name, parse_throttle_limits};

impl RegisteredDevice {
    /// The group whose limits of requests and bytes per second the device shares.
    fn throttle_group(&self) -> Option<Arc<str>> {
        self.throttle_group.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Puts the device into a group, or into none; returns the group before.
    fn set_throttle_group(&self, group: Option<&str>) -> Option<Arc<str>> {
        let mut now = self.throttle_group.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut *now, group.map(Arc::from))
    }
}

/// Limits the device `word` as `request` says. The limits of snapshots and clones that were created
/// by name are recorded, so they come back with them. May block.
///
/// # Errors
/// ENXIO if there is no such device; EINVAL for limits or a group's name that are none; ENOENT for
/// a group without devices if no limits are given. EIO if the limits hold, but cannot be recorded.
pub fn throttle_device(
    registry: &DeviceRegistry,
    word: &str,
    request: &api::ThrottleDeviceRequest,
) -> Result<(), VerbError> {
    set_requested_throttle(registry, word, request)?;
    block_on_verb(record_throttles(registry)).map_err(|error| {
        let why = format!("it is limited, but only until the server ends: {error}");
        VerbError::new(word, TargetError::errno(EIO).because(why))
    })
}

/// Records the limits of snapshots and clones that were created by name, as far as they have
/// changed: those of a group may change for several.
async fn record_throttles(registry: &DeviceRegistry) -> std::io::Result<()> {
    let Some(folder) = registry.state_folder() else { return Ok(()) };
    for record in folder.attached_here().into_iter().filter(|record| record.by_name) {
        let Ok(mapped) = registry.find(&record.name) else { continue };
        if throttle_settings(&mapped) != record.throttle {
            let _lock = registry.store_locks.lock(std::slice::from_ref(&record.store)).await;
            folder.record_throttle(&record.file_name(), throttle_settings(&mapped))?;
        }
    }
    for record in folder.all_own_clones() {
        let Ok(mapped) = registry.find(&record.name) else { continue };
        let throttle = throttle_settings(&mapped);
        folder.change_clone(&record.name, |was| CloneRecord { throttle, ..was })?;
    }
    Ok(())
}

fn set_requested_throttle(
    registry: &DeviceRegistry,
    word: &str,
    request: &api::ThrottleDeviceRequest,
) -> Result<(), VerbError> {
    let mapped = registry.find(word)?;
    let refused = |errno, why: String| VerbError::new(word, TargetError::errno(errno).because(why));
    let limits = request.limits.as_deref().map(parse_throttle_limits).transpose();
    let limits = limits.map_err(|error| refused(EINVAL, error.to_string()))?;
    match (&request.group, limits) {
        (None, None) => return Err(refused(EINVAL, "there are neither limits nor a group".into())),
        (Some(_), Some(None)) => {
            let why = "none ends the limits of a device: give no group with it";
            return Err(refused(EINVAL, why.into()));
        }
        (Some(group), _) if !is_throttle_group_name(group) => {
            let why =
                format!("the name of a group has 1 to {GROUP_NAME_MAX} bytes and no control characters");
            return Err(refused(EINVAL, why));
        }
        (group, limits) => set_device_throttle(registry, &mapped, limits.flatten(), group.as_deref()),
    }
    .map_err(|NoSuchThrottleGroup| {
        refused(ENOENT, "no device is in this group: give its limits, as in iops=1000".into())
    })
}

/// Limits a device as a file or another process says; `None` for no limits.
///
/// # Errors
/// EINVAL for limits that are none.
pub(crate) fn apply_throttle_settings(
    registry: &DeviceRegistry,
    mapped: &RegisteredDevice,
    settings: Option<&ThrottleSettings>,
) -> Result<(), VerbError> {
    let limits = settings.map(|settings| settings.limits.parse::<ThrottleLimits>()).transpose();
    let limits = limits.map_err(|error| {
        VerbError::new(mapped.device.name(), TargetError::errno(EINVAL).because(error.to_string()))
    })?;
    let group = settings.and_then(|settings| settings.group.as_deref());
    // Only a group without limits can be missing.
    let _ = set_device_throttle(registry, mapped, limits, group);
    Ok(())
}

/// No device is in a group, so its limits are not known.
struct NoSuchThrottleGroup;

fn set_device_throttle(
    registry: &DeviceRegistry,
    mapped: &RegisteredDevice,
    limits: Option<ThrottleLimits>,
    group: Option<&str>,
) -> Result<(), NoSuchThrottleGroup> {
    let _lock = registry.throttling();
    let cores = registry.cores();
    let Some(group) = group else {
        let was_in_group = mapped.set_throttle_group(None).is_some();
        let before = mapped.device.throttle().filter(|_| !was_in_group);
        if was_in_group || before.as_ref().map(|throttle| *throttle.limits()) != limits {
            mapped.device.set_throttle(limits.map(|limits| throttle_after(before.as_ref(), limits)), cores);
        }
        return Ok(());
    };
    let mut members = registry.all_with_pending();
    members.retain(|one| one.throttle_group().is_some_and(|of| *of == *group));
    let before = members.iter().find_map(|one| one.device.throttle());
    let throttle = match (before, limits) {
        (Some(before), None) => before,
        (Some(before), Some(limits)) if *before.limits() == limits => before,
        (before, Some(limits)) => throttle_after(before.as_ref(), limits),
        (None, None) => return Err(NoSuchThrottleGroup),
    };
    mapped.set_throttle_group(Some(group));
    for one in members.iter().map(|one| &**one).chain([mapped]) {
        if one.device.throttle().is_none_or(|before| !Arc::ptr_eq(&before, &throttle)) {
            one.device.set_throttle(Some(Arc::clone(&throttle)), cores);
        }
    }
    Ok(())
}

/// Limits that follow `before`, if there were any.
fn throttle_after(before: Option<&Arc<Throttle>>, limits: ThrottleLimits) -> Arc<Throttle> {
    before.map_or_else(|| Throttle::new(limits), |before| before.followed_by(limits))
}

/// What limits a device; `None` for nothing.
pub(crate) fn throttle_settings(mapped: &RegisteredDevice) -> Option<ThrottleSettings> {
    let limits = mapped.device.throttle()?.limits().to_string();
    Some(ThrottleSettings { limits, group: mapped.throttle_group().map(|group| group.to_string()) })
}

/// The limits of a device, as clients see them.
pub(super) fn describe_throttle(mapped: &RegisteredDevice) -> Option<api::DeviceThrottle> {
    let throttle = mapped.device.throttle()?;
    let ThrottleSettings { limits, group } = throttle_settings(mapped)?;
    let rates = throttle.limits().rates().map(|(key, rate)| {
        let rate = api::DeviceThrottleRate { per_second: rate.per_second, burst: rate.burst };
        (key.word().to_owned(), rate)
    });
    let counters = mapped.device.throttle_counters();
    let (waiting, delayed) = (counters.waiting, counters.delayed);
    Some(api::DeviceThrottle { rates: rates.collect(), limits, group, waiting, delayed })
}
