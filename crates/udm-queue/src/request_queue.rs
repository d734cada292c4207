//! The shared part of a queue's lanes, and changes of its settings.
//!
//! Settings are never changed in place: a change creates new settings with new tags. It takes the
//! old tags permanently, in line with the lanes that want one, so requests continue meanwhile. When
//! it has the last tag, no request is with the disk. Then the new settings take effect, and the old
//! tags are retired. A lane sees this when a batch does not go straight to the disk, and moves its
//! waiting requests to the new settings. So each request has a tag of the old or the new settings,
//! and the disk never has more requests than either allows. A lane with enough tags checks nothing.
//!
//! *Price.* A load if a batch may have to wait. After a change, a short lock once per lane.

use crate::lane::QueueLane;
use crate::merge::MergeLimits;
use crate::settings::QueueSettings;
use crate::shared_tags::SharedTagSet;
use crate::single_owner::SingleOwnerForwarder;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use udm_core::errno::{EBUSY, EINVAL};
use udm_core::{
    Cx, Device, DeviceControlError, DeviceId, Lane, Limits, QueueChangeCallback, QueueChangeCancelFn,
    QueueReport, Sector, Sectors,
};
use udm_wire::uri::{IoSchedulerName, QueueParams};

/// The control half of a queue.
pub(crate) struct RequestQueue {
    id: DeviceId,
    disk: Arc<dyn Device>,
    /// Tags shared with other disks, below the queue's own tags.
    shared: Option<Arc<SharedTagSet>>,
    /// Current settings. Locked briefly when a lane is opened, settings change, or a report is
    /// made.
    now: Mutex<Arc<QueueSettings>>,
    /// Copy of the current setting, because cores read limits too.
    max_sectors_kb: AtomicU32,
    /// True while a change of settings is in progress.
    changing: AtomicBool,
    /// Forwards the requests of all cores to one core if they have one order.
    owner: SingleOwnerForwarder,
    place: RequestQueueLayer,
    me: Weak<RequestQueue>,
}

/// Position of a queue.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum RequestQueueLayer {
    /// In front of a disk, below tables that keep its limits.
    Disk,
    /// In front of a disk, without a scheduler, now and later.
    Unscheduled,
    /// In front of a mapped device, which checks requests after the queue.
    Device,
}

/// The user of a lane.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum QueueLaneUser {
    /// The layer above, on its core.
    Core,
    /// The owner task, which has the order of all requests.
    Task,
}

impl RequestQueue {
    pub fn new(
        disk: Arc<dyn Device>,
        params: QueueParams,
        place: RequestQueueLayer,
        shared: Option<Arc<SharedTagSet>>,
    ) -> Arc<RequestQueue> {
        Arc::new_cyclic(|me| RequestQueue {
            id: DeviceId::new(),
            disk,
            shared,
            max_sectors_kb: AtomicU32::new(params.max_sectors_kb),
            now: Mutex::new(Arc::new(QueueSettings::new(params))),
            changing: AtomicBool::new(false),
            owner: SingleOwnerForwarder::default(),
            place,
            me: Weak::clone(me),
        })
    }

    pub fn disk(&self) -> &dyn Device {
        &*self.disk
    }

    fn now(&self) -> MutexGuard<'_, Arc<QueueSettings>> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens a lane on this core.
    pub fn lane(&self, who: QueueLaneUser, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        // Opened even if an owner task serves the requests, so that an error shows here.
        let mut below = self.disk.open(cx)?;
        if let Some(set) = &self.shared {
            below = set.lane(self.id, below, cx);
        }
        let me = self.me.upgrade().expect("a caller holds it");
        Ok(Box::new(QueueLane::new(me, who, below, cx)))
    }

    /// The current settings for a lane, with tags created.
    pub fn settings(&self, cx: &Cx<'_>) -> Arc<QueueSettings> {
        let now = self.now();
        // Under the lock, since a change takes all tags that exist.
        now.tags(cx.core().index(), cx.cores());
        Arc::clone(&now)
    }

    /// True if requests of `who` are forwarded to the owner task.
    pub fn is_forwarded(&self, who: QueueLaneUser, settings: &QueueSettings, cx: &Cx<'_>) -> bool {
        who == QueueLaneUser::Core
            && settings.params.scheduler == IoSchedulerName::MqDeadline
            && cx.cores() > 1
    }

    /// Opens this core's lane to the owner task.
    pub fn remote_lane(&self, cx: &mut Cx<'_>) -> Box<dyn Lane> {
        let me: Arc<dyn Device> = self.me.upgrade().expect("a lane holds it");
        self.owner.open(&me, cx)
    }

    /// The current limits of merging.
    pub fn merge_limits(&self, settings: &QueueSettings) -> MergeLimits {
        let limits = self.most(settings.params.max_sectors_kb);
        let longest = settings.merged_max(limits.max_sectors);
        match self.place {
            // Without a table the device has no end yet.
            RequestQueueLayer::Device if limits.size > Sectors::ZERO => {
                let block = u64::from(limits.logical_block) / udm_core::SECTOR_SIZE;
                MergeLimits { longest, block: block.max(1), end: Sector(limits.size.0) }
            }
            _ => MergeLimits { longest, block: 1, end: Sector(u64::MAX) },
        }
    }

