//! Tasks on simulated cores: work of targets such as path checks, and control-side I/O of loads.

use crate::cores::TaskPurpose;
use crate::environment::{CHECK_SLACK, lock_environment};
use crate::model::Violation;
use crate::world::MappedDeviceStackWorld;
use slab::Slab;
use std::sync::Arc;
use udm_core::{
    AckOnLastDrop, Batch, Bio, BioOwnerId, BioTask, BioTaskCx, BioTaskFactory, BioTaskLaneId,
    CoreCommandSender, CoreLaneState, Device, DeviceControlError, DeviceId, Lane, Nanos, OwnWork,
    PolledUnitId, WaitQueue, WaitQueueSubscription,
};

/// A task that runs on a core.
pub struct RunningTask {
    task: Box<dyn BioTask>,
    /// Address of messages to the task.
    pub topic: DeviceId,
    owner: BioOwnerId,
    /// Purpose of the task.
    pub(crate) purpose: TaskPurpose,
    lanes: Slab<LaneOpenedByTask>,
    wake: Nanos,
    /// Earliest time of the next turn, unless a message arrives.
    late: Nanos,
    /// True if a message has arrived.
    pub has_messages: bool,
    /// Set if the task must stop; the `AckOnLastDrop` is dropped when the task knows.
    pub stop: Option<Option<AckOnLastDrop>>,
    /// True once the task has been asked to stop.
    pub stops: bool,
}

/// A lane of a task.
struct LaneOpenedByTask {
    lane: Box<dyn Lane>,
    batch: Batch,
    in_flight: usize,
    wake: Nanos,
    /// True if the task has closed the lane.
    closed: bool,
}

impl RunningTask {
    /// Creates a task with owner `owner` on its core.
    #[must_use]
    pub fn new(
        make: BioTaskFactory,
        topic: DeviceId,
        owner: BioOwnerId,
        purpose: TaskPurpose,
    ) -> RunningTask {
        let (task, lanes) = (make(), Slab::new());
        let (wake, late) = (Nanos(0), Nanos(0));
        RunningTask {
            task,
            topic,
            owner,
            purpose,
            lanes,
            wake,
            late,
            has_messages: false,
            stop: None,
            stops: false,
        }
    }

    /// Wake target of the task on its core.
    #[must_use]
    pub fn wake_target(&self) -> PolledUnitId {
        PolledUnitId(self.owner.0)
    }

    /// True for an owner lane, which serves the requests of all cores in one order.
    #[must_use]
    pub fn is_owner_lane(&self) -> bool {
        self.purpose == TaskPurpose::OwnerLane
    }

    /// Time of the next turn.
    #[must_use]
    pub fn reason(&self) -> Nanos {
        match self.has_messages || self.stop.is_some() {
            true => Nanos(0),
            false => self.lanes.iter().map(|(_, open)| open.wake).fold(self.wake, Nanos::min).max(self.late),
        }
    }

    /// Delays the next turn until `until`.
    pub fn postpone(&mut self, until: Nanos) {
        self.late = until;
    }

    /// Makes the task poll its lanes, because the environment completed requests.
    pub fn wake_lanes(&mut self, now: Nanos) {
        self.lanes.iter_mut().for_each(|(_, open)| open.wake = open.wake.min(now));
    }

    /// True if the task has nothing in flight and no required own work.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        let idle = |open: &LaneOpenedByTask| {
            open.in_flight == 0 && !open.closed && open.lane.own_work() < OwnWork::Required
        };
        self.lanes.iter().all(|(_, open)| idle(open))
    }

    /// Describes the work in progress, for a person.
    #[must_use]
    pub fn waits(&self) -> String {
        let waits = |open: &LaneOpenedByTask| {
            open.in_flight > 0 || open.closed || open.lane.own_work() == OwnWork::Required
        };
        let lanes = self.lanes.iter().filter(|(_, open)| waits(open));
        let lanes = lanes.map(|(key, open)| {
            let (LaneOpenedByTask { in_flight, closed, wake, .. }, busy) = (open, open.lane.own_work());
            let next = wake.0 / 1000;
            format!("{in_flight} in flight in lane {key}, {busy:?}, closed: {closed}, next at {next} us")
        });
        lanes.collect::<Vec<_>>().join("; ")
    }

    /// Runs one turn. Returns true if the task is over.
    pub(crate) fn turn(&mut self, state: &mut CoreLaneState, now: Nanos) -> bool {
        state.inboxes().set_current_target(Some(self.wake_target()));
        if std::mem::take(&mut self.has_messages) || self.wake <= now {
            self.wake = Nanos::NEVER;
            self.call(state, now, |task, cx| task.turn(cx));
        }
        if let Some(ack) = self.stop.take() {
            self.call(state, now, |task, cx| task.stop(cx));
            drop(ack);
        }
        let mut done = Batch::new();
        loop {
            self.move_bios(&mut done, state, now);
            if done.is_empty() {
                break;
            }
            done.iter_mut().for_each(|bio| bio.finish());
            self.call(state, now, |task, cx| task.complete(&mut done, cx));
        }
        // A closed lane first completes its required own work, as on a real core.
        self.lanes.retain(|_, open| !open.closed || open.lane.own_work() == OwnWork::Required);
        self.task.is_over() && self.lanes.iter().all(|(_, open)| !open.closed && open.in_flight == 0)
    }

    fn call(
        &mut self,
        state: &mut CoreLaneState,
        now: Nanos,
        f: impl FnOnce(&mut dyn BioTask, &mut dyn BioTaskCx),
    ) {
        let RunningTask { task, lanes, wake, owner, .. } = self;
        f(&mut **task, &mut SimTaskCx { state, now, lanes, wake, owner: *owner });
    }

    /// Submits queued bios and polls the lanes.
    fn move_bios(&mut self, done: &mut Batch, state: &mut CoreLaneState, now: Nanos) {
        for (_, open) in &mut self.lanes {
            let mut cx = state.cx(now);
            let before = done.len();
            if !open.batch.is_empty() {
                open.lane.submit(&mut open.batch, &mut cx);
            }
            open.lane.poll(done, &mut cx);
            open.in_flight -= done.len() - before;
            open.wake = cx.wake();
        }
    }
}

