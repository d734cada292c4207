//! Schedulers: they choose the waiting request that gets the next tag.

mod fifo;
mod mq_deadline;

use crate::merge::{Merger, Request};
use fifo::FifoScheduler;
use mq_deadline::DeadlineScheduler;
use udm_core::{Batch, Bio, Cx};
use udm_wire::uri::{QueueParams, Scheduler};

/// The schedulers, one line each. A list and no trait: what is asked for each request is in line.
pub(crate) enum IoScheduler {
    /// First come, first served.
    None(FifoScheduler),
    /// By sector, with an age at which a request goes first.
    MqDeadline(Box<DeadlineScheduler>),
}

/// Does `$do` with the scheduler in `$sched`, whichever it is.
macro_rules! each {
    ($sched:expr, $one:ident => $do:expr) => {
        match $sched {
            IoScheduler::None($one) => $do,
            IoScheduler::MqDeadline($one) => $do,
        }
    };
}

impl IoScheduler {
    /// The one that `params` name, empty.
    pub fn new(params: &QueueParams) -> IoScheduler {
        match params.scheduler {
            Scheduler::None => IoScheduler::None(FifoScheduler::default()),
            Scheduler::MqDeadline => IoScheduler::MqDeadline(Box::new(DeadlineScheduler::new(params))),
        }
    }

    /// True for the one without an order of its own: what need not wait may pass it by.
    #[inline]
    pub fn is_none(&self) -> bool {
        matches!(self, IoScheduler::None(_))
    }

    /// How many requests wait.
    #[inline]
    pub fn len(&self) -> usize {
        each!(self, one => one.len())
    }

    /// Takes `bio`, by itself or as a part of one that waits.
    pub fn add(&mut self, bio: Box<Bio>, merger: &mut Merger, cx: &Cx<'_>) {
        each!(self, one => one.add(bio, merger, cx));
    }

    /// The next to go.
    pub fn next(&mut self, merger: &mut Merger, cx: &Cx<'_>) -> Option<Request> {
        each!(self, one => one.next(merger, cx))
    }

    /// Takes back all that wait, as they came from above.
    pub fn hand_back(&mut self, merger: &mut Merger, back: &mut Batch) {
        each!(self, one => one.hand_back(merger, back));
    }
}
