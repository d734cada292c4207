//! The queues in front of paths: which there are, how their settings change, and that no path has
//! more than they let through.

use crate::env::lock;
use crate::machine::Machine;
use crate::model::Wrong;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use udm_core::{Device, DiskQueue};
use udm_queue::Queued;
use udm_wire::uri::QueueParams;

/// A queue.
pub(crate) struct Queue {
    path: usize,
    queued: Arc<Queued>,
    /// Changes that were asked for, and those that hold.
    asked: u64,
    hold: Arc<AtomicU64>,
}

impl Machine {
    /// Puts queues in front of paths, which `cores` cores will use.
    pub(crate) fn make_queues(&mut self, queues: &[(usize, QueueParams)], cores: usize) {
        for (path, params) in queues {
            let front = &mut self.fronts[*path];
            let queued = Arc::new(Queued::new(Arc::clone(front), params));
            *front = Arc::clone(&queued) as Arc<dyn Device>;
            let report = queued.report(cores);
            let number =
                |name| report.numbers.iter().find(|(known, _)| *known == name).map_or(0, |(_, n)| *n);
            let most = number("nr_hw_queues") * number("queue_depth");
            lock(&self.env).paths[*path].most = most;
            self.queues.push(Queue { path: *path, queued, asked: 0, hold: Arc::default() });
        }
    }

    /// Changes a setting of a queue, by chance, whatever is under way.
    pub(crate) fn change_queue(&mut self) {
        let chance = &mut self.control;
        let nth = chance.below(self.queues.len() as u64) as usize;
        let alone = self.cores.len() == 1;
        let (name, value) = match chance.below(4) {
            0 if alone => ("scheduler", chance.pick(&["none", "mq-deadline"])),
            1 => ("nomerges", chance.pick(&["0", "1", "2"])),
            2 => ("fifo_batch", chance.pick(&["1", "16"])),
            _ => ("nr_requests", chance.pick(&["4", "16", "64"])),
        };
        let Queue { path, queued, asked, hold } = &mut self.queues[nth];
        let of_then = Arc::clone(hold);
        let then = Box::new(move || _ = of_then.fetch_add(1, Ordering::Relaxed));
        // Some can't be, and while one is under way there is no other.
        let changed = queued.change(&[(name.into(), value.into())], then).is_ok();
        *asked += u64::from(changed);
        self.totals.queue_changes += u64::from(changed);
        lock(&self.env).say(format!("the queue of p{path} has {name}={value}: {changed}"));
    }

    /// At rest every change holds.
    pub(crate) fn changes_hold(&self) -> Result<(), Wrong> {
        let lags = |queue: &&Queue| queue.hold.load(Ordering::Relaxed) != queue.asked;
        match self.queues.iter().find(lags) {
            Some(Queue { path, .. }) => {
                Err(format!("at rest, a change of the queue of p{path} does not hold yet"))
            }
            None => Ok(()),
        }
    }
}
