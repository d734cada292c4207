//! The queues in front of what tables use: what they do, and changes of it.

use super::show::describe;
use crate::error::VerbError;
use crate::http::api;
use crate::registry::{Mapped, Registry};
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::oneshot;
use udm_core::errno::{EINVAL, ENXIO};
use udm_core::{CancelChange, DevNo, Device, HwQueueReport, OpenError, QueueReport};
use udm_dm::TargetError;

/// The queues in front of what the live table uses, and its own, by number.
pub(super) fn queues(registry: &Registry, mapped: &Mapped) -> Vec<api::Queue> {
    queued_devices(mapped)
        .into_iter()
        .filter_map(|(number, device)| queue(registry, number, &*device))
        .collect()
}

/// What has a queue in front of it: of what the live table uses, and the device itself.
fn queued_devices(mapped: &Mapped) -> BTreeMap<DevNo, Arc<dyn Device>> {
    let own = (mapped.device.number(), Arc::clone(&mapped.device) as Arc<dyn Device>);
    used(mapped).chain([own]).filter(|(_, device)| device.queue().is_some()).collect()
}

/// What the live table uses, by number.
pub(super) fn used(mapped: &Mapped) -> impl Iterator<Item = (DevNo, Arc<dyn Device>)> {
    let live = mapped.device.live();
    let used = live.iter().flat_map(|table| table.devices()).map(|used| (used.number, used.device));
    used.collect::<Vec<_>>().into_iter()
}

fn queue(registry: &Registry, number: DevNo, device: &dyn Device) -> Option<api::Queue> {
    let QueueReport { scheduler, numbers, hw_queues } = device.queue()?.report(registry.core_count());
    let hw_queue = |hw: HwQueueReport| api::HwQueue {
        cores: hw.cores.into_iter().map(|core| core as u64).collect(),
        tags: hw.tags.into(),
        tags_in_use: hw.tags_in_use.into(),
        in_line: hw.in_line.into(),
        shared: hw.shared.map(|shared| api::SharedTags {
            held: shared.held.into(),
            most: shared.most.into(),
            tags: shared.tags.into(),
            disks: shared.disks.into(),
        }),
    };
    Some(api::Queue {
        number: number.to_string(),
        uri: registry.uri_of(number),
        scheduler,
        settings: numbers.into_iter().map(|(name, number)| (name.to_owned(), number)).collect(),
        hw_queues: hw_queues.into_iter().map(hw_queue).collect(),
    })
}

/// Changes settings of the queues in front of what the live table of the device `word` uses and of
/// its own, or of one of them: `disk`, by its number or URI. Returns the device when they hold,
/// whatever its name is by then. If the future is dropped before that, each change that does not
/// hold yet is cancelled.
///
/// # Errors
/// ENXIO when there is no such device, or when it has been removed meanwhile; EINVAL where it has
/// no such queue, and for what can't be set; EBUSY while a queue is being changed. With several
/// queues the first may be changed then.
pub async fn change_queues(
    registry: &Registry,
    word: &str,
    disk: Option<&str>,
    settings: &BTreeMap<String, String>,
) -> Result<api::Device, VerbError> {
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
    let mut under_way = Vec::new();
    for (number, device) in &all {
        let (done, told) = oneshot::channel();
        let then = Box::new(move || _ = done.send(()));
        let changed = device.queue().map(|queue| queue.change(&settings, then)).transpose();
        let cancel =
            changed.map_err(|OpenError { errno, text }| refused(errno, format!("{number}: {text}")))?;
        under_way.push((told, CancelOnDrop(cancel)));
    }
    for (told, _cancel) in under_way {
        // One that is dropped is gone with its disk.
        let _ = told.await;
    }
    match registry.listed(&mapped.device) {
        Some(mapped) => Ok(describe(registry, &mapped)),
        None => Err(refused(ENXIO, "it has been removed meanwhile".into())),
    }
}

/// Cancels a change of a queue when it is dropped, if the change does not hold yet.
struct CancelOnDrop(Option<CancelChange>);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        if let Some(cancel) = self.0.take() {
            cancel();
        }
    }
}
