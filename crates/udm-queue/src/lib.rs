//! The queue in front of a disk (the kernel's blk-mq): how many requests the disk has at a time,
//! which waiting request is next, and which are merged.
//!
//! ```text
//!   lane on core 0      lane on core 1      lane on core 2      lane on core 3
//!   merge, schedule     merge, schedule     merge, schedule     merge, schedule
//!        └───── hardware queue 0 ─────┘          └───── hardware queue 1 ─────┘
//!               queue_depth tags                        queue_depth tags
//!        │                   │                   │                   │
//!   the disk's lane     the disk's lane     the disk's lane     the disk's lane
//! ```
//!
//! A backend has a queue only if its URI asks for one. A hardware queue is its tags and nothing
//! else. Cores that share one share a number, and each has its own lane to the disk. So no request
//! changes its core, and a request completes on the core that submitted it (the kernel's
//! `rq_affinity` 2).
//!
//! * **Tags** (`tags`): a tag is a permit. A lane takes the tags for a batch with one atomic, and
//!   returns them with one. If none is free, the lane enters a line. A lane that returns tags
//!   grants them to the line, one each in turn, so a core with many requests starves no other.
//!   Another design had one core own the tags. It needs a message each way per batch and saves two
//!   atomics.
//! * **Merging** (`merge`): joins the data of adjacent requests on the way down and splits it on
//!   the way up. It looks at neighbours in a batch and at waiting requests: the latest eight
//!   without a scheduler, the neighbours by sector with one. The mapped device already splits
//!   requests by the limits of the queue.
//! * **`mq-deadline`** (`sched`) has one order for the whole disk. With several cores, a task on
//!   one core owns the disk's lane, and the others send it their requests
//!   ([`SingleOwnerForwarder`]). A suspend without flush takes waiting requests back
//!   (`single_owner/drain`). Requests of other lanes return to the queue with a new start time, so
//!   they do not expire while such a suspend waits.
//! * **Settings change under load** (`request_queue`): new settings have new tags. The change takes
//!   the old tags one by one, in line with the lanes. When it has all, no request is with the disk;
//!   the old tags are retired, and each lane moves its waiting requests. So requests continue, and
//!   the disk never has more than both settings allow.
//! * **A request-based device** has a queue above its mapped device (`dm_mq_queue_depth` and
//!   `dm_mq_nr_hw_queues`; see `udm-dm`). It survives a change of tables.
//! * **Shared tags** (`shared_tags`, null devices with `shared_tags`) lie below the queues. A
//!   request with a tag of its queue waits on its core for a tag of the set. The share of a disk
//!   depends on how many disks are active, so it is counted under a lock.
//!
//! Not supported: `kyber`, and the kernel's estimate of a busy queue with its reruns by timer. A
//! lane is polled when a request of it completes.
//!
//! This crate does no I/O, starts no thread, and reads no clock but [`udm_core::Cx`]: the simulator
//! runs it unchanged.
#![forbid(unsafe_code)]

mod lane;
mod merge;
mod request_queue;
mod sched;
mod settings;
mod shared_tags;
mod single_owner;
mod tags;

pub use shared_tags::SharedTagSet;
pub use single_owner::SingleOwnerForwarder;

use request_queue::{QueueLaneUser, RequestQueue, RequestQueueLayer};
use std::sync::Arc;
use udm_core::{
    ChangeTrackingCheckpoint, Cx, Device, DeviceControlError, DeviceId, DiskInUseByOtherProgram, DiskQueue,
    Extents, GrowResultCallback, GrowthPolicy, InterProcessDiskLock, Lane, Limits, PowerSwitch,
    QueueChangeCallback, QueueChangeCancelFn, QueueReport, RangeChangeStatus, Sector, Sectors,
    SharedDiskState, StackedDevice,
};
use udm_wire::uri::QueueParams;

/// A disk with a request queue in front of it. All other operations go to the disk.
pub struct QueuedDevice(Arc<RequestQueue>);

