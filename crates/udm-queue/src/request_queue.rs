//! What the lanes of one queue have in common, and how its settings change.
//!
//! Settings are never changed in place: each change makes others, with tags of their own. It takes
//! the old tags for good, in line with the lanes that want one; so requests go on meanwhile, and
//! when it has the last nothing is with the disk. Then the new settings hold and the old tags are
//! retired. A lane finds that out where a batch does not go straight down: it moves what waits in
//! it to the new ones. So a request has a tag of the old or of the new settings, the disk has never
//! more than either allows, and a lane that has its tags looks at nothing.
//!
//! *Price.* A load where a batch may have to wait. With a change a lock for a moment, each lane
//! once.

use crate::lane::QueueLane;
use crate::merge::MergeLimits;
use crate::settings::QueueSettings;
use crate::shared_tags::TagSet;
use crate::single_owner::SingleOwner;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use udm_core::bugs::{self, Bug};
use udm_core::errno::{EBUSY, EINVAL};
use udm_core::{
    CancelChange, Cx, Device, DeviceId, Lane, Limits, OpenError, QueueChangeCallback, QueueReport, Sector,
    Sectors,
};
use udm_wire::uri::{QueueParams, Scheduler};

/// See the module.
pub(crate) struct RequestQueue {
    id: DeviceId,
    disk: Arc<dyn Device>,
    /// Tags that it shares with other disks, below its own.
    shared: Option<Arc<TagSet>>,
    /// The settings that hold. Held for moments, where a lane is opened, settings change, or
    /// somebody looks.
    now: Mutex<Arc<QueueSettings>>,
    /// Of the settings that hold: limits are asked for by cores too.
    max_sectors_kb: AtomicU32,
    /// They are about to be others.
    changing: AtomicBool,
    /// The way of all cores to one, where requests have one order.
    funnel: SingleOwner,
    place: QueuePosition,
    me: Weak<RequestQueue>,
}

/// What a queue is in front of.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum QueuePosition {
    /// A disk, below tables that send it what it takes.
    Disk,
    /// The same, and there may be no scheduler, now or later.
    Unscheduled,
    /// A mapped device, which sees what it is asked behind the queue.
    Device,
}

/// Whose a lane is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum LaneUser {
    /// Of what lies above, on its core.
    Core,
    /// Of the task that has the order of all requests.
    Task,
}

