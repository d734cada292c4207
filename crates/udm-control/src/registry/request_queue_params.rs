//! The queues of request-based devices: the kernel's parameters `dm_mq_queue_depth` and
//! `dm_mq_nr_hw_queues` of dm-mod.

use std::sync::Arc;
use udm_core::Device;
use udm_dm::QueueFactory;
use udm_queue::QueuedDevice;
use udm_wire::uri::{IoSchedulerName, QueueParams};

/// Parameters of a device's own queue. If both are `None`, the device has no queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestQueueParams {
    /// `dm_mq_queue_depth`: 0 means 2048; larger values than 10240 mean 10240.
    pub queue_depth: Option<u32>,
    /// `dm_mq_nr_hw_queues`: 0 means 1; at most 32 and at most the number of cores.
    pub nr_hw_queues: Option<u32>,
}

impl RequestQueueParams {
    /// These parameters, with defaults from `there`.
    #[must_use]
    pub fn or(self, there: RequestQueueParams) -> RequestQueueParams {
        RequestQueueParams {
            queue_depth: self.queue_depth.or(there.queue_depth),
            nr_hw_queues: self.nr_hw_queues.or(there.nr_hw_queues),
        }
    }

    /// The parameters of the queue on `cores` cores; `None` for no queue.
    fn params(self, cores: usize) -> Option<QueueParams> {
        if self == RequestQueueParams::default() {
            return None;
        }
        // As the kernel's `__dm_get_module_param`.
        let clamped = |given: Option<u32>, default, most| match given {
            None | Some(0) => default,
            Some(given) => given.min(most),
        };
        let cores = u32::try_from(cores).unwrap_or(u32::MAX).max(1);
        let nr_hw_queues = clamped(self.nr_hw_queues, 1, 32).min(cores);
        // The kernel's default scheduler.
        let scheduler = if nr_hw_queues == 1 { IoSchedulerName::MqDeadline } else { IoSchedulerName::None };
        let queue_depth = clamped(self.queue_depth, 2048, 10240);
        Some(QueueParams { scheduler, nr_hw_queues, queue_depth, ..QueueParams::default() })
    }

    /// The factory of the queue; `None` for no queue.
    pub(crate) fn queue_by(self, cores: usize) -> Option<QueueFactory> {
        let params = self.params(cores)?;
        Some(Box::new(move |device| Arc::new(QueuedDevice::of_device(device, &params)) as Arc<dyn Device>))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_numbers() {
        let params = |queue_depth, nr_hw_queues, cores| {
            let params = RequestQueueParams { queue_depth, nr_hw_queues }.params(cores)?;
            Some((params.queue_depth, params.nr_hw_queues, params.scheduler, params.requests()))
        };
        let (none, deadline) = (IoSchedulerName::None, IoSchedulerName::MqDeadline);
        assert_eq!(params(None, None, 4), None);
        assert_eq!(params(Some(0), None, 4), Some((2048, 1, deadline, 256)));
        assert_eq!(params(None, Some(2), 4), Some((2048, 2, none, 2048)));
        assert_eq!(params(Some(64), Some(33), 64), Some((64, 32, none, 64)));
        assert_eq!(params(Some(20000), Some(8), 2), Some((10240, 2, none, 10240)));
        assert_eq!(params(Some(4), Some(8), 1), Some((4, 1, deadline, 8)));
    }
}
