//! Schedulers: they choose the waiting request that gets the next tag.

mod fifo;
mod mq_deadline;

use crate::merge::{Merger, Request};
use fifo::FifoScheduler;
use mq_deadline::DeadlineScheduler;
use udm_core::{Batch, Bio, Cx};
use udm_wire::uri::{IoSchedulerName, QueueParams};

/// The schedulers, one variant each. An enum instead of a trait, so that calls per request are
/// inlined.
pub(crate) enum IoScheduler {
    /// First in, first out.
    None(FifoScheduler),
    /// By sector, with deadlines.
    MqDeadline(Box<DeadlineScheduler>),
}

/// Evaluates `$do` with the scheduler in `$sched`.
macro_rules! each {
    ($sched:expr, $one:ident => $do:expr) => {
        match $sched {
            IoScheduler::None($one) => $do,
            IoScheduler::MqDeadline($one) => $do,
        }
    };
}

impl IoScheduler {
    /// Creates the scheduler that `params` names.
    pub fn new(params: &QueueParams) -> IoScheduler {
        match params.scheduler {
            IoSchedulerName::None => IoScheduler::None(FifoScheduler::default()),
            IoSchedulerName::MqDeadline => IoScheduler::MqDeadline(Box::new(DeadlineScheduler::new(params))),
        }
    }

    /// True for the scheduler without an order: requests that need not wait may bypass it.
    #[inline]
    pub fn is_none(&self) -> bool {
        matches!(self, IoScheduler::None(_))
    }

    /// Number of waiting requests.
    #[inline]
    pub fn len(&self) -> usize {
        each!(self, one => one.len())
    }

    /// Adds `bio`, as a new request or merged with a waiting one.
    pub fn add(&mut self, bio: Box<Bio>, merger: &mut Merger, cx: &Cx<'_>) {
        each!(self, one => one.add(bio, merger, cx));
    }

    /// Removes and returns the next request to send.
    pub fn next(&mut self, merger: &mut Merger, cx: &Cx<'_>) -> Option<Request> {
        each!(self, one => one.next(merger, cx))
    }

    /// Removes all waiting bios, as they came from above.
    pub fn hand_back(&mut self, merger: &mut Merger, back: &mut Batch) {
        each!(self, one => one.hand_back(merger, back));
    }
}
