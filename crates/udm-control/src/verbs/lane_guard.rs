//! Keeps a lane open for a device that no client uses, as long as the device has work.

use crate::registry::Registry;
use std::sync::Arc;
use tokio::sync::Notify;
use udm_core::{Ack, Batch, Device, DeviceSlot, FirstError, OwnWork, Task, TaskCx, TaskHandle};
use udm_dm::MappedDevice;

/// Keeps a lane of a device open on one core until it is dropped.
pub(super) struct LaneGuard {
    _task: TaskHandle,
    pub(super) failure: FirstError,
}

/// Task that keeps a lane open. `ack` is dropped once the lane is open or can't be opened.
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

    /// Clients may use the same lane, so its own work must be completed.
    fn own_work(&self) -> OwnWork {
        OwnWork::Required
    }
}

/// Opens a lane. `ack` is dropped once the lane is open or can't be opened.
pub(super) fn open_lane(registry: &Registry, device: &Arc<MappedDevice>, ack: Ack) -> LaneGuard {
    let failure = FirstError::default();
    let device = Arc::clone(device) as Arc<dyn Device>;
    let keep =
        LaneTask { device: Some(device), slot: None, failure: failure.clone(), ack: Some(ack), over: false };
    LaneGuard { _task: registry.cores().start(Box::new(move || Box::new(keep))), failure }
}

/// Opens a lane for a resume or a suspend, if a target needs one. An open error is ignored here:
/// the next user of the device gets it.
pub(super) async fn lane_for_change(registry: &Registry, device: &Arc<MappedDevice>) -> Option<LaneGuard> {
    let tables = [device.live(), device.inactive()];
    let mut targets = tables.iter().flatten().flat_map(|table| table.targets());
    if !targets.any(|entry| entry.target.features().needs_own_lane) {
        return None;
    }
    let open = Arc::new(Notify::new());
    let opened = Arc::clone(&open);
    let held = open_lane(registry, device, Ack::new(move || opened.notify_one()));
    open.notified().await;
    Some(held)
}
