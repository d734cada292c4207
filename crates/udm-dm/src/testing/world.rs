//! Cores on one thread.

use super::lock_test_mutex;
use super::tasks::{self, RunningTestTask, TaskStartStopQueue};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use udm_core::{
    Batch, Bio, BioTaskFactory, BioTaskHandle, CoreCommandSender, CoreId, CoreLaneState, Cx, Device,
    DeviceControlError, DeviceId, Lane, LaneCommand, Nanos,
};

/// Cores on one thread, stepped by hand.
pub struct SteppedTestCores {
    pub(super) cores: Vec<CoreLaneState>,
    pub(super) test_cores: Arc<TestCoreInboxes>,
    pub(super) tasks: Vec<RunningTestTask>,
    in_turn: Arc<AtomicBool>,
    /// The current time; the test advances it.
    pub now: Nanos,
    /// The earliest time at which a lane asked to be polled, since the test last set this to
    /// [`Nanos::NEVER`].
    pub wake: Nanos,
}

/// The inboxes of a [`SteppedTestCores`].
#[derive(Default)]
pub struct TestCoreInboxes {
    boxes: Vec<Mutex<VecDeque<TestCoreMessage>>>,
    pub(super) orders: Arc<Mutex<TaskStartStopQueue>>,
}

/// Receiver and command; `None` is a wake-up.
type TestCoreMessage = (DeviceId, Option<LaneCommand>);

impl CoreCommandSender for TestCoreInboxes {
    fn broadcast(&self, device: DeviceId, command: LaneCommand) {
        for inbox in &self.boxes {
            lock_test_mutex(inbox).push_back((device, Some(command.clone())));
        }
    }

    fn wake_up(&self, core: CoreId, id: DeviceId) {
        lock_test_mutex(&self.boxes[core.index()]).push_back((id, None));
    }

    /// The task runs in [`TestWorld::run_tasks`].
    fn start(&self, make: BioTaskFactory) -> BioTaskHandle {
        tasks::queue_task_start(&self.orders, make)
    }
}

impl SteppedTestCores {
    /// A world of `cores` cores at time 0.
    #[must_use]
    pub fn new(cores: usize) -> SteppedTestCores {
        let boxes = (0..cores).map(|_| Mutex::default()).collect();
        let test_cores = Arc::new(TestCoreInboxes { boxes, orders: Arc::default() });
        let others = || Arc::<TestCoreInboxes>::clone(&test_cores) as Arc<dyn CoreCommandSender>;
        let state =
            |n: usize| CoreLaneState::new(CoreId(n as u16), cores, n as u64, None).with_cores(others());
        SteppedTestCores {
            cores: (0..cores).map(state).collect(),
            test_cores,
            tasks: Vec::new(),
            in_turn: Arc::default(),
            now: Nanos(0),
            wake: Nanos::NEVER,
        }
    }

    /// The inboxes, for senders of commands.
    #[must_use]
    pub fn cores(&self) -> Arc<TestCoreInboxes> {
        Arc::clone(&self.test_cores)
    }

    /// True during the turn of a core. Tests use it to check that an action does not happen on a
    /// core.
    #[must_use]
    pub fn in_turn(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.in_turn)
    }

    /// Runs one turn of `core`, which first delivers the commands that wait for it.
    pub fn turn<R>(&mut self, core: usize, f: impl FnOnce(&mut Cx<'_>) -> R) -> R {
        self.deliver(core);
        let mut cx = self.cores[core].cx(self.now);
        self.in_turn.store(true, Ordering::Relaxed);
        let result = f(&mut cx);
        self.in_turn.store(false, Ordering::Relaxed);
        self.wake = self.wake.min(cx.wake());
        result
    }

    /// The state of `core`, for tests that create their own turns. Delivers nothing.
    pub fn state(&mut self, core: usize) -> &mut CoreLaneState {
        &mut self.cores[core]
    }

    /// True if messages wait for `core`.
    #[must_use]
    pub fn has_messages(&self, core: usize) -> bool {
        !lock_test_mutex(&self.test_cores.boxes[core]).is_empty()
    }

    /// Delivers the messages that wait for `core` to the inboxes of its lanes.
    pub fn deliver(&mut self, core: usize) {
        loop {
            let next = lock_test_mutex(&self.test_cores.boxes[core]).pop_front();
            let ports = self.cores[core].inboxes();
            match next {
                Some((device, Some(command))) => ports.deliver(device, &command),
                Some((id, None)) => ports.wake_up(id),
                None => return,
            }
        }
    }

    /// Opens `device` on `core`.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn open(&mut self, core: usize, device: &dyn Device) -> Result<Box<dyn Lane>, DeviceControlError> {
        self.turn(core, |cx| device.open(cx))
    }

    /// Starts `bios` and submits them as one batch.
    pub fn submit(&mut self, core: usize, lane: &mut dyn Lane, bios: impl IntoIterator<Item = Box<Bio>>) {
        let mut batch: Batch = bios.into_iter().collect();
        for bio in &mut batch {
            bio.start();
        }
        self.turn(core, |cx| lane.submit(&mut batch, cx));
        assert!(batch.is_empty(), "submit leaves the batch empty");
    }

    /// Polls once, and finishes the bios that came back.
    pub fn poll(&mut self, core: usize, lane: &mut dyn Lane) -> Batch {
        let mut done = Batch::new();
        self.turn(core, |cx| lane.poll(&mut done, cx));
        for bio in &mut done {
            bio.finish();
        }
        done
    }

    /// Submits `bio` alone and polls until it completes.
    ///
    /// # Panics
    /// If it has not completed after a thousand polls, or another bio came back.
    pub fn run(&mut self, core: usize, lane: &mut dyn Lane, bio: Box<Bio>) -> Box<Bio> {
        self.submit(core, lane, [bio]);
        for _ in 0..1000 {
            let mut done = self.poll(core, lane);
            assert!(done.len() <= 1, "one bio was submitted, {} were returned", done.len());
            if let Some(bio) = done.pop() {
                return bio;
            }
        }
        panic!("the bio did not complete");
    }
}
