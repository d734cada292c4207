//! Bios that found no path, or lost theirs.
//!
//! A path error sends a bio round again in the same poll. Each round either ends it or fails one
//! more path, so there are no more rounds in a poll than paths. With no path left a bio is parked
//! if bios are to be held, and fails with EIO if not. Parked bios look again when the shared word
//! has moved: a path returned, or bios are to be held no longer.

use super::lane::MultipathLane;
use smallvec::SmallVec;
use udm_core::bugs::{self, Bug};
use udm_core::{Batch, Cx, Drain, Status};

impl MultipathLane {
    /// True when bios without a path wait for one. A flushing suspend waits for nobody.
    fn queues_without_path(&self) -> bool {
        !self.draining.is_some_and(Drain::fails_held)
            && self.shared.word().queueing()
            && !bugs::on(Bug::HeldBioFails)
    }

    /// What becomes of bios for which there is no path.
    #[cold]
    pub(super) fn no_path(&mut self, batch: &mut Batch) {
        if self.queues_without_path() {
            self.parked.append(batch);
            self.report_waiting();
        } else {
            self.fail(batch);
        }
    }

    /// Tells the journal how many bios wait here.
    fn report_waiting(&mut self) {
        let path_log = &self.shared.path_log;
        path_log.waiting(self.reported_waiting, self.parked.len());
        self.reported_waiting = self.parked.len();
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

    /// Sends the bios in `to_retry` to other paths until all are on their way, parked or over. What
    /// comes back meanwhile goes to `done`. One event, however many paths failed.
    #[cold]
    pub(super) fn retry_failed(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        for _ in 0..=self.shared.path_count() {
            let mut batch = std::mem::take(&mut self.to_retry);
            for bio in &mut batch {
                bio.status = Status::Ok;
            }
            if bugs::on(Bug::LandsAfterRetry) {
                bugs::record_echo(std::sync::Arc::as_ptr(&self.shared) as usize, &batch);
            }
            if bugs::on(Bug::RetryForgets) && batch.len() > 1 {
                bugs::leak_bios(batch.pop());
            }
            // With the last path gone and nothing to wait for, bios fail where they are: only a bio
            // that looks for a path and finds none makes the group lose its standing.
            if self.shared.valid() == 0 && !self.queues_without_path() {
                self.fail(&mut batch);
            } else {
                self.dispatch_retries(&mut batch, cx);
            }
            // `reap` may only add to it from here on; its room is used again.
            self.to_retry = batch;
            self.reap(done, cx);
            if self.to_retry.is_empty() {
                break;
            }
        }
        if !self.to_retry.is_empty() {
            // Paths returned and failed again while this went on. The next poll goes on.
            cx.wake_now();
        }
        if std::mem::take(&mut self.router.path_failed) || bugs::on(Bug::EventForEachError) {
            self.shared.path_log.event();
        }
    }

    /// Sends bios that a path has failed to others, and counts them there.
    fn dispatch_retries(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        let before: SmallVec<[usize; 16]> = self.legs.in_flight().collect();
        self.dispatch(batch, cx);
        for ((now, before), counter) in self.legs.in_flight().zip(before).zip(&*self.served) {
            counter.retried((now - before) as u64);
        }
    }

    /// Sends parked bios on their way, or fails them, if something has changed. A `submit` may have
    /// seen the change before: then there is a group again, and nothing new in the word.
    #[cold]
    pub(super) fn unpark(&mut self, cx: &mut Cx<'_>) {
        let served = self.router.group().is_some() && !bugs::on(Bug::ParkedMissReturn);
        if served || self.shared.word() != self.router.seen() || !self.queues_without_path() {
            // Those that find no path still are parked again, into the scratch list's room.
            let room = std::mem::take(&mut self.spare);
            let mut batch = std::mem::replace(&mut self.parked, room);
            self.dispatch(&mut batch, cx);
            self.spare = batch;
            self.report_waiting();
        }
    }

    /// The end of a `drain`: a no-flush suspend takes back what is held; a flushing one makes the
    /// next poll fail it.
    pub(super) fn hand_back_parked(&mut self, how: Drain, back: &mut Batch) {
        if how == Drain::NoFlush {
            back.append(&mut self.parked);
            self.report_waiting();
            // As they were given: the path error that they came back with is not their last word.
            for bio in &mut self.to_retry {
                bio.status = Status::Ok;
            }
            back.append(&mut self.to_retry);
        }
    }
}
