//! The queue in front of a request-based device, where it is to have one: all lanes of the device
//! go through it.

use super::device::MappedDevice;
use std::sync::{Arc, OnceLock, Weak};
use udm_core::errno::ENXIO;
use udm_core::{Cx, Device, DeviceId, Lane, Limits, OpenError, Sectors};

/// Puts a queue in front of a device.
pub type QueueFactory = Box<dyn Fn(Arc<dyn Device>) -> Arc<dyn Device> + Send + Sync>;

/// What makes it, and that.
#[derive(Default)]
pub(super) struct DeviceQueue {
    by: OnceLock<QueueFactory>,
    front_queue: OnceLock<Arc<dyn Device>>,
}

impl DeviceQueue {
    /// The queue, where there is one.
    pub fn front_queue(&self) -> Option<&Arc<dyn Device>> {
        self.front_queue.get()
    }

    /// The device is request-based, and has its queue from now on.
    pub fn begin(&self, id: DeviceId, device: &Weak<MappedDevice>) {
        if self.by.get().is_some() {
            self.front_queue.get_or_init(|| self.build_queue(id, device));
        }
    }

    /// One that nobody has yet.
    pub fn build_queue(&self, id: DeviceId, device: &Weak<MappedDevice>) -> Arc<dyn Device> {
        let bare = Arc::new(UnqueuedDevice { id, device: Weak::clone(device) });
        self.by.get().map_or(Arc::clone(&bare) as Arc<dyn Device>, |by| by(bare))
    }
}

impl MappedDevice {
    /// Says what makes the device's queue, where its first load makes it request-based. The first
    /// one stays.
    pub fn set_queue_factory(&self, by: QueueFactory) {
        let _ = self.queue.by.set(by);
    }

    /// The device's own queue, where it has one.
    pub fn own_queue(&self) -> Option<Arc<dyn Device>> {
        self.queue.front_queue().cloned()
    }
}

/// A mapped device behind its queue.
struct UnqueuedDevice {
    id: DeviceId,
    /// It has the queue, which has this.
    device: Weak<MappedDevice>,
}

impl Device for UnqueuedDevice {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, OpenError> {
        match self.device.upgrade() {
            Some(device) => device.open_unqueued(cx),
            None => Err(OpenError::new(ENXIO, "the device is gone")),
        }
    }

    fn limits(&self) -> Limits {
        self.device.upgrade().map_or(Limits::new(Sectors::ZERO), |device| device.limits())
    }
}
