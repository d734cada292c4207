//! The path watch of one core: deadlines, hedged reads, and ejection of slow paths. It is optional
//! ([`PathWatchOptions`]); a lane without it executes none of this code.
//!
//! The watch is a layer between the multipath lane and its paths, not a mode of that lane. The lane
//! above sees a silent path as a path that failed with a timeout. Each path gets a
//! [`WatchedPathLane`]. All of them share one [`LanePathWatcher`], which owns the lanes of the
//! paths, because a hedged read involves two paths.
//!
//! * **A read is sent as a copy with memory of its own.** A late answer lands in the copy. So the
//!   original can complete or be sent to another path. If the memory for copies is used up, the
//!   read is sent itself and cannot be given up.
//! * **A write or a flush is sent itself.** It stays with its path until the path returns it. A
//!   write on two paths could arrive late and undo a newer one. Of two answers to a flush, the late
//!   one may be the error.
//!
//! Rules:
//!
//! * Requests are stamped once per turn. A timer runs only while requests wait.
//! * The deadline counts from the last answer of the path on this core, because a path that answers
//!   other requests is busy and not silent. A request that gets no answer at all is given up after
//!   four deadlines. An NBD path with its own `deadline=` counts with the same type
//!   ([`PauseAwareReplyDeadline`](udm_core::PauseAwareReplyDeadline)): time in which the core did
//!   not run does not count.
//! * If a request is past its deadline, its path is failed. Reads return with a timeout and are
//!   retried on other paths. Other requests wait and are counted.
//! * Copies that the lane above no longer waits for (`detached_copies`) are required own work: a
//!   suspend and a close wait for them.
//! * Ejection is advice ([`ejection`](super::ejection)). A lane follows it only if the group has
//!   another path, so it changes no group and fails no request.
//! * Latencies are counted in a small array of steps per lane. They are evaluated once per window,
//!   when a request is sent.
//!
//! `in_flight`: requests in flight. `completions`: completions and late requests. `slow_paths`:
//! hedges and trials of ejected paths, with `hedge_budget` and `slow_path_score`.

mod completions;
mod hedge_budget;
mod in_flight;
mod slow_path_score;
mod slow_paths;

use super::counters::{LaneCountersByPath, PathWatchCounters};
use super::path_maintenance::PathWatchOptions;
use super::state::MultipathState;
use hedge_budget::HedgeBudget;
use in_flight::{
    BioSendTime, BioSendTimeQueue, PathInFlightBio, PathInFlightBioKind, PathReadReason, ReadAwaitingCopies,
    ReadCopyPool,
};
use slab::Slab;
use slow_path_score::SlowPathScore;
use slow_paths::EjectionTrial;
use smallvec::SmallVec;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use udm_core::latency::LatencyWindowHistogram;
use udm_core::{Batch, Bio, Cx, DrainMode, Lane, Nanos, Op, OwnWork, PauseAwareReplyDeadline};

/// The watch of one lane over its paths.
pub(super) struct LanePathWatcher {
    shared: Arc<MultipathState>,
    settings: PathWatchOptions,
    counters: LaneCountersByPath,
    paths: Vec<WatchedPath>,
    groups: Vec<WatchedGroup>,
    slots: Slab<PathInFlightBio>,
    reads: Slab<ReadAwaitingCopies>,
    serial: u64,
    copies: ReadCopyPool,
    /// Number of copies on all paths that the lane above does not know of.
    detached_copies: usize,
    /// A suspend is in progress. The caller polls each path once after each drain, so a poll here
    /// for another path would make that path start work again that it must hand back.
    draining: bool,
    window_end: Nanos,
    trial: Option<EjectionTrial>,
    /// Scratch.
    out: Batch,
    completions: Batch,
}

/// The state of one watched path.
struct WatchedPath {
    lane: Box<dyn Lane>,
    group: usize,
    in_flight: usize,
    /// Time of the last completion, with or without error.
    last_answer: Nanos,
    /// Time since which the path has had requests in flight.
    busy_since: Nanos,
    /// Copies in flight on this path that the lane above does not know of: hedges, trials, and
    /// copies of reads that were given up or answered by another path.
    detached_copies: usize,
    /// The deadline timer, if there is a deadline, and the requests that it applies to.
    deadline_timer: Option<PauseAwareReplyDeadline>,
    before_deadline: BioSendTimeQueue,
    /// Reads that may still be hedged.
    unhedged: BioSendTimeQueue,
    /// Slow reads that were refused a hedge, or whose hedge failed.
    refused: BioSendTimeQueue,
    /// Hedged reads, in the order of their hedges.
    hedged: BioSendTimeQueue,
    /// Completions that were not processed because the work budget was used up.
    unprocessed: VecDeque<Box<Bio>>,
    /// Bios to return in the next poll.
    completed: Batch,
    window: LatencyWindowHistogram,
    score: SlowPathScore,
}

