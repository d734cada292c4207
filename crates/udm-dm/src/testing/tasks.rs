//! Tasks on cores stepped by hand. Each task has a turn in every round, even if it asked for none.

use super::{SteppedTestCores, lock_test_mutex};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use udm_core::{
    AckOnLastDrop, Batch, Bio, BioOwnerId, BioTask, BioTaskCx, BioTaskFactory, BioTaskHandle, BioTaskLaneId,
    CoreCommandSender, CoreLaneState, Device, DeviceControlError, Lane, Nanos, OwnWork, WaitQueue,
    WaitQueueSubscription,
};

/// Start and stop commands that are not executed yet.
#[derive(Default)]
pub(super) struct TaskStartStopQueue {
    started: u64,
    queue: VecDeque<TaskStartStopCommand>,
}

enum TaskStartStopCommand {
    Start(u64, BioTaskFactory),
    Stop(u64, Option<AckOnLastDrop>),
}

/// Queues the start of the task that `make` creates. Returns a handle that stops the task.
pub(super) fn queue_task_start(
    orders: &Arc<Mutex<TaskStartStopQueue>>,
    make: BioTaskFactory,
) -> BioTaskHandle {
    let mut all = lock_test_mutex(orders);
    let id = all.started;
    all.started += 1;
    all.queue.push_back(TaskStartStopCommand::Start(id, make));
    let orders = Arc::clone(orders);
    BioTaskHandle::new(move |ack| {
        let mut all = lock_test_mutex(&orders);
        let waits = all
            .queue
            .iter()
            .position(|order| matches!(order, TaskStartStopCommand::Start(one, _) if *one == id));
        match waits {
            // The task has not started, so its start is removed.
            Some(at) => drop(all.queue.remove(at)),
            None => all.queue.push_back(TaskStartStopCommand::Stop(id, ack)),
        }
    })
}

/// A running task and its core.
pub(super) struct RunningTestTask {
    id: u64,
    core: usize,
    task: Box<dyn BioTask>,
    owner: BioOwnerId,
    lanes: Vec<Option<TestTaskLane>>,
}

/// A lane of a task.
struct TestTaskLane {
    lane: Box<dyn Lane>,
    batch: Batch,
    in_flight: usize,
    closed: bool,
}

impl RunningTestTask {
    fn call(
        &mut self,
        state: &mut CoreLaneState,
        now: Nanos,
        f: impl FnOnce(&mut dyn BioTask, &mut dyn BioTaskCx),
    ) {
        let RunningTestTask { task, lanes, owner, .. } = self;
        f(&mut **task, &mut TestTaskCx { state, now, lanes, owner: *owner });
    }

    /// Runs one turn. Returns true if the task is over.
    fn turn(&mut self, state: &mut CoreLaneState, now: Nanos, stop: Option<Option<AckOnLastDrop>>) -> bool {
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
    state: &'a mut CoreLaneState,
    now: Nanos,
    lanes: &'a mut Vec<Option<TestTaskLane>>,
    owner: BioOwnerId,
}

impl TestTaskCx<'_> {
    fn lane(&mut self, slot: BioTaskLaneId) -> &mut TestTaskLane {
        self.lanes[slot.0].as_mut().expect("a lane that is open")
    }
}

impl BioTaskCx for TestTaskCx<'_> {
    fn open(&mut self, device: &Arc<dyn Device>) -> Result<BioTaskLaneId, DeviceControlError> {
        let lane = device.open(&mut self.state.cx(self.now))?;
        self.lanes.push(Some(TestTaskLane { lane, batch: Batch::new(), in_flight: 0, closed: false }));
        Ok(BioTaskLaneId(self.lanes.len() - 1))
    }

    fn close(&mut self, slot: BioTaskLaneId) {
        let open = self.lane(slot);
        assert_eq!(open.in_flight, 0, "a task closes a lane with bios in flight");
        open.closed = true;
    }

    fn submit(&mut self, slot: BioTaskLaneId, mut bio: Box<Bio>) {
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

    fn all_cores(&self) -> Arc<dyn CoreCommandSender> {
        Arc::clone(self.state.others())
    }

    fn subscribe(&mut self, queue: &Arc<WaitQueue>) -> WaitQueueSubscription {
        queue.subscribe(&mut self.state.cx(self.now))
    }
}

impl SteppedTestCores {
    /// Starts the queued tasks, round robin over the cores, and gives each task one turn. Returns
    /// the number of running tasks.
    pub fn run_tasks(&mut self) -> usize {
        let orders = std::mem::take(&mut lock_test_mutex(&self.test_cores.orders).queue);
        let mut stops = Vec::new();
        for order in orders {
            match order {
                TaskStartStopCommand::Start(id, make) => {
                    let core = id as usize % self.cores.len();
                    let owner = self.cores[core].new_owner();
                    self.tasks.push(RunningTestTask { id, core, task: make(), owner, lanes: Vec::new() });
                }
                TaskStartStopCommand::Stop(id, ack) => stops.push((id, ack)),
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
