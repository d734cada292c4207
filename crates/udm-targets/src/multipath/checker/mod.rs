//! The path checker: reads from paths, fails those that do not answer, and reinstates those that
//! do.
//!
//! The kernel leaves this to a daemon (multipathd). If the device's maintenance settings request it
//! ([`super::PathMaintenanceSettings`]), a task reads the first block of each path through lanes of
//! its own. The interval grows while the path works. An answer that does not blame the path is
//! good; an answer that blames it, or none in time, is bad. A good path with a bad answer is failed
//! before a request meets it. A failed path with a good answer is reinstated. A path that an
//! administrator failed is not checked until it is reinstated.
//!
//! A message such as `fail_if_no_path` holds until a path comes back. Then `no_path_retry` applies
//! again, as with multipathd.
//!
//! **A path comes back as the same disk.** Backends accept nothing else: a file is the inode and a
//! block device the number that was opened, and an NBD server with another export is refused
//! ([`udm_core::Device::rejection_reason`]). The size is checked here: the last block that the
//! table uses of a failed path is read before the path is reinstated.
//!
//! * `check_schedule`: when a path is checked. `marginal`: paths that are held back because they
//!   keep failing. `group_rank`: priorities of paths and groups. `policy`: the end of queueing
//!   without a path, and the return to a better group (failback). `report`: messages for people.
//!   These are pure functions of times and results.
//!
//! The task runs in the background: a check that hangs delays no suspend, no end and no other
//! check. A path whose check hangs gets no second check. A path failure and a reinstate message
//! wake the task. A suspend stops it, because a suspended device takes no messages; the task then
//! forgets the history of the paths.

mod check_schedule;
mod checked_path;
mod group_rank;
mod marginal;
mod policy;
mod report;

use super::checker_status::PathCheckerStatus;
use super::path_log::{self, PathFailReason};
use super::state::{MultipathState, PathStateSnapshot};
use check_schedule::PathCheckSchedule;
use checked_path::{CheckedPath, PendingPathCheck};
use group_rank::{GroupRank, PathPriorities};
use marginal::{PathQuarantineState, QuarantinedPathAction};
use policy::{FailbackPolicy, NoPathPolicy, PathReinstateKind};
pub(super) use report::short_path_refusal_reason;
use std::ops::Range;
use std::sync::Arc;
use udm_core::{
    Batch, Bio, BioTask, BioTaskCx, Buf, Limits, Nanos, Op, OwnWork, SECTOR_SIZE, Sector, Sectors,
    WaitQueueSubscription,
};
use udm_dm::PathCheckResult;
use udm_dm::target::ResolvedDevice;
use udm_wire::multipath_conf::MultipathSettings;

/// Bit in the cookie of a sample read, beside the index of the path.
const SAMPLE: u64 = 1 << 63;

/// The input of a checker.
pub(super) struct PathCheckerInput {
    pub shared: Arc<MultipathState>,
    pub checker_status: Arc<PathCheckerStatus>,
    /// The length of the target.
    pub len: Sectors,
    /// All paths in the table's order.
    pub paths: Vec<ResolvedDevice>,
    /// The range of path indexes of each group.
    pub groups: Vec<Range<usize>>,
    pub settings: Arc<MultipathSettings>,
}

/// If the task is polled more than this after its due time, the core was stalled.
const STALL: Nanos = Nanos::from_millis(1_000);

/// The task that checks the paths of one device.
pub(super) struct PathChecker {
    shared: Arc<MultipathState>,
    checker_status: Arc<PathCheckerStatus>,
    len: Sectors,
    settings: Arc<MultipathSettings>,
    groups: Vec<Range<usize>>,
    /// Empty before the first turn.
    paths: Vec<CheckedPath>,
    devices: Vec<ResolvedDevice>,
    queueing: NoPathPolicy,
    failback: FailbackPolicy,
    prios: PathPriorities,
    wait_handle: Option<WaitQueueSubscription>,
    /// Completed bios, reused for the next checks.
    free_bios: Batch,
    stopping: bool,
    /// The time at which the task asked to be polled.
    due: Nanos,
}

