//! The data path of a mapped device on one core: the live table's lane, and what becomes of bios
//! while tables change.
//!
//! ```text
//!             Suspend                  nothing in flight
//!  Running ------------> Draining ---------------------> Suspended
//!     ^                     |  (ack when it leaves)           |
//!     +------ Resume -------+------------- Resume ------------+
//! ```
//!
//! Running: batches go straight down; a test of the port's flag is all there is to it. Draining:
//! new bios are parked, what is in flight comes home, what is only held is handed back and parked
//! too (no-flush) or fails (flush). Suspended: all bios are parked; those that will not wait fail
//! (kernel: NOWAIT with EAGAIN, read-ahead with EIO). Resume puts the lane of the wanted generation
//! in place, then everything parked goes down, oldest first.
//!
//! Commands may come twice or for a generation that is already in place (a lane opened between two
//! of them): the generation makes them harmless. Without a table there is no lane, and bios end
//! with EIO.
//!
//! A lane that is let go may have work of its own left (`OwnWork::Required`): a device below that was
//! resumed meanwhile may have given it some. It is *retired*: given nothing, and polled until that
//! work is done. The control side holds its table for as long.

use super::device::TableSlot;
use crate::table::{Table, TableLane};
use std::rc::Rc;
use std::sync::{Arc, Weak};
use udm_core::bugs::{self, Bug};
use udm_core::{Batch, Bio, BioFlags, Cx, Drain, Lane, LaneCommand, LaneInbox, OpenError, OwnWork, Status};

#[derive(Clone, Copy, PartialEq, Eq)]
enum LaneState {
    Running,
    Draining(Drain),
    Suspended,
}

/// A table's lane that has yet to begin, and the generation of the table.
pub(super) struct PreparedLane {
    generation: u64,
    lane: Box<TableLane>,
    /// The control half holds it for as long as the lane can still begin.
    table: Weak<Table>,
}

impl PreparedLane {
    pub fn new(slot: &TableSlot, cx: &mut Cx<'_>) -> Result<PreparedLane, OpenError> {
        let lane = Box::new(TableLane::open(&slot.table, cx)?);
        Ok(PreparedLane { generation: slot.generation, lane, table: Arc::downgrade(&slot.table) })
    }
}

/// See the module's documentation.
pub(super) struct MappedLane {
    port: Rc<LaneInbox>,
    /// Running with a table, nothing prepared, nothing to hand out: what `submit` and `poll` test
    /// first.
    ordinary: bool,
    live: Option<Box<TableLane>>,
    generation: u64,
    /// The table of a live lane that has yet to begin: the device has not run since it was opened.
    fresh: Option<Weak<Table>>,
    prepared: Option<PreparedLane>,
    /// Lanes that were let go with work of their own left, and who waits for that.
    retired: Vec<(Box<TableLane>, udm_core::Ack)>,
    state: LaneState,
    acks: Vec<udm_core::Ack>,
    /// Handed back by the lane below: older than what is parked.
    returned: Batch,
    parked: Batch,
    /// Ended here, to be handed out by the next poll.
    ended: Batch,
}

impl MappedLane {
    pub fn new(
        port: Rc<LaneInbox>,
        live: Option<PreparedLane>,
        prepared: Option<PreparedLane>,
        suspended: bool,
        cx: &mut Cx<'_>,
    ) -> MappedLane {
        let mut lane = MappedLane {
            port,
            ordinary: false,
            live: None,
            generation: 0,
            fresh: None,
            prepared,
            retired: Vec::new(),
            state: if suspended { LaneState::Suspended } else { LaneState::Running },
            acks: Vec::new(),
            returned: Batch::new(),
            parked: Batch::new(),
            ended: Batch::new(),
        };
        lane.take(live);
        if !suspended {
            lane.begin_live(cx);
        }
        lane.update_state();
        lane
    }

