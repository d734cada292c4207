//! The data path of a mapped device on one core: the lane of the live table, and the bios that wait
//! while tables change.
//!
//! ```text
//!             Suspend                  nothing in flight
//!  Running ------------> Draining ---------------------> Suspended
//!     ^                     |  (ack when it leaves)           |
//!     +------ Resume -------+------------- Resume ------------+
//! ```
//!
//! * Running: batches go straight down. The only cost is one test of the inbox flag.
//! * Draining: new bios are held. Bios in flight complete. Bios that targets hold back are
//!   returned and held too (no-flush), or they fail (flush).
//! * Suspended: all bios are held. Bios that must not wait fail (kernel: NOWAIT with EAGAIN,
//!   read-ahead with EIO).
//! * Resume installs the lane of the requested generation. Then all held bios go down, oldest
//!   first.
//!
//! A command may come twice, or for a generation that is already installed, because a lane may be
//! opened between two commands. The generation makes such commands harmless. Without a live table
//! there is no lane, and bios fail with EIO.
//!
//! With limits of requests or bytes per second ([`crate::throttle`]), bios that run may have to
//! wait in a `ThrottleQueue` first. Any command may bring other limits, so the lane reads them
//! then.
//!
//! A replaced lane may still have own work (`OwnWork::Required`), because a device below that was
//! resumed meanwhile gave it some. It is then *retired*: it gets no bios and is polled until the
//! work is done. The control half holds its table until then.

use super::device::TableWithGeneration;
use crate::table::{Table, TableLane};
use crate::throttle::{DeviceThrottle, ThrottleQueue};
use std::rc::Rc;
use std::sync::{Arc, Weak};
use udm_core::{
    Batch, Bio, BioFlags, Cx, DeviceControlError, DrainMode, Lane, LaneCommand, LaneInbox, OwnWork, Status,
};

#[derive(Clone, Copy, PartialEq, Eq)]
enum LaneSuspendState {
    Running,
    Draining(DrainMode),
    Suspended,
}

/// A lane of a table that has not begun yet, and the generation of the table.
pub(super) struct PreparedTableLane {
    generation: u64,
    lane: Box<TableLane>,
    /// The control half holds the table as long as the lane can still begin.
    table: Weak<Table>,
}

impl PreparedTableLane {
    pub fn new(slot: &TableWithGeneration, cx: &mut Cx<'_>) -> Result<PreparedTableLane, DeviceControlError> {
        let lane = Box::new(TableLane::open(&slot.table, cx)?);
        Ok(PreparedTableLane { generation: slot.generation, lane, table: Arc::downgrade(&slot.table) })
    }
}

/// The lane of a mapped device: commands, held bios, and the lane of the live table.
pub(super) struct MappedLane {
    inbox: Rc<LaneInbox>,
    /// True if the lane runs with a table and without limits of requests per second, nothing is
    /// prepared or retired, and `ended` is empty.
    /// `submit` and `poll` test this first.
    ordinary: bool,
    live: Option<Box<TableLane>>,
    generation: u64,
    /// The table of a live lane that has not begun: the device has not run since the lane was
    /// opened.
    fresh: Option<Weak<Table>>,
    prepared: Option<PreparedTableLane>,
    /// Replaced lanes with own work left, and the acks that wait for this work.
    retired: Vec<(Box<TableLane>, udm_core::AckOnLastDrop)>,
    state: LaneSuspendState,
    acks: Vec<udm_core::AckOnLastDrop>,
    /// Bios that the lane below handed back; they are older than the held ones.
    returned: Batch,
    held_bios: Batch,
    /// Bios that ended here; the next poll hands them out.
    ended: Batch,
    device_throttle: Arc<DeviceThrottle>,
    /// `None` for a device without limits.
    throttle: Option<ThrottleQueue>,
}

impl MappedLane {
    pub fn new(
        inbox: Rc<LaneInbox>,
        live: Option<PreparedTableLane>,
        prepared: Option<PreparedTableLane>,
        suspended: bool,
        device_throttle: Arc<DeviceThrottle>,
        cx: &mut Cx<'_>,
    ) -> MappedLane {
        let mut lane = MappedLane {
            inbox,
            ordinary: false,
            live: None,
            generation: 0,
            fresh: None,
            prepared,
            retired: Vec::new(),
            state: if suspended { LaneSuspendState::Suspended } else { LaneSuspendState::Running },
            acks: Vec::new(),
            returned: Batch::new(),
            held_bios: Batch::new(),
            ended: Batch::new(),
            device_throttle,
            throttle: None,
        };
        lane.read_limits(cx);
        lane.take(live);
        if !suspended {
            lane.begin_live(cx);
        }
        lane.update_state();
        lane
    }

