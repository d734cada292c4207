//! A lane for devices that nobody uses, for as long as they have something to do.

use crate::registry::Registry;
use std::sync::Arc;
use tokio::sync::Notify;
use udm_core::{Ack, Batch, Device, DeviceSlot, FirstError, OwnWork, Task, TaskCx, TaskHandle};
use udm_dm::{MappedDevice, Target};

/// A lane of a device, open on one core until this is dropped.
pub(super) struct LaneGuard {
    _task: TaskHandle,
    pub(super) failure: FirstError,
}

/// Has a lane open. `ack` is dropped when it is, or can't be.
struct LaneTask {
    device: Option<Arc<dyn Device>>,
    slot: Option<DeviceSlot>,
    failure: FirstError,
    ack: Option<Ack>,
    over: bool,
}

impl Task for LaneTask {
    fn turn(&mut self, cx: &mut dyn TaskCx) {
        if let Some(device) = self.device.take() {
            match cx.open(&device) {
                Ok(slot) => self.slot = Some(slot),
                Err(error) => self.failure.set(error),
            }
        }
        self.ack = None;
    }

    fn complete(&mut self, _: &mut Batch, _: &mut dyn TaskCx) {}

    fn stop(&mut self, cx: &mut dyn TaskCx) {
        if let Some(slot) = self.slot.take() {
            cx.close(slot);
        }
        self.over = true;
    }

    fn is_over(&self) -> bool {
        self.over
    }

    /// The lane is the one that clients use, if there are any; what it owes is waited for.
    fn busy(&self) -> OwnWork {
        OwnWork::Required
    }
}

/// Has a lane opened. `ack` is dropped when it is open, or can't be.
pub(super) fn lane(registry: &Registry, device: &Arc<MappedDevice>, ack: Ack) -> LaneGuard {
    let failure = FirstError::default();
    let device = Arc::clone(device) as Arc<dyn Device>;
    let keep =
        LaneTask { device: Some(device), slot: None, failure: failure.clone(), ack: Some(ack), over: false };
    LaneGuard { _task: registry.cores().start(Box::new(move || Box::new(keep))), failure }
}

/// A lane for a resume or a suspend, where a target has something to do then. One that can't be
/// opened is no obstacle: whoever uses the device next is told why.
pub(super) async fn lane_for_change(registry: &Registry, device: &Arc<MappedDevice>) -> Option<LaneGuard> {
    let tables = [device.live(), device.inactive()];
    let mut targets = tables.iter().flatten().flat_map(|table| table.targets());
    if !targets.any(|entry| Target::needs_own_lane(&*entry.target)) {
        return None;
    }
    let open = Arc::new(Notify::new());
    let opened = Arc::clone(&open);
    let held = lane(registry, device, Ack::new(move || opened.notify_one()));
    open.notified().await;
    Some(held)
}