impl QueuedDevice {
    /// Puts a queue with these parameters in front of `disk`.
    #[must_use]
    pub fn new(disk: Arc<dyn Device>, params: &QueueParams) -> QueuedDevice {
        QueuedDevice(RequestQueue::new(disk, params.clone(), RequestQueueLayer::Disk, None))
    }

    /// As [`QueuedDevice::new`], but the queue never has a scheduler, not even after a change.
    #[must_use]
    pub fn without_scheduler(disk: Arc<dyn Device>, params: &QueueParams) -> QueuedDevice {
        QueuedDevice(RequestQueue::new(disk, params.clone(), RequestQueueLayer::Unscheduled, None))
    }

    /// Puts a queue with these parameters in front of all lanes of the mapped device `bare`.
    #[must_use]
    pub fn of_device(bare: Arc<dyn Device>, params: &QueueParams) -> QueuedDevice {
        QueuedDevice(RequestQueue::new(bare, params.clone(), RequestQueueLayer::Device, None))
    }

    /// As [`QueuedDevice::new`], with shared tags of `set` below the tags of the queue. A scheduler
    /// is only possible if `may_schedule` is true.
    #[must_use]
    pub fn sharing(
        disk: Arc<dyn Device>,
        params: &QueueParams,
        may_schedule: bool,
        set: Arc<SharedTagSet>,
    ) -> QueuedDevice {
        let place = if may_schedule { RequestQueueLayer::Disk } else { RequestQueueLayer::Unscheduled };
        QueuedDevice(RequestQueue::new(disk, params.clone(), place, Some(set)))
    }
}

impl Device for QueuedDevice {
    fn id(&self) -> DeviceId {
        self.0.id()
    }

    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        self.0.lane(QueueLaneUser::Core, cx)
    }

    fn limits(&self) -> Limits {
        self.0.limits()
    }

    fn refresh_size(&self) {
        self.0.disk().refresh_size();
    }

    fn retry_now(&self) {
        self.0.disk().retry_now();
    }

    fn may_shrink(&self) -> bool {
        self.0.disk().may_shrink()
    }

    fn is_pinned_version(&self) -> bool {
        self.0.disk().is_pinned_version()
    }

    fn growth(&self) -> Option<GrowthPolicy> {
        self.0.disk().growth()
    }

    fn grow(&self, size: Sectors, then: GrowResultCallback) {
        self.0.disk().grow(size, then);
    }

    fn extents(&self, from: Sector, len: Sectors, out: &mut Extents) {
        self.0.disk().extents(from, len, out);
    }

    fn checkpoints(&self) -> Vec<ChangeTrackingCheckpoint> {
        self.0.disk().checkpoints()
    }

    fn changed(
        &self,
        since: &ChangeTrackingCheckpoint,
        from: Sector,
        len: Sectors,
        out: &mut Extents<RangeChangeStatus>,
    ) {
        self.0.disk().changed(since, from, len, out);
    }

    fn shared_disk_state(&self) -> Option<&SharedDiskState> {
        self.0.disk().shared_disk_state()
    }

    fn lock(&self) -> Result<Option<InterProcessDiskLock>, DiskInUseByOtherProgram> {
        self.0.disk().lock()
    }

    fn stall_reason(&self) -> Option<String> {
        self.0.disk().stall_reason()
    }

    fn rejection_reason(&self) -> Option<String> {
        self.0.disk().rejection_reason()
    }

    fn wwid(&self) -> Option<String> {
        self.0.disk().wwid()
    }

    fn path_priority(&self) -> Option<u32> {
        self.0.disk().path_priority()
    }

    fn power(&self) -> Option<&dyn PowerSwitch> {
        self.0.disk().power()
    }

    fn stacked(&self) -> Option<&dyn StackedDevice> {
        self.0.disk().stacked()
    }

    fn queue(&self) -> Option<&dyn DiskQueue> {
        Some(self)
    }
}

impl DiskQueue for QueuedDevice {
    fn report(&self, cores: usize) -> QueueReport {
        self.0.report(cores)
    }

    fn change(
        &self,
        settings: &[(String, String)],
        then: QueueChangeCallback,
    ) -> Result<QueueChangeCancelFn, DeviceControlError> {
        self.0.change(settings, then)
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests;
