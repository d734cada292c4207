//! Slow paths of a watched lane: hedged reads, and the ejection of paths and their return.
//!
//! An ejected path gets no requests. When a trial is due, the first lane that gets requests sends
//! copies of a few reads to the path, one at a time ([`EjectionTrial`]). No request waits for these
//! copies. If they are fast enough, the path is in use again. If not, it stays ejected for twice as
//! long.

use super::hedge_budget::{AFTER_MIN, PERCENTILE, QUIET_FACTOR, READS_MIN};
use super::in_flight::{BioSendTime, PathInFlightBioKind, PathReadReason};
use super::slow_path_score::{self, SlowPathScore, TRIAL_READS};
use super::{LanePathWatcher, WatchedGroup, WatchedPath};
use crate::multipath::counters::PathWatchCounters;
use udm_core::latency::LatencyWindowHistogram;
use udm_core::{Cx, Nanos};

/// Minimum length of a window.
const WINDOW: Nanos = Nanos::from_millis(250);
/// Maximum length of a trial; then another lane may begin one.
const TRIAL_MAX: Nanos = Nanos::from_millis(10_000);
/// Delay of the next trial if a trial had no reads.
const TRIAL_NEXT: Nanos = Nanos::from_millis(1_000);

/// The trial of an ejected path.
pub(super) struct EjectionTrial {
    path: usize,
    /// Latencies of the copies; [`Nanos::NEVER`] for a failed one.
    times: Vec<Nanos>,
    /// The serial of the copy in flight.
    out: Option<u64>,
    until: Nanos,
}

impl WatchedGroup {
    /// Time without a completion after which a path is quiet.
    fn quiet(&self) -> Nanos {
        Nanos(self.after.0.saturating_mul(QUIET_FACTOR))
    }

    /// Records one latency. The latency of a copy that is no longer needed is clamped to just below
    /// the hedge delay. If it counted in full, a hanging path would increase the delay for all
    /// paths. If it did not count, the delay would become shorter and shorter.
    pub(super) fn count(&mut self, what: PathInFlightBioKind, took: Nanos) {
        match what {
            PathInFlightBioKind::Copy { role: PathReadReason::EjectionTrial, .. } => {}
            PathInFlightBioKind::Copy { read: None, .. } => {
                self.window.add(took.min(Nanos(self.after.0 - 1)));
            }
            _ => self.window.add(took),
        }
    }
}

impl LanePathWatcher {
    /// Hedges the slow reads on `path`.
    pub(super) fn check_hedges(&mut self, path: usize, now: Nanos, cx: &mut Cx<'_>) {
        if !self.settings.hedge_reads {
            return;
        }
        let group = self.paths[path].group;
        if self.groups[group].after == Nanos::NEVER {
            self.learn(group);
        }
        let after = self.groups[group].after;
        if after == Nanos::NEVER {
            return;
        }
        self.check_hedged(path, now, cx);
        while let Some(sent) = self.paths[path].refused.first(&self.slots)
            && self.hedge(path, sent, now, cx)
        {
            self.paths[path].refused.pop();
        }
        while let Some(sent) = self.paths[path].unhedged.first(&self.slots) {
            let due = sent.at + after;
            if due > now {
                cx.wake_at(due);
                break;
            }
            self.paths[path].unhedged.pop();
            if !self.hedge(path, sent, now, cx) {
                PathWatchCounters::add(&self.counts(path).hedges_refused, 1);
                let path = &mut self.paths[path];
                path.refused.push(sent, path.in_flight, &self.slots);
            }
        }
        if self.paths[path].refused.first(&self.slots).is_some() {
            self.groups[group].refused = true;
            if !self.is_quiet(path, now) {
                cx.wake_at(self.quiet_at(path));
            }
        }
    }

    /// If the hedge's own path has become quiet, the hedge counts as failed, so that the read can
    /// be hedged on a further path. Without one, the hedge stays: its path may only be slow, for
    /// example while it connects, and a late answer is better than none before the deadline. Only
    /// the oldest hedge is checked: on a working path a hedge completes soon.
    fn check_hedged(&mut self, path: usize, now: Nanos, cx: &mut Cx<'_>) {
        while let Some(sent) = self.paths[path].hedged.first(&self.slots) {
            let PathInFlightBioKind::Copy { read: Some(read), .. } = self.slots[sent.slot].kind else {
                return;
            };
            if let Some(hedge) = self.reads[read].hedge {
                let other = self.slots[hedge].path;
                if !self.is_quiet(other, now) {
                    return cx.wake_at(self.quiet_at(other));
                }
                if self.hedge_path(path, &self.reads[read].hedge_paths, now).is_some() {
                    self.hedge_failed(read, now);
                }
            }
            self.paths[path].hedged.pop();
        }
    }