    /// Executes the commands in the inbox.
    #[cold]
    fn process_commands(&mut self, cx: &mut Cx<'_>) {
        while let Some(command) = self.inbox.take() {
            match command {
                LaneCommand::Prepare { table, generation, failure, ack } => {
                    if self.generation != generation && self.prepared_generation() != Some(generation) {
                        let table = table.downcast::<Table>().expect("the table of a mapped device");
                        match PreparedTableLane::new(&TableWithGeneration { table, generation }, cx) {
                            Ok(opened) => self.prepared = Some(opened),
                            Err(error) => failure.set(error),
                        }
                    }
                    drop(ack);
                }
                LaneCommand::Unprepare { generation, ack } => {
                    if self.prepared_generation() == Some(generation) {
                        let opened = self.prepared.take();
                        self.retire(opened.map(|opened| opened.lane), ack);
                    } else {
                        drop(ack);
                    }
                }
                LaneCommand::Suspend { how, ack } => {
                    if self.state != LaneSuspendState::Suspended {
                        self.state = LaneSuspendState::Draining(how);
                        self.acks.push(ack);
                    }
                }
                LaneCommand::Resume { generation, ack } => {
                    let old = self.resume(generation, cx);
                    self.retire(old, ack);
                }
                // Otherwise, the poll that follows is all that a kick requests.
                LaneCommand::Kick => self.read_limits(cx),
            }
            self.update_state();
        }
    }

    /// Reads the limits of the device. Without limits, bios that wait for them are sent.
    fn read_limits(&mut self, cx: &mut Cx<'_>) {
        match (self.device_throttle.for_lane(), &mut self.throttle) {
            (Some(limits), Some(queue)) if Arc::ptr_eq(queue.throttle(), &limits) => {}
            (Some(limits), Some(queue)) => queue.set_throttle(limits, cx.now()),
            (Some(limits), None) => {
                self.throttle = Some(ThrottleQueue::new(limits, &self.device_throttle));
            }
            (None, _) => self.end_throttling(cx),
        }
    }

    /// Drops the throttle queue. Its bios are sent, or held if the lane does not run.
    fn end_throttling(&mut self, cx: &mut Cx<'_>) {
        let Some(mut queue) = self.throttle.take() else { return };
        let mut batch = Batch::new();
        queue.take_all(&mut batch);
        if self.state == LaneSuspendState::Running {
            self.send_now(&mut batch, cx);
        } else {
            // They came before the suspend, so before all that are held since.
            batch.append(&mut self.held_bios);
            self.held_bios = batch;
        }
    }

    fn prepared_generation(&self) -> Option<u64> {
        self.prepared.as_ref().map(|opened| opened.generation)
    }

    fn take(&mut self, opened: Option<PreparedTableLane>) {
        if let Some(PreparedTableLane { generation, lane, table }) = opened {
            (self.live, self.generation, self.fresh) = (Some(lane), generation, Some(table));
        }
    }

    /// The device runs: its live lane begins, if it has not yet.
    fn begin_live(&mut self, cx: &mut Cx<'_>) {
        let table = self.fresh.take().and_then(|table| table.upgrade());
        if let (Some(live), Some(table)) = (&mut self.live, table) {
            live.begin(&table, cx);
        }
    }

    /// Drops a replaced lane and then `ack`: now, or when its own work is done.
    fn retire(&mut self, lane: Option<Box<TableLane>>, ack: udm_core::AckOnLastDrop) {
        let owes = |lane: &TableLane| lane.own_work() == OwnWork::Required;
        self.retired.extend(lane.filter(|lane| owes(lane)).map(|lane| (lane, ack)));
    }

    /// Installs the lane of `generation` and submits all held bios. Returns the replaced lane.
    fn resume(&mut self, generation: u64, cx: &mut Cx<'_>) -> Option<Box<TableLane>> {
        let mut old = None;
        if self.generation != generation {
            assert!(self.is_empty(), "tables are swapped while nothing is in flight");
            let prepared = self.prepared.take().filter(|opened| opened.generation == generation);
            // Either every lane prepared this generation, or the change was cancelled. Without a
            // prepared lane, the old table must not be used either.
            debug_assert!(prepared.is_some(), "generation {generation} was not prepared");
            (old, self.generation) = (self.live.take(), generation);
            self.take(prepared);
        }
        self.begin_live(cx);
        self.state = LaneSuspendState::Running;
        self.acks.clear();
        let mut batch = std::mem::take(&mut self.returned);
        batch.append(&mut self.held_bios);
        self.send(&mut batch, cx);
        self.returned = batch;
        old
    }

    /// Submits bios as far as the limits of the device allow; the others wait.
    fn send(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        if let Some(queue) = &mut self.throttle
            && !batch.is_empty()
        {
            queue.admit(batch, cx.now());
            queue.next_release().into_iter().for_each(|at| cx.wake_at(at));
        }
        self.send_now(batch, cx);
    }

    /// Submits the waiting bios for which it is time now.
    fn send_waiting(&mut self, cx: &mut Cx<'_>) {
        let Some(queue) = self.throttle.as_mut().filter(|queue| !queue.is_empty()) else { return };
        let mut batch = Batch::new();
        queue.release(&mut batch, cx.now());
        queue.next_release().into_iter().for_each(|at| cx.wake_at(at));
        self.send_now(&mut batch, cx);
    }

    /// Submits to the live table, or fails the bios if there is none.
    fn send_now(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        if batch.is_empty() {
            return;
        }
        match &mut self.live {
            Some(live) => live.submit(batch, cx),
            None => batch.drain(..).for_each(|bio| end_bio_with_status(&mut self.ended, bio, Status::IoErr)),
        }
    }

