//! The queues in front of the disks that tables use: reports, and changes of settings.

use super::show::describe_mapped_device;
use crate::api;
use crate::error::VerbError;
use crate::registry::{DeviceRegistry, RegisteredDevice};
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::oneshot;
use udm_core::errno::{EINVAL, ENXIO};
use udm_core::{DevNo, Device, DeviceControlError, HwQueueReport, QueueChangeCancelFn, QueueReport};
use udm_dm::TargetError;

/// The queues in front of the disks of the live table, and the device's own, by number.
pub(super) fn queue_reports(
    registry: &DeviceRegistry,
    mapped: &RegisteredDevice,
) -> Vec<api::RequestQueueReport> {
    queued_devices(mapped)
        .into_iter()
        .filter_map(|(number, device)| queue_report(registry, number, &*device))
        .collect()
}

/// Devices with a queue, by number: those that the live table uses, and the device itself.
fn queued_devices(mapped: &RegisteredDevice) -> BTreeMap<DevNo, Arc<dyn Device>> {
    let own = (mapped.device.number(), Arc::clone(&mapped.device) as Arc<dyn Device>);
    used_devices(mapped).chain([own]).filter(|(_, device)| device.queue().is_some()).collect()
}

/// The devices that the live table uses, with their numbers.
pub(super) fn used_devices(mapped: &RegisteredDevice) -> impl Iterator<Item = (DevNo, Arc<dyn Device>)> {
    let live = mapped.device.live();
    let used = live.iter().flat_map(|table| table.devices()).map(|used| (used.number, used.device));
    used.collect::<Vec<_>>().into_iter()
}

fn queue_report(
    registry: &DeviceRegistry,
    number: DevNo,
    device: &dyn Device,
) -> Option<api::RequestQueueReport> {
    let QueueReport { scheduler, numbers, hw_queues } = device.queue()?.report(registry.core_count());
    let hw_queue = |hw: HwQueueReport| api::HwQueue {
        cores: hw.cores.into_iter().map(|core| core as u64).collect(),
        tags: hw.tags.into(),
        tags_in_use: hw.tags_in_use.into(),
        in_line: hw.waiting.into(),
        shared: hw.shared.map(|shared| api::SharedTagUsage {
            held: shared.held.into(),
            most: shared.most.into(),
            tags: shared.tags.into(),
            disks: shared.disks.into(),
        }),
    };
    Some(api::RequestQueueReport {
        number: number.to_string(),
        uri: registry.uri_of(number),
        scheduler,
        settings: numbers.into_iter().map(|(name, number)| (name.to_owned(), number)).collect(),
        hw_queues: hw_queues.into_iter().map(hw_queue).collect(),
    })
}

/// Changes settings of queues: the device's own and those in front of the disks that its live table
/// uses, or of one `disk`, given by its number or URI. Returns the device when the settings are in
/// effect, even if it was renamed meanwhile. If the future is dropped before that, changes not yet
/// in effect are cancelled.
///
/// # Errors
/// ENXIO if there is no such device, or if it was removed meanwhile; EINVAL if it has no such
/// queue, or for a setting that can't be changed; EBUSY while a queue is being changed. With
/// several queues, some may have been changed before the error.
pub async fn change_queue_settings(
    registry: &DeviceRegistry,
    word: &str,
    disk: Option<&str>,
    settings: &BTreeMap<String, String>,
) -> Result<api::DeviceDescription, VerbError> {
    let refused = |errno, why| VerbError::new(word, TargetError::errno(errno).because(why));
    if settings.is_empty() {
        return Err(refused(EINVAL, "there are no settings to change".into()));
    }
    let settings: Vec<_> = settings.iter().map(|(name, value)| (name.clone(), value.clone())).collect();
    let mapped = registry.find(word)?;
    let mut all = queued_devices(&mapped);
    if let Some(disk) = disk {
        all.retain(|number, _| number.to_string() == disk || registry.uri_of(*number) == disk);
    }
    if all.is_empty() {
        let why = match disk {
            Some(disk) => format!("its table uses no {disk:?} with a queue in front"),
            None => "neither it nor what its table uses has a queue in front".into(),
        };
        return Err(refused(EINVAL, why));
    }
    let mut pending = Vec::new();
    for (number, device) in &all {
        let (done, changed_settings) = oneshot::channel();
        let then = Box::new(move || _ = done.send(()));
        let changed = device.queue().map(|queue| queue.change(&settings, then)).transpose();
        let cancel = changed
            .map_err(|DeviceControlError { errno, text }| refused(errno, format!("{number}: {text}")))?;
        pending.push((changed_settings, QueueChangeCancelGuard(cancel)));
    }
    for (changed_settings, _cancel) in pending {
        // The sender is dropped if the disk is gone.
        let _ = changed_settings.await;
    }
    match registry.listed(&mapped.device) {
        Some(mapped) => Ok(describe_mapped_device(registry, &mapped)),
        None => Err(refused(ENXIO, "it has been removed meanwhile".into())),
    }
}

/// Cancels a change of a queue when dropped, unless the change is in effect.
struct QueueChangeCancelGuard(Option<QueueChangeCancelFn>);

impl Drop for QueueChangeCancelGuard {
    fn drop(&mut self) {
        if let Some(cancel) = self.0.take() {
            cancel();
        }
    }
}
