//! The data path of a queue on one core.
//!
//! Where nothing waits, nothing can be merged and there are tags, a batch goes straight down,
//! unless the scheduler has an order of its own.

use crate::merge::Merger;
use crate::request_queue::{LaneUser, RequestQueue};
use crate::sched::IoScheduler;
use crate::tags::LaneTags;
use std::sync::Arc;
use udm_core::bugs::{self, Bug};
use udm_core::{Batch, BioFlags, Cx, Drain, Lane, OwnWork, Status};

/// See the module.
pub(crate) struct QueueLane {
    queues: Arc<RequestQueue>,
    who: LaneUser,
    below: Box<dyn Lane>,
    /// The way to the task that has the order of all requests: where it has, and until the last of
    /// those that it was sent is home.
    remote_lane: Option<Box<dyn Lane>>,
    /// How many it has.
    forwarded: usize,
    /// It is where requests go.
    forwards: bool,
    /// They may go straight down.
    can_bypass: bool,
    tags: LaneTags,
    /// Requests whose tags were given back though they are not home: the disk only holds them.
    released: usize,
    waiting: IoScheduler,
    merger: Merger,
    /// Parts of requests that failed, to be read by themselves.
    retries: Batch,
    /// Bios that would have to wait and were told not to, for the next `poll`.
    ended: Batch,
    /// Scratch.
    nowait: Batch,
    down: Batch,
}

impl QueueLane {
    pub fn new(queues: Arc<RequestQueue>, who: LaneUser, below: Box<dyn Lane>, cx: &mut Cx<'_>) -> QueueLane {
        let settings = queues.settings(cx);
        let params = &settings.params;
        let forwards = queues.is_forwarded(who, &settings, cx);
        let waiting = IoScheduler::new(params);
        QueueLane {
            who,
            below,
            remote_lane: forwards.then(|| queues.remote_lane(cx)),
            forwarded: 0,
            forwards,
            can_bypass: waiting.is_none(),
            tags: LaneTags::new(settings.tags(cx.core().index(), cx.cores()), cx),
            released: 0,
            waiting,
            merger: Merger::new(params, queues.merge_limits(&settings), cx.new_owner()),
            retries: Batch::new(),
            ended: Batch::new(),
            nowait: Batch::new(),
            down: Batch::new(),
            queues,
        }
    }

    /// Other settings hold. None of its requests is with the disk; what waits goes by those.
    #[cold]
    fn apply_settings(&mut self, cx: &mut Cx<'_>) {
        let settings = self.queues.settings(cx);
        let params = &settings.params;
        let mut waited = Batch::new();
        self.waiting.hand_back(&mut self.merger, &mut waited);
        self.tags = LaneTags::new(settings.tags(cx.core().index(), cx.cores()), cx);
        self.waiting = IoScheduler::new(params);
        self.merger.change(params, self.queues.merge_limits(&settings));
        self.can_bypass = self.waiting.is_none();
        self.forwards = self.queues.is_forwarded(self.who, &settings, cx);
        if bugs::on(Bug::WaitingNotMoved) {
            return bugs::leak_bios(waited);
        }
        if !self.forwards {
            // Sent by who called, who has to know that something goes down.
            waited.drain(..).for_each(|bio| self.waiting.add(bio, &mut self.merger, cx));
            if bugs::on(Bug::MovedUnpolled) {
                self.dispatch(cx);
            }
            return;
        }
        waited.append(&mut self.retries);
        self.forward(&mut waited, cx);
    }

    /// Sends `batch` to the task that has the order of all requests.
    fn forward(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        self.forwarded += batch.len();
        let remote_lane = self.remote_lane.get_or_insert_with(|| self.queues.remote_lane(cx));
        remote_lane.submit(batch, cx);
    }

    fn wanted(&self) -> usize {
        self.waiting.len() + self.retries.len()
    }

    #[inline(never)]
    fn enqueue(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        if self.tags.are_retired() {
            self.apply_settings(cx);
        }
        if self.forwards {
            return self.forward(batch, cx);
        }
        for bio in batch.drain(..) {
            if !bio.flags.contains(BioFlags::NOWAIT) {
                self.waiting.add(bio, &mut self.merger, cx);
            } else if self.wanted() == 0 && self.tags.take_one(1) {
                self.down.push(bio);
            } else {
                self.nowait.push(bio);
            }
        }
        self.dispatch(cx);
        if !self.nowait.is_empty() {
            self.send_nowait(cx);
        }
    }

    /// Sends what is not to wait behind what came with it: it is not merged, so it goes now or not
    /// at all.
    #[cold]
    fn send_nowait(&mut self, cx: &mut Cx<'_>) {
        let mut batch = std::mem::take(&mut self.nowait);
        if self.forwards {
            self.forward(&mut batch, cx);
        }
        for mut bio in batch.drain(..) {
            if self.wanted() == 0 && self.tags.take_one(1) {
                self.down.push(bio);
            } else {
                bio.end_with(Status::Again);
                self.ended.push(bio);
                cx.wake_now();
            }
        }
        if !self.down.is_empty() {
            self.below.submit(&mut self.down, cx);
        }
        self.nowait = batch;
    }

