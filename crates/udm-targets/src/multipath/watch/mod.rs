//! The path watch of one core: deadlines, hedged reads, and ejection of slow paths. It is optional
//! ([`udm_dm::PathWatch`]); a lane without it executes none of this code.
//!
//! It is a layer between the multipath lane and its paths, and not a mode of that lane. To the lane
//! above, a silent path is a path that failed with a timeout. Each path gets a [`Leg`]. All legs of
//! a lane share one [`Watch`] with the lanes of the paths, because a hedged read involves two
//! paths.
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
//!   ([`Patience`](udm_core::Patience)): time in which the core did not run does not count.
//! * Past its deadline a path is failed. Its reads return with a timeout and are retried like
//!   others; the other requests wait, and are counted.
//! * Copies that the lane above no longer waits for (`guests`) are required own work: a suspend and
//!   a close wait for them.
//! * Ejection is advice ([`ejection`](super::ejection)). A lane follows it only if the group has
//!   another path, so it changes no group and fails no request.
//! * Latencies are counted in a small array of steps per lane. They are evaluated once per window,
//!   when a request is sent.
//!
//! `slots`: requests in flight. `answers`: completions and late requests. `doubt`: hedges and
//! trials of ejected paths, with `hedge` and `judge`.

mod answers;
mod doubt;
mod hedge;
mod judge;
mod slots;

use super::served::{Row, Watched};
use super::state::Shared;
use doubt::Trial;
use hedge::Budget;
use judge::Standing;
use slab::Slab;
use slots::{Copies, Read, Role, Sent, Slot, Waiting, What};
use smallvec::SmallVec;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use udm_core::bugs::{self, Bug};
use udm_core::latency::Window;
use udm_core::{Batch, Bio, Busy, Cx, Drain, Lane, Nanos, Op, Patience};
use udm_dm::PathWatch;

/// The watch of one lane over its paths.
pub(super) struct Watch {
    shared: Arc<Shared>,
    how: PathWatch,
    row: Row,
    paths: Vec<Path>,
    groups: Vec<Group>,
    slots: Slab<Slot>,
    reads: Slab<Read>,
    serial: u64,
    copies: Copies,
    /// Copies on all paths that are nobody's above.
    guests: usize,
    /// A suspend is under way: a path is polled once behind each drain, and by its own leg. What it
    /// is to hand back it would begin anew with a second.
    draining: bool,
    window_end: Nanos,
    trial: Option<Trial>,
    /// Scratch.
    out: Batch,
    came: Batch,
}

/// A path.
struct Path {
    lane: Box<dyn Lane>,
    group: usize,
    in_flight: usize,
    /// When it last answered something, well or not.
    heard: Nanos,
    /// Since when it has had something to answer.
    asked: Nanos,
    /// Copies in flight here that the lane above does not know of: hedges, trials, and those of
    /// reads that were given up or answered elsewhere.
    guests: usize,
    /// How long it may be silent, where there is a deadline, and what has one.
    patience: Option<Patience>,
    undue: Waiting,
    /// Reads that may yet be hedged.
    unhedged: Waiting,
    /// Those for which there was no hedge when they had taken long, or whose hedge came to nothing.
    refused: Waiting,
    /// Those that were hedged, by when that was.
    hedged: Waiting,
    /// What came back and was not looked at, for want of work to spend on it.
    arrived: VecDeque<Box<Bio>>,
    /// What goes up with the next poll.
    home: Batch,
    window: Window,
    standing: Standing,
}

/// A group.
struct Group {
    paths: Range<usize>,
    /// How long a read takes before it is hedged; never, as long as that is not known.
    after: Nanos,
    /// What reads took, to learn that from.
    window: Window,
    budget: Budget,
    /// Reads were refused a hedge, and a path that answers may take them.
    refused: bool,
}

/// A path of a watched lane.
struct Leg {
    watch: Rc<RefCell<Watch>>,
    path: usize,
}

/// Puts a watch over `lanes`, which belong to groups of so many paths each.
pub(super) fn over(
    lanes: Vec<Box<dyn Lane>>,
    counts: impl Iterator<Item = usize>,
    (how, shared, row): (PathWatch, Arc<Shared>, Row),
    cx: &mut Cx<'_>,
) -> Vec<Box<dyn Lane>> {
    let mut start = 0;
    let group = |count| {
        let paths = start..start + count;
        start = paths.end;
        Group {
            paths,
            after: Nanos::NEVER,
            window: Window::default(),
            budget: Budget::default(),
            refused: false,
        }
    };
    let groups: Vec<_> = counts.map(group).collect();
    let of = |path: usize| groups.iter().position(|g| g.paths.contains(&path)).unwrap_or_default();
    let path = |(index, lane)| Path {
        lane,
        group: of(index),
        in_flight: 0,
        heard: Nanos(0),
        asked: Nanos(0),
        guests: 0,
        patience: how.deadline.map(Patience::new),
        undue: Waiting::default(),
        unhedged: Waiting::default(),
        refused: Waiting::default(),
        hedged: Waiting::default(),
        arrived: VecDeque::new(),
        home: Batch::new(),
        window: Window::default(),
        standing: Standing::default(),
    };
    let paths: Vec<_> = lanes.into_iter().enumerate().map(path).collect();
    let count = paths.len();
    let watch = Rc::new(RefCell::new(Watch {
        shared,
        how,
        row,
        paths,
        groups,
        slots: Slab::new(),
        reads: Slab::new(),
        serial: 0,
        copies: Copies::new(cx.new_owner()),
        guests: 0,
        draining: false,
        window_end: Nanos(0),
        trial: None,
        out: Batch::new(),
        came: Batch::new(),
    }));
    (0..count).map(|path| Box::new(Leg { watch: Rc::clone(&watch), path }) as Box<dyn Lane>).collect()
}