/// The state of one group.
struct WatchedGroup {
    paths: Range<usize>,
    /// Time after which a read is hedged; [`Nanos::NEVER`] until it is known.
    after: Nanos,
    /// Latencies from which `after` is computed.
    window: LatencyWindowHistogram,
    budget: HedgeBudget,
    /// Reads were refused a hedge; a path that answers may take them.
    refused: bool,
}

/// The lane of one watched path.
struct WatchedPathLane {
    watch: Rc<RefCell<LanePathWatcher>>,
    path: usize,
}

/// Puts a watch over `lanes`; `counts` has the number of paths of each group.
pub(super) fn add_path_watch_to_lanes(
    lanes: Vec<Box<dyn Lane>>,
    counts: impl Iterator<Item = usize>,
    (settings, shared, counters): (PathWatchOptions, Arc<MultipathState>, LaneCountersByPath),
    cx: &mut Cx<'_>,
) -> Vec<Box<dyn Lane>> {
    let mut start = 0;
    let group = |count| {
        let paths = start..start + count;
        start = paths.end;
        WatchedGroup {
            paths,
            after: Nanos::NEVER,
            window: LatencyWindowHistogram::default(),
            budget: HedgeBudget::default(),
            refused: false,
        }
    };
    let groups: Vec<_> = counts.map(group).collect();
    let of = |path: usize| groups.iter().position(|g| g.paths.contains(&path)).unwrap_or_default();
    let path = |(index, lane)| WatchedPath {
        lane,
        group: of(index),
        in_flight: 0,
        last_answer: Nanos(0),
        busy_since: Nanos(0),
        detached_copies: 0,
        deadline_timer: settings.deadline.map(PauseAwareReplyDeadline::new),
        before_deadline: BioSendTimeQueue::default(),
        unhedged: BioSendTimeQueue::default(),
        refused: BioSendTimeQueue::default(),
        hedged: BioSendTimeQueue::default(),
        unprocessed: VecDeque::new(),
        completed: Batch::new(),
        window: LatencyWindowHistogram::default(),
        score: SlowPathScore::default(),
    };
    let paths: Vec<_> = lanes.into_iter().enumerate().map(path).collect();
    let count = paths.len();
    let watch = Rc::new(RefCell::new(LanePathWatcher {
        shared,
        settings,
        counters,
        paths,
        groups,
        slots: Slab::new(),
        reads: Slab::new(),
        serial: 0,
        copies: ReadCopyPool::new(cx.new_owner()),
        detached_copies: 0,
        draining: false,
        window_end: Nanos(0),
        trial: None,
        out: Batch::new(),
        completions: Batch::new(),
    }));
    (0..count)
        .map(|path| Box::new(WatchedPathLane { watch: Rc::clone(&watch), path }) as Box<dyn Lane>)
        .collect()
}

impl Lane for WatchedPathLane {
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        self.watch.borrow_mut().submit(self.path, batch, cx);
    }

    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        self.watch.borrow_mut().poll(self.path, done, cx);
    }

    fn drain(&mut self, how: DrainMode, back: &mut Batch, cx: &mut Cx<'_>) {
        self.watch.borrow_mut().drain(self.path, how, back, cx);
    }

    fn own_work(&self) -> OwnWork {
        let watch = self.watch.borrow();
        let path = &watch.paths[self.path];
        path.lane.own_work().max(if path.detached_copies > 0 { OwnWork::Required } else { OwnWork::Idle })
    }
}

impl LanePathWatcher {
    fn submit(&mut self, path: usize, batch: &mut Batch, cx: &mut Cx<'_>) {
        let now = cx.now();
        self.draining = false;
        self.end_window(now);
        let (mut reads, mut last) = (0, None);
        for bio in batch.drain(..) {
            reads += u64::from(bio.op == Op::Read);
            let (bio, read) = self.prepare(path, bio, now);
            last = read.or(last);
            self.out.push(bio);
        }
        let group = self.paths[path].group;
        self.groups[group].budget.earn(reads);
        self.send(path, cx);
        if let (Some(read), true) = (last, self.trial.is_some()) {
            self.send_trial_read(read, now, cx);
        }
    }

