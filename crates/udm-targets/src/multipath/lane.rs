//! The data path of a multipath device on one core.
//!
//! * `submit`: one load of the shared word shows that nothing has changed. The selector of the
//!   group in use distributes the batch to the paths. A single bio goes to its path in the batch
//!   that it came in.
//! * `poll`: each path with bios in flight is polled. Completed bios are examined once, for errors
//!   and for their length. Bios of a single path are examined in the caller's list, bios of several
//!   paths while they are moved to it.
//!
//! All other code is in `route` and `retry`. It runs only if a path or a group changes, a bio has
//! an error, or no path is left.

use super::counters::LaneCountersByPath;
use super::path_log::PathFailReason;
use super::reaped_paths::CompletedPathBios;
use super::route::LanePriorityGroups;
use super::selector::SelectorLane;
use super::state::MultipathState;
use std::sync::Arc;
use udm_core::{Batch, Bio, Cx, DrainMode, Lane, Op, OwnWork, Sectors};
use udm_dm::child_lanes::{ChildLanes, ChildPollResult};

/// The lane of a multipath device.
pub(super) struct MultipathLane {
    pub(super) shared: Arc<MultipathState>,
    pub(super) router: LanePriorityGroups,
    /// The paths.
    pub(super) children: ChildLanes,
    /// For each path, its group and its position in the group.
    path_positions: Vec<(u32, u32)>,
    pub(super) counters: LaneCountersByPath,
    /// Queued bios that found no path.
    pub(super) held_bios: Batch,
    /// How many of the `held_bios` bios the path log has counted.
    pub(super) reported_waiting: usize,
    /// Bios that a path failed, to be retried.
    pub(super) to_retry: Batch,
    /// Bios that failed because no path was left, for the next `poll`.
    pub(super) ended: Batch,
    /// The next `poll` checks `ended` and `draining`.
    pub(super) slow_poll_due: bool,
    /// Scratch.
    pub(super) empty_batch: Batch,
    /// The current suspend, set by each `drain` and cleared by the next `poll`. A cancelled suspend
    /// is not reported to the lane, so the value must not outlive that poll.
    pub(super) draining: Option<DrainMode>,
}

impl MultipathLane {
    /// `groups` has the number of paths and the selector of each group, `paths` all paths in the
    /// same order.
    pub(super) fn new(
        shared: Arc<MultipathState>,
        groups: impl Iterator<Item = (usize, SelectorLane)>,
        paths: Vec<Box<dyn Lane>>,
        counters: LaneCountersByPath,
    ) -> MultipathLane {
        let router = LanePriorityGroups::new(&shared, groups);
        MultipathLane {
            shared,
            path_positions: router.path_positions(),
            router,
            children: ChildLanes::new(paths),
            counters,
            held_bios: Batch::new(),
            reported_waiting: 0,
            to_retry: Batch::new(),
            ended: Batch::new(),
            slow_poll_due: false,
            empty_batch: Batch::new(),
            draining: None,
        }
    }

    /// Sends `batch` to the paths of the group in use. If no path is left, the bios are queued or
    /// failed. `batch` is empty afterwards.
    #[inline(always)]
    pub(super) fn dispatch(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        if self.shared.word() == self.router.seen()
            && let Some(group) = self.router.group()
        {
            group.selector.deal(batch, group.paths.start, &mut self.children, cx);
        } else {
            self.dispatch_after_change(batch, cx);
        }
    }

    /// As [`MultipathLane::dispatch`], if something has changed or no path was left.
    #[inline(never)]
    fn dispatch_after_change(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        if batch.is_empty() {
            return;
        }
        if self.shared.word() != self.router.seen() {
            self.router.look(&self.shared);
        }
        match self.router.group() {
            Some(group) => {
                group.selector.deal(batch, group.paths.start, &mut self.children, cx);
            }
            None => self.no_path(batch),
        }
    }

    /// Polls the paths that have bios in flight.
    #[inline(always)]
    pub(super) fn reap(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        match self.children.poll_busy(done, cx) {
            Some(polled) => self.polled(polled, done, cx),
            None => self.reap_several(done, cx),
        }
    }

    /// Polls several paths. The selector of the group in use takes the bios of its paths if all of
    /// them succeeded.
    #[inline(never)]
    fn reap_several(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        let Some(polled) = self.children.poll_separately(cx) else { return self.reap_many(done, cx) };
        let (before, mut marks) = (done.len(), polled);
        if let Some(group) = self.router.group() {
            let to = CompletedPathBios { children: &mut self.children, counters: &self.counters, done };
            marks = group.selector.reaped(group.paths.clone(), marks, to, cx);
        }
        while marks != 0 {
            let (index, from) = (marks.trailing_zeros() as usize, done.len());
            marks &= marks - 1;
            let back = self.children.completions(index);
            let count = back.len();
            done.append(back);
            let left = self.children.taken(index, count);
            self.polled(ChildPollResult { child: index, from, left }, done, cx);
        }
        self.children.finish_separate_poll(polled, done.len() > before, done, cx);
    }

