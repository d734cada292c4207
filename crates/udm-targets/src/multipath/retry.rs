//! Bios that found no path, or whose path failed.
//!
//! A bio with a path error is retried in the same poll. Each retry either completes the bio or
//! fails one more path, so a poll has no more rounds than paths. If no path is left, the bio is
//! queued or fails with EIO, as configured. Queued bios are retried when the shared word has
//! changed: a path returned, or bios must fail now.

use super::lane::MultipathLane;
use smallvec::SmallVec;
use udm_core::{Batch, Cx, DrainMode, Status};

impl MultipathLane {
    /// True if bios without a path are queued. During a flushing suspend they fail.
    fn queues_without_path(&self) -> bool {
        !self.draining.is_some_and(DrainMode::fails_held) && self.shared.word().queueing()
    }

    /// Queues or fails the bios for which there is no path.
    #[cold]
    pub(super) fn no_path(&mut self, batch: &mut Batch) {
        if self.queues_without_path() {
            self.held_bios.append(batch);
            self.report_waiting();
        } else {
            self.fail(batch);
        }
    }

    /// Updates the number of queued bios in the path log.
    fn report_waiting(&mut self) {
        let path_log = &self.shared.path_log;
        path_log.waiting(self.reported_waiting, self.held_bios.len());
        self.reported_waiting = self.held_bios.len();
        if self.reported_waiting > 0 {
            path_log.no_path(true);
        }
    }

    fn fail(&mut self, batch: &mut Batch) {
        for bio in &mut *batch {
            bio.end_with(Status::IoErr);
        }
        if !batch.is_empty() {
            self.shared.path_log.ended(batch.len());
            self.shared.path_log.no_path(false);
        }
        self.ended.append(batch);
        self.slow_poll_due = true;
    }

    /// Sends the bios in `to_retry` to other paths until each one is in flight, queued or
    /// completed. Bios that complete in the meantime go to `done`. One event is raised, however
    /// many paths failed.
    #[cold]
    pub(super) fn retry_failed(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        for _ in 0..=self.shared.path_count() {
            let mut batch = std::mem::take(&mut self.to_retry);
            for bio in &mut batch {
                bio.status = Status::Ok;
            }
            // If the last path failed and bios are not queued, bios fail here without a new choice
            // of group. As in the kernel, only a bio that looks for a path and finds none clears
            // the current group.
            if self.shared.valid() == 0 && !self.queues_without_path() {
                self.fail(&mut batch);
            } else {
                self.dispatch_retries(&mut batch, cx);
            }
            // `batch` is empty now; its memory is reused. Only `reap` adds to `to_retry` from here
            // on.
            self.to_retry = batch;
            self.reap(done, cx);
            if self.to_retry.is_empty() {
                break;
            }
        }
        if !self.to_retry.is_empty() {
            // Paths returned and failed again during this loop. The next poll continues.
            cx.wake_now();
        }
        if std::mem::take(&mut self.router.path_failed) {
            self.shared.path_log.event();
        }
    }

    /// Sends bios that a path has failed to other paths, and counts them there as retries.
    fn dispatch_retries(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        let before: SmallVec<[usize; 16]> = self.children.in_flight().collect();
        self.dispatch(batch, cx);
        for ((now, before), counter) in self.children.in_flight().zip(before).zip(&*self.counters) {
            counter.retried((now - before) as u64);
        }
    }

    /// Retries or fails queued bios if something has changed. An earlier `submit` may have seen the
    /// change already: then a group is in use again and the word is not new.
    #[cold]
    pub(super) fn unpark(&mut self, cx: &mut Cx<'_>) {
        let served = self.router.group().is_some();
        if served || self.shared.word() != self.router.seen() || !self.queues_without_path() {
            // Bios that still find no path are queued again, in the memory of the scratch list.
            let room = std::mem::take(&mut self.empty_batch);
            let mut batch = std::mem::replace(&mut self.held_bios, room);
            self.dispatch(&mut batch, cx);
            self.empty_batch = batch;
            self.report_waiting();
        }
    }

    /// The last step of `drain`. A no-flush suspend hands queued bios back; during a flushing
    /// suspend the next poll fails them.
    pub(super) fn hand_back_parked(&mut self, how: DrainMode, back: &mut Batch) {
        if how == DrainMode::NoFlush {
            back.append(&mut self.held_bios);
            self.report_waiting();
            // Bios are handed back as they were submitted, without their path error.
            for bio in &mut self.to_retry {
                bio.status = Status::Ok;
            }
            back.append(&mut self.to_retry);
        }
    }
}
