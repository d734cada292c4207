//! The queue in front of a device, as the control side sees it.

/// A queue in front of a device.
pub trait DiskQueue: Send + Sync {
    /// What it does, where there are `cores` cores.
    fn report(&self, cores: usize) -> QueueReport;
}

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
    /// How many cores have requests that wait for a tag.
    pub cores_waiting: u32,
}
