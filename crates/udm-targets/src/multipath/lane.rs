//! The data path of a multipath device on one core.
//!
//! `submit`: one load of the shared word tells that nothing has changed; the selector of the group in use deals the batch out; each path that
//! got any is given its batch. `poll`: each path that has any in flight is polled straight into the caller's list, and what came back
//! is looked through once, for errors and for its length. Everything else is in `route` and `retry` and runs only when a path or a group
//! changes, an error comes back, or no path is left.

use super::journal::Why;
use super::route::Router;
use super::selector::SelectorLane;
use super::served::Row;
use super::state::Shared;
use std::sync::Arc;
use udm_core::{Batch, Busy, Cx, Drain, Lane, Sectors};
use udm_dm::bugs::{self, Bug};

/// A path of this lane.
pub(super) struct PathLane {
    lane: Box<dyn Lane>,
    /// Bios that it has been given and has not handed back.
    in_flight: usize,
    group: u32,
    /// Its place in its group.
    place: u32,
}

/// See the module.
pub(super) struct MultipathLane {
    pub(super) shared: Arc<Shared>,
    pub(super) router: Router,
    paths: Vec<PathLane>,
    /// What each path is given next; empty outside `submit`.
    outs: Vec<Batch>,
    /// Scratch: the paths that a batch was dealt to, by place in the group.
    chosen: Vec<u32>,
    /// The paths that have bios in flight. No others are polled while bios come back.
    busy: Vec<u32>,
    served: Row,
    /// Bios that found no path, held back.
    pub(super) parked: Batch,
    /// How many of them the journal knows of.
    pub(super) told: usize,
    /// Bios that a path failed, to go round again.
    pub(super) again: Batch,
    /// Bios that have failed for want of a path, for the next `poll`.
    pub(super) ended: Batch,
    /// Scratch.
    pub(super) spare: Batch,
    /// The suspend under way: from each `drain` to the end of the `poll` behind it, since one that is called off is seen by nothing else.
    pub(super) draining: Option<Drain>,
}

impl MultipathLane {
    /// `groups` has the number of paths and the selector of each group, `paths` all paths in that order.
    pub(super) fn new(
        shared: Arc<Shared>,
        groups: impl Iterator<Item = (usize, Box<dyn SelectorLane>)>,
        paths: Vec<Box<dyn Lane>>,
        served: Row,
    ) -> MultipathLane {
        let router = Router::new(&shared, groups);
        let places = router.places();
        let path = |(lane, (group, place))| PathLane { lane, in_flight: 0, group, place };
        let paths: Vec<_> = paths.into_iter().zip(places).map(path).collect();
        MultipathLane {
            shared,
            router,
            outs: paths.iter().map(|_| Batch::new()).collect(),
            chosen: Vec::with_capacity(paths.len()),
            busy: Vec::with_capacity(paths.len()),
            paths,
            served,
            parked: Batch::new(),
            told: 0,
            again: Batch::new(),
            ended: Batch::new(),
            spare: Batch::new(),
            draining: None,
        }
    }

    /// Sends `batch` to the paths of the group in use, or where bios without a path go. Leaves it empty.
    pub(super) fn dispatch(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        if self.shared.word() != self.router.seen()
            && !(bugs::on(Bug::StalePathGeneration) && self.router.group().is_some())
        {
            self.router.look(&self.shared);
        }
        let Some(group) = self.router.group() else { return self.no_path(batch) };
        let outs = &mut self.outs[group.paths.clone()];
        group.selector.select(batch, outs, &mut self.chosen, cx.now);
        for place in self.chosen.drain(..) {
            let index = group.paths.start + place as usize;
            let (path, out) = (&mut self.paths[index], &mut self.outs[index]);
            if path.in_flight == 0 {
                self.busy.push(index as u32);
            }
            path.in_flight += out.len();
            path.lane.submit(out, cx);
        }
    }

    /// Polls the paths that have any in flight. True when bios came back.
    fn reap(&mut self, done: &mut Batch, cx: &mut Cx<'_>) -> bool {
        let before = done.len() + self.again.len();
        let mut i = 0;
        while let Some(&index) = self.busy.get(i) {
            let path = &mut self.paths[index as usize];
            let from = done.len();
            path.lane.poll(done, cx);
            if done.len() > from {
                self.took_back(index as usize, done, from, cx);
            }
            if self.paths[index as usize].in_flight == 0 {
                self.busy.swap_remove(i);
            } else {
                i += 1;
            }
        }
        done.len() + self.again.len() > before
    }

