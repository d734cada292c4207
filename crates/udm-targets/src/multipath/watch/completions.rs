//! Completions of the paths of a watched lane, and requests past their deadline.

use super::LanePathWatcher;
use super::in_flight::{
    BioSendTime, PathInFlightBio, PathInFlightBioKind, PathReadReason, ReadAwaitingCopies, copy_segments,
};
use super::slow_path_score::LOST_READS_MAX;
use crate::multipath::counters::PathWatchCounters;
use crate::multipath::path_log::PathFailReason;
use udm_core::{Bio, Cx, Nanos, Op, Status, UnansweredRequestState};

/// Bytes of completed reads that a poll copies even if the core's work budget is used up.
const FLOOR: u64 = 256 << 10;

impl LanePathWatcher {
    /// Polls the lane of a path and processes its completions, as far as the work budget allows.
    pub(super) fn poll_path(&mut self, path: usize, now: Nanos, cx: &mut Cx<'_>) {
        let mut completions = std::mem::take(&mut self.completions);
        self.paths[path].lane.poll(&mut completions, cx);
        let refused = &mut self.groups[self.paths[path].group].refused;
        if !completions.is_empty() && std::mem::take(refused) {
            // A refused read may be on a path that was already polled in this turn.
            cx.wake_now();
        }
        self.paths[path].unprocessed.extend(completions.drain(..));
        self.completions = completions;
        let mut floor = FLOOR;
        while let Some(bio) = self.paths[path].unprocessed.pop_front() {
            let cost = if bio.op == Op::Read { bio.sectors.bytes() } else { 0 };
            if cx.cpu_budget() < cost && floor < cost && floor < FLOOR {
                self.paths[path].unprocessed.push_front(bio);
                cx.wake_now();
                break;
            }
            cx.set_cpu_budget(cx.cpu_budget().saturating_sub(cost));
            floor = floor.saturating_sub(cost);
            self.process_completion(path, bio, now, cx);
        }
    }

    /// Frees the slot of `bio`, which completed on `path`, and returns the slot.
    pub(super) fn remove_slot(&mut self, path: usize, bio: &Bio) -> PathInFlightBio {
        let slot = self.slots.remove(bio.cookie as usize);
        debug_assert_eq!(slot.path, path, "a bio came back from another path");
        self.paths[path].in_flight -= 1;
        slot
    }

    fn process_completion(&mut self, path: usize, mut bio: Box<Bio>, now: Nanos, cx: &mut Cx<'_>) {
        let slot = self.remove_slot(path, &bio);
        self.paths[path].last_answer = now;
        let took = (bio.op == Op::Read && bio.status.is_ok()).then(|| now.since(slot.at));
        if let Some(took) = took {
            if let Some(all) = &self.counters[path].latency {
                all.add(took);
            }
            self.paths[path].window.add(took);
            let group = self.paths[path].group;
            self.groups[group].count(slot.kind, took);
        }
        match slot.kind {
            PathInFlightBioKind::Original { cookie, late } => {
                bio.cookie = cookie;
                self.late_completed(path, late);
                self.paths[path].completed.push(bio);
            }
            PathInFlightBioKind::Copy { read, role } => {
                bio.finish();
                self.copy_completed(path, read, role);
                match read {
                    Some(read) => self.answered(read, role, &bio, now, cx),
                    None if role == PathReadReason::EjectionTrial => {
                        self.trial_read_done(slot.serial, took, now);
                    }
                    None => PathWatchCounters::add(&self.counts(path).late_completions, 1),
                }
                self.copies.give_back(bio);
            }
        }
    }

    /// Counts a completed copy on `path`.
    pub(super) fn copy_completed(&mut self, path: usize, read: Option<usize>, role: PathReadReason) {
        if read.is_none() || role != PathReadReason::Own {
            self.detached_copies -= 1;
            self.paths[path].detached_copies -= 1;
        }
    }

    /// Counts a request that completed after its deadline.
    pub(super) fn late_completed(&self, path: usize, late: bool) {
        if late {
            PathWatchCounters::take(&self.counts(path).waiting, 1);
        }
    }

    /// The first answer completes a read. If a hedge fails, the read still waits for its own path.
    fn answered(&mut self, read: usize, role: PathReadReason, copy: &Bio, now: Nanos, cx: &mut Cx<'_>) {
        let won = role == PathReadReason::Hedge;
        if won && !copy.status.is_ok() {
            return self.hedge_failed(read, now);
        }
        let ReadAwaitingCopies { mut bio, child, .. } = self.end_read(read, Some(won), now);
        if copy.status.is_ok() {
            copy_segments(&copy.data, &mut bio.data);
        }
        bio.end_with(copy.status);
        self.paths[child].completed.push(bio);
        if won {
            // The path `child` may already have been polled in this turn.
            cx.wake_now();
            self.paths[child].score.lost += 1;
            if self.paths[child].score.lost >= LOST_READS_MAX {
                self.eject_path(child, now);
            }
        } else {
            self.paths[child].score.lost = 0;
        }
    }