impl RequestQueue {
    pub fn new(
        disk: Arc<dyn Device>,
        params: QueueParams,
        place: QueuePosition,
        shared: Option<Arc<TagSet>>,
    ) -> Arc<RequestQueue> {
        Arc::new_cyclic(|me| RequestQueue {
            id: DeviceId::new(),
            disk,
            shared,
            max_sectors_kb: AtomicU32::new(params.max_sectors_kb),
            now: Mutex::new(Arc::new(QueueSettings::new(params))),
            changing: AtomicBool::new(false),
            funnel: SingleOwner::default(),
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

    /// A lane on this core.
    pub fn lane(&self, who: LaneUser, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, OpenError> {
        // Also where another core will have the order: that this one can't open it shows here.
        let mut below = self.disk.open(cx)?;
        if let Some(set) = &self.shared {
            below = set.lane(self.id, below, cx);
        }
        let me = self.me.upgrade().expect("it is being used");
        Ok(Box::new(QueueLane::new(me, who, below, cx)))
    }

    /// What holds for a lane from now on, with its tags there.
    pub fn settings(&self, cx: &Cx<'_>) -> Arc<QueueSettings> {
        let now = self.now();
        // Under the lock: a change takes all the tags that there are.
        now.tags(cx.core().index(), cx.cores());
        Arc::clone(&now)
    }

    /// True where requests of `who` go to the task that has the order of all.
    pub fn is_forwarded(&self, who: LaneUser, settings: &QueueSettings, cx: &Cx<'_>) -> bool {
        who == LaneUser::Core && settings.params.scheduler == Scheduler::MqDeadline && cx.cores() > 1
    }

    /// This core's way to that task.
    pub fn remote_lane(&self, cx: &mut Cx<'_>) -> Box<dyn Lane> {
        let me: Arc<dyn Device> = self.me.upgrade().expect("a lane has it");
        self.funnel.open(&me, cx)
    }

    /// What is merged, as of now.
    pub fn merge_limits(&self, settings: &QueueSettings) -> MergeLimits {
        let limits = self.most(settings.params.max_sectors_kb);
        let longest = settings.merged_max(limits.max_sectors);
        match self.place {
            // Without a table there is no end yet.
            QueuePosition::Device if limits.size > Sectors::ZERO => {
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

    /// See [`udm_core::DiskQueue::change`].
    pub fn change(
        &self,
        settings: &[(String, String)],
        then: QueueChangeCallback,
    ) -> Result<CancelChange, OpenError> {
        let mut now = self.now();
        let mut params = now.params.clone();
        // Another scheduler has other requests.
        let (first, others): (Vec<_>, Vec<_>) = settings.iter().partition(|(name, _)| name == "scheduler");
        for (name, value) in first.into_iter().chain(others) {
            params.change(name, value).map_err(|why| OpenError::new(EINVAL, why))?;
        }
        if params.scheduler != Scheduler::None && self.place == QueuePosition::Unscheduled {
            return Err(OpenError::new(EINVAL, "no_sched=1 forbids a scheduler"));
        }
        if self.changing.load(Ordering::Acquire) {
            return Err(OpenError::new(EBUSY, "another change of the queue is under way"));
        }
        if params == now.params {
            // Nothing changes, so nobody is waited for: the disk may be hanging.
            drop(now);
            then();
            return Ok(Box::new(|| {}));
        }
        self.changing.store(true, Ordering::Release);
        let (next, before) = (Arc::new(QueueSettings::new(params)), Arc::clone(&now));
        let tags = before.all_tags().to_vec();
        if tags.is_empty() {
            // Nobody has opened it, nor can before the lock is let go.
            *now = next;
            drop(now);
            self.changed(&before);
            then();
            return Ok(Box::new(|| {}));
        }
        drop(now);
        let pending = Arc::new(PendingChange {
            queues_left: AtomicUsize::new(tags.len()),
            change: Mutex::new(Some((self.me.upgrade().expect("it is being used"), next, before, then))),
        });
        let takers = tags.into_iter().filter_map(|tags| {
            let pending = Arc::clone(&pending);
            match bugs::on(Bug::TagsNotAwaited) {
                true => {
                    pending.queue_taken();
                    None
                }
                false => {
                    let taker = tags.retire_all(Box::new(move || pending.queue_taken()));
                    Some((tags, taker))
                }
            }
        });
        let takers: Vec<_> = takers.collect();
        Ok(Box::new(move || {
            if let Some((me, ..)) = pending.take() {
                takers.iter().for_each(|(tags, taker)| tags.give_back(taker));
                me.changing.store(false, Ordering::Release);
            }
        }))
    }

    /// Other settings than `before` hold, whose tags are all taken.
    fn changed(&self, before: &QueueSettings) {
        let max_sectors_kb = self.now().params.max_sectors_kb;
        self.max_sectors_kb.store(max_sectors_kb, Ordering::Relaxed);
        before.all_tags().iter().for_each(|tags| tags.retire());
        self.changing.store(false, Ordering::Release);
    }
}

/// A change that waits for tags of the old settings.
struct PendingChange {
    /// Hardware queues whose tags are not all taken.
    queues_left: AtomicUsize,
    /// The queue, its next and its present settings, and who is told. None once the change is
    /// complete or cancelled, whichever comes first.
    change: Mutex<Option<(Arc<RequestQueue>, Arc<QueueSettings>, Arc<QueueSettings>, QueueChangeCallback)>>,
}

impl PendingChange {
    fn take(
        &self,
    ) -> Option<(Arc<RequestQueue>, Arc<QueueSettings>, Arc<QueueSettings>, QueueChangeCallback)> {
        self.change.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// All tags of a hardware queue are taken. The last one completes the change.
    fn queue_taken(&self) {
        // The last one sees all that the others did.
        if self.queues_left.fetch_sub(1, Ordering::AcqRel) == 1
            && let Some((queues, next, before, then)) = self.take()
        {
            *queues.now() = next;
            queues.changed(&before);
            then();
        }
    }
}

/// As the task opens it.
impl Device for RequestQueue {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, OpenError> {
        self.lane(LaneUser::Task, cx)
    }

    fn limits(&self) -> Limits {
        self.most(self.max_sectors_kb.load(Ordering::Relaxed))
    }
}