    /// Acts on the commands in the port.
    #[cold]
    fn process_commands(&mut self, cx: &mut Cx<'_>) {
        while let Some(command) = self.port.take() {
            match command {
                LaneCommand::Prepare { table, generation, failure, ack } => {
                    if self.generation != generation && self.prepared_generation() != Some(generation) {
                        let table = table.downcast::<Table>().expect("the table of a mapped device");
                        match PreparedLane::new(&TableSlot { table, generation }, cx) {
                            Ok(opened) => self.prepared = Some(opened),
                            Err(error) => failure.set(error),
                        }
                    }
                    drop(ack);
                }
                LaneCommand::Unprepare { generation, ack } => {
                    if self.prepared_generation() == Some(generation) && !bugs::on(Bug::PrepareNotUndone) {
                        let opened = self.prepared.take();
                        self.retire(opened.map(|opened| opened.lane), ack);
                    } else {
                        drop(ack);
                    }
                }
                LaneCommand::Suspend { how, ack } => {
                    if self.state != LaneState::Suspended {
                        self.state = LaneState::Draining(how);
                        self.acks.push(ack);
                    }
                }
                LaneCommand::Resume { generation, ack } => {
                    let old = self.resume(generation, cx);
                    self.retire(old, ack);
                }
                // The poll that follows is all that was asked for.
                LaneCommand::Kick => {}
            }
            self.update_state();
        }
    }

    fn prepared_generation(&self) -> Option<u64> {
        self.prepared.as_ref().map(|opened| opened.generation)
    }

    fn take(&mut self, opened: Option<PreparedLane>) {
        if let Some(PreparedLane { generation, lane, table }) = opened {
            (self.live, self.generation, self.fresh) = (Some(lane), generation, Some(table));
        }
    }

    /// The device runs: a lane that is in place begins, once.
    fn begin_live(&mut self, cx: &mut Cx<'_>) {
        let table = self.fresh.take().and_then(|table| table.upgrade());
        if let (Some(live), Some(table)) = (&mut self.live, table) {
            live.begin(&table, cx);
        }
    }

    /// Drops a lane that is in use no more, and then `ack`: at once, or behind its own work.
    fn retire(&mut self, lane: Option<Box<TableLane>>, ack: udm_core::Ack) {
        let owes = |lane: &TableLane| lane.busy() == OwnWork::Required && !bugs::on(Bug::OwnWorkDropped);
        self.retired.extend(lane.filter(|lane| owes(lane)).map(|lane| (lane, ack)));
    }

    /// Takes the lane of `generation` and lets everything parked go down. Which lane it replaces.
    fn resume(&mut self, generation: u64, cx: &mut Cx<'_>) -> Option<Box<TableLane>> {
        let mut old = None;
        if self.generation != generation && bugs::on(Bug::ReloadDropsParked) {
            bugs::leak_bios(self.parked.drain(..));
        }
        if self.generation != generation && bugs::on(Bug::OldTableKept) {
            self.prepared = None;
            self.generation = generation;
        }
        if self.generation != generation {
            assert!(self.is_empty(), "tables change places while nothing is in flight");
            let prepared = self.prepared.take().filter(|opened| opened.generation == generation);
            // Every lane prepared it or the change was called off; without it the old table must
            // not be used either.
            debug_assert!(prepared.is_some(), "generation {generation} was not prepared");
            (old, self.generation) = (self.live.take(), generation);
            self.take(prepared);
        }
        self.begin_live(cx);
        self.state = LaneState::Running;
        self.acks.clear();
        let mut batch = std::mem::take(&mut self.returned);
        batch.append(&mut self.parked);
        self.send(&mut batch, cx);
        self.returned = batch;
        old
    }

    /// Submits to the live table, or ends the bios when there is none.
    fn send(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        if batch.is_empty() {
            return;
        }
        match &mut self.live {
            Some(live) => live.submit(batch, cx),
            None => batch.drain(..).for_each(|bio| end(&mut self.ended, bio, Status::IoErr)),
        }
    }

    /// True when nothing is in flight in the live table.
    fn is_empty(&self) -> bool {
        self.live.as_ref().is_none_or(|live| live.is_empty())
    }

    /// Leaves Draining when it can, and works out `ordinary`.
    fn update_state(&mut self) {
        if matches!(self.state, LaneState::Draining(_))
            && (self.is_empty() && self.busy() < OwnWork::Required || bugs::on(Bug::SuspendAcksEarly))
        {
            self.state = LaneState::Suspended;
            self.acks.clear();
        }
        self.ordinary = self.state == LaneState::Running
            && self.live.is_some()
            && self.prepared.is_none()
            && self.retired.is_empty()
            && self.ended.is_empty();
    }