    /// Removes `read`, which is completed or given up. `won` is `None` if it was given up,
    /// otherwise it is true if the hedge answered first.
    pub(super) fn end_read(&mut self, read: usize, won: Option<bool>, now: Nanos) -> ReadAwaitingCopies {
        let ended = self.reads.remove(read);
        let ReadAwaitingCopies { child, own, hedge, .. } = ended;
        match won {
            Some(true) => {
                self.detach_copy(own);
                PathWatchCounters::add(&self.counts(child).hedges_won, 1);
            }
            Some(false) => {}
            // Given up: its own copy may still be in flight.
            None => self.detach_copy(own),
        }
        if let Some(hedge) = hedge {
            if won != Some(true) {
                self.detach_copy(hedge);
                PathWatchCounters::add(&self.counts(child).hedges_wasted, 1);
            }
            let group = self.paths[child].group;
            self.groups[group].budget.ended(won == Some(true), now);
        }
        ended
    }

    /// Marks a copy as no longer needed.
    fn detach_copy(&mut self, slot: usize) {
        let Some(PathInFlightBio { path, kind: PathInFlightBioKind::Copy { read, role }, .. }) =
            self.slots.get_mut(slot)
        else {
            return;
        };
        if read.take().is_some() && *role == PathReadReason::Own {
            self.detached_copies += 1;
            self.paths[*path].detached_copies += 1;
        }
    }

    /// A hedge failed or is on a quiet path.
    pub(super) fn hedge_failed(&mut self, read: usize, now: Nanos) {
        let ReadAwaitingCopies { child, hedge, .. } = &mut self.reads[read];
        let (child, hedge) = (*child, hedge.take());
        if let Some(hedge) = hedge {
            self.detach_copy(hedge);
        }
        PathWatchCounters::add(&self.counts(child).hedges_wasted, 1);
        let group = self.paths[child].group;
        self.groups[group].budget.ended(false, now);
        // The read may be hedged again, on another path.
        let own = self.reads[read].own;
        let PathInFlightBio { at, serial, .. } = self.slots[own];
        let path = &mut self.paths[child];
        path.refused.push(BioSendTime { at, slot: own, serial }, path.in_flight, &self.slots);
    }

    /// Handles the requests on `path` that are past their deadline.
    pub(super) fn check_deadlines(&mut self, path: usize, now: Nanos, cx: &mut Cx<'_>) {
        while let Some(sent) = self.paths[path].before_deadline.first(&self.slots) {
            let last_answer = self.paths[path].last_answer;
            let Some(deadline_timer) = &mut self.paths[path].deadline_timer else { return };
            let how = deadline_timer.check(sent.at, last_answer, now);
            if let UnansweredRequestState::Pending(due) = how {
                cx.wake_at(due);
                break;
            }
            self.paths[path].before_deadline.pop();
            self.fail_silent(path, how);
            self.expire_slot(path, sent.slot, now);
        }
    }

    /// Fails a path because it is silent or has not completed a request for too long.
    fn fail_silent(&self, path: usize, how: UnansweredRequestState) {
        if self.shared.path(path).failed {
            return;
        }
        let stays = |slot: &PathInFlightBio| {
            slot.path == path && matches!(slot.kind, PathInFlightBioKind::Original { .. })
        };
        let waiting = self.slots.iter().filter(|(_, slot)| stays(slot)).count();
        if self.shared.fail(path, &PathFailReason::Silent { how, waiting }) {
            self.shared.path_log.event();
        }
    }

    /// Handles the request in `slot`, whose deadline has passed.
    fn expire_slot(&mut self, path: usize, slot: usize, now: Nanos) {
        match &mut self.slots[slot].kind {
            PathInFlightBioKind::Original { late, .. } => {
                *late = true;
                PathWatchCounters::add(&self.counts(path).waiting, 1);
            }
            PathInFlightBioKind::Copy { read: Some(read), role: PathReadReason::Own } => {
                let read = *read;
                let ReadAwaitingCopies { mut bio, child, .. } = self.end_read(read, None, now);
                PathWatchCounters::add(&self.counts(child).abandoned_reads, 1);
                bio.end_with(Status::Timeout);
                self.paths[child].completed.push(bio);
            }
            PathInFlightBioKind::Copy { read: Some(read), .. } => {
                let read = *read;
                self.hedge_failed(read, now);
            }
            PathInFlightBioKind::Copy { read: None, role } => {
                if *role == PathReadReason::EjectionTrial {
                    let serial = self.slots[slot].serial;
                    self.slots[slot].kind =
                        PathInFlightBioKind::Copy { read: None, role: PathReadReason::Hedge };
                    self.trial_read_done(serial, None, now);
                }
            }
        }
    }
}