    /// As [`MultipathLane::reap_several`], for more paths than a bit mask can hold.
    #[inline(never)]
    fn reap_many(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        let mut round = self.children.poll();
        while let Some(polled) = self.children.poll_next(&mut round, done, cx) {
            self.polled(polled, done, cx);
        }
        self.children.poll_idle(&round, done, cx);
    }

    /// Counts the bios in `done` that completed on one path, and removes those with a path error.
    #[inline(always)]
    fn polled(&mut self, polled: ChildPollResult, done: &mut Batch, cx: &Cx<'_>) {
        let ChildPollResult { child: index, from, left } = polled;
        let counter = &self.counters[index];
        counter.set_in_flight(left);
        let back = &done[from..];
        if let [only] = back
            && only.status.is_ok()
        {
            counter.count_completed(only.op, 1, only.sectors.bytes());
            return self.router.polled(self.path_positions[index], back, only.sectors, cx);
        }
        // One pass checks that all succeeded and have the same operation.
        let op = back.first().map_or(Op::Read, |bio| bio.op);
        let (mut odd, mut sectors) = (0, Sectors::ZERO);
        for bio in back {
            odd |= bio.status as u8 | (bio.op as u8 ^ op as u8);
            sectors += bio.sectors;
        }
        if odd == 0 {
            counter.count_completed(op, back.len() as u64, sectors.bytes());
            self.router.polled(self.path_positions[index], back, sectors, cx);
        } else {
            self.polled_mixed(index, done, from, sectors, cx);
        }
    }

    /// As [`MultipathLane::polled`], for bios with different operations or with errors.
    #[inline(never)]
    fn polled_mixed(&mut self, index: usize, done: &mut Batch, from: usize, sectors: Sectors, cx: &Cx<'_>) {
        let counter = &self.counters[index];
        let mut all_ok = true;
        for bio in &done[from..] {
            all_ok &= bio.status.is_ok();
            counter.count_completed(bio.op, 1, bio.sectors.bytes());
        }
        if all_ok {
            self.router.polled(self.path_positions[index], &done[from..], sectors, cx);
        } else {
            self.errors(index, done, from, sectors, cx);
        }
    }

    /// Separates failed bios: those with a path error are retried, the others are returned.
    #[cold]
    fn errors(&mut self, index: usize, done: &mut Batch, from: usize, sectors: Sectors, cx: &Cx<'_>) {
        self.router.polled(self.path_positions[index], &done[from..], sectors, cx);
        let before = self.to_retry.len();
        self.empty_batch.extend(done.drain(from..));
        for bio in self.empty_batch.drain(..) {
            let retry = bio.status.is_path_error();
            if !bio.status.is_ok() {
                self.counters[index].failed(&bio);
            }
            let to = if retry { &mut self.to_retry } else { &mut *done };
            to.push(bio);
        }
        let blames = |bio: &&Bio| bio.status.fails_path();
        if let Some(bio) = self.to_retry[before..].iter().map(|bio| &**bio).find(blames) {
            self.router.path_failed |= self.shared.fail(index, &PathFailReason::Bio(bio));
        }
    }

    /// The last step of a poll while failed bios wait or a suspend is in progress.
    #[cold]
    fn poll_slow(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        self.slow_poll_due = false;
        done.append(&mut self.ended);
        if self.draining == Some(DrainMode::NoFlush) && !self.held_bios.is_empty() {
            // Queued after the last `drain`: the next one hands them back.
            cx.wake_now();
        }
        self.draining = None;
    }
}

impl Lane for MultipathLane {
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        // A suspended device gets no bios, so the device has been resumed.
        self.draining = None;
        self.dispatch(batch, cx);
    }

    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        if !self.held_bios.is_empty() {
            self.unpark(cx);
        }
        self.reap(done, cx);
        if !self.to_retry.is_empty() {
            self.retry_failed(done, cx);
        }
        if self.slow_poll_due {
            self.poll_slow(done, cx);
        }
    }

    fn drain(&mut self, how: DrainMode, back: &mut Batch, cx: &mut Cx<'_>) {
        (self.draining, self.slow_poll_due) = (Some(how), true);
        // Bios that a path holds back must complete too.
        for index in 0..self.children.len() {
            let from = self.children.drain(index, how, back, cx);
            self.counters[index].set_in_flight(self.children.in_flight_on(index));
            let came = &back[from..];
            let sectors = Sectors(came.iter().map(|bio| bio.sectors.0).sum());
            self.router.polled(self.path_positions[index], came, sectors, cx);
        }
        self.hand_back_parked(how, back);
    }

    fn own_work(&self) -> OwnWork {
        self.children.own_work()
    }
}
