//! The data path of a table: from the device's sectors to the targets' lanes and back.
//!
//! The table enforces the rules for its targets. They see only requests inside their range, aligned
//! to their blocks, within their limits, and of supported operations. Most bios are reads or writes
//! that fit. Such a bio goes down whole: its sector is changed on the way to its child
//! ([`ChildLanes`]), and restored on the way up. Linear and striped targets have no lane of their
//! own, because this change is all they do. All other bios go through the [`BioSplitter`].
//!
//! A single bio, or a batch for the only child, is passed on in its own batch. Other batches are
//! distributed to the children. The [`TableRouter`] decides where a bio goes.

use super::Table;
use super::child_layout::TargetChildMap;
use super::router::{BioRoute, TableRouter};
use crate::child_lanes::{ChildLanes, ChildPollResult};
use crate::split::BioSplitter;
use std::rc::Rc;
use udm_core::{Batch, BioFlags, Cx, DeviceControlError, DrainMode, Lane, OwnWork};

/// Flags of writes that may need a flush before or after them.
const FLUSHES: BioFlags = BioFlags::FUA.union(BioFlags::PREFLUSH);

/// The lane of a table: its router, its children and its splitter.
pub(crate) struct TableLane {
    route: TableRouter,
    children: ChildLanes,
    split: BioSplitter,
}

impl TableLane {
    /// Opens the lanes of a table.
    ///
    /// # Errors
    /// If a device below cannot be opened on this core.
    pub fn open(table: &Table, cx: &mut Cx<'_>) -> Result<TableLane, DeviceControlError> {
        let children = Rc::new(TargetChildMap::new(&table.entries));
        let lanes = children.open(&table.entries, cx)?;
        let split = BioSplitter::new(cx.new_owner());
        Ok(TableLane { route: TableRouter::new(table, children), children: ChildLanes::new(lanes), split })
    }

    /// As [`TableLane::open`], for a table that is live.
    ///
    /// # Errors
    /// If a device below cannot be opened on this core.
    pub fn open_live(table: &Table, cx: &mut Cx<'_>) -> Result<TableLane, DeviceControlError> {
        let mut lane = TableLane::open(table, cx)?;
        lane.begin(table, cx);
        Ok(lane)
    }

    /// The table is live from now on: see [`udm_core::Lane::begin`].
    pub fn begin(&mut self, table: &Table, cx: &mut Cx<'_>) {
        self.route = TableRouter::new(table, Rc::clone(&self.route.children));
        self.children.begin(cx);
    }

    /// True if no bio from above is in flight.
    pub fn is_empty(&self) -> bool {
        self.split.is_idle() && self.children.is_empty()
    }

    /// Submits reads and writes that the caller has checked: they fit the limits of the table, and
    /// need neither a flush nor FUA. All lines of the table are one, which changes no sector.
    #[inline(always)]
    pub fn submit_checked(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        debug_assert!(self.route.single() == Some(0), "the only child has the sectors of the table");
        debug_assert!(batch.iter().all(|bio| bio.op.has_data() && !bio.flags.intersects(FLUSHES)));
        self.children.submit_alone(batch, cx);
    }

    /// Submits a batch that is not a single bio for a single child.
    #[inline(never)]
    fn submit_any(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        if let [bio] = &mut batch[..]
            && let Some(child) = self.route.fast_path(bio)
        {
            return self.children.submit(child, batch, cx);
        }
        let moved = if self.children.len() == 1 { self.route.fast_path_all(batch) } else { 0 };
        if moved < batch.len() {
            self.deal(batch, moved, cx);
        } else if !batch.is_empty() {
            self.children.submit_alone(batch, cx);
        }
    }

    /// Distributes a batch. The first `moved` bios are already mapped and go to the only child.
    #[inline(never)]
    fn deal(&mut self, batch: &mut Batch, moved: usize, cx: &mut Cx<'_>) {
        let mut bios = self.children.deal(batch);
        for _ in 0..moved {
            bios.take().into_iter().for_each(|bio| bios.put(0, bio));
        }
        while let Some(mut bio) = self.route.deal(&mut bios) {
            match self.route.down(&mut bio) {
                BioRoute::Child(child) => bios.put(child, bio),
                BioRoute::Split => self.split.take(bio),
                BioRoute::End(status) => self.split.end(bio, status),
            }
        }
        drop(bios);
        if !self.split.is_idle() {
            self.pump();
        }
        self.children.send(cx);
    }

    fn pump(&mut self) {
        self.split.pump(&self.route, |child, fragment| self.children.push(child, fragment));
    }

    #[inline(always)]
    fn poll_children(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        match self.children.poll_alone(done, cx) {
            // The mapping adds 0, so no sector was changed.
            Some(_) if self.route.single() == Some(0) => {}
            Some(from) => self.route.up(0, &mut done[from..]),
            None => self.poll_several(done, cx),
        }
    }

    #[inline(never)]
    fn poll_several(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        if let Some(ChildPollResult { child, from, .. }) = self.children.poll_busy(done, cx) {
            return self.route.up(child, &mut done[from..]);
        }
        let mut round = self.children.poll();
        while let Some(ChildPollResult { child, from, .. }) = self.children.poll_next(&mut round, done, cx) {
            self.route.up(child, &mut done[from..]);
        }
        self.children.poll_idle(&round, done, cx);
    }

    /// Polls while the splitter holds bios.
    #[cold]
    fn poll_split(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        let start = done.len();
        self.split.requeue_returned();
        self.poll_children(done, cx);
        self.split.collect(done, start);
        self.pump();
        if self.children.send(cx) || self.split.has_returned() {
            // The bios just sent may have completed already, and returned bios wait for a `drain`.
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
            self.children.submit_alone(batch, cx);
        } else {
            self.submit_any(batch, cx);
        }
    }

    #[inline(always)]
    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        if !self.split.is_idle() {
            return self.poll_split(done, cx);
        }
        self.poll_children(done, cx);
    }

    fn drain(&mut self, how: DrainMode, back: &mut Batch, cx: &mut Cx<'_>) {
        let start = back.len();
        for child in 0..self.children.len() {
            let from = self.children.drain(child, how, back, cx);
            self.route.up(child, &mut back[from..]);
        }
        self.split.collect_returned(back, start);
        self.split.take_returned(back);
    }

    fn own_work(&self) -> OwnWork {
        self.children.own_work()
    }
}
