//! The queue in front of a device, as the control side sees it.

use crate::OpenError;

/// A queue in front of a device.
pub trait DiskQueue: Send + Sync {
    /// What it does, where there are `cores` cores.
    fn report(&self, cores: usize) -> QueueReport;

    /// Changes settings while requests are under way. Returns at once; `then` is called, on any
    /// thread, once the settings hold for every request that is with the device or will be. Until
    /// then the returned function cancels the change: the old settings stay, `then` is dropped, and
    /// requests that waited for the change go on.
    ///
    /// # Errors
    /// EINVAL for a setting that is not possible, EBUSY while another change is under way: nothing
    /// has changed.
    fn change(
        &self,
        settings: &[(String, String)],
        then: QueueChangeCallback,
    ) -> Result<CancelChange, OpenError>;
}

/// Cancels a change of a queue, if it does not hold yet.
pub type CancelChange = Box<dyn FnOnce() + Send>;

/// Is told that a change of a queue holds.
pub type QueueChangeCallback = Box<dyn FnOnce() + Send>;

/// What a queue does.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QueueReport {
    /// Which of the requests that wait goes next.
    pub scheduler: String,
    /// What else it is told, by the names that a URI has for it, with what holds where nothing was
    /// said filled in.
    pub numbers: Vec<(&'static str, u64)>,
    /// Its hardware queues.
    pub hw_queues: Vec<HwQueueReport>,
}

/// A hardware queue, as of now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HwQueueReport {
    /// The cores that send through it.
    pub cores: Vec<usize>,
    /// Its tags.
    pub tags: u32,
    /// Those that requests have.
    pub tags_in_use: u32,
    /// How many are in line for a tag: lanes, and a change of settings.
    pub in_line: u32,
    /// Where the disk shares tags with others, and a lane is open.
    pub shared: Option<SharedTags>,
}

/// Tags that disks share, as one of them sees them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SharedTags {
    /// Those that it holds.
    pub held: u32,
    /// What it may hold now.
    pub most: u32,
    /// All of them.
    pub tags: u32,
    /// Disks that are active.
    pub disks: u32,
}
