//! The optional queue in front of a request-based device. All lanes of the device go through it.

use super::device::MappedDevice;
use std::sync::{Arc, OnceLock, Weak};
use udm_core::errno::ENXIO;
use udm_core::{Cx, Device, DeviceControlError, DeviceId, Lane, Limits, Sectors};

/// Creates a queue in front of a device.
pub type QueueFactory = Box<dyn Fn(Arc<dyn Device>) -> Arc<dyn Device> + Send + Sync>;

/// The queue factory of a device, and the queue once it is created.
#[derive(Default)]
pub(super) struct LazyRequestQueue {
    by: OnceLock<QueueFactory>,
    front_queue: OnceLock<Arc<dyn Device>>,
}

impl LazyRequestQueue {
    /// The queue, if there is one.
    pub fn front_queue(&self) -> Option<&Arc<dyn Device>> {
        self.front_queue.get()
    }

    /// The device is request-based: creates its queue, if there is a factory.
    pub fn begin(&self, id: DeviceId, device: &Weak<MappedDevice>) {
        if self.by.get().is_some() {
            self.front_queue.get_or_init(|| self.build_queue(id, device));
        }
    }

    /// Creates a new queue in front of the device.
    pub fn build_queue(&self, id: DeviceId, device: &Weak<MappedDevice>) -> Arc<dyn Device> {
        let bare = Arc::new(MappedDeviceBelowQueue { id, device: Weak::clone(device) });
        self.by.get().map_or(Arc::clone(&bare) as Arc<dyn Device>, |by| by(bare))
    }
}

impl MappedDevice {
    /// Sets the queue factory. It is used if the first load makes the device request-based. Only
    /// the first call has an effect.
    pub fn set_queue_factory(&self, by: QueueFactory) {
        let _ = self.queue.by.set(by);
    }

    /// The device's own queue, if it has one.
    pub fn own_queue(&self) -> Option<Arc<dyn Device>> {
        self.queue.front_queue().cloned()
    }
}

/// The mapped device as its own queue sees it.
struct MappedDeviceBelowQueue {
    id: DeviceId,
    /// Weak, because the device holds the queue, which holds this.
    device: Weak<MappedDevice>,
}

impl Device for MappedDeviceBelowQueue {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        match self.device.upgrade() {
            Some(device) => device.open_unqueued(cx),
            None => Err(DeviceControlError::new(ENXIO, "the device is gone")),
        }
    }

    fn limits(&self) -> Limits {
        self.device.upgrade().map_or(Limits::new(Sectors::ZERO), |device| device.limits())
    }
}
