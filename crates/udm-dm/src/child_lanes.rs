//! The legs of a lane: which legs get bios, and which legs are polled.
//!
//! A leg that is not in use costs nothing. While bios come back, only legs with bios in flight are
//! polled. The idle legs are polled when a poll brings nothing back, and in every [`IDLE_EVERY`]th
//! poll. An idle mapped device may have a suspend to acknowledge, and an idle connection may need
//! maintenance. The core does not sleep before idle legs were polled.

use udm_core::bugs::{self, Bug};
use udm_core::{Batch, Bio, Cx, Drain, Lane, OwnWork};

/// Idle legs are polled in every `IDLE_EVERY`th poll, even if polls keep bringing bios back. The
/// value is large enough to cost nothing, and small enough for a caller that waits for an idle leg.
const IDLE_EVERY: u32 = 64;

/// A set of legs is one word of marks. Leg `n` has bit `n` % [`MARKS`].
const MARKS: usize = u64::BITS as usize;

struct ChildLane {
    lane: Box<dyn Lane>,
    /// The batch for the next `submit` of this leg; empty outside of a `submit`.
    out: Batch,
    /// Number of bios that were submitted to the lane and have not come back.
    in_flight: usize,
}

/// The legs of a lane, with the number of bios in flight on each.
pub struct ChildLanes {
    legs: Vec<ChildLane>,
    /// Marks the legs whose `out` batch is not empty.
    given: u64,
    /// Marks the legs that have bios in flight.
    busy: u64,
    /// Marks all legs.
    all: u64,
    /// Number of polls until idle legs are polled, even if bios came back.
    polls: u32,
}

/// A batch whose bios are being distributed to legs: see [`ChildLanes::deal`].
pub struct BatchDispatch<'a> {
    bios: std::vec::Drain<'a, Box<Bio>>,
    legs: &'a mut [ChildLane],
    given: &'a mut u64,
}

/// The index for "no leg".
const NO_CHILD: usize = usize::MAX;

impl BatchDispatch<'_> {
    /// Appends each bio to the batch of the leg that `place` returns. Stops at the first bio for
    /// which `place` returns `None`, and returns this bio.
    #[inline(always)]
    pub fn each(&mut self, mut place: impl FnMut(&mut Bio) -> Option<usize>) -> Option<Box<Bio>> {
        loop {
            let (legs, mut given) = (&mut *self.legs, *self.given);
            // This loop calls no function, so its counters stay in registers. A batch without room
            // ends the loop.
            let stopped = self.bios.find_map(|mut bio| {
                let Some(leg) = place(&mut bio) else { return Some((bio, NO_CHILD)) };
                let out = &mut legs[leg].out;
                if out.len() == out.capacity() {
                    return Some((bio, leg));
                }
                out.push(bio);
                given |= child_bit(leg);
                None
            });
            *self.given = given;
            match stopped? {
                (bio, NO_CHILD) => return Some(bio),
                (bio, leg) => self.put(leg, bio),
            }
        }
    }

    /// Appends each bio to the batch of one of two different `legs`: to the second one if `second`
    /// is true. Returns the number of bios for the second leg.
    #[inline(always)]
    pub fn between(self, legs: [usize; 2], second: impl FnMut(&mut Box<Bio>) -> bool) -> usize {
        let Ok([a, b]) = self.legs.get_disjoint_mut(legs) else { unreachable!("two legs") };
        let count = self.bios.len();
        let seconds = udm_core::partition(self.bios, [&mut a.out, &mut b.out], second);
        let child_bits = [seconds < count, seconds > 0].map(u64::from);
        *self.given |= (child_bits[0] * child_bit(legs[0])) | (child_bits[1] * child_bit(legs[1]));
        seconds
    }

    /// Number of bios that have no leg yet.
    #[inline(always)]
    pub fn left(&self) -> usize {
        self.bios.len()
    }

    /// Takes the next bio.
    #[inline]
    pub fn take(&mut self) -> Option<Box<Bio>> {
        self.bios.next()
    }

    /// Puts `bio` into the batch of leg `leg`.
    #[inline(always)]
    pub fn put(&mut self, leg: usize, bio: Box<Bio>) {
        push(&mut self.legs[leg].out, bio);
        *self.given |= child_bit(leg);
    }
}

/// Kept out of line, with only one batch as argument, so that the values of the caller stay in
/// registers.
#[inline(never)]
fn push(out: &mut Batch, bio: Box<Bio>) {
    out.push(bio);
}