    #[cold]
    fn submit_slow(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        self.process_commands(cx);
        if self.state == LaneState::Running {
            self.send(batch, cx);
        } else {
            for bio in batch.drain(..) {
                if bio.flags.contains(BioFlags::NOWAIT) {
                    end(&mut self.ended, bio, Status::Again);
                } else if bio.flags.contains(BioFlags::RAHEAD) {
                    end(&mut self.ended, bio, Status::IoErr);
                } else {
                    self.parked.push(bio);
                }
            }
        }
        self.update_state();
    }

    #[cold]
    fn poll_slow(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        self.process_commands(cx);
        if let Some(live) = &mut self.live {
            if let LaneState::Draining(how) = self.state {
                let before = self.returned.len();
                live.drain(how, &mut self.returned, cx);
                let back = &self.returned[before..];
                debug_assert!(back.iter().all(|bio| bio.status.is_ok()), "handed back as it was given");
            }
            // Also with nothing in flight: a mapped device below has mail of its own.
            live.poll(done, cx);
        }
        if let Some(opened) = &mut self.prepared {
            let from = done.len();
            opened.lane.poll(done, cx);
            debug_assert_eq!(done.len(), from, "a lane that was given nothing has nothing to return");
        }
        self.retired.retain_mut(|(lane, _)| {
            let from = done.len();
            lane.poll(done, cx);
            debug_assert_eq!(done.len(), from, "a lane that was let go has nothing to return");
            lane.busy() == OwnWork::Required
        });
        done.append(&mut self.ended);
        self.update_state();
    }
}

fn end(ended: &mut Batch, mut bio: Box<Bio>, status: Status) {
    bio.status = status;
    ended.push(bio);
}

impl MappedLane {
    /// Nobody will resume this device, nor let a suspend of it end.
    #[cold]
    fn drain_final(&mut self, back: &mut Batch, cx: &mut Cx<'_>) {
        let parked = std::mem::take(&mut self.returned).into_iter().chain(std::mem::take(&mut self.parked));
        parked.for_each(|bio| end(&mut self.ended, bio, Status::IoErr));
        if let Some(live) = &mut self.live {
            live.drain(Drain::End, back, cx);
        }
        self.retired.iter_mut().for_each(|(lane, _)| lane.drain(Drain::End, back, cx));
        self.update_state();
    }
}

impl Lane for MappedLane {
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        match &mut self.live {
            Some(live) if self.ordinary && !self.port.has_messages() => live.submit(batch, cx),
            _ => self.submit_slow(batch, cx),
        }
    }

    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        match &mut self.live {
            Some(live) if self.ordinary && !self.port.has_messages() => live.poll(done, cx),
            _ => self.poll_slow(done, cx),
        }
    }

    /// A suspend of the device above. What is parked here, or held by targets that hand back, can
    /// wait up there as well, whatever this device is doing; but a flushing suspend above fails
    /// nothing that it still means to serve (kernel: it waits).
    fn drain(&mut self, how: Drain, back: &mut Batch, cx: &mut Cx<'_>) {
        if how == Drain::Flush {
            return;
        }
        if how == Drain::End {
            return self.drain_final(back, cx);
        }
        back.append(&mut self.returned);
        back.append(&mut self.parked);
        if let (Some(live), LaneState::Running | LaneState::Draining(_)) = (&mut self.live, self.state) {
            live.drain(how, back, cx);
        }
        self.update_state();
    }

    /// A lane that is only prepared may have begun already: its table has been told of the resume.
    fn busy(&self) -> OwnWork {
        let prepared = self.prepared.as_ref().filter(|_| !bugs::on(Bug::PreparedNotBusy));
        let prepared = prepared.map(|opened| opened.lane.busy());
        let retired = self.retired.iter().map(|(lane, _)| lane.busy()).max();
        self.live.as_ref().map(|live| live.busy()).max(prepared).max(retired).unwrap_or_default()
    }
}