impl PathChecker {
    pub fn new(subject: PathCheckerInput) -> PathChecker {
        let PathCheckerInput { shared, checker_status, len, paths, groups, settings } = subject;
        let mut prios = PathPriorities::new(&settings, paths.iter().map(|path| path.name.as_str()));
        for (path, resolved) in paths.iter().enumerate() {
            prios.report(path, resolved.device.path_priority());
            checker_status.set(path, PathCheckResult::Unchecked);
            checker_status.set_prio(path, prios.of(path));
        }
        PathChecker {
            queueing: NoPathPolicy::new(&settings),
            failback: FailbackPolicy::new(&settings),
            prios,
            shared,
            checker_status,
            len,
            settings,
            groups,
            paths: Vec::new(),
            devices: paths,
            wait_handle: None,
            free_bios: Batch::new(),
            stopping: false,
            due: Nanos::NEVER,
        }
    }

    /// Initializes the paths in the first turn.
    fn begin(&mut self, cx: &mut dyn BioTaskCx) {
        let now = cx.now();
        let checked = |device: ResolvedDevice| CheckedPath {
            schedule: PathCheckSchedule::new(&self.settings, now, device.number.minor),
            device: Some(device),
            lane: None,
            seen: (0, false),
            fails_at_start: 0,
            pending: None,
            samples: 0,
            quarantine: PathQuarantineState::Healthy(None),
            refused: false,
        };
        self.paths = self.devices.drain(..).map(checked).collect();
        for (index, path) in self.paths.iter_mut().enumerate() {
            path.fails_at_start = self.shared.path(index).fail_count;
        }
        if let Some(on) = self.queueing.begin() {
            self.queue(on, cx);
        }
    }

    /// Sets whether requests without a path are queued.
    fn queue(&self, on: bool, cx: &mut dyn BioTaskCx) {
        if self.shared.valid() == 0 && on != self.shared.word().queueing() {
            self.shared.path_log.policy(on);
        }
        self.shared.set_queueing(on);
        self.shared.path_log.kick(&*cx.all_cores());
    }

    /// Observes all paths, handles timeouts and starts the checks that are due.
    fn look(&mut self, cx: &mut dyn BioTaskCx) {
        let now = cx.now();
        if self.due < Nanos::NEVER && self.due + STALL < now {
            // The core was stalled. That time does not count, because completed checks may not have
            // been processed yet.
            let pending = self.paths.iter_mut().filter_map(|path| path.pending.as_mut());
            pending.for_each(|pending| pending.at = now);
        }
        for index in 0..self.paths.len() {
            let view = self.shared.path(index);
            self.observe_path(index, view, now);
            self.quarantine(index, cx);
            let path = &mut self.paths[index];
            match &mut path.pending {
                Some(pending) if !pending.late && pending.at + self.settings.checker_timeout <= now => {
                    pending.late = true;
                    let same = pending.fails == view.fail_count && !view.failed;
                    self.shared.path_log.checked(&self.checker_status, index, PathCheckResult::Timeout);
                    if same {
                        self.fail(index, &PathFailReason::NoAnswer(self.settings.checker_timeout), cx);
                    }
                }
                // The path is scheduled again when the pending check completes.
                Some(_) => {}
                // As in multipathd, a path that an administrator failed is not checked.
                None if path.schedule.due <= now && view.held => path.schedule.still_down(now),
                None if path.schedule.due <= now => self.check(index, view.fail_count, cx),
                None => {}
            }
        }
        let queueing = self.shared.word().queues_after_resume();
        if let Some(on) = self.queueing.look(now, self.shared.valid(), queueing) {
            self.queue(on, cx);
        }
        if self.failback.next() <= now {
            self.fail_back(PathReinstateKind::StillUp, cx);
        }
        self.publish_status(now);
        self.due = self.next();
        cx.wake_at(self.due);
    }