/// The mark of leg `index`.
#[inline(always)]
fn child_bit(index: usize) -> u64 {
    1 << (index % MARKS)
}

/// The marks of the first `count` legs.
fn child_bits(count: usize) -> u64 {
    (0..count.min(MARKS)).fold(0, |child_bits, index| child_bits | child_bit(index))
}

/// The result of polling one leg.
#[derive(Clone, Copy, Debug)]
pub struct PolledChild {
    /// Index of the leg.
    pub leg: usize,
    /// Index in `done` of the first bio that the leg gave back, if any.
    pub from: usize,
    /// Bios that are still in flight on the leg.
    pub left: usize,
}

/// The state of a poll of several legs: see [`ChildLanes::poll`].
pub struct PollPass {
    /// Marks the legs that are not polled yet.
    child_bits: u64,
    /// Index of the next leg, if several legs share a mark.
    next: usize,
    /// True if this poll skips idle legs.
    partly: bool,
    came_back: bool,
}

impl ChildLanes {
    /// Creates the legs. Nothing is in flight on any of `lanes`.
    pub fn new(lanes: impl IntoIterator<Item = Box<dyn Lane>>) -> ChildLanes {
        let leg = |lane| ChildLane { lane, out: Batch::new(), in_flight: 0 };
        let legs: Vec<_> = lanes.into_iter().map(leg).collect();
        ChildLanes { given: 0, busy: 0, all: child_bits(legs.len()), polls: IDLE_EVERY, legs }
    }

    /// Appends `bio` to the batch of leg `index`. The caller must call [`ChildLanes::send`] next.
    #[inline]
    pub fn push(&mut self, index: usize, bio: Box<Bio>) {
        self.legs[index].out.push(bio);
        self.given |= child_bit(index);
    }

    /// Starts to distribute `batch` to the legs. The caller must call [`ChildLanes::send`] next.
    #[inline(always)]
    pub fn deal<'a>(&'a mut self, batch: &'a mut Batch) -> BatchDispatch<'a> {
        BatchDispatch { bios: batch.drain(..), legs: &mut self.legs, given: &mut self.given }
    }

    /// Submits all pushed bios. Returns whether there were any.
    #[inline(never)]
    pub fn send(&mut self, cx: &mut Cx<'_>) -> bool {
        let given = std::mem::take(&mut self.given);
        self.busy |= given;
        let (several, mut child_bits) = (self.legs.len() > MARKS, given);
        while child_bits != 0 {
            let first = child_bits.trailing_zeros() as usize;
            if several {
                self.send_to_each(first, cx);
            } else {
                self.send_to(first, cx);
            }
            child_bits &= child_bits - 1;
        }
        given != 0
    }

    /// Calls `send_to` for each leg that has the same mark as leg `first`.
    #[cold]
    fn send_to_each(&mut self, first: usize, cx: &mut Cx<'_>) {
        for index in (first..self.legs.len()).step_by(MARKS) {
            if !self.legs[index].out.is_empty() {
                self.send_to(index, cx);
            }
        }
    }

    #[inline(always)]
    fn send_to(&mut self, index: usize, cx: &mut Cx<'_>) {
        let leg = &mut self.legs[index];
        leg.in_flight += leg.out.len();
        if bugs::on(Bug::SubmitTwice) {
            leg.out
                .extend(leg.out.last().map(|bio| bugs::duplicate_bio(bio)).into_iter().collect::<Vec<_>>());
        }
        leg.lane.submit(&mut leg.out, cx);
    }

    /// Submits all of `batch` to leg `index`. Used for a batch that goes to one leg, often a single
    /// bio.
    #[inline(always)]
    pub fn submit(&mut self, index: usize, batch: &mut Batch, cx: &mut Cx<'_>) {
        let leg = &mut self.legs[index];
        self.busy |= child_bit(index);
        leg.in_flight += batch.len();
        leg.lane.submit(batch, cx);
    }

    /// Submits all of `batch` to the only leg. It does not mark the leg busy, because
    /// [`ChildLanes::poll_alone`] does not need the mark.
    #[inline(always)]
    pub fn submit_alone(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        let [leg] = &mut self.legs[..] else { unreachable!("it is one of several") };
        leg.in_flight += batch.len();
        leg.lane.submit(batch, cx);
    }

