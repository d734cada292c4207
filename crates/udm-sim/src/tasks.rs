//! Tasks on simulated cores: what targets do without being asked, such as checks of paths, and what
//! the control side has done when a table is loaded.

use crate::cores::TaskPurpose;
use crate::environment::{CHECK_SLACK, lock};
use crate::model::Violation;
use crate::world::TargetWorld;
use slab::Slab;
use std::sync::Arc;
use udm_core::{
    Ack, Batch, Bio, CoreState, Cores, Device, DeviceId, DeviceSlot, Lane, Nanos, OpenError, OwnWork,
    OwnerId, Task, TaskCx, TaskFactory, WaitHandle, WaitQueue, WakeTarget,
};

/// A task of a core.
pub struct RunningTask {
    task: Box<dyn Task>,
    /// Where it is told to stop.
    pub topic: DeviceId,
    owner: OwnerId,
    /// What it is for.
    pub(crate) purpose: TaskPurpose,
    lanes: Slab<TaskLane>,
    wake: Nanos,
    /// Its core gets to it no sooner, unless there is mail for it.
    late: Nanos,
    /// It has mail.
    pub mail: bool,
    /// It is to stop; what is dropped when it knows.
    pub stop: Option<Option<Ack>>,
    /// It is to stop, or has been told.
    pub stops: bool,
}

/// A lane of a task, of its own.
struct TaskLane {
    lane: Box<dyn Lane>,
    batch: Batch,
    in_flight: usize,
    wake: Nanos,
    /// The task has given it up.
    closed: bool,
}

impl RunningTask {
    /// One that is started, as `owner` of its core.
    #[must_use]
    pub fn new(make: TaskFactory, topic: DeviceId, owner: OwnerId, purpose: TaskPurpose) -> RunningTask {
        let (task, lanes) = (make(), Slab::new());
        let (wake, late) = (Nanos(0), Nanos(0));
        RunningTask { task, topic, owner, purpose, lanes, wake, late, mail: false, stop: None, stops: false }
    }

    /// Its number among what its core visits.
    #[must_use]
    pub fn visit(&self) -> WakeTarget {
        WakeTarget(self.owner.0)
    }

    /// It has the one order of what all cores ask for.
    #[must_use]
    pub fn is_owner_lane(&self) -> bool {
        self.purpose == TaskPurpose::OwnerLane
    }

    /// When it has a reason for a turn.
    #[must_use]
    pub fn reason(&self) -> Nanos {
        match self.mail || self.stop.is_some() {
            true => Nanos(0),
            false => self.lanes.iter().map(|(_, open)| open.wake).fold(self.wake, Nanos::min).max(self.late),
        }
    }

    /// Its core does not get to it before `until`.
    pub fn postpone(&mut self, until: Nanos) {
        self.late = until;
    }

    /// Its lanes are to be polled: the outside has something for them.
    pub fn wake_lanes(&mut self, now: Nanos) {
        self.lanes.iter_mut().for_each(|(_, open)| open.wake = open.wake.min(now));
    }

    /// Nothing of it is in flight, and nothing owed.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        let idle =
            |open: &TaskLane| open.in_flight == 0 && !open.closed && open.lane.busy() < OwnWork::Required;
        self.lanes.iter().all(|(_, open)| idle(open))
    }

    /// What of it is in flight, for a person.
    #[must_use]
    pub fn waits(&self) -> String {
        let waits =
            |open: &TaskLane| open.in_flight > 0 || open.closed || open.lane.busy() == OwnWork::Required;
        let lanes = self.lanes.iter().filter(|(_, open)| waits(open));
        let lanes = lanes.map(|(key, open)| {
            let (TaskLane { in_flight, closed, wake, .. }, busy) = (open, open.lane.busy());
            let next = wake.0 / 1000;
            format!("{in_flight} in flight in lane {key}, {busy:?}, closed: {closed}, next at {next} us")
        });
        lanes.collect::<Vec<_>>().join("; ")
    }

    /// A turn of it; true when it is over.
    pub(crate) fn turn(&mut self, state: &mut CoreState, now: Nanos) -> bool {
        state.ports().visit(Some(self.visit()));
        if std::mem::take(&mut self.mail) || self.wake <= now {
            self.wake = Nanos::NEVER;
            self.call(state, now, |task, cx| task.turn(cx));
        }
        if let Some(told) = self.stop.take() {
            self.call(state, now, |task, cx| task.stop(cx));
            drop(told);
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
        // What a lane owes it does before it goes, as on a real core.
        self.lanes.retain(|_, open| !open.closed || open.lane.busy() == OwnWork::Required);
        self.task.is_over() && self.lanes.iter().all(|(_, open)| !open.closed && open.in_flight == 0)
    }

    fn call(&mut self, state: &mut CoreState, now: Nanos, f: impl FnOnce(&mut dyn Task, &mut dyn TaskCx)) {
        let RunningTask { task, lanes, wake, owner, .. } = self;
        f(&mut **task, &mut SimTaskCx { state, now, lanes, wake, owner: *owner });
    }

    /// Submits what there is and polls the lanes.
    fn move_bios(&mut self, done: &mut Batch, state: &mut CoreState, now: Nanos) {
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

/// What a task may touch.
struct SimTaskCx<'a> {
    state: &'a mut CoreState,
    now: Nanos,
    lanes: &'a mut Slab<TaskLane>,
    wake: &'a mut Nanos,
    owner: OwnerId,
}

impl TaskCx for SimTaskCx<'_> {
    fn open(&mut self, device: &Arc<dyn Device>) -> Result<DeviceSlot, OpenError> {
        let lane = device.open(&mut self.state.cx(self.now))?;
        let open = TaskLane { lane, batch: Batch::new(), in_flight: 0, wake: Nanos::NEVER, closed: false };
        Ok(DeviceSlot(self.lanes.insert(open)))
    }

    fn close(&mut self, slot: DeviceSlot) {
        let open = &mut self.lanes[slot.0];
        assert_eq!(open.in_flight, 0, "a task closes a lane with bios in flight");
        open.closed = true;
    }

    fn submit(&mut self, slot: DeviceSlot, mut bio: Box<Bio>) {
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

    fn all_cores(&self) -> Arc<dyn Cores> {
        Arc::clone(self.state.others())
    }

    fn subscribe(&mut self, bell: &Arc<WaitQueue>) -> WaitHandle {
        bell.subscribe(&mut self.state.cx(self.now))
    }
}

impl TargetWorld {
    /// Takes notice of paths that a checker failed or reinstated: reinstated those that answered
    /// one since they failed, failed those that gave a bad answer or none, and no others. One that
    /// has to be failed is.
    pub(crate) fn sync_checked_paths(&mut self) -> Result<(), Violation> {
        let mut env = lock(&self.machine.env);
        let (now, timeout) = (env.now, env.check_timeout);
        for (i, device) in self.devices.iter_mut().enumerate() {
            let Some(access) = device.access.filter(|a| !env.accesses[*a].has_unknown_paths) else {
                continue;
            };
            let live = device.mapped().live();
            let reports =
                live.iter().flat_map(|table| table.targets()).flat_map(|entry| entry.target.path_reports());
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
                    // It was failed, and what is left held back was checked at once.
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
                        return Err(format!("a check of p{p} has failed, and d{i} thinks well of it"));
                    }
                    (false, false) if still && path.check_counts && overdue(late) => {
                        return Err(format!("p{p} does not answer a check, and d{i} thinks well of it"));
                    }
                    (false, false) => {}
                }
            }
        }
        Ok(())
    }
}
