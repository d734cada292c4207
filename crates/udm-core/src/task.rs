//! Work that no client asks for: a path that is checked, a lane that is kept open.

use crate::{Batch, Bio, Cores, Device, Nanos, OpenError, OwnWork, WaitHandle, WaitQueue};
use std::sync::Arc;

/// Something that opens devices and submits bios of its own accord, on one core for its whole life,
/// whether there are clients or not. [`crate::Cores::start`] starts one.
pub trait Task {
    /// Goes on: called once when it was started, then whenever a time that it asked for has come or
    /// a bell that it waits for was rung. What it does in a call must be bounded, for the others of
    /// its core.
    fn turn(&mut self, cx: &mut dyn TaskCx);

    /// Takes its bios that finished and leaves `done` empty.
    fn complete(&mut self, done: &mut Batch, cx: &mut dyn TaskCx);

    /// Begin nothing new, let go of what nothing is in flight on, and be over when all is home.
    fn stop(&mut self, cx: &mut dyn TaskCx);

    /// True when it is over and nothing of it is in flight: the core drops it.
    fn is_over(&self) -> bool;

    /// Whether the end of the program waits for it; the same for its whole life. The lanes of one
    /// in the background are its own, so that nobody has to wait for what is in flight on them.
    fn busy(&self) -> OwnWork;
}

/// What a task may touch besides itself.
pub trait TaskCx {
    /// A lane of `device` on this core.
    ///
    /// # Errors
    /// As the device says.
    fn open(&mut self, device: &Arc<dyn Device>) -> Result<DeviceSlot, OpenError>;

    /// Gives a lane up. Nothing of this task may be in flight on it.
    fn close(&mut self, slot: DeviceSlot);

    /// Queues a bio: it goes down with this turn's batch and comes back through [`Task::complete`].
    fn submit(&mut self, slot: DeviceSlot, bio: Box<Bio>);

    /// The time, the same for the whole turn.
    fn now(&self) -> Nanos;

    /// Asks for one turn at `at` or soon after; a later call replaces it, [`Nanos::NEVER`] takes it
    /// back.
    fn wake_at(&mut self, at: Nanos);

    /// The inboxes of all cores.
    fn all_cores(&self) -> Arc<dyn Cores>;

    /// A place from which to wait for `wait_queue`.
    fn subscribe(&mut self, bell: &Arc<WaitQueue>) -> WaitHandle;
}

/// A lane that a task has open, as its core numbers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceSlot(pub usize);

/// Makes a task, on the core that will have it: tasks are not `Send`.
pub type TaskFactory = Box<dyn FnOnce() -> Box<dyn Task> + Send>;

/// A task that was started, from outside. Dropping it stops the task.
#[must_use = "the task is stopped when this is dropped"]
pub struct TaskHandle(Option<Box<dyn FnOnce(Option<crate::Ack>) + Send + Sync>>);

impl TaskHandle {
    /// A handle that calls `stop` once, with what is to be dropped when the core has told the task.
    pub fn new(stop: impl FnOnce(Option<crate::Ack>) + Send + Sync + 'static) -> TaskHandle {
        TaskHandle(Some(Box::new(stop)))
    }

    /// Stops the task. `told` is dropped when the task knows; what it has in flight then may take
    /// longer.
    pub fn stop(mut self, told: crate::Ack) {
        if let Some(stop) = self.0.take() {
            stop(Some(told));
        }
    }
}

impl Drop for TaskHandle {
    fn drop(&mut self) {
        if let Some(stop) = self.0.take() {
            stop(None);
        }
    }
}
