//! A lane for devices that nobody uses, for as long as they have something to do.

use crate::registry::Registry;
use std::sync::Arc;
use tokio::sync::Notify;
use udm_core::{Ack, Device, DeviceId, Failure};
use udm_dm::{MappedDevice, Target};

/// A lane of a device, open on one core until this is dropped.
pub(super) struct Held<'a> {
    registry: &'a Registry,
    device: DeviceId,
    pub(super) failure: Failure,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.registry.cores().release(self.device);
    }
}

/// Has a lane opened. `ack` is dropped when it is open, or can't be.
pub(super) fn lane<'a>(registry: &'a Registry, device: &Arc<MappedDevice>, ack: Ack) -> Held<'a> {
    let failure = Failure::default();
    registry.cores().hold(Arc::clone(device) as Arc<dyn Device>, failure.clone(), ack);
    Held { registry, device: device.id(), failure }
}

/// A lane for a resume or a suspend, where a target has something to do then. One that can't be opened is no obstacle: whoever uses the device next is told why.
pub(super) async fn lane_for_change<'a>(
    registry: &'a Registry,
    device: &Arc<MappedDevice>,
) -> Option<Held<'a>> {
    let tables = [device.live(), device.inactive()];
    let mut targets = tables.iter().flatten().flat_map(|table| table.targets());
    if !targets.any(|entry| Target::works_unasked(&*entry.target)) {
        return None;
    }
    let open = Arc::new(Notify::new());
    let opened = Arc::clone(&open);
    let held = lane(registry, device, Ack::new(move || opened.notify_one()));
    open.notified().await;
    Some(held)
}
