//! Tasks on cores stepped by hand. Each task has a turn in every round, even if it asked for none.

use super::{TestWorld, lock};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use udm_core::{
    Ack, Batch, Bio, CoreState, Cores, Device, DeviceSlot, Lane, Nanos, OpenError, OwnWork, OwnerId, Task,
    TaskCx, TaskFactory, TaskHandle, WaitHandle, WaitQueue,
};

/// Start and stop commands that are not executed yet.
#[derive(Default)]
pub(super) struct TaskCommandQueue {
    started: u64,
    queue: VecDeque<TaskCommand>,
}

enum TaskCommand {
    Start(u64, TaskFactory),
    Stop(u64, Option<Ack>),
}

/// Queues the start of the task that `make` creates. Returns a handle that stops the task.
pub(super) fn start(orders: &Arc<Mutex<TaskCommandQueue>>, make: TaskFactory) -> TaskHandle {
    let mut all = lock(orders);
    let id = all.started;
    all.started += 1;
    all.queue.push_back(TaskCommand::Start(id, make));
    let orders = Arc::clone(orders);
    TaskHandle::new(move |ack| {
        let mut all = lock(&orders);
        let waits =
            all.queue.iter().position(|order| matches!(order, TaskCommand::Start(one, _) if *one == id));
        match waits {
            // The task has not started, so its start is removed.
            Some(at) => drop(all.queue.remove(at)),
            None => all.queue.push_back(TaskCommand::Stop(id, ack)),
        }
    })
}

/// A running task and its core.
pub(super) struct RunningTask {
    id: u64,
    core: usize,
    task: Box<dyn Task>,
    owner: OwnerId,
    lanes: Vec<Option<TaskLane>>,
}

/// A lane of a task.
struct TaskLane {
    lane: Box<dyn Lane>,
    batch: Batch,
    in_flight: usize,
    closed: bool,
}

impl RunningTask {
    fn call(&mut self, state: &mut CoreState, now: Nanos, f: impl FnOnce(&mut dyn Task, &mut dyn TaskCx)) {
        let RunningTask { task, lanes, owner, .. } = self;
        f(&mut **task, &mut TestTaskCx { state, now, lanes, owner: *owner });
    }

    /// Runs one turn. Returns true if the task is over.
    fn turn(&mut self, state: &mut CoreState, now: Nanos, stop: Option<Option<Ack>>) -> bool {
        self.call(state, now, |task, cx| task.turn(cx));
        if let Some(ack) = stop {
            self.call(state, now, |task, cx| task.stop(cx));
            drop(ack);
        }
        let mut done = Batch::new();
        for open in self.lanes.iter_mut().flatten() {
            let mut cx = state.cx(now);
            if !open.batch.is_empty() {
                open.lane.submit(&mut open.batch, &mut cx);
            }
            let before = done.len();
            open.lane.poll(&mut done, &mut cx);
            open.in_flight -= done.len() - before;
        }
        if !done.is_empty() {
            done.iter_mut().for_each(|bio| bio.finish());
            self.call(state, now, |task, cx| task.complete(&mut done, cx));
        }
        for slot in &mut self.lanes {
            // Required own work of a lane is done before the lane is dropped.
            slot.take_if(|open| open.closed && open.lane.own_work() != OwnWork::Required);
        }
        self.task.is_over() && self.lanes.iter().all(Option::is_none)
    }
}

/// The context of a task during its turn.
struct TestTaskCx<'a> {
    state: &'a mut CoreState,
    now: Nanos,
    lanes: &'a mut Vec<Option<TaskLane>>,
    owner: OwnerId,
}

impl TestTaskCx<'_> {
    fn lane(&mut self, slot: DeviceSlot) -> &mut TaskLane {
        self.lanes[slot.0].as_mut().expect("a lane that is open")
    }
}

impl TaskCx for TestTaskCx<'_> {
    fn open(&mut self, device: &Arc<dyn Device>) -> Result<DeviceSlot, OpenError> {
        let lane = device.open(&mut self.state.cx(self.now))?;
        self.lanes.push(Some(TaskLane { lane, batch: Batch::new(), in_flight: 0, closed: false }));
        Ok(DeviceSlot(self.lanes.len() - 1))
    }

    fn close(&mut self, slot: DeviceSlot) {
        let open = self.lane(slot);
        assert_eq!(open.in_flight, 0, "a task closes a lane with bios in flight");
        open.closed = true;
    }

    fn submit(&mut self, slot: DeviceSlot, mut bio: Box<Bio>) {
        bio.owner = self.owner;
        bio.started = self.now;
        bio.start();
        let open = self.lane(slot);
        open.in_flight += 1;
        open.batch.push(bio);
    }

    fn now(&self) -> Nanos {
        self.now
    }

    fn wake_at(&mut self, _: Nanos) {}

    fn all_cores(&self) -> Arc<dyn Cores> {
        Arc::clone(self.state.others())
    }

    fn subscribe(&mut self, queue: &Arc<WaitQueue>) -> WaitHandle {
        queue.subscribe(&mut self.state.cx(self.now))
    }
}

impl TestWorld {
    /// Starts the queued tasks, round robin over the cores, and gives each task one turn. Returns
    /// the number of running tasks.
    pub fn run_tasks(&mut self) -> usize {
        let orders = std::mem::take(&mut lock(&self.test_cores.orders).queue);
        let mut stops = Vec::new();
        for order in orders {
            match order {
                TaskCommand::Start(id, make) => {
                    let core = id as usize % self.cores.len();
                    let owner = self.cores[core].new_owner();
                    self.tasks.push(RunningTask { id, core, task: make(), owner, lanes: Vec::new() });
                }
                TaskCommand::Stop(id, ack) => stops.push((id, ack)),
            }
        }
        let mut tasks = std::mem::take(&mut self.tasks);
        tasks.retain_mut(|one| {
            self.deliver(one.core);
            let stop = stops.iter().position(|(id, _)| *id == one.id).map(|at| stops.remove(at).1);
            !one.turn(&mut self.cores[one.core], self.now, stop)
        });
        self.tasks = tasks;
        self.tasks.len()
    }
}