    /// Polls the only leg. Returns the index in `done` of the first bio that came back, or `None`
    /// if there are several legs.
    #[inline(always)]
    pub fn poll_alone(&mut self, done: &mut Batch, cx: &mut Cx<'_>) -> Option<usize> {
        let [leg] = &mut self.legs[..] else { return None };
        let from = done.len();
        leg.lane.poll(done, cx);
        leg.in_flight -= done.len() - from;
        Some(from)
    }

    /// Polls the only leg that has bios in flight. Returns `None` if several legs have, or none.
    #[inline(always)]
    pub fn poll_busy(&mut self, done: &mut Batch, cx: &mut Cx<'_>) -> Option<PolledChild> {
        if self.busy & self.busy.wrapping_sub(1) != 0 || self.legs.len() > MARKS {
            return None;
        }
        let (index, from) = (self.busy.trailing_zeros() as usize, done.len());
        // If nothing is in flight, the index equals `MARKS` and no leg has it.
        let leg = self.legs.get_mut(index)?;
        leg.lane.poll(done, cx);
        let count = done.len() - from;
        debug_assert!(count <= leg.in_flight, "a leg handed back more than it was given");
        leg.in_flight -= count;
        let left = leg.in_flight;
        if left == 0 {
            self.busy = 0;
        }
        if self.legs.len() > 1 {
            self.poll_others(count > 0, done, cx);
        }
        Some(PolledChild { leg: index, from, left })
    }

    /// Starts a poll. Call [`ChildLanes::poll_next`] until it returns `None`, then
    /// [`ChildLanes::poll_idle`].
    #[inline(always)]
    pub fn poll(&mut self) -> PollPass {
        let partly = self.busy != self.all || self.legs.len() > MARKS;
        PollPass { child_bits: self.busy, next: usize::MAX, partly, came_back: false }
    }

    /// Polls the next leg that has bios in flight.
    #[inline(always)]
    pub fn poll_next(
        &mut self,
        round: &mut PollPass,
        done: &mut Batch,
        cx: &mut Cx<'_>,
    ) -> Option<PolledChild> {
        let index = if self.legs.len() > MARKS {
            self.next_of_many(round)?
        } else {
            if round.child_bits == 0 {
                return None;
            }
            let index = round.child_bits.trailing_zeros() as usize;
            round.child_bits &= round.child_bits - 1;
            index
        };
        let leg = &mut self.legs[index];
        let from = done.len();
        leg.lane.poll(done, cx);
        let count = done.len() - from;
        debug_assert!(count <= leg.in_flight, "a leg handed back more than it was given");
        leg.in_flight -= count;
        let left = leg.in_flight;
        round.came_back |= count > 0;
        if left == 0 {
            self.mark_idle(index);
        }
        Some(PolledChild { leg: index, from, left })
    }

    /// Polls each leg that has bios in flight into a batch of its own. Returns their marks: bit `n`
    /// for leg `n`. For each of these legs, the caller then uses [`ChildLanes::back`] and
    /// [`ChildLanes::taken`]. At the end it calls [`ChildLanes::finish_separate_poll`].
    ///
    /// Returns `None` if several legs share a mark. In this case, use [`ChildLanes::poll`].
    ///
    /// A caller that inspects every bio can do so in a loop that calls no function. If 16 paths
    /// share a batch, a multipath request takes 0.8 ns less of 8.5 ns than with
    /// [`ChildLanes::poll_next`].
    #[inline(always)]
    pub fn poll_separately(&mut self, cx: &mut Cx<'_>) -> Option<u64> {
        (self.legs.len() <= MARKS).then(|| self.poll_marked(cx))
    }

    /// Kept out of line, with nothing but polls, so that its values stay in registers.
    #[inline(never)]
    fn poll_marked(&mut self, cx: &mut Cx<'_>) -> u64 {
        let mut child_bits = self.busy;
        while child_bits != 0 {
            let leg = &mut self.legs[child_bits.trailing_zeros() as usize];
            leg.lane.poll(&mut leg.out, cx);
            child_bits &= child_bits - 1;
        }
        self.busy
    }

    /// The bios that leg `index` has given back. The caller takes them out.
    #[inline(always)]
    pub fn back(&mut self, index: usize) -> &mut Batch {
        &mut self.legs[index].out
    }

    /// The caller took all `count` bios out of [`ChildLanes::back`]. Returns how many are left in
    /// flight on the leg.
    #[inline(always)]
    pub fn taken(&mut self, index: usize, count: usize) -> usize {
        let leg = &mut self.legs[index];
        debug_assert!(count <= leg.in_flight, "a leg handed back more than it was given");
        leg.in_flight -= count;
        self.busy &= !(u64::from(leg.in_flight == 0) << index);
        leg.in_flight
    }

