//! The data path of a queue on one core.
//!
//! A batch goes straight to the disk if no request waits, none can be merged, and enough tags are
//! free. A scheduler with an order of its own prevents this.

use crate::merge::Merger;
use crate::request_queue::{QueueLaneUser, RequestQueue};
use crate::sched::IoScheduler;
use crate::tags::LaneTags;
use std::sync::Arc;
use udm_core::{Batch, BioFlags, Cx, DrainMode, Lane, OwnWork, Status};

/// The lane of a queue: merges, schedules and sends requests.
pub(crate) struct QueueLane {
    queues: Arc<RequestQueue>,
    who: QueueLaneUser,
    below: Box<dyn Lane>,
    /// The lane to the owner task. It stays open while requests are forwarded, and until the last
    /// forwarded request has completed.
    remote_lane: Option<Box<dyn Lane>>,
    /// Number of requests forwarded to the owner task.
    forwarded: usize,
    /// True if new requests are forwarded to the owner task.
    forwards: bool,
    /// True if requests may go straight to the disk.
    can_bypass: bool,
    tags: LaneTags,
    /// Number of held writes in the disk's lane whose tags have been returned.
    released: usize,
    waiting: IoScheduler,
    merger: Merger,
    /// Parts of failed requests, to be read one by one.
    retries: Batch,
    /// NOWAIT bios that failed; the next `poll` returns them.
    ended: Batch,
    /// Reused vectors.
    nowait: Batch,
    down: Batch,
}

impl QueueLane {
    pub fn new(
        queues: Arc<RequestQueue>,
        who: QueueLaneUser,
        below: Box<dyn Lane>,
        cx: &mut Cx<'_>,
    ) -> QueueLane {
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

    /// Applies new settings. None of the lane's requests is with the disk, and waiting requests
    /// move to the new settings.
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
        if !self.forwards {
            // The caller sends the requests, since it must poll afterwards.
            waited.drain(..).for_each(|bio| self.waiting.add(bio, &mut self.merger, cx));
            return;
        }
        waited.append(&mut self.retries);
        self.forward(&mut waited, cx);
    }

    /// Forwards `batch` to the owner task.
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

    /// Sends requests that must not wait, after the rest of their batch. They are not merged: each
    /// is sent now or fails.
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

    /// Sends requests for which tags are available. Returns true if any was sent.
    fn dispatch(&mut self, cx: &mut Cx<'_>) -> bool {
        loop {
            while self.wanted() > 0 && self.tags.take_one(self.wanted()) {
                let bio = self.retries.pop().or_else(|| {
                    self.waiting.next(&mut self.merger, cx).map(|request| self.merger.send(request))
                });
                self.down.push(bio.expect("a request waits"));
            }
            if !self.tags.update_wait(self.wanted(), cx) {
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

    /// Handles `n` requests completed by the disk: returns their tags, and the tags of held writes
    /// ([`Lane::held_writes`]). Otherwise, held writes of an abandoned path would block all waiters
    /// for a tag.
    #[inline]
    fn completed(&mut self, n: usize) {
        if self.released == 0 && n > 0 {
            self.tags.completed(n);
        } else if self.tags.any_out() || self.released > 0 {
            self.release_abandoned(n);
        }
    }

    /// As [`QueueLane::completed`], if held writes exist or may exist.
    #[cold]
    fn release_abandoned(&mut self, n: usize) {
        let before = std::mem::replace(&mut self.released, self.below.held_writes());
        // Some of the completed requests have returned their tags before.
        let completed = n + self.released - before;
        if completed > 0 {
            self.tags.completed(completed);
        }
    }

    /// Handles the bios of `done` from index `from` on, which the disk completed. Returns true if
    /// new requests were sent.
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

    /// Closes the lane to the owner task if it is no longer used.
    fn close_remote_lane(&mut self) {
        self.remote_lane.take_if(|_| !self.forwards && self.forwarded == 0);
    }

    /// Collects bios that the owner task hands back.
    #[cold]
    fn drain_remote_lane(&mut self, how: DrainMode, back: &mut Batch, cx: &mut Cx<'_>) {
        let from = back.len();
        if let Some(remote_lane) = &mut self.remote_lane {
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
            // Requests sent here may have completed at once, so the lower lane is polled again.
            while self.handle_completions(done, from, cx) {
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

    fn drain(&mut self, how: DrainMode, back: &mut Batch, cx: &mut Cx<'_>) {
        if how == DrainMode::NoFlush {
            self.waiting.hand_back(&mut self.merger, back);
            back.append(&mut self.retries);
            self.tags.update_wait(0, cx);
        }
        if self.remote_lane.is_some() {
            self.drain_remote_lane(how, back, cx);
        }
        let from = back.len();
        self.below.drain(how, back, cx);
        self.completed(back.len() - from);
        if self.merger.has_in_flight() {
            self.merger.back(back, from, true, &mut self.retries, &mut self.down);
        }
        self.tags.update_wait(self.wanted(), cx);
    }

    fn own_work(&self) -> OwnWork {
        self.below.own_work()
    }
}
