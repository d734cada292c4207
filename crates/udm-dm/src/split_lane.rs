//! The lane of whatever has several places for its bios: a table, a striped target.
//!
//! A bio that can go whole is moved to where it lies below, and back again on its way up; one that
//! can't goes through the [`Splitter`]. A batch of which all goes to one leg, a single bio above
//! all, is passed on as it came. Where bios go is for a [`Route`] to say.

use crate::bugs::{self, Bug};
use crate::legs::{Deal, Legs};
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
    /// As [`Route::down`], for what nearly all bios are: moves `bio` and says which leg it goes to,
    /// if it is plain that it goes whole; else it is left as it is. Calls nothing, so that a loop
    /// of it keeps what it needs in registers.
    fn plain(&self, bio: &mut Bio) -> Option<usize>;

    /// Does [`Route::plain`] with each of `bios` for as long as they all go to leg `leg`: how many
    /// do, and what it said of the next.
    #[inline(always)]
    fn all_to(&self, leg: usize, bios: &mut [Box<Bio>]) -> (usize, Option<usize>) {
        all_to(leg, bios, |bio| self.plain(bio))
    }

    /// Deals out bios for as long as it is plain where they go: the first of which it is not.
    #[inline(always)]
    fn deal(&self, bios: &mut Deal<'_>) -> Option<Box<Bio>> {
        bios.each(|bio| self.plain(bio))
    }

    /// The way of `bio`. One that goes whole is moved: its sector counts as the leg does from here
    /// on.
    fn down(&self, bio: &mut Bio) -> Way;

    /// Undoes that for bios that came back from leg `leg`, pieces among them, whose place nobody
    /// looks at any more.
    fn up(&self, leg: usize, bios: &mut [Box<Bio>]);
}

/// See [`Route::all_to`].
#[inline(always)]
pub fn all_to(
    leg: usize,
    bios: &mut [Box<Bio>],
    plain: impl Fn(&mut Bio) -> Option<usize>,
) -> (usize, Option<usize>) {
    let mut other = None;
    let count = bios.iter_mut().position(|bio| {
        other = plain(bio);
        other != Some(leg)
    });
    (count.unwrap_or(bios.len()), other)
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

    /// What chooses between the legs.
    pub(crate) fn route(&self) -> &R {
        &self.route
    }

    /// Has the legs begin, and from now on `route` choose between them.
    pub(crate) fn begin_with(&mut self, route: R, cx: &mut Cx<'_>) {
        self.route = route;
        self.legs.begin(cx);
    }

    /// True when nothing from above is in flight.
    pub fn is_empty(&self) -> bool {
        self.split.is_idle() && self.legs.is_empty()
    }

    /// Submits a batch that is not a single bio, or one that may not go whole.
    #[inline(never)]
    fn submit_many(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        let [first, rest @ ..] = &mut batch[..] else { return };
        let Some(leg) = self.route.plain(first) else { return self.deal(batch, 0, None, cx) };
        let (count, other) = self.route.all_to(leg, rest);
        if count < rest.len() {
            self.deal(batch, 1 + count, Some((leg, other)), cx);
        } else if !self.legs.submit_alone(batch, cx) {
            self.legs.submit(leg, batch, cx);
        }
    }

    /// Deals out a batch. With `known` the first `count` of its bios have been moved and go to the
    /// first leg of it, and the next has been tried: it goes to the second, if that is one.
    #[inline(never)]
    fn deal(
        &mut self,
        batch: &mut Batch,
        count: usize,
        known: Option<(usize, Option<usize>)>,
        cx: &mut Cx<'_>,
    ) {
        let mut bios = self.legs.deal(batch);
        let mut odd = None;
        if let Some((leg, other)) = known {
            for _ in 0..count {
                bios.take().into_iter().for_each(|bio| bios.put(leg, bio));
            }
            odd = bios.take();
            if let Some(leg) = other {
                odd.take().into_iter().for_each(|bio| bios.put(leg, bio));
            }
        }
        while let Some(mut bio) = odd.take().or_else(|| self.route.deal(&mut bios)) {
            match self.route.down(&mut bio) {
                Way::Leg(leg) => bios.put(leg, bio),
                Way::Cut => self.split.take(bio),
                Way::End(status) => self.split.end(bio, status),
            }
        }
        drop(bios);
        if !self.split.is_idle() {
            self.pump();
        }
        self.legs.send(cx);
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

    #[inline(never)]
    fn poll_several(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        if let Some((leg, from)) = self.legs.poll_busy(done, cx) {
            return self.route.up(leg, &mut done[from..]);
        }
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
            // What was just sent may be done already; what is to be handed back waits for a
            // `drain`.
            cx.wake_now();
        }
        self.split.take_finished(done);
    }
}

impl<R: Route> Lane for SplitLane<R> {
    #[inline]
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        if let [bio] = &mut batch[..]
            && let Some(leg) = self.route.plain(bio)
        {
            if !self.legs.submit_alone(batch, cx) {
                self.legs.submit(leg, batch, cx);
            }
        } else {
            self.submit_many(batch, cx);
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