    /// True if nothing is in flight in the live table.
    fn is_empty(&self) -> bool {
        self.live.as_ref().is_none_or(|live| live.is_empty())
    }

    /// Leaves `Draining` if possible, and updates `ordinary`.
    fn update_state(&mut self) {
        if matches!(self.state, LaneSuspendState::Draining(_))
            && self.is_empty()
            && self.own_work() < OwnWork::Required
        {
            self.state = LaneSuspendState::Suspended;
            self.acks.clear();
        }
        self.ordinary = self.state == LaneSuspendState::Running
            && self.throttle.is_none()
            && self.live.is_some()
            && self.prepared.is_none()
            && self.retired.is_empty()
            && self.ended.is_empty();
    }

    #[cold]
    fn submit_slow(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        self.process_commands(cx);
        if self.state == LaneSuspendState::Running {
            self.send(batch, cx);
        } else {
            for bio in batch.drain(..) {
                if bio.flags.contains(BioFlags::NOWAIT) {
                    end_bio_with_status(&mut self.ended, bio, Status::Again);
                } else if bio.flags.contains(BioFlags::RAHEAD) {
                    end_bio_with_status(&mut self.ended, bio, Status::IoErr);
                } else {
                    self.held_bios.push(bio);
                }
            }
        }
        self.update_state();
    }

    #[cold]
    fn poll_slow(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        self.process_commands(cx);
        if self.state == LaneSuspendState::Running {
            self.send_waiting(cx);
        }
        if let Some(live) = &mut self.live {
            if let LaneSuspendState::Draining(how) = self.state {
                let before = self.returned.len();
                live.drain(how, &mut self.returned, cx);
                let back = &self.returned[before..];
                debug_assert!(back.iter().all(|bio| bio.status.is_ok()), "handed back as it was given");
            }
            // Polled even with nothing in flight, because a mapped device below may have messages.
            live.poll(done, cx);
        }
        if let Some(opened) = &mut self.prepared {
            let from = done.len();
            opened.lane.poll(done, cx);
            debug_assert_eq!(done.len(), from, "a prepared lane has no bios to return");
        }
        self.retired.retain_mut(|(lane, _)| {
            let from = done.len();
            lane.poll(done, cx);
            debug_assert_eq!(done.len(), from, "a retired lane has no bios to return");
            lane.own_work() == OwnWork::Required
        });
        done.append(&mut self.ended);
        self.update_state();
    }
}

fn end_bio_with_status(ended: &mut Batch, mut bio: Box<Bio>, status: Status) {
    bio.status = status;
    ended.push(bio);
}

impl MappedLane {
    /// No command will resume this device or complete its suspend, so held bios fail.
    #[cold]
    fn drain_final(&mut self, back: &mut Batch, cx: &mut Cx<'_>) {
        let mut held_bios = std::mem::take(&mut self.returned);
        self.throttle.iter_mut().for_each(|queue| queue.take_all(&mut held_bios));
        held_bios.append(&mut self.held_bios);
        held_bios.drain(..).for_each(|bio| end_bio_with_status(&mut self.ended, bio, Status::IoErr));
        if let Some(live) = &mut self.live {
            live.drain(DrainMode::End, back, cx);
        }
        self.retired.iter_mut().for_each(|(lane, _)| lane.drain(DrainMode::End, back, cx));
        self.update_state();
    }
}

impl Lane for MappedLane {
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        match &mut self.live {
            Some(live) if self.ordinary && !self.inbox.has_messages() => live.submit(batch, cx),
            _ => self.submit_slow(batch, cx),
        }
    }

    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        match &mut self.live {
            Some(live) if self.ordinary && !self.inbox.has_messages() => live.poll(done, cx),
            _ => self.poll_slow(done, cx),
        }
    }

    /// A suspend of the device above. Bios that are held here or held by targets can wait above
    /// too, whatever this device does. But a flushing suspend above does not fail bios that this
    /// device will still serve (kernel: it waits).
    fn drain(&mut self, how: DrainMode, back: &mut Batch, cx: &mut Cx<'_>) {
        if how == DrainMode::Flush {
            return;
        }
        if how == DrainMode::End {
            return self.drain_final(back, cx);
        }
        back.append(&mut self.returned);
        self.throttle.iter_mut().for_each(|queue| queue.take_all(back));
        back.append(&mut self.held_bios);
        if let (Some(live), LaneSuspendState::Running | LaneSuspendState::Draining(_)) =
            (&mut self.live, self.state)
        {
            live.drain(how, back, cx);
        }
        self.update_state();
    }

    /// A prepared lane counts too. It may have own work already, because the resume hooks of its
    /// table have run.
    fn own_work(&self) -> OwnWork {
        let prepared = self.prepared.as_ref().map(|opened| opened.lane.own_work());
        let retired = self.retired.iter().map(|(lane, _)| lane.own_work()).max();
        self.live.as_ref().map(|live| live.own_work()).max(prepared).max(retired).unwrap_or_default()
    }
}