    /// Time of the next look.
    fn next(&self) -> Nanos {
        let timeout = self.settings.checker_timeout;
        let path = |path: &CheckedPath| {
            let check = match &path.pending {
                Some(pending) if pending.late => Nanos::NEVER,
                Some(pending) => pending.at + timeout,
                None => path.schedule.due,
            };
            check.min(path.quarantine.next())
        };
        let paths = self.paths.iter().map(path).min().unwrap_or(Nanos::NEVER);
        paths.min(self.queueing.next()).min(self.failback.next())
    }

    /// Handles failures of the path, and reinstatements by message, since the last look.
    fn observe_path(&mut self, index: usize, view: PathStateSnapshot, now: Nanos) {
        let none_left = self.shared.valid() == 0;
        let path = &mut self.paths[index];
        let (fails, failed) = std::mem::replace(&mut path.seen, (view.fail_count, view.failed));
        if view.fail_count != fails {
            path.schedule.failed(now);
            path.refused = false;
            self.failback.failed();
            let counts = view.fail_count != path.fails_at_start && !path.quarantine.is_quarantined();
            if let Some(rule) = self.settings.marginal.filter(|_| counts) {
                path.quarantine.failed(now, &rule, none_left);
                self.log_quarantine(index, now);
            }
        }
        if failed && (!view.failed || view.fail_count != fails) {
            self.queueing.returned();
        }
        let path = &mut self.paths[index];
        if !view.failed && (failed || view.fail_count != fails) {
            path.schedule.returned(now, false);
        }
        if view.held {
            self.shared.path_log.checked(&self.checker_status, index, PathCheckResult::Unchecked);
        }
        // A message or command reinstated the path, which ends the quarantine.
        if !view.failed && path.quarantine.is_quarantined() {
            path.quarantine = PathQuarantineState::Healthy(None);
        }
    }

    /// Runs the quarantine of a path that keeps failing.
    fn quarantine(&mut self, index: usize, cx: &mut dyn BioTaskCx) {
        let (Some(rule), now) = (self.settings.marginal, cx.now()) else { return };
        let none_left = self.shared.valid() == 0;
        let path = &mut self.paths[index];
        let samples = matches!(path.quarantine, PathQuarantineState::Sampling { .. });
        match path.quarantine.look(now, &rule, path.samples, none_left) {
            QuarantinedPathAction::Nothing
                if samples && matches!(path.quarantine, PathQuarantineState::Failed { .. }) =>
            {
                self.log_quarantine(index, now);
            }
            QuarantinedPathAction::Nothing => {}
            QuarantinedPathAction::Release => path.schedule.due = now,
            QuarantinedPathAction::Sample => {
                if self.read(index, SAMPLE, false, cx) {
                    self.paths[index].samples += 1;
                } else {
                    self.paths[index].quarantine.sampled(false);
                }
            }
        }
    }

    /// Fails a path.
    fn fail(&self, index: usize, why: &PathFailReason<'_>, cx: &mut dyn BioTaskCx) {
        if self.shared.fail(index, why) {
            self.shared.path_log.event();
            self.shared.path_log.kick(&*cx.all_cores());
        }
    }

    /// Starts the check of a path.
    fn check(&mut self, index: usize, fails: u64, cx: &mut dyn BioTaskCx) {
        let now = cx.now();
        if self.shared.path(index).failed
            && let Some(path) = &self.paths[index].device
        {
            // A pending reconnect is tried at once, because the check waits for its result.
            path.device.retry_now();
        }
        match self.read(index, 0, false, cx) {
            true => {
                self.paths[index].pending =
                    Some(PendingPathCheck { at: now, fails, late: false, end: false });
            }
            // Without a lane the state of the path is unknown.
            false => self.paths[index].schedule.still_down(now),
        }
    }