    /// Sends what there are tags for; was there any?
    fn dispatch(&mut self, cx: &mut Cx<'_>) -> bool {
        loop {
            while self.wanted() > 0 && self.tags.take_one(self.wanted()) {
                let bio = self.retries.pop().or_else(|| {
                    self.waiting.next(&mut self.merger, cx).map(|request| self.merger.send(request))
                });
                self.down.push(bio.expect("something waits"));
            }
            if !self.tags.settle(self.wanted(), cx) {
                if self.wanted() == 0 || !self.tags.are_retired() {
                    break;
                }
                self.apply_settings(cx);
            }
        }
        let any = !self.down.is_empty();
        if any {
            self.below.submit(&mut self.down, cx);
        }
        any
    }

    /// `n` requests came home from the disk: gives their tags back, and those of requests that it
    /// only holds ([`Lane::held`]). With those a path that was given up would keep all others who
    /// wait for a tag.
    #[inline]
    fn completed(&mut self, n: usize) {
        if self.released == 0 && n > 0 {
            self.tags.completed(n);
        } else if self.tags.any_out() || self.released > 0 {
            self.release_abandoned(n);
        }
    }

    /// The same where there are such, or may be.
    #[cold]
    fn release_abandoned(&mut self, n: usize) {
        let before = std::mem::replace(&mut self.released, self.below.held());
        // Of those that came home, some had given theirs back.
        let completed = n + self.released - before;
        if completed > 0 {
            self.tags.completed(completed);
        }
    }

    /// Those of `done` from `from` on came from below. True when others went there.
    #[inline(never)]
    fn handle_completions(&mut self, done: &mut Batch, from: usize, cx: &mut Cx<'_>) -> bool {
        self.completed(done.len() - from);
        if self.merger.has_in_flight() {
            self.merger.back(done, from, false, &mut self.retries, &mut self.down);
        }
        done.append(&mut self.ended);
        let from = done.len();
        if let Some(remote_lane) = &mut self.remote_lane {
            remote_lane.poll(done, cx);
            self.forwarded -= done.len() - from;
            self.close_remote_lane();
        }
        self.dispatch(cx)
    }

    /// Closes the way where no more goes by it.
    fn close_remote_lane(&mut self) {
        self.remote_lane.take_if(|_| !self.forwards && (self.forwarded == 0 || bugs::on(Bug::WayLeftEarly)));
    }

    /// Takes back what comes back by the way.
    #[cold]
    fn drain_remote_lane(&mut self, how: Drain, back: &mut Batch, cx: &mut Cx<'_>) {
        let from = back.len();
        if let Some(remote_lane) = self.remote_lane.as_mut().filter(|_| !bugs::on(Bug::WayNotDrained)) {
            remote_lane.drain(how, back, cx);
        }
        self.forwarded -= back.len() - from;
        self.close_remote_lane();
    }
}

impl Lane for QueueLane {
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        let direct = self.can_bypass && self.wanted() == 0 && !self.merger.finds_merge(batch);
        if direct && self.tags.take_all(batch.len()) {
            self.below.submit(batch, cx);
        } else {
            self.enqueue(batch, cx);
        }
    }

    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        let mut from = done.len();
        self.below.poll(done, cx);
        let quiet = !self.merger.has_in_flight() && self.ended.is_empty() && self.remote_lane.is_none();
        if self.wanted() > 0 || !quiet {
            // What goes down here is polled for as what a submit sends: it may have ended in that.
            while self.handle_completions(done, from, cx) && !bugs::on(Bug::SentUnpolled) {
                from = done.len();
                self.below.poll(done, cx);
                if done.len() == from {
                    break;
                }
            }
        } else {
            self.completed(done.len() - from);
        }
    }

    fn drain(&mut self, how: Drain, back: &mut Batch, cx: &mut Cx<'_>) {
        if how == Drain::NoFlush {
            self.waiting.hand_back(&mut self.merger, back);
            back.append(&mut self.retries);
            self.tags.settle(0, cx);
        }
        if self.remote_lane.is_some() {
            self.drain_remote_lane(how, back, cx);
        }
        let from = back.len();
        self.below.drain(how, back, cx);
        if !bugs::on(Bug::HandedBackKeepsTag) {
            self.completed(back.len() - from);
        }
        if self.merger.has_in_flight() {
            self.merger.back(back, from, true, &mut self.retries, &mut self.down);
        }
        self.tags.settle(self.wanted(), cx);
    }

    fn busy(&self) -> OwnWork {
        self.below.busy()
    }
}
