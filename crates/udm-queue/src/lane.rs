//! The data path of a queue on one core.
//!
//! Where nothing waits, nothing can be merged and there are tags, a batch goes straight down,
//! unless the scheduler has an order of its own.

use crate::merge::Merger;
use crate::sched::Sched;
use crate::tags::Held;
use udm_core::{Batch, BioFlags, Busy, Cx, Drain, Lane, Status};

/// See the module.
pub(crate) struct QueueLane {
    below: Box<dyn Lane>,
    tags: Held,
    waiting: Sched,
    merger: Merger,
    /// Parts of requests that failed, to be read by themselves.
    again: Batch,
    /// Bios that would have to wait and were told not to, for the next `poll`.
    ended: Batch,
    /// Scratch.
    down: Batch,
}

impl QueueLane {
    pub fn new(below: Box<dyn Lane>, tags: Held, waiting: Sched, merger: Merger) -> QueueLane {
        let (again, ended, down) = Default::default();
        QueueLane { below, tags, waiting, merger, again, ended, down }
    }

    fn wanted(&self) -> usize {
        self.waiting.len() + self.again.len()
    }

    #[inline(never)]
    fn enqueue(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        for mut bio in batch.drain(..) {
            if bio.flags.contains(BioFlags::NOWAIT) {
                // It is not merged, so it goes now or not at all.
                if self.wanted() == 0 && self.tags.take_one(1) {
                    self.down.push(bio);
                } else {
                    bio.end_with(Status::Again);
                    self.ended.push(bio);
                    cx.wake_now();
                }
            } else {
                self.waiting.add(bio, &mut self.merger, cx);
            }
        }
        self.dispatch(cx);
    }

    /// Sends what there are tags for.
    fn dispatch(&mut self, cx: &mut Cx<'_>) {
        loop {
            while self.wanted() > 0 && self.tags.take_one(self.wanted()) {
                let bio = self.again.pop().or_else(|| {
                    self.waiting.next(&mut self.merger, cx).map(|request| self.merger.send(request))
                });
                self.down.push(bio.expect("something waits"));
            }
            if !self.tags.settle(self.wanted(), cx) {
                break;
            }
        }
        if !self.down.is_empty() {
            self.below.submit(&mut self.down, cx);
        }
    }

    /// Those of `done` from `from` on came from below.
    #[inline(never)]
    fn came_back(&mut self, done: &mut Batch, from: usize, cx: &mut Cx<'_>) {
        self.tags.home(done.len() - from);
        if self.merger.is_under_way() {
            self.merger.back(done, from, false, &mut self.again, &mut self.down);
        }
        done.append(&mut self.ended);
        self.dispatch(cx);
    }
}

impl Lane for QueueLane {
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        let direct = self.waiting.is_none() && self.wanted() == 0 && !self.merger.finds(batch);
        if direct && self.tags.take_all(batch.len()) {
            self.below.submit(batch, cx);
        } else {
            self.enqueue(batch, cx);
        }
    }

    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        let from = done.len();
        self.below.poll(done, cx);
        if self.wanted() > 0 || self.merger.is_under_way() || !self.ended.is_empty() {
            self.came_back(done, from, cx);
        } else if done.len() > from {
            self.tags.home(done.len() - from);
        }
    }

    fn drain(&mut self, how: Drain, back: &mut Batch, cx: &mut Cx<'_>) {
        if how == Drain::NoFlush {
            self.waiting.hand_back(&mut self.merger, back);
            back.append(&mut self.again);
            self.tags.settle(0, cx);
        }
        let from = back.len();
        self.below.drain(how, back, cx);
        self.tags.home(back.len() - from);
        if self.merger.is_under_way() {
            self.merger.back(back, from, true, &mut self.again, &mut self.down);
        }
        self.tags.settle(self.wanted(), cx);
    }

    fn busy(&self) -> Busy {
        self.below.busy()
    }
}