impl Lane for Leg {
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        self.watch.borrow_mut().submit(self.path, batch, cx);
    }

    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        self.watch.borrow_mut().poll(self.path, done, cx);
    }

    fn drain(&mut self, how: Drain, back: &mut Batch, cx: &mut Cx<'_>) {
        self.watch.borrow_mut().drain(self.path, how, back, cx);
    }

    fn busy(&self) -> Busy {
        let watch = self.watch.borrow();
        let path = &watch.paths[self.path];
        let owes = path.guests > 0 && !bugs::on(Bug::LateNotOwed);
        path.lane.busy().max(if owes { Busy::Owed } else { Busy::Idle })
    }
}

impl Watch {
    fn submit(&mut self, path: usize, batch: &mut Batch, cx: &mut Cx<'_>) {
        let now = cx.now();
        self.draining = false;
        self.look_back(now);
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
            self.try_with(read, now, cx);
        }
    }

    /// What goes down for `bio`, and the read that it is a copy of.
    fn prepare(&mut self, path: usize, mut bio: Box<Bio>, now: Nanos) -> (Box<Bio>, Option<usize>) {
        let copied = bio.op == Op::Read || bugs::on(Bug::WriteGivenUp) && bio.op == Op::Write;
        if copied && let Some(mut copy) = self.copies.of(&bio) {
            let read =
                self.reads.insert(Read { bio, leg: path, own: 0, hedge: None, tried: SmallVec::new() });
            let sent = self.enter(path, What::Copy { read: Some(read), role: Role::Own }, now);
            self.reads[read].own = sent.slot;
            copy.cookie = sent.slot as u64;
            if self.how.hedge_reads {
                let path = &mut self.paths[path];
                path.unhedged.push(sent, path.in_flight, &self.slots);
            }
            return (copy, Some(read));
        }
        if bio.op == Op::Read {
            Watched::add(&self.counts(path).bare, 1);
        }
        let sent = self.enter(path, What::Itself { cookie: bio.cookie, late: false }, now);
        bio.cookie = sent.slot as u64;
        (bio, None)
    }

    /// Something is about to be sent.
    fn enter(&mut self, path: usize, what: What, now: Nanos) -> Sent {
        self.serial += 1;
        let slot = self.slots.insert(Slot { serial: self.serial, path, at: now, what });
        let sent = Sent { at: now, slot, serial: self.serial };
        let path = &mut self.paths[path];
        if path.in_flight == 0 {
            path.asked = now;
        }
        path.in_flight += 1;
        if self.how.deadline.is_some() {
            path.undue.push(sent, path.in_flight, &self.slots);
        }
        sent
    }

    /// Sends what is in `out`.
    fn send(&mut self, path: usize, cx: &mut Cx<'_>) {
        self.paths[path].lane.submit(&mut self.out, cx);
    }

    fn poll(&mut self, path: usize, done: &mut Batch, cx: &mut Cx<'_>) {
        let now = cx.now();
        self.take_in(path, now, cx);
        if self.guests > 0 && !self.draining {
            // A hedge may have been answered where the lane above sees nothing in flight.
            for other in (0..self.paths.len()).filter(|other| *other != path) {
                if self.paths[other].guests > 0 {
                    self.take_in(other, now, cx);
                    self.see_deadlines(other, now, cx);
                }
            }
        }
        self.see_deadlines(path, now, cx);
        self.see_hedges(path, now, cx);
        done.append(&mut self.paths[path].home);
    }

    /// What a path hands back was not started, and goes up as it was given.
    fn drain(&mut self, path: usize, how: Drain, back: &mut Batch, cx: &mut Cx<'_>) {
        let now = cx.now();
        self.draining = true;
        let mut came = std::mem::take(&mut self.came);
        self.paths[path].lane.drain(how, &mut came, cx);
        for mut bio in came.drain(..) {
            let slot = self.leave(path, &bio);
            match slot.what {
                What::Itself { cookie, late } => {
                    bio.cookie = cookie;
                    self.heard_of(path, late);
                    back.push(bio);
                }
                What::Copy { read, role } => {
                    bio.finish();
                    self.copies.give_back(bio);
                    self.is_home(path, read, role);
                    match (read, role) {
                        (Some(read), Role::Own) => back.push(self.end_read(read, None, now).bio),
                        (Some(read), _) => self.hedge_failed(read, now),
                        (None, Role::Trial) => self.tried(slot.serial, None, now),
                        (None, _) => {}
                    }
                }
            }
        }
        self.came = came;
    }

    /// The counters of `path` for what the watch does.
    fn counts(&self, path: usize) -> &Watched {
        &self.row[path].watched
    }
}
