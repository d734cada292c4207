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
//! No I/O, no threads, no clock but [`udm_core::Cx`]: the simulator runs it unchanged.
#![forbid(unsafe_code)]

mod funnel;
mod lane;
mod merge;
mod sched;
mod settings;
mod tags;

pub use funnel::Funnel;

use lane::QueueLane;
use merge::Merger;
use sched::Sched;
use settings::Settings;
use std::sync::Arc;
use udm_core::{
    Checkpoint, Commons, Cx, Device, DeviceId, DiskLock, DiskQueue, DiskTaken, Extents, Grown, Growth, Lane,
    Limits, OpenError, QueueReport, Sector, Sectors, Since, Stacked,
};
use udm_wire::uri::{QueueParams, Scheduler};

/// A disk with a queue in front of it. Everything but its requests it leaves to the disk.
pub struct Queued {
    all: Arc<Queues>,
    /// The way of all cores to one, where requests have one order.
    funnel: Option<Funnel>,
    as_device: Arc<dyn Device>,
}

impl Queued {
    /// `disk`, with a queue of these parameters.
    #[must_use]
    pub fn new(disk: Arc<dyn Device>, params: &QueueParams) -> Queued {
        let funnel = (params.scheduler == Scheduler::MqDeadline).then(Funnel::default);
        let settings = Settings::new(params.clone());
        let all = Arc::new(Queues { id: DeviceId::new(), disk, settings });
        Queued { as_device: Arc::clone(&all) as Arc<dyn Device>, all, funnel }
    }
}

/// The queues, as a device that each core has its own way to.
struct Queues {
    id: DeviceId,
    disk: Arc<dyn Device>,
    settings: Settings,
}

impl Device for Queues {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, OpenError> {
        let below = self.disk.open(cx)?;
        let Settings { params, .. } = &self.settings;
        let tags = self.settings.tags(cx.core().index(), cx.cores());
        let longest = self.settings.merged_max(self.limits().max_sectors);
        let merger = Merger::new(params, longest, cx.new_owner());
        Ok(Box::new(QueueLane::new(below, tags::Held::new(tags, cx), Sched::new(params), merger)))
    }

    fn limits(&self) -> Limits {
        let limits = self.disk.limits();
        let block = u64::from(limits.logical_block) / udm_core::SECTOR_SIZE;
        match u64::from(self.settings.params.max_sectors_kb) * 2 {
            0 => limits,
            most => {
                let max_sectors = Sectors((most.min(limits.max_sectors.0) / block).max(1) * block);
                Limits { max_sectors, ..limits }
            }
        }
    }
}

impl Device for Queued {
    fn id(&self) -> DeviceId {
        self.all.id
    }

    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, OpenError> {
        match &self.funnel {
            Some(funnel) if cx.cores() > 1 => Ok(funnel.open(&self.as_device, cx)),
            _ => self.all.open(cx),
        }
    }

    fn limits(&self) -> Limits {
        self.all.limits()
    }

    fn look_again(&self) {
        self.all.disk.look_again();
    }

    fn can_be_cut(&self) -> bool {
        self.all.disk.can_be_cut()
    }

    fn growth(&self) -> Option<Growth> {
        self.all.disk.growth()
    }

    fn grow(&self, size: Sectors, then: Grown) {
        self.all.disk.grow(size, then);
    }

    fn extents(&self, from: Sector, len: Sectors, out: &mut Extents) {
        self.all.disk.extents(from, len, out);
    }

    fn checkpoints(&self) -> Vec<Checkpoint> {
        self.all.disk.checkpoints()
    }

    fn changed(&self, since: &Checkpoint, from: Sector, len: Sectors, out: &mut Extents<Since>) {
        self.all.disk.changed(since, from, len, out);
    }

    fn commons(&self) -> Option<&Commons> {
        self.all.disk.commons()
    }

    fn lock(&self) -> Result<Option<DiskLock>, DiskTaken> {
        self.all.disk.lock()
    }

    fn waits(&self) -> Option<String> {
        self.all.disk.waits()
    }

    fn refused(&self) -> Option<String> {
        self.all.disk.refused()
    }

    fn stacked(&self) -> Option<&dyn Stacked> {
        self.all.disk.stacked()
    }

    fn queue(&self) -> Option<&dyn DiskQueue> {
        Some(self)
    }
}

impl DiskQueue for Queued {
    fn report(&self, cores: usize) -> QueueReport {
        let disk_max = self.all.disk.limits().max_sectors;
        self.all.settings.report(cores, self.limits().max_sectors, disk_max)
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests;
