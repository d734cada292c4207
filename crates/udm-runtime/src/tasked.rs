//! Tasks among the front ends of a core.

use crate::front_end::{FrontCx, FrontEnd};
use std::any::Any;
use std::sync::Arc;
use udm_core::{
    Ack, Batch, Bell, Bio, Busy, Cores, Device, DeviceId, DeviceSlot, Listener, Nanos, OpenError, Task,
    TaskCx,
};

/// The letter that stops a task.
pub(crate) struct Stop {
    /// Dropped with the letter, when it has been read.
    pub(crate) _told: Option<Ack>,
}

/// A task, which is a front end that nobody is connected to.
pub(crate) struct Tasked {
    task: Box<dyn Task>,
    /// Where it is told to stop.
    topic: DeviceId,
}

impl Tasked {
    pub(crate) fn new(task: Box<dyn Task>, topic: DeviceId) -> Tasked {
        Tasked { task, topic }
    }
}

impl FrontEnd for Tasked {
    fn gather(&mut self, cx: &mut FrontCx<'_, '_>) {
        cx.listen(self.topic);
        self.task.turn(cx);
    }

    fn complete(&mut self, done: &mut Batch, cx: &mut FrontCx<'_, '_>) {
        self.task.complete(done, cx);
    }

    fn letter(&mut self, letter: &(dyn Any + Send), cx: &mut FrontCx<'_, '_>) {
        if letter.is::<Stop>() {
            self.task.stop(cx);
        }
    }

    /// The end of the program stops what is in the background. Who started what is owed stops it,
    /// and the end waits for that.
    fn stop(&mut self, cx: &mut FrontCx<'_, '_>) {
        if self.task.busy() < Busy::Owed {
            self.task.stop(cx);
        }
    }

    fn is_closed(&self) -> bool {
        self.task.is_over()
    }

    fn busy(&self) -> Busy {
        self.task.busy()
    }
}

impl TaskCx for FrontCx<'_, '_> {
    fn open(&mut self, device: &Arc<dyn Device>) -> Result<DeviceSlot, OpenError> {
        FrontCx::open(self, device)
    }

    fn close(&mut self, slot: DeviceSlot) {
        FrontCx::close(self, slot);
    }

    fn submit(&mut self, slot: DeviceSlot, bio: Box<Bio>) {
        FrontCx::submit(self, slot, bio);
    }

    fn now(&self) -> Nanos {
        FrontCx::now(self)
    }

    fn wake_at(&mut self, at: Nanos) {
        FrontCx::wake_at(self, at);
    }

    fn all_cores(&self) -> Arc<dyn Cores> {
        Arc::clone(self.cx.all_cores())
    }

    fn listen(&mut self, bell: &Arc<Bell>) -> Listener {
        bell.listen(self.cx)
    }
}
