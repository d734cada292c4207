//! The lane of whatever has several places for its bios: a table, a striped target.
//!
//! A bio that can go whole is moved to where it lies below, and back again on its way up; one that can't goes through the [`Splitter`]. A batch of which all goes to
//! one leg, a single bio above all, is passed on as it came. Where bios go is for a [`Route`] to say.

use crate::bugs::{self, Bug};
use crate::legs::Legs;
use crate::split::{Cut, Splitter};
use udm_core::{Batch, Bio, Busy, Cx, Drain, Lane, Status};

/// Where a bio goes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// To this leg, whole; it has been moved.
    Leg(usize),
    /// In pieces.
    Cut,
    /// Nowhere.
    End(Status),
}

/// Says where bios go.
pub trait Route: Cut {
    /// Moves bios from the front of `bios` on for as long as they go to leg 0 whole; says how many. For routes that know it of a run of bios at less than
    /// [`Route::down`] costs for each.
    fn run_down(&self, bios: &mut [Box<Bio>]) -> usize {
        let _ = bios;
        0
    }

    /// The way of `bio`. One that goes whole is moved: its sector counts as the leg does from here on.
    fn down(&self, bio: &mut Bio) -> Way;

    /// Undoes that for bios that came back from leg `leg`, pieces among them, whose place nobody looks at any more.
    fn up(&self, leg: usize, bios: &mut [Box<Bio>]);
}

/// See the module's documentation.
pub struct SplitLane<R> {
    route: R,
    legs: Legs,
    split: Splitter,
}

impl<R: Route> SplitLane<R> {
    /// A lane over `lanes`, between which `route` chooses.
    pub fn new(route: R, lanes: Vec<Box<dyn Lane>>, cx: &mut Cx<'_>) -> SplitLane<R> {
        SplitLane { route, legs: Legs::new(lanes), split: Splitter::new(cx.new_owner()) }
    }

    /// True when nothing from above is in flight.
    pub fn is_empty(&self) -> bool {
        self.split.is_idle() && self.legs.is_empty()
    }

    /// Submits a batch that is not a single bio.
    #[inline(never)]
    fn submit_many(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        let run = self.route.run_down(batch);
        let mut only = (run > 0).then_some(0);
        for (i, bio) in batch.iter_mut().enumerate().skip(run) {
            match self.route.down(bio) {
                Way::Leg(leg) if i == 0 => only = Some(leg),
                Way::Leg(leg) if only == Some(leg) => {}
                way => return self.deal(batch, only.unwrap_or_default(), i, way, cx),
            }
        }
        if let Some(leg) = only {
            self.legs.submit(leg, batch, cx);
        }
    }

    /// Deals out a batch of which the first `count` bios are on their way to leg `leg`, and the next on `way`.
    #[inline(never)]
    fn deal(&mut self, batch: &mut Batch, leg: usize, count: usize, way: Way, cx: &mut Cx<'_>) {
        let mut bios = batch.drain(..);
        for bio in bios.by_ref().take(count) {
            self.legs.push(leg, bio);
        }
        if let Some(bio) = bios.next() {
            self.put(bio, way);
        }
        for mut bio in bios {
            let way = self.route.down(&mut bio);
            self.put(bio, way);
        }
        if !self.split.is_idle() {
            self.pump();
        }
        self.legs.send(cx);
    }

    #[inline(always)]
    fn put(&mut self, bio: Box<Bio>, way: Way) {
        match way {
            Way::Leg(leg) => self.legs.push(leg, bio),
            Way::Cut => self.split.take(bio),
            Way::End(status) => self.split.end(bio, status),
        }
    }

    fn pump(&mut self) {
        self.split.pump(&self.route, |leg, fragment| self.legs.push(leg, fragment));
    }

    #[inline(always)]
    fn poll_legs(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        match self.legs.poll_alone(done, cx) {
            Some(from) => self.route.up(0, &mut done[from..]),
            None => self.poll_several(done, cx),
        }
    }

    fn poll_several(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        let mut round = self.legs.poll();
        while let Some((leg, from)) = self.legs.poll_next(&mut round, done, cx) {
            self.route.up(leg, &mut done[from..]);
        }
        self.legs.poll_idle(&round, done, cx);
    }

    /// A poll while the splitter has something.
    #[cold]
    fn poll_split(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        let start = done.len();
        self.split.take_again();
        self.poll_legs(done, cx);
        self.split.collect(done, start);
        self.pump();
        if self.legs.send(cx) || self.split.has_returned() {
            // What was just sent may be done already; what is to be handed back waits for a `drain`.
            cx.wake_at(cx.now);
        }
        self.split.take_finished(done);
    }
}

impl<R: Route> Lane for SplitLane<R> {
    #[inline]
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        let [bio] = &mut batch[..] else { return self.submit_many(batch, cx) };
        match self.route.down(bio) {
            Way::Leg(leg) => self.legs.submit(leg, batch, cx),
            way => self.deal(batch, 0, 0, way, cx),
        }
    }

    #[inline]
    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        if !self.split.is_idle() {
            return self.poll_split(done, cx);
        }
        self.poll_legs(done, cx);
    }

    fn drain(&mut self, how: Drain, back: &mut Batch, cx: &mut Cx<'_>) {
        let start = back.len();
        for leg in 0..self.legs.len() {
            let from = self.legs.drain(leg, how, back, cx);
            if !bugs::on(Bug::MovedWhenHandedBack) {
                self.route.up(leg, &mut back[from..]);
            }
        }
        self.split.collect_back(back, start);
        self.split.take_returned(back);
    }

    fn busy(&self) -> Busy {
        self.legs.busy()
    }
}