    /// Ends a separate poll of the legs that `polled` marks, like [`ChildLanes::poll_idle`].
    #[inline(always)]
    pub fn finish_separate_poll(&mut self, polled: u64, came_back: bool, done: &mut Batch, cx: &mut Cx<'_>) {
        if polled != self.all {
            self.poll_others(came_back, done, cx);
        }
    }

    #[cold]
    fn next_of_many(&self, round: &mut PollPass) -> Option<usize> {
        loop {
            while let Some(leg) = self.legs.get(round.next) {
                let index = round.next;
                round.next += MARKS;
                if leg.in_flight > 0 {
                    return Some(index);
                }
            }
            if round.child_bits == 0 {
                return None;
            }
            round.next = round.child_bits.trailing_zeros() as usize;
            round.child_bits &= round.child_bits - 1;
        }
    }

    /// Nothing is in flight on leg `index` any more.
    #[inline(always)]
    fn mark_idle(&mut self, index: usize) {
        if self.legs.len() <= MARKS || self.all_idle(index % MARKS) {
            self.busy &= !child_bit(index);
        }
    }

    /// True if nothing is in flight on the legs that have the same mark as leg `first`.
    #[cold]
    fn all_idle(&self, first: usize) -> bool {
        self.legs[first..].iter().step_by(MARKS).all(|leg| leg.in_flight == 0)
    }

    /// Ends a poll: polls the idle legs if they are due.
    #[inline(always)]
    pub fn poll_idle(&mut self, round: &PollPass, done: &mut Batch, cx: &mut Cx<'_>) {
        if round.partly {
            self.poll_others(round.came_back, done, cx);
        }
    }

    #[inline(always)]
    fn poll_others(&mut self, came_back: bool, done: &mut Batch, cx: &mut Cx<'_>) {
        if bugs::on(Bug::IdleLegForgotten) {
            return;
        }
        self.polls -= 1;
        if self.polls == 0 || !came_back {
            self.poll_idle_children(done, cx);
        } else {
            // The idle legs are polled in the first poll that brings nothing back.
            cx.wake_now();
        }
    }

    #[cold]
    fn poll_idle_children(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        self.polls = IDLE_EVERY;
        for leg in self.legs.iter_mut().filter(|leg| leg.in_flight == 0) {
            let before = done.len();
            leg.lane.poll(done, cx);
            debug_assert_eq!(before, done.len(), "a leg handed back what it was not given");
        }
    }

    /// Drains leg `index`, which is below [`ChildLanes::len`]. Returns the index in `back` of the
    /// first bio that the leg handed back.
    pub fn drain(&mut self, index: usize, how: Drain, back: &mut Batch, cx: &mut Cx<'_>) -> usize {
        let (leg, from) = (&mut self.legs[index], back.len());
        leg.lane.drain(how, back, cx);
        leg.in_flight -= back.len() - from;
        if leg.in_flight == 0 {
            self.mark_idle(index);
        }
        from
    }

    /// Calls `begin` of all legs.
    pub fn begin(&mut self, cx: &mut Cx<'_>) {
        for leg in &mut self.legs {
            if let Some(lane) = leg.lane.begin(cx) {
                leg.lane = lane;
            }
        }
    }

    /// Closes leg `index` while nothing is in flight. The indexes of later legs decrease by one.
    pub fn remove(&mut self, index: usize) -> Box<dyn Lane> {
        debug_assert!(self.is_empty());
        self.all = child_bits(self.legs.len() - 1);
        self.legs.remove(index).lane
    }

    /// True if nothing is in flight.
    pub fn is_empty(&self) -> bool {
        self.legs.iter().all(|leg| leg.in_flight == 0)
    }

    /// Number of bios in flight on each leg.
    pub fn in_flight(&self) -> impl Iterator<Item = usize> + '_ {
        self.legs.iter().map(|leg| leg.in_flight)
    }

    /// Number of bios in flight on leg `index`.
    #[inline(always)]
    pub fn in_flight_on(&self, index: usize) -> usize {
        self.legs[index].in_flight
    }

    /// Number of legs.
    pub fn len(&self) -> usize {
        self.legs.len()
    }

    /// The own work of the legs: the highest value that one of them reports.
    pub fn own_work(&self) -> OwnWork {
        self.legs.iter().map(|leg| leg.lane.own_work()).max().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests;
