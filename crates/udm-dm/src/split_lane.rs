//! The lane of whatever has several places for its bios: a table, a striped target.
//!
//! A bio that can go whole is moved to where it lies below, and back again on its way up; one that
//! can't goes through the [`Splitter`]. A batch of which all goes to one leg, a single bio above
//! all, is passed on as it came. Where bios go is for a [`Route`] to say.

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
    /// As [`Route::down`], for what nearly all bios are: moves `bio` and says which leg it goes to,
    /// if it is plain that it goes whole; else it is left as it is. Calls nothing, so that a loop
    /// of it keeps what it needs in registers.
    fn plain(&self, bio: &mut Bio) -> Option<usize>;

    /// The same for bios from the front of `bios` on for as long as it is plain: writes the leg of
    /// each to its place in `to`, and says how many.
    #[inline(always)]
    fn run(&self, bios: &mut [Box<Bio>], to: &mut [u32]) -> usize {
        run(bios, to, |bio| self.plain(bio))
    }

    /// The way of `bio`. One that goes whole is moved: its sector counts as the leg does from here
    /// on.
    fn down(&self, bio: &mut Bio) -> Way;

    /// Undoes that for bios that came back from leg `leg`, pieces among them, whose place nobody
    /// looks at any more.
    fn up(&self, leg: usize, bios: &mut [Box<Bio>]);
}

/// Does `plain` with bios from the front of `bios` on for as long as it says a leg, and writes that
/// to its place in `to`; says how many.
#[inline(always)]
pub fn run(bios: &mut [Box<Bio>], to: &mut [u32], plain: impl Fn(&mut Bio) -> Option<usize>) -> usize {
    let odd = bios.iter_mut().zip(&mut *to).position(|(bio, to)| match plain(bio) {
        Some(leg) => {
            *to = leg as u32;
            false
        }
        None => true,
    });
    odd.unwrap_or(to.len())
}

/// See the module's documentation.
pub struct SplitLane<R> {
    route: R,
    legs: Legs,
    split: Splitter,
    /// Scratch: the leg of each bio of a batch.
    to: Vec<u32>,
}

impl<R: Route> SplitLane<R> {
    /// A lane over `lanes`, between which `route` chooses.
    pub fn new(route: R, lanes: Vec<Box<dyn Lane>>, cx: &mut Cx<'_>) -> SplitLane<R> {
        SplitLane { route, legs: Legs::new(lanes), split: Splitter::new(cx.new_owner()), to: Vec::new() }
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
        if self.to.len() < batch.len() {
            self.to.resize(batch.len(), 0);
        }
        let to = &mut self.to[..batch.len()];
        let mut count = 0;
        loop {
            count += self.route.run(&mut batch[count..], &mut to[count..]);
            let Some(bio) = batch.get_mut(count) else { break };
            match self.route.down(bio) {
                Way::Leg(leg) => to[count] = leg as u32,
                way => return self.deal_odd(batch, count, way, cx),
            }
            count += 1;
        }
        let Some(&leg) = to.first() else { return };
        if self.legs.submit_alone(batch, cx) {
            return;
        }
        if to.iter().all(|other| *other == leg) {
            self.legs.submit(leg as usize, batch, cx);
        } else {
            self.legs.deal(batch, 0, to, cx);
        }
    }

    /// Deals out a batch of which the first `count` bios are on their way to the legs in `to`, and
    /// the next on `way`.
    #[inline(never)]
    fn deal_odd(&mut self, batch: &mut Batch, count: usize, way: Way, cx: &mut Cx<'_>) {
        let mut bios = batch.drain(..);
        for (bio, &leg) in bios.by_ref().take(count).zip(&self.to) {
            self.legs.push(leg as usize, bio);
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
