//! The data path of a table: from the device's sectors to the targets' lanes and back.
//!
//! The table is the boundary: whatever comes in from above, targets only see requests inside their
//! range, aligned to their blocks, of operations that they take, no longer than their limits. The
//! usual bio (a read or write that fits) goes whole, moved to where it lies on its [leg](Legs) on
//! the way down and back on the way up; linear and striped targets have no lane of their own, that
//! move is all there is to them. The rest goes through the [`Splitter`].
//!
//! A single bio, and a batch for the only leg there is, is passed on as it came; other batches are
//! dealt out. Where bios go is for the [`TableRouter`] to say.

use super::Table;
use super::child_layout::ChildLayout;
use super::router::{RouteAction, TableRouter};
use crate::child_lanes::{ChildLanes, PolledChild};
use crate::split::Splitter;
use std::rc::Rc;
use udm_core::bugs::{self, Bug};
use udm_core::{Batch, Cx, Drain, Lane, OpenError, OwnWork};

/// See the module's documentation.
pub(crate) struct TableLane {
    route: TableRouter,
    legs: ChildLanes,
    split: Splitter,
}

impl TableLane {
    /// Opens the lanes of a table.
    ///
    /// # Errors
    /// When a device below can't be opened on this core.
    pub fn open(table: &Table, cx: &mut Cx<'_>) -> Result<TableLane, OpenError> {
        let legs = Rc::new(ChildLayout::new(&table.entries));
        let lanes = legs.open(&table.entries, cx)?;
        let split = Splitter::new(cx.new_owner());
        Ok(TableLane { route: TableRouter::new(table, legs), legs: ChildLanes::new(lanes), split })
    }

    /// The table is in use from now on: see [`udm_core::Lane::begin`].
    pub fn begin(&mut self, table: &Table, cx: &mut Cx<'_>) {
        self.route = TableRouter::new(table, Rc::clone(&self.route.legs));
        self.legs.begin(cx);
    }

    /// True when nothing from above is in flight.
    pub fn is_empty(&self) -> bool {
        self.split.is_idle() && self.legs.is_empty()
    }

    /// Submits a batch that is not a single bio for a single leg.
    #[inline(never)]
    fn submit_any(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        if let [bio] = &mut batch[..]
            && let Some(leg) = self.route.fast_path(bio)
        {
            return self.legs.submit(leg, batch, cx);
        }
        let moved = if self.legs.len() == 1 { self.route.fast_path_all(batch) } else { 0 };
        if moved < batch.len() {
            self.deal(batch, moved, cx);
        } else if !batch.is_empty() {
            self.legs.submit_alone(batch, cx);
        }
    }

    /// Deals out a batch, of which the first `moved` bios have been moved and go to the only leg.
    #[inline(never)]
    fn deal(&mut self, batch: &mut Batch, moved: usize, cx: &mut Cx<'_>) {
        let mut bios = self.legs.deal(batch);
        for _ in 0..moved {
            bios.take().into_iter().for_each(|bio| bios.put(0, bio));
        }
        while let Some(mut bio) = self.route.deal(&mut bios) {
            match self.route.down(&mut bio) {
                RouteAction::ChildLane(leg) => bios.put(leg, bio),
                RouteAction::SplitBio => self.split.take(bio),
                RouteAction::End(status) => self.split.end(bio, status),
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
            // Nothing was moved.
            Some(_) if self.route.single() == Some(0) => {}
            Some(from) => self.route.up(0, &mut done[from..]),
            None => self.poll_several(done, cx),
        }
    }

    #[inline(never)]
    fn poll_several(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        if let Some(PolledChild { leg, from, .. }) = self.legs.poll_busy(done, cx) {
            return self.route.up(leg, &mut done[from..]);
        }
        let mut round = self.legs.poll();
        while let Some(PolledChild { leg, from, .. }) = self.legs.poll_next(&mut round, done, cx) {
            self.route.up(leg, &mut done[from..]);
        }
        self.legs.poll_idle(&round, done, cx);
    }

    /// A poll while the splitter has something.
    #[cold]
    fn poll_split(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        let start = done.len();
        self.split.requeue_returned();
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

impl Lane for TableLane {
    #[inline]
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        if let Some(shift) = self.route.single()
            && let [bio] = &mut batch[..]
            && self.route.to_single(bio, shift)
        {
            self.legs.submit_alone(batch, cx);
        } else {
            self.submit_any(batch, cx);
        }
    }

    #[inline(always)]
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
        self.split.collect_returned(back, start);
        self.split.take_returned(back);
    }

    fn busy(&self) -> OwnWork {
        self.legs.busy()
    }
}
