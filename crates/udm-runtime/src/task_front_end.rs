//! Tasks as front ends of a core.

use crate::front_end::{FrontCx, FrontEnd};
use std::any::Any;
use std::sync::Arc;
use udm_core::{
    AckOnLastDrop, Batch, Bio, BioTask, BioTaskCx, BioTaskLaneId, CoreCommandSender, Device,
    DeviceControlError, DeviceId, Nanos, OwnWork, WaitQueue, WaitQueueSubscription,
};

/// The message that stops a task.
pub(crate) struct StopTaskMessage {
    /// Dropped with the message, after the task has handled it.
    pub(crate) _ack: Option<AckOnLastDrop>,
}

/// A task: a front end without a client.
pub(crate) struct TaskFrontEnd {
    task: Box<dyn BioTask>,
    /// The topic of the stop message.
    topic: DeviceId,
}

impl TaskFrontEnd {
    pub(crate) fn new(task: Box<dyn BioTask>, topic: DeviceId) -> TaskFrontEnd {
        TaskFrontEnd { task, topic }
    }
}

impl FrontEnd for TaskFrontEnd {
    fn gather(&mut self, cx: &mut FrontCx<'_, '_>) {
        cx.subscribe(self.topic);
        self.task.turn(cx);
    }

    fn complete(&mut self, done: &mut Batch, cx: &mut FrontCx<'_, '_>) {
        self.task.complete(done, cx);
    }

    fn message(&mut self, message: &(dyn Any + Send), cx: &mut FrontCx<'_, '_>) {
        if message.is::<StopTaskMessage>() {
            self.task.stop(cx);
        }
    }

    /// The program end stops background tasks. A required task is stopped by its creator, and the
    /// program end waits for it.
    fn stop(&mut self, cx: &mut FrontCx<'_, '_>) {
        if self.task.own_work() < OwnWork::Required {
            self.task.stop(cx);
        }
    }

    fn is_closed(&self) -> bool {
        self.task.is_over()
    }

    fn own_work(&self) -> OwnWork {
        self.task.own_work()
    }
}

impl BioTaskCx for FrontCx<'_, '_> {
    fn open(&mut self, device: &Arc<dyn Device>) -> Result<BioTaskLaneId, DeviceControlError> {
        FrontCx::open(self, device)
    }

    fn close(&mut self, slot: BioTaskLaneId) {
        FrontCx::close(self, slot);
    }

    fn submit(&mut self, slot: BioTaskLaneId, bio: Box<Bio>) {
        FrontCx::submit(self, slot, bio);
    }

    fn now(&self) -> Nanos {
        FrontCx::now(self)
    }

    fn wake_at(&mut self, at: Nanos) {
        FrontCx::wake_at(self, at);
    }

    fn all_cores(&self) -> Arc<dyn CoreCommandSender> {
        Arc::clone(self.cx.all_cores())
    }

    fn subscribe(&mut self, queue: &Arc<WaitQueue>) -> WaitQueueSubscription {
        queue.subscribe(self.cx)
    }
}