    /// Reads the first block of a path, or the last one that the table uses. Returns false if the
    /// path cannot be opened.
    fn read(&mut self, index: usize, what: u64, end: bool, cx: &mut dyn BioTaskCx) -> bool {
        let of = self.len;
        let path = &mut self.paths[index];
        let Some(device) = path.device.as_ref().map(|device| &device.device) else { return false };
        if path.lane.is_none() {
            path.lane = cx.open(device).ok();
        }
        let Some(lane) = path.lane else { return false };
        let Limits { logical_block, .. } = device.limits();
        let len = u64::from(logical_block).max(SECTOR_SIZE);
        let mut bio = self.free_bios.pop().unwrap_or_default();
        bio.op = Op::Read;
        bio.sector = Sector(if end { of.0.saturating_sub(len / SECTOR_SIZE) } else { 0 });
        bio.sectors = Sectors::from_bytes(len);
        bio.data = Buf::zeroed(len as usize).into();
        bio.cookie = index as u64 | what;
        cx.submit(lane, bio);
        true
    }

    /// Handles a completed check or sample read.
    fn answered(&mut self, bio: &Bio, cx: &mut dyn BioTaskCx) {
        let index = (bio.cookie & !SAMPLE) as usize;
        let (path, now, well) = (&mut self.paths[index], cx.now(), !bio.status.is_path_error());
        if bio.cookie & SAMPLE != 0 {
            path.samples -= 1;
            return path.quarantine.sampled(well);
        }
        let Some(mut pending) = path.pending.take().filter(|_| !self.stopping) else { return };
        let view = self.shared.path(index);
        // The path failed after the check began, so this result says nothing about the failure.
        if pending.late || pending.fails != view.fail_count {
            path.schedule.unanswered(now, !pending.late && !view.failed);
            return;
        }
        let short = !bio.status.is_ok() && self.is_truncated(index);
        self.checker_status.set_truncated(index, short);
        let path = &mut self.paths[index];
        match (view.failed, well && !(view.failed && short)) {
            (false, true) => {
                path.schedule.works(now);
                self.works(index, pending.at, PathReinstateKind::StillUp, cx);
            }
            (false, false) => {
                path.schedule.still_down(now);
                self.shared.path_log.checked(&self.checker_status, index, PathCheckResult::Down);
                self.fail(index, &PathFailReason::Check(bio.status), cx);
            }
            (true, true) if path.quarantine.is_quarantined() => {
                path.schedule.still_down(now);
                self.shared.path_log.checked(&self.checker_status, index, PathCheckResult::Delayed);
            }
            // The last block is read too, within the remaining time.
            (true, true) if !pending.end && self.read(index, 0, true, cx) => {
                pending.end = true;
                self.paths[index].pending = Some(pending);
            }
            (true, true) => {
                let path_return = self.kind_of_return(index);
                let path = &mut self.paths[index];
                if self.shared.reinstate(index, path_log::ReinstateReason::CheckPassed) {
                    path.seen.1 = false;
                    path.schedule.returned(now, true);
                    self.queueing.returned();
                    self.shared.path_log.event();
                    self.shared.path_log.kick(&*cx.all_cores());
                    self.works(index, pending.at, path_return, cx);
                } else {
                    path.schedule.still_down(now);
                }
            }
            (true, false) => {
                self.paths[index].schedule.still_down(now);
                self.shared.path_log.checked(&self.checker_status, index, PathCheckResult::Down);
                self.log_refused(index, short);
            }
        }
    }

    /// A check of a path succeeded.
    fn works(
        &mut self,
        index: usize,
        pending: Nanos,
        path_return: PathReinstateKind,
        cx: &mut dyn BioTaskCx,
    ) {
        self.prios.answered(index, cx.now().since(pending));
        if let Some(device) = &self.paths[index].device {
            self.prios.report(index, device.device.path_priority());
        }
        self.shared.path_log.checked(&self.checker_status, index, PathCheckResult::Up);
        self.checker_status.set_prio(index, self.prios.of(index));
        self.fail_back(path_return, cx);
    }