    /// Accounts for `done[from..]`, which came back from path `index`, and takes those out that a path error ended.
    fn took_back(&mut self, index: usize, done: &mut Batch, from: usize, cx: &Cx<'_>) {
        let path = &mut self.paths[index];
        let back = &done[from..];
        debug_assert!(back.len() <= path.in_flight, "a path handed back more than it was given");
        path.in_flight -= back.len();
        let mut sectors = 0;
        let mut all_ok = true;
        for bio in back {
            sectors += bio.sectors.0;
            all_ok &= bio.status.is_ok();
        }
        let sectors = Sectors(sectors);
        self.router.end_io(path.group, path.place as usize, back, sectors, cx.now);
        self.served[index].served(back.len() as u64, sectors.bytes());
        if !all_ok {
            self.errors(index, done, from);
        }
    }

    /// Sorts out what came back with an error: path errors go round again, the rest goes up.
    #[cold]
    fn errors(&mut self, index: usize, done: &mut Batch, from: usize) {
        let before = self.again.len();
        self.spare.extend(done.drain(from..));
        for bio in self.spare.drain(..) {
            let retry = bio.status.is_path_error() && !bugs::on(Bug::PathErrorNotRetried)
                || bio.status == udm_core::Status::Medium && bugs::on(Bug::MediumErrorFailsPath);
            let to = if retry { &mut self.again } else { &mut *done };
            to.push(bio);
        }
        let failed = self.again.len() - before;
        if failed > 0 {
            self.served[index].failed(failed as u64);
            self.router.path_failed |= self.shared.fail(index, &Why::Bio(&self.again[before]));
        }
    }

    /// Polls the paths that have nothing in flight: a mapped device among them may have been told to suspend, a connection to be kept.
    /// Only when nothing came back, since a core that is busy has better to do and one that is not will be here soon.
    #[cold]
    fn poll_idle(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        for path in self.paths.iter_mut().filter(|p| p.in_flight == 0) {
            let before = done.len();
            path.lane.poll(done, cx);
            debug_assert_eq!(before, done.len(), "a path handed back what it was not given");
        }
    }
}

impl Lane for MultipathLane {
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        // A suspended device is given no bios, so it has been resumed.
        self.draining = None;
        if !batch.is_empty() {
            self.dispatch(batch, cx);
        }
    }

    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        if !self.parked.is_empty() {
            self.unpark(cx);
        }
        let visited = self.busy.len();
        let came_back = self.reap(done, cx);
        if !self.again.is_empty() {
            self.go_round(done, cx);
        }
        done.append(&mut self.ended);
        self.router.publish();
        if self.draining == Some(Drain::NoFlush) && !self.parked.is_empty() {
            // Parked behind the last `drain`: the next one hands them back.
            cx.wake_at(cx.now);
        }
        if !bugs::on(Bug::CancelKeepsDraining) {
            self.draining = None;
        }
        if !came_back {
            self.poll_idle(done, cx);
        } else if visited < self.paths.len() {
            // The idle paths are due in a poll that brings nothing back; the core must not sleep before.
            cx.wake_at(cx.now);
        }
    }

    fn drain(&mut self, how: Drain, back: &mut Batch, cx: &mut Cx<'_>) {
        self.draining = Some(how);
        // What the paths themselves hold back must end too.
        for i in (0..self.busy.len()).rev() {
            let index = self.busy[i] as usize;
            let from = back.len();
            self.paths[index].lane.drain(how, back, cx);
            let path = &mut self.paths[index];
            let came = &back[from..];
            path.in_flight -= came.len();
            let sectors = Sectors(came.iter().map(|bio| bio.sectors.0).sum());
            self.router.end_io(path.group, path.place as usize, came, sectors, cx.now);
            if path.in_flight == 0 {
                self.busy.swap_remove(i);
            }
        }
        self.hand_back(how, back);
    }

    fn busy(&self) -> Busy {
        self.paths.iter().map(|path| path.lane.busy()).max().unwrap_or_default()
    }
}

impl MultipathLane {
    /// Polls once more after bios were sent again. True when some came back.
    pub(super) fn reap_again(&mut self, done: &mut Batch, cx: &mut Cx<'_>) -> bool {
        self.reap(done, cx)
    }

    pub(super) fn path_count(&self) -> usize {
        self.paths.len()
    }
}
