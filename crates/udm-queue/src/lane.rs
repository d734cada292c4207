//! The data path of a queue on one core.
//!
//! Where nothing waits, nothing can be merged and there are tags, a batch goes straight down,
//! unless the scheduler has an order of its own.

use crate::merge::Merger;
use crate::queues::{Queues, Who};
use crate::sched::Sched;
use crate::tags::Held;
use std::sync::Arc;
use udm_core::bugs::{self, Bug};
use udm_core::{Batch, BioFlags, Busy, Cx, Drain, Lane, Status};

/// See the module.
pub(crate) struct QueueLane {
    queues: Arc<Queues>,
    who: Who,
    below: Box<dyn Lane>,
    /// The way to the task that has the order of all requests: where it has, and until the last of
    /// those that it was sent is home.
    way: Option<Box<dyn Lane>>,
    /// How many it has.
    away: usize,
    /// It is where requests go.
    elsewhere: bool,
    /// They may go straight down.
    straight: bool,
    tags: Held,
    /// Requests whose tags were given back though they are not home: the disk only holds them.
    released: usize,
    waiting: Sched,
    merger: Merger,
    /// Parts of requests that failed, to be read by themselves.
    again: Batch,
    /// Bios that would have to wait and were told not to, for the next `poll`.
    ended: Batch,
    /// Scratch.
    nowait: Batch,
    down: Batch,
}

impl QueueLane {
    pub fn new(queues: Arc<Queues>, who: Who, below: Box<dyn Lane>, cx: &mut Cx<'_>) -> QueueLane {
        let settings = queues.settings(cx);
        let params = &settings.params;
        let elsewhere = queues.is_elsewhere(who, &settings, cx);
        let waiting = Sched::new(params);
        QueueLane {
            who,
            below,
            way: elsewhere.then(|| queues.way(cx)),
            away: 0,
            elsewhere,
            straight: waiting.is_none(),
            tags: Held::new(settings.tags(cx.core().index(), cx.cores()), cx),
            released: 0,
            waiting,
            merger: Merger::new(params, queues.bounds(&settings), cx.new_owner()),
            again: Batch::new(),
            ended: Batch::new(),
            nowait: Batch::new(),
            down: Batch::new(),
            queues,
        }
    }

    /// Other settings hold. None of its requests is with the disk; what waits goes by those.
    #[cold]
    fn renew(&mut self, cx: &mut Cx<'_>) {
        let settings = self.queues.settings(cx);
        let params = &settings.params;
        let mut waited = Batch::new();
        self.waiting.hand_back(&mut self.merger, &mut waited);
        self.tags = Held::new(settings.tags(cx.core().index(), cx.cores()), cx);
        self.waiting = Sched::new(params);
        self.merger.change(params, self.queues.bounds(&settings));
        self.straight = self.waiting.is_none();
        self.elsewhere = self.queues.is_elsewhere(self.who, &settings, cx);
        if bugs::on(Bug::WaitingNotMoved) {
            return bugs::lose(waited);
        }
        if !self.elsewhere {
            // Sent by who called, who has to know that something goes down.
            waited.drain(..).for_each(|bio| self.waiting.add(bio, &mut self.merger, cx));
            if bugs::on(Bug::MovedUnpolled) {
                self.dispatch(cx);
            }
            return;
        }
        waited.append(&mut self.again);
        self.send_away(&mut waited, cx);
    }

    /// Sends `batch` to the task that has the order of all requests.
    fn send_away(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        self.away += batch.len();
        let way = self.way.get_or_insert_with(|| self.queues.way(cx));
        way.submit(batch, cx);
    }

    fn wanted(&self) -> usize {
        self.waiting.len() + self.again.len()
    }

    #[inline(never)]
    fn enqueue(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        if self.tags.are_retired() {
            self.renew(cx);
        }
        if self.elsewhere {
            return self.send_away(batch, cx);
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
        if self.elsewhere {
            self.send_away(&mut batch, cx);
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
                let bio = self.again.pop().or_else(|| {
                    self.waiting.next(&mut self.merger, cx).map(|request| self.merger.send(request))
                });
                self.down.push(bio.expect("something waits"));
            }
            if !self.tags.settle(self.wanted(), cx) {
                if self.wanted() == 0 || !self.tags.are_retired() {
                    break;
                }
                self.renew(cx);
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
    fn home(&mut self, n: usize) {
        if self.released == 0 && n > 0 {
            self.tags.home(n);
        } else if self.tags.any_out() || self.released > 0 {
            self.see_held(n);
        }
    }

    /// The same where there are such, or may be.
    #[cold]
    fn see_held(&mut self, n: usize) {
        let before = std::mem::replace(&mut self.released, self.below.held());
        // Of those that came home, some had given theirs back.
        let home = n + self.released - before;
        if home > 0 {
            self.tags.home(home);
        }
    }

    /// Those of `done` from `from` on came from below. True when others went there.
    #[inline(never)]
    fn came_back(&mut self, done: &mut Batch, from: usize, cx: &mut Cx<'_>) -> bool {
        self.home(done.len() - from);
        if self.merger.is_under_way() {
            self.merger.back(done, from, false, &mut self.again, &mut self.down);
        }
        done.append(&mut self.ended);
        let from = done.len();
        if let Some(way) = &mut self.way {
            way.poll(done, cx);
            self.away -= done.len() - from;
            self.leave_way();
        }
        self.dispatch(cx)
    }

    /// Closes the way where no more goes by it.
    fn leave_way(&mut self) {
        self.way.take_if(|_| !self.elsewhere && (self.away == 0 || bugs::on(Bug::WayLeftEarly)));
    }

    /// Takes back what comes back by the way.
    #[cold]
    fn drain_way(&mut self, how: Drain, back: &mut Batch, cx: &mut Cx<'_>) {
        let from = back.len();
        if let Some(way) = self.way.as_mut().filter(|_| !bugs::on(Bug::WayNotDrained)) {
            way.drain(how, back, cx);
        }
        self.away -= back.len() - from;
        self.leave_way();
    }
}

impl Lane for QueueLane {
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        let direct = self.straight && self.wanted() == 0 && !self.merger.finds(batch);
        if direct && self.tags.take_all(batch.len()) {
            self.below.submit(batch, cx);
        } else {
            self.enqueue(batch, cx);
        }
    }

    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        let mut from = done.len();
        self.below.poll(done, cx);
        let quiet = !self.merger.is_under_way() && self.ended.is_empty() && self.way.is_none();
        if self.wanted() > 0 || !quiet {
            // What goes down here is polled for as what a submit sends: it may have ended in that.
            while self.came_back(done, from, cx) && !bugs::on(Bug::SentUnpolled) {
                from = done.len();
                self.below.poll(done, cx);
                if done.len() == from {
                    break;
                }
            }
        } else {
            self.home(done.len() - from);
        }
    }

    fn drain(&mut self, how: Drain, back: &mut Batch, cx: &mut Cx<'_>) {
        if how == Drain::NoFlush {
            self.waiting.hand_back(&mut self.merger, back);
            back.append(&mut self.again);
            self.tags.settle(0, cx);
        }
        if self.way.is_some() {
            self.drain_way(how, back, cx);
        }
        let from = back.len();
        self.below.drain(how, back, cx);
        if !bugs::on(Bug::HandedBackKeepsTag) {
            self.home(back.len() - from);
        }
        if self.merger.is_under_way() {
            self.merger.back(back, from, true, &mut self.again, &mut self.down);
        }
        self.tags.settle(self.wanted(), cx);
    }

    fn busy(&self) -> Busy {
        self.below.busy()
    }
}