    /// The kind of return that a failed path makes if it is reinstated now.
    fn kind_of_return(&self, index: usize) -> PathReinstateKind {
        let alone = |group: &Range<usize>| group.clone().all(|path| self.shared.path(path).failed);
        let first = self.groups.iter().position(|group| group.contains(&index)).filter(|group| {
            let mut ranks = self.ranks();
            ranks[*group] = GroupRank::new(false, std::iter::once(self.prios.of(index)));
            alone(&self.groups[*group]) && group_rank::best_group(&ranks) == Some(*group)
        });
        if first.is_some() { PathReinstateKind::FirstOfBest } else { PathReinstateKind::Path }
    }

    fn ranks(&self) -> Vec<GroupRank> {
        let up = |path: &usize| !self.shared.path(*path).failed;
        let rank = |group: &Range<usize>| {
            GroupRank::new(false, group.clone().filter(up).map(|path| self.prios.of(path)))
        };
        self.groups.iter().map(rank).collect()
    }

    /// Switches back to the best group if it is time. If a group is disabled, or a message chose a
    /// working group, there is no failback.
    fn fail_back(&mut self, path_return: PathReinstateKind, cx: &mut dyn BioTaskCx) {
        if (0..self.groups.len()).any(|group| self.shared.is_bypassed(group)) {
            return self.failback.failed();
        }
        let word = self.shared.word();
        let (best_group, in_use) = (group_rank::best_group(&self.ranks()), word.next().or(word.current()));
        if let Some(chosen) = self.shared.manual_group() {
            // A manual choice holds until the group fails or is the best one.
            let up = self.groups[chosen].clone().any(|path| !self.shared.path(path).failed);
            if up && best_group != Some(chosen) {
                return self.failback.failed();
            }
            self.shared.clear_manual_group(chosen);
        }
        if let Some(group) = self.failback.look(cx.now(), best_group, in_use, path_return) {
            self.failback.failed();
            self.shared.path_log.failed_back(group);
            self.shared.switch(group);
            self.shared.path_log.event();
            self.shared.path_log.kick(&*cx.all_cores());
        }
    }
}

impl BioTask for PathChecker {
    fn turn(&mut self, cx: &mut dyn BioTaskCx) {
        if self.stopping {
            return;
        }
        if !self.devices.is_empty() {
            self.begin(cx);
        }
        let wait_handle = self.wait_handle.take().unwrap_or_else(|| cx.subscribe(&self.shared.wait_queue));
        loop {
            let seen = wait_handle.epoch();
            self.look(cx);
            if wait_handle.register_wait(seen) {
                break;
            }
        }
        self.wait_handle = Some(wait_handle);
    }

    fn complete(&mut self, done: &mut Batch, cx: &mut dyn BioTaskCx) {
        for bio in done.drain(..) {
            self.answered(&bio, cx);
            self.free_bios.push(bio);
        }
        match self.stopping {
            true => self.stop(cx),
            false => self.turn(cx),
        }
    }

    fn stop(&mut self, cx: &mut dyn BioTaskCx) {
        self.stopping = true;
        self.wait_handle = None;
        self.devices.clear();
        self.checker_status.set_timers(Nanos::NEVER, None);
        (0..self.paths.len()).for_each(|path| self.checker_status.set_quarantine(path, None));
        cx.wake_at(Nanos::NEVER);
        for path in &mut self.paths {
            path.close(cx);
            path.device.take_if(|_| path.pending.is_none() && path.samples == 0);
        }
    }

    fn is_over(&self) -> bool {
        self.stopping && self.paths.iter().all(CheckedPath::is_idle)
    }

    fn own_work(&self) -> OwnWork {
        OwnWork::Background
    }
}
