//! The queue in front of a disk (blk-mq): how many requests are with it at a time, which of those
//! that wait goes next, and which go down as one.
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
//! A hardware queue is its tags and nothing else: cores that have one in common share a number, and
//! each has its own way to the disk. So no request changes its core, and completion is where it was
//! submitted (the kernel's `rq_affinity` 2) by construction. What has to have one order for the
//! whole disk, `mq-deadline`, is done on one core, to which the others send their requests
//! ([`Funnel`]).
//!
//! Settings are changed while requests are under way ([`queues`]).
//!
//! No I/O, no threads, no clock but [`udm_core::Cx`]: the simulator runs it unchanged.
#![forbid(unsafe_code)]

mod funnel;
mod lane;
mod merge;
mod queues;
mod sched;
mod settings;
mod shared;
mod tags;

pub use funnel::Funnel;
pub use shared::TagSet;

use queues::{Place, Queues, Who};
use std::sync::Arc;
use udm_core::{
    CancelChange, Changed, Checkpoint, Commons, Cx, Device, DeviceId, DiskLock, DiskQueue, DiskTaken,
    Extents, Grown, Growth, Lane, Limits, OpenError, PowerSwitch, QueueReport, Sector, Sectors, Since,
    Stacked,
};
use udm_wire::uri::QueueParams;

/// A disk with a queue in front of it. Everything but its requests it leaves to the disk.
pub struct Queued(Arc<Queues>);

impl Queued {
    /// `disk`, with a queue of these parameters.
    #[must_use]
    pub fn new(disk: Arc<dyn Device>, params: &QueueParams) -> Queued {
        Queued(Queues::new(disk, params.clone(), Place::Disk, None))
    }

    /// The same, where there may be no scheduler, now or later.
    #[must_use]
    pub fn without_scheduler(disk: Arc<dyn Device>, params: &QueueParams) -> Queued {
        Queued(Queues::new(disk, params.clone(), Place::Unscheduled, None))
    }

    /// A mapped device, `bare`, with a queue of these parameters in front of all its lanes.
    #[must_use]
    pub fn of_device(bare: Arc<dyn Device>, params: &QueueParams) -> Queued {
        Queued(Queues::new(bare, params.clone(), Place::Device, None))
    }

    /// A disk with tags of `set` below those of its queue. There is a scheduler only where there
    /// may be.
    #[must_use]
    pub fn sharing(
        disk: Arc<dyn Device>,
        params: &QueueParams,
        may_schedule: bool,
        set: Arc<TagSet>,
    ) -> Queued {
        let place = if may_schedule { Place::Disk } else { Place::Unscheduled };
        Queued(Queues::new(disk, params.clone(), place, Some(set)))
    }
}

impl Device for Queued {
    fn id(&self) -> DeviceId {
        self.0.id()
    }

    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, OpenError> {
        self.0.lane(Who::Core, cx)
    }

    fn limits(&self) -> Limits {
        self.0.limits()
    }

    fn look_again(&self) {
        self.0.disk().look_again();
    }

    fn try_again(&self) {
        self.0.disk().try_again();
    }

    fn can_be_cut(&self) -> bool {
        self.0.disk().can_be_cut()
    }

    fn growth(&self) -> Option<Growth> {
        self.0.disk().growth()
    }

    fn grow(&self, size: Sectors, then: Grown) {
        self.0.disk().grow(size, then);
    }

    fn extents(&self, from: Sector, len: Sectors, out: &mut Extents) {
        self.0.disk().extents(from, len, out);
    }

    fn checkpoints(&self) -> Vec<Checkpoint> {
        self.0.disk().checkpoints()
    }

    fn changed(&self, since: &Checkpoint, from: Sector, len: Sectors, out: &mut Extents<Since>) {
        self.0.disk().changed(since, from, len, out);
    }

    fn commons(&self) -> Option<&Commons> {
        self.0.disk().commons()
    }

    fn lock(&self) -> Result<Option<DiskLock>, DiskTaken> {
        self.0.disk().lock()
    }

    fn waits(&self) -> Option<String> {
        self.0.disk().waits()
    }

    fn refused(&self) -> Option<String> {
        self.0.disk().refused()
    }

    fn power(&self) -> Option<&dyn PowerSwitch> {
        self.0.disk().power()
    }

    fn stacked(&self) -> Option<&dyn Stacked> {
        self.0.disk().stacked()
    }

    fn queue(&self) -> Option<&dyn DiskQueue> {
        Some(self)
    }
}

impl DiskQueue for Queued {
    fn report(&self, cores: usize) -> QueueReport {
        self.0.report(cores)
    }

    fn change(&self, settings: &[(String, String)], then: Changed) -> Result<CancelChange, OpenError> {
        self.0.change(settings, then)
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests;
