//! Keeps a lane open for a device that no client uses, as long as the device has work.

use crate::registry::DeviceRegistry;
use std::sync::Arc;
use tokio::sync::Notify;
use udm_core::{
    AckOnLastDrop, Batch, BioTask, BioTaskCx, BioTaskHandle, BioTaskLaneId, Device, FirstLaneError, OwnWork,
};
use udm_dm::MappedDevice;

/// Keeps a lane of a device open on one core until it is dropped.
pub(super) struct LaneGuard {
    _task: BioTaskHandle,
    pub(super) failure: FirstLaneError,
}

/// Task that keeps a lane open. `ack` is dropped once the lane is open or can't be opened.
struct KeepLaneOpenTask {
    device: Option<Arc<dyn Device>>,
    slot: Option<BioTaskLaneId>,
    failure: FirstLaneError,
    ack: Option<AckOnLastDrop>,
    over: bool,
}

impl BioTask for KeepLaneOpenTask {
    fn turn(&mut self, cx: &mut dyn BioTaskCx) {
        if let Some(device) = self.device.take() {
            match cx.open(&device) {
                Ok(slot) => self.slot = Some(slot),
                Err(error) => self.failure.set(error),
            }
        }
        self.ack = None;
    }

    fn complete(&mut self, _: &mut Batch, _: &mut dyn BioTaskCx) {}

    fn stop(&mut self, cx: &mut dyn BioTaskCx) {
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
pub(super) fn open_lane(
    registry: &DeviceRegistry,
    device: &Arc<MappedDevice>,
    ack: AckOnLastDrop,
) -> LaneGuard {
    let failure = FirstLaneError::default();
    let device = Arc::clone(device) as Arc<dyn Device>;
    let keep = KeepLaneOpenTask {
        device: Some(device),
        slot: None,
        failure: failure.clone(),
        ack: Some(ack),
        over: false,
    };
    LaneGuard { _task: registry.cores().start(Box::new(move || Box::new(keep))), failure }
}

/// Opens a lane for a resume or a suspend, if a target needs one. An open error is ignored here:
/// the next user of the device gets it.
pub(super) async fn open_lane_for_change(
    registry: &DeviceRegistry,
    device: &Arc<MappedDevice>,
) -> Option<LaneGuard> {
    let tables = [device.live(), device.inactive()];
    let mut targets = tables.iter().flatten().flat_map(|table| table.targets());
    if !targets.any(|entry| entry.target.features().needs_own_lane) {
        return None;
    }
    let open = Arc::new(Notify::new());
    let opened = Arc::clone(&open);
    let held = open_lane(registry, device, AckOnLastDrop::new(move || opened.notify_one()));
    open.notified().await;
    Some(held)
}
