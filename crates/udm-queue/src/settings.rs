//! Settings of a queue, and the tags that follow from them.

use crate::tags::HwQueueTags;
use std::sync::{Arc, OnceLock};
use udm_core::{HwQueueReport, QueueReport, Sectors};
use udm_wire::uri::{IoSchedulerName, QueueParams};

/// Default limit of a merged request: the kernel's `BLK_DEF_MAX_SECTORS_CAP`.
const MERGED_MAX: Sectors = Sectors(2560);

/// Settings of a queue, with their tags.
pub(crate) struct QueueSettings {
    pub params: QueueParams,
    /// Tags per hardware queue; created when the first lane is opened.
    tags: OnceLock<Box<[Arc<HwQueueTags>]>>,
}

/// How the tags of a queue are divided.
struct TagLayout {
    /// Number of hardware queues.
    queues: usize,
    /// Number of tag sets: one per hardware queue, or a single one if one core has the order.
    sets: usize,
    /// Tags per set.
    each: u32,
}

impl QueueSettings {
    pub fn new(params: QueueParams) -> QueueSettings {
        QueueSettings { params, tags: OnceLock::new() }
    }

    fn shares(&self, cores: usize) -> TagLayout {
        let queues = match self.params.nr_hw_queues as usize {
            0 => cores.max(1),
            count => count.min(cores.max(1)),
        };
        let depth = self.params.queue_depth;
        match self.params.scheduler {
            IoSchedulerName::None => TagLayout { queues, sets: queues, each: self.params.requests() },
            // One core has the order of all requests, so it has the tags of all hardware queues.
            IoSchedulerName::MqDeadline => {
                TagLayout { queues, sets: 1, each: depth.saturating_mul(queues as u32) }
            }
        }
    }

    /// All tags that lanes may use.
    pub fn all_tags(&self) -> &[Arc<HwQueueTags>] {
        self.tags.get().map_or(&[], |all| all)
    }

    /// The tags of `core`'s hardware queue, with `cores` cores. Cores that share a queue are
    /// neighbours.
    pub fn tags(&self, core: usize, cores: usize) -> Arc<HwQueueTags> {
        let TagLayout { sets, each, .. } = self.shares(cores);
        let all = self.tags.get_or_init(|| (0..sets).map(|_| Arc::new(HwQueueTags::new(each))).collect());
        Arc::clone(&all[map_core_to_hw_queue(core, cores, all.len())])
    }

    /// The longest merged request, if the disk accepts `most`.
    pub fn merged_max(&self, most: Sectors) -> Sectors {
        if self.params.max_sectors_kb == 0 { most.min(MERGED_MAX) } else { most }
    }

    /// Report for `cores` cores over a disk that accepts `disk_max` per request, and `most` through
    /// the queue.
    pub fn report(&self, cores: usize, most: Sectors, disk_max: Sectors) -> QueueReport {
        let TagLayout { queues, sets, each } = self.shares(cores);
        let mut numbers = self.params.by_name();
        for (name, number) in &mut numbers {
            match *name {
                "nr_hw_queues" => *number = queues as u64,
                "nr_requests" => *number = u64::from(self.params.requests()),
                "max_sectors_kb" => *number = self.merged_max(most).0 / 2,
                _ => {}
            }
        }
        numbers.push(("max_hw_sectors_kb", disk_max.0 / 2));
        let hw_queue = |set: usize| {
            let tags = self.tags.get().and_then(|all| all.get(set));
            let (free, waiting) = tags.map_or((each, 0), |tags| tags.usage());
            HwQueueReport {
                cores: (0..cores).filter(|core| map_core_to_hw_queue(*core, cores, sets) == set).collect(),
                tags: each,
                tags_in_use: each.saturating_sub(free),
                waiting,
                shared: None,
            }
        };
        let hw_queues = (0..sets).map(hw_queue).collect();
        QueueReport { scheduler: self.params.scheduler.to_string(), numbers, hw_queues }
    }
}

/// The hardware queue of `core`, if `cores` cores share `queues` queues. Neighbours share a queue;
/// if the division is uneven, the first queues have one more core. Equals kernel `lib/group_cpus.c`
/// on a machine with one node and no sibling threads.
pub(crate) fn map_core_to_hw_queue(core: usize, cores: usize, queues: usize) -> usize {
    let (size, larger) = (cores / queues, cores % queues);
    match core.checked_sub(larger * (size + 1)) {
        None => core / (size + 1),
        Some(behind) => larger + behind / size.max(1),
    }
}