    /// Hedges a read on `path`. Returns false if no hedge is available now.
    fn hedge(&mut self, path: usize, sent: BioSendTime, now: Nanos, cx: &mut Cx<'_>) -> bool {
        let PathInFlightBioKind::Copy { read: Some(read), role: PathReadReason::Own } =
            self.slots[sent.slot].kind
        else {
            return true;
        };
        let tried = &self.reads[read].hedge_paths;
        let Some(other) = self.hedge_path(path, tried, now) else { return !tried.is_empty() };
        let budget = &mut self.groups[self.paths[path].group].budget;
        let (paid, paused) = (budget.take(now), budget.paused(now));
        let free = !paid && self.is_quiet(path, now) && self.may_answer(other, paused, now);
        if !(paid || free) || !self.send_copy(other, read, PathReadReason::Hedge, now, cx) {
            return false;
        }
        self.reads[read].hedge_paths.push(other);
        let on = &mut self.paths[path];
        on.hedged.push(sent, on.in_flight, &self.slots);
        PathWatchCounters::add(&self.counts(path).hedges, 1);
        PathWatchCounters::add(&self.counts(path).free_hedges, u64::from(free));
        true
    }

    /// Time from which `path` is quiet if it completes nothing before.
    fn quiet_at(&self, path: usize) -> Nanos {
        let path = &self.paths[path];
        path.last_answer.max(path.busy_since) + self.groups[path.group].quiet()
    }

    /// True if `path` has had requests for long and completed nothing.
    fn is_quiet(&self, path: usize, now: Nanos) -> bool {
        self.paths[path].in_flight > 0 && self.quiet_at(path) <= now
    }

    /// True if `path` is not known to be quiet. During a pause of hedging the path must have
    /// answered recently or be idle: one read finds out.
    fn may_answer(&self, path: usize, paused: bool, now: Nanos) -> bool {
        let WatchedPath { in_flight, last_answer, group, .. } = self.paths[path];
        match paused {
            true => in_flight == 0 || now < last_answer + self.groups[group].quiet(),
            false => !self.is_quiet(path, now),
        }
    }

    /// Sends a further copy of `read` to `path`. Returns false if the copy does not fit.
    fn send_copy(
        &mut self,
        path: usize,
        read: usize,
        role: PathReadReason,
        now: Nanos,
        cx: &mut Cx<'_>,
    ) -> bool {
        let Some(mut copy) = self.copies.of(&self.reads[read].bio) else { return false };
        let of = (role == PathReadReason::Hedge).then_some(read);
        let sent = self.add_slot(path, PathInFlightBioKind::Copy { read: of, role }, now);
        copy.cookie = sent.slot as u64;
        if role == PathReadReason::Hedge {
            self.reads[read].hedge = Some(sent.slot);
        }
        self.detached_copies += 1;
        self.paths[path].detached_copies += 1;
        self.out.push(copy);
        self.send(path, cx);
        // The copy may be completed already.
        cx.wake_now();
        true
    }

    /// The other paths in use of the group of `path`.
    fn others(&self, path: usize) -> impl Iterator<Item = usize> {
        let group = self.groups[self.paths[path].group].paths.clone();
        group.filter(move |other| *other != path && self.shared.path(*other).is_in_use())
    }

    /// The path with the fewest bios in flight, without those in `tried`. A quiet path is chosen
    /// only if all are quiet.
    fn hedge_path(&self, path: usize, tried: &[usize], now: Nanos) -> Option<usize> {
        let others = self.others(path).filter(|other| !tried.contains(other));
        others.min_by_key(|other| (self.is_quiet(*other, now), self.paths[*other].in_flight))
    }