    fn most(&self, max_sectors_kb: u32) -> Limits {
        let limits = self.disk.limits();
        let block = u64::from(limits.logical_block) / udm_core::SECTOR_SIZE;
        match u64::from(max_sectors_kb) * 2 {
            0 => limits,
            most => {
                let max_sectors = Sectors((most.min(limits.max_sectors.0) / block).max(1) * block);
                Limits { max_sectors, ..limits }
            }
        }
    }

    pub fn report(&self, cores: usize) -> QueueReport {
        let settings = Arc::clone(&self.now());
        let most = self.most(settings.params.max_sectors_kb).max_sectors;
        let mut report = settings.report(cores, most, self.disk.limits().max_sectors);
        let of = report.hw_queues.len();
        for (nth, hw_queue) in report.hw_queues.iter_mut().enumerate() {
            hw_queue.shared = self.shared.as_ref().and_then(|set| set.usage(self.id, nth, of));
        }
        report
    }

    /// Changes the settings; see [`udm_core::DiskQueue::change`].
    pub fn change(
        &self,
        settings: &[(String, String)],
        then: QueueChangeCallback,
    ) -> Result<QueueChangeCancelFn, DeviceControlError> {
        let mut now = self.now();
        let mut params = now.params.clone();
        // First the scheduler, since it resets the number of requests.
        let (first, others): (Vec<_>, Vec<_>) = settings.iter().partition(|(name, _)| name == "scheduler");
        for (name, value) in first.into_iter().chain(others) {
            params.change(name, value).map_err(|why| DeviceControlError::new(EINVAL, why))?;
        }
        if params.scheduler != IoSchedulerName::None && self.place == RequestQueueLayer::Unscheduled {
            return Err(DeviceControlError::new(EINVAL, "no_sched=1 forbids a scheduler"));
        }
        if self.changing.load(Ordering::Acquire) {
            return Err(DeviceControlError::new(EBUSY, "another change of the queue is in progress"));
        }
        if params == now.params {
            // Nothing changes, so this must not wait for requests: the disk may hang.
            drop(now);
            then();
            return Ok(Box::new(|| {}));
        }
        self.changing.store(true, Ordering::Release);
        let (next, before) = (Arc::new(QueueSettings::new(params)), Arc::clone(&now));
        let tags = before.all_tags().to_vec();
        if tags.is_empty() {
            // No lane is open, and none can be opened while the lock is held.
            *now = next;
            drop(now);
            self.changed(&before);
            then();
            return Ok(Box::new(|| {}));
        }
        drop(now);
        let pending = Arc::new(PendingQueueSettingsChange {
            queues_left: AtomicUsize::new(tags.len()),
            change: Mutex::new(Some((self.me.upgrade().expect("a caller holds it"), next, before, then))),
        });
        let takers = tags.into_iter().map(|tags| {
            let pending = Arc::clone(&pending);
            let taker = tags.retire_all(Box::new(move || pending.queue_taken()));
            (tags, taker)
        });
        let takers: Vec<_> = takers.collect();
        Ok(Box::new(move || {
            if let Some((me, ..)) = pending.take() {
                takers.iter().for_each(|(tags, taker)| tags.give_back(taker));
                me.changing.store(false, Ordering::Release);
            }
        }))
    }

    /// Finishes a change from `before`, whose tags are all taken.
    fn changed(&self, before: &QueueSettings) {
        let max_sectors_kb = self.now().params.max_sectors_kb;
        self.max_sectors_kb.store(max_sectors_kb, Ordering::Relaxed);
        before.all_tags().iter().for_each(|tags| tags.retire());
        self.changing.store(false, Ordering::Release);
    }
}

/// The queue, its new and old settings, and the callback.
type QueueSettingsChange = (Arc<RequestQueue>, Arc<QueueSettings>, Arc<QueueSettings>, QueueChangeCallback);

/// A change that waits for the tags of the old settings.
struct PendingQueueSettingsChange {
    /// Number of hardware queues whose tags are not all taken.
    queues_left: AtomicUsize,
    /// `None` when the change is complete or cancelled.
    change: Mutex<Option<QueueSettingsChange>>,
}

impl PendingQueueSettingsChange {
    fn take(&self) -> Option<QueueSettingsChange> {
        self.change.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// All tags of a hardware queue are taken. The last hardware queue completes the change.
    fn queue_taken(&self) {
        // AcqRel: the last caller sees all that the others did.
        if self.queues_left.fetch_sub(1, Ordering::AcqRel) == 1
            && let Some((queues, next, before, then)) = self.take()
        {
            *queues.now() = next;
            queues.changed(&before);
            then();
        }
    }
}

/// The device that the owner task opens.
impl Device for RequestQueue {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        self.lane(QueueLaneUser::Task, cx)
    }

    fn limits(&self) -> Limits {
        self.most(self.max_sectors_kb.load(Ordering::Relaxed))
    }
}