/// Context of a task in its turn.
struct SimTaskCx<'a> {
    state: &'a mut CoreLaneState,
    now: Nanos,
    lanes: &'a mut Slab<LaneOpenedByTask>,
    wake: &'a mut Nanos,
    owner: BioOwnerId,
}

impl BioTaskCx for SimTaskCx<'_> {
    fn open(&mut self, device: &Arc<dyn Device>) -> Result<BioTaskLaneId, DeviceControlError> {
        let lane = device.open(&mut self.state.cx(self.now))?;
        let open =
            LaneOpenedByTask { lane, batch: Batch::new(), in_flight: 0, wake: Nanos::NEVER, closed: false };
        Ok(BioTaskLaneId(self.lanes.insert(open)))
    }

    fn close(&mut self, slot: BioTaskLaneId) {
        let open = &mut self.lanes[slot.0];
        assert_eq!(open.in_flight, 0, "a task closes a lane with bios in flight");
        open.closed = true;
    }

    fn submit(&mut self, slot: BioTaskLaneId, mut bio: Box<Bio>) {
        bio.owner = self.owner;
        bio.started = self.now;
        bio.start();
        let open = &mut self.lanes[slot.0];
        open.in_flight += 1;
        open.batch.push(bio);
    }

    fn now(&self) -> Nanos {
        self.now
    }

    fn wake_at(&mut self, at: Nanos) {
        *self.wake = at;
    }

    fn all_cores(&self) -> Arc<dyn CoreCommandSender> {
        Arc::clone(self.state.others())
    }

    fn subscribe(&mut self, queue: &Arc<WaitQueue>) -> WaitQueueSubscription {
        queue.subscribe(&mut self.state.cx(self.now))
    }
}

impl MappedDeviceStackWorld {
    /// Updates the model for paths that a checker failed or reinstated. A reinstated path must have
    /// answered a check since its failure. A failed path must have a check with a bad or no answer.
    /// A path that must be failed has to be.
    ///
    /// # Errors
    /// If the state of a path has no reason.
    pub(crate) fn sync_checked_paths(&mut self) -> Result<(), Violation> {
        let mut env = lock_environment(&self.machine.env);
        let (now, timeout) = (env.now, env.check_timeout);
        for (i, device) in self.devices.iter_mut().enumerate() {
            let Some(access) = device.access.filter(|a| !env.accesses[*a].has_unknown_paths) else {
                continue;
            };
            let live = device.mapped().live();
            let reports = live.iter().flat_map(|table| table.path_reports());
            let still = device.is_live() && !device.is_changing();
            for report in reports {
                let p = report.number.minor as usize;
                let path = &env.paths[p];
                if path.access != Some(access) || path.failed && report.failed {
                    continue;
                }
                let overdue = |since: Option<Nanos>| since.is_some_and(|at| at + timeout <= now);
                let late = path.checked_at.map(|at| at + CHECK_SLACK);
                match (path.failed, report.failed) {
                    (true, false) => {
                        if !path.answered {
                            return Err(format!("d{i} has reinstated p{p}, which did not answer"));
                        }
                        env.say(format!("d{i} reinstates p{p}, which answers"));
                        env.reinstate(p);
                        device.events.0 += 1;
                        self.machine.totals.reinstated += 1;
                    }
                    (_, true) => {
                        if !path.doubted && !overdue(path.asked_at) {
                            return Err(format!("d{i} has failed p{p}, which gave no bad answer"));
                        }
                        env.say(format!("d{i} fails p{p}, of which a check has failed"));
                        env.fail(p);
                        env.paths[p].checked_out = now;
                        device.events.0 += 1;
                        self.machine.totals.checked_out += 1;
                    }
                    // The path was failed, and the check of the held-back path ran at once.
                    (false, false) if report.fail_count > path.fails => {
                        if !path.doubted || !path.answered {
                            return Err(format!("d{i} has failed and reinstated p{p} without a reason"));
                        }
                        env.say(format!("d{i} fails p{p}, of which a check has failed, and reinstates it"));
                        env.fail(p);
                        env.reinstate(p);
                        device.events.0 += 2;
                        self.machine.totals.checked_out += 1;
                        self.machine.totals.reinstated += 1;
                    }
                    (false, false) if still && path.must_fail => {
                        return Err(format!("a check of p{p} has failed, but d{i} considers it good"));
                    }
                    (false, false) if still && path.check_counts && overdue(late) => {
                        return Err(format!("p{p} does not answer a check, but d{i} considers it good"));
                    }
                    (false, false) => {}
                }
            }
        }
        Ok(())
    }
}