    /// If the window is over, evaluates latencies and slow paths. Then starts trials that are due.
    pub(super) fn end_window(&mut self, now: Nanos) {
        if now < self.window_end {
            return;
        }
        self.window_end = now + WINDOW;
        for group in 0..self.groups.len() {
            let paths = self.groups[group].paths.clone();
            if self.paths[paths.clone()].iter().map(|path| path.window.total()).sum::<u32>() < READS_MIN {
                continue;
            }
            self.learn(group);
            if self.settings.eject_slow {
                self.find_slow_path(group, now);
            }
            self.groups[group].window = LatencyWindowHistogram::default();
            self.paths[paths].iter_mut().for_each(|path| path.window = LatencyWindowHistogram::default());
        }
        if self.settings.eject_slow && self.shared.has_ejected() {
            self.check_probation(now);
        }
    }

    /// Updates the hedge delay of `group` if the window has enough reads. The delay at most
    /// doubles, so that a short stall of all paths has a limited effect.
    fn learn(&mut self, group: usize) {
        let group = &mut self.groups[group];
        if group.window.total() >= READS_MIN {
            let most = group.window.percentile(PERCENTILE).unwrap_or_default().max(AFTER_MIN);
            group.after = most.min(Nanos(group.after.0.saturating_mul(2)));
        }
    }

    fn find_slow_path(&mut self, group: usize, now: Nanos) {
        let range = self.groups[group].paths.clone();
        let shared = &self.shared;
        let paths = self.paths[range.clone()].iter_mut().zip(range);
        let in_use = paths.filter(|(_, index)| shared.path(*index).is_in_use());
        let mut in_use: Vec<_> = in_use.map(|(p, index)| (index, &mut p.score, &p.window)).collect();
        if let Some(slow) = slow_path_score::find_slow_path(&mut in_use) {
            self.eject_path(slow, now);
        }
    }

    /// Ejects a path, unless it is the last one in use of its group.
    pub(super) fn eject_path(&mut self, path: usize, now: Nanos) {
        self.paths[path].score = SlowPathScore::default();
        if self.settings.eject_slow
            && self.others(path).next().is_some()
            && self.shared.path(path).is_in_use()
        {
            self.shared.eject(path, now);
        }
    }

    /// Starts a trial that is due, and ends a trial that takes too long.
    fn check_probation(&mut self, now: Nanos) {
        if let Some(trial) = self.trial.take_if(|trial| trial.until <= now) {
            self.end_trial(trial, now);
        }
        if self.trial.is_some() {
            return;
        }
        let until = now + TRIAL_MAX;
        let due = (0..self.paths.len()).find(|path| self.shared.ejection(*path).claim_trial(now, until));
        self.trial =
            due.map(|path| EjectionTrial { path, times: Vec::with_capacity(TRIAL_READS), out: None, until });
    }

    /// Sends a copy of `read` to the path on trial.
    pub(super) fn send_trial_read(&mut self, read: usize, now: Nanos, cx: &mut Cx<'_>) {
        let Some(EjectionTrial { path, out: None, .. }) = self.trial else { return };
        let same = self.paths[path].group == self.paths[self.reads[read].child].group;
        if same && !self.shared.path(path).failed {
            let sent = self.send_copy(path, read, PathReadReason::EjectionTrial, now, cx);
            let serial = sent.then_some(self.serial);
            self.trial.as_mut().into_iter().for_each(|trial| trial.out = serial);
        }
    }

    /// Trial copy `serial` completed in time `took`, or failed (`None`). A copy of an earlier trial
    /// is ignored.
    pub(super) fn trial_read_done(&mut self, serial: u64, took: Option<Nanos>, now: Nanos) {
        let Some(trial) = self.trial.as_mut().filter(|trial| trial.out == Some(serial)) else { return };
        trial.out = None;
        trial.times.push(took.unwrap_or(Nanos::NEVER));
        if trial.times.len() < TRIAL_READS {
            return;
        }
        if let Some(trial) = self.trial.take() {
            self.end_trial(trial, now);
        }
    }

    /// Evaluates the trial. If no copy was sent, the trial is postponed; another lane may have
    /// reads.
    fn end_trial(&self, EjectionTrial { path, mut times, out, .. }: EjectionTrial, now: Nanos) {
        if out.is_some() {
            times.push(Nanos::NEVER);
        }
        let others: Vec<_> = self.others(path).map(|other| &self.paths[other].score).collect();
        if times.is_empty() {
            self.shared.ejection(path).postpone_trial(now + TRIAL_NEXT);
        } else if slow_path_score::trial_passed(&mut times, &others) {
            self.shared.end_ejection(path, now);
        } else {
            self.shared.ejection(path).trial_failed(now);
        }
    }
}
