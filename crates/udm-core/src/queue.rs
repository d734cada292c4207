//! The request queue in front of a device, as the control half sees it.

use crate::DeviceControlError;

/// A request queue in front of a device.
pub trait DiskQueue: Send + Sync {
    /// Settings and state of the queue, for `cores` cores.
    fn report(&self, cores: usize) -> QueueReport;

    /// Changes settings while requests are in flight. Returns at once. `then` is called, on any
    /// thread, once the settings apply to every request of the device. Until then, the returned
    /// function cancels the change: the old settings stay, `then` is dropped, and requests that
    /// waited for the change continue.
    ///
    /// # Errors
    /// EINVAL for an invalid setting, EBUSY while another change is in progress. Nothing has
    /// changed then.
    fn change(
        &self,
        settings: &[(String, String)],
        then: QueueChangeCallback,
    ) -> Result<QueueChangeCancelFn, DeviceControlError>;
}

/// Cancels a change of a queue, unless it has taken effect.
pub type QueueChangeCancelFn = Box<dyn FnOnce() + Send>;

/// Called when a change of a queue has taken effect.
pub type QueueChangeCallback = Box<dyn FnOnce() + Send>;

/// Settings and state of a request queue.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QueueReport {
    /// Name of the I/O scheduler.
    pub scheduler: String,
    /// The other settings, by the names that a URI uses; defaults are filled in.
    pub numbers: Vec<(&'static str, u64)>,
    /// Hardware queues.
    pub hw_queues: Vec<HwQueueReport>,
}

/// Current state of a hardware queue.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HwQueueReport {
    /// Cores that use the queue.
    pub cores: Vec<usize>,
    /// Number of tags.
    pub tags: u32,
    /// Number of tags in use.
    pub tags_in_use: u32,
    /// Number of waiters for a tag: lanes, and a change of settings.
    pub waiting: u32,
    /// Shared tags, if the disk shares tags with others and a lane is open.
    pub shared: Option<DiskSharedTagUsage>,
}

/// Tags shared by several disks, as seen by one of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskSharedTagUsage {
    /// Number of tags that this disk holds.
    pub held: u32,
    /// Number of tags that this disk may hold now.
    pub most: u32,
    /// Total number of tags.
    pub tags: u32,
    /// Number of active disks.
    pub disks: u32,
}
