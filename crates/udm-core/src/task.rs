//! Tasks: work on a core without a client, such as a path check.

use crate::{
    Batch, Bio, CoreCommandSender, Device, DeviceControlError, Nanos, OwnWork, WaitQueue,
    WaitQueueSubscription,
};
use std::sync::Arc;

/// Work that opens devices and submits bios without a client, on one core for its whole life.
/// [`crate::CoreCommandSender::start`] starts a task.
pub trait BioTask {
    /// Runs the task: once after its start, then each time that it asked for and after each wake of
    /// a [`WaitQueue`] that it waits for. The work of a call must be bounded, since it delays the
    /// others of the core.
    fn turn(&mut self, cx: &mut dyn BioTaskCx);

    /// Takes the completed bios of the task and leaves `done` empty.
    fn complete(&mut self, done: &mut Batch, cx: &mut dyn BioTaskCx);

    /// Stops the task: it begins nothing new, closes idle lanes, and is over when all bios have
    /// completed.
    fn stop(&mut self, cx: &mut dyn BioTaskCx);

    /// True if the task is over and has nothing in flight: the core drops it.
    fn is_over(&self) -> bool;

    /// Whether the program end waits for the task. A background task has lanes of its own, so its
    /// bios in flight delay nobody; once stopped it may become required, until its bios complete.
    fn own_work(&self) -> OwnWork;
}

/// The context of a task: everything outside itself that a task may touch.
pub trait BioTaskCx {
    /// Opens a lane of `device` on this core.
    ///
    /// # Errors
    /// The error of the device.
    fn open(&mut self, device: &Arc<dyn Device>) -> Result<BioTaskLaneId, DeviceControlError>;

    /// Closes a lane. The task must have nothing in flight on it.
    fn close(&mut self, slot: BioTaskLaneId);

    /// Queues a bio: it is submitted with this turn's batch and completes through
    /// [`BioTask::complete`].
    fn submit(&mut self, slot: BioTaskLaneId, bio: Box<Bio>);

    /// The time, the same for the whole turn.
    fn now(&self) -> Nanos;

    /// Asks for one turn at `at` or soon after. A later call replaces the time; [`Nanos::NEVER`]
    /// cancels it.
    fn wake_at(&mut self, at: Nanos);

    /// All cores.
    fn all_cores(&self) -> Arc<dyn CoreCommandSender>;

    /// Creates a handle to wait for `queue`.
    fn subscribe(&mut self, queue: &Arc<WaitQueue>) -> WaitQueueSubscription;
}

/// An open lane of a task, as numbered by its core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BioTaskLaneId(pub usize);

/// Creates a task on the core that runs it, since tasks are not `Send`.
pub type BioTaskFactory = Box<dyn FnOnce() -> Box<dyn BioTask> + Send>;

/// The handle of a started task. Dropping it stops the task.
#[must_use = "the task is stopped when this is dropped"]
pub struct BioTaskHandle(Option<Box<dyn FnOnce(Option<crate::AckOnLastDrop>) + Send + Sync>>);

impl BioTaskHandle {
    /// Creates a handle that calls `stop` once. The `AckOnLastDrop` is dropped after
    /// [`BioTask::stop`] was called.
    pub fn new(stop: impl FnOnce(Option<crate::AckOnLastDrop>) + Send + Sync + 'static) -> BioTaskHandle {
        BioTaskHandle(Some(Box::new(stop)))
    }

    /// Stops the task. `ack` is dropped once [`BioTask::stop`] was called; bios in flight may take
    /// longer.
    pub fn stop(mut self, ack: crate::AckOnLastDrop) {
        if let Some(stop) = self.0.take() {
            stop(Some(ack));
        }
    }
}

impl Drop for BioTaskHandle {
    fn drop(&mut self) {
        if let Some(stop) = self.0.take() {
            stop(None);
        }
    }
}