    /// Returns the bio to send for `bio`, and the read if it is a copy.
    fn prepare(&mut self, path: usize, mut bio: Box<Bio>, now: Nanos) -> (Box<Bio>, Option<usize>) {
        if bio.op == Op::Read
            && let Some(mut copy) = self.copies.of(&bio)
        {
            let read = self.reads.insert(ReadAwaitingCopies {
                bio,
                child: path,
                own: 0,
                hedge: None,
                hedge_paths: SmallVec::new(),
            });
            let sent = self.add_slot(
                path,
                PathInFlightBioKind::Copy { read: Some(read), role: PathReadReason::Own },
                now,
            );
            self.reads[read].own = sent.slot;
            copy.cookie = sent.slot as u64;
            if self.settings.hedge_reads {
                let path = &mut self.paths[path];
                path.unhedged.push(sent, path.in_flight, &self.slots);
            }
            return (copy, Some(read));
        }
        if bio.op == Op::Read {
            PathWatchCounters::add(&self.counts(path).uncopied_reads, 1);
        }
        let sent =
            self.add_slot(path, PathInFlightBioKind::Original { cookie: bio.cookie, late: false }, now);
        bio.cookie = sent.slot as u64;
        (bio, None)
    }

    /// Registers a bio that is about to be sent.
    fn add_slot(&mut self, path: usize, kind: PathInFlightBioKind, now: Nanos) -> BioSendTime {
        self.serial += 1;
        let slot = self.slots.insert(PathInFlightBio { serial: self.serial, path, at: now, kind });
        let sent = BioSendTime { at: now, slot, serial: self.serial };
        let path = &mut self.paths[path];
        if path.in_flight == 0 {
            path.busy_since = now;
        }
        path.in_flight += 1;
        if self.settings.deadline.is_some() {
            path.before_deadline.push(sent, path.in_flight, &self.slots);
        }
        sent
    }

    /// Sends the bios in `out`.
    fn send(&mut self, path: usize, cx: &mut Cx<'_>) {
        self.paths[path].lane.submit(&mut self.out, cx);
    }

    fn poll(&mut self, path: usize, done: &mut Batch, cx: &mut Cx<'_>) {
        let now = cx.now();
        self.poll_path(path, now, cx);
        if self.detached_copies > 0 && !self.draining {
            // A hedge may complete on a path on which the lane above has nothing in flight.
            for other in (0..self.paths.len()).filter(|other| *other != path) {
                if self.paths[other].detached_copies > 0 {
                    self.poll_path(other, now, cx);
                    self.check_deadlines(other, now, cx);
                }
            }
        }
        self.check_deadlines(path, now, cx);
        self.check_hedges(path, now, cx);
        done.append(&mut self.paths[path].completed);
    }

    /// Bios that a path hands back were not started, and are returned as they were submitted.
    fn drain(&mut self, path: usize, how: DrainMode, back: &mut Batch, cx: &mut Cx<'_>) {
        let now = cx.now();
        self.draining = true;
        let mut completions = std::mem::take(&mut self.completions);
        self.paths[path].lane.drain(how, &mut completions, cx);
        for mut bio in completions.drain(..) {
            let slot = self.remove_slot(path, &bio);
            match slot.kind {
                PathInFlightBioKind::Original { cookie, late } => {
                    bio.cookie = cookie;
                    self.late_completed(path, late);
                    back.push(bio);
                }
                PathInFlightBioKind::Copy { read, role } => {
                    bio.finish();
                    self.copies.give_back(bio);
                    self.copy_completed(path, read, role);
                    match (read, role) {
                        (Some(read), PathReadReason::Own) => back.push(self.end_read(read, None, now).bio),
                        (Some(read), _) => self.hedge_failed(read, now),
                        (None, PathReadReason::EjectionTrial) => self.trial_read_done(slot.serial, None, now),
                        (None, _) => {}
                    }
                }
            }
        }
        self.completions = completions;
    }

    /// The watch counters of `path`.
    fn counts(&self, path: usize) -> &PathWatchCounters {
        &self.counters[path].watched
    }
}
