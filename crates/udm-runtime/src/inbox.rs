//! The inbox of a core, and the wakeup of a sleeping core.
//!
//! Any thread may send; only the core receives. Messages of one sender keep their order. A wakeup
//! costs a system call only if the core sleeps ([`CoreSleepState`]).

use crate::sleep_state::{CoreSleepState, ReceivingCoreState};
use crossbeam_queue::SegQueue;
use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// A queue of messages with an eventfd; one per core.
pub(crate) struct EventFdMessageQueue<T> {
    queue: SegQueue<T>,
    sleep_state: CoreSleepState,
    eventfd: Arc<OwnedFd>,
}

impl<T> EventFdMessageQueue<T> {
    pub(crate) fn new() -> io::Result<EventFdMessageQueue<T>> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC)?;
        Ok(EventFdMessageQueue {
            queue: SegQueue::new(),
            sleep_state: CoreSleepState::new(),
            eventfd: Arc::new(fd),
        })
    }

    /// Queues a message and wakes the core if it sleeps. Messages to a detached core are dropped.
    pub(crate) fn send(&self, message: T) {
        self.queue.push(message);
        loop {
            match self.sleep_state.after_send() {
                ReceivingCoreState::Awake => return,
                // The counter cannot overflow: it is written once per sleep of the core.
                ReceivingCoreState::Sleeping => {
                    let _ = rustix::io::write(&*self.eventfd, &1u64.to_ne_bytes());
                    return;
                }
                ReceivingCoreState::Detached if self.sleep_state.discard_if_detached(|| self.empty()) => {
                    return;
                }
                ReceivingCoreState::Detached => {}
            }
        }
    }

    /// Detaches the core: drops all messages, queued and new.
    pub(crate) fn stop_receiving(&self) {
        self.sleep_state.stop_receiving();
        self.empty();
    }

    /// A new core attaches to the inbox of a detached one.
    pub(crate) fn join(&self) {
        self.sleep_state.join();
    }

    fn empty(&self) {
        while self.queue.pop().is_some() {}
    }

    /// Takes the oldest message. Only the core calls this.
    pub(crate) fn take(&self) -> Option<T> {
        self.queue.pop()
    }

    /// True if a message is queued.
    pub(crate) fn has_messages(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Announces that the core is about to sleep. Returns false if it must not, because a message
    /// is queued.
    pub(crate) fn try_sleep(&self) -> bool {
        self.sleep_state.try_sleep(|| self.has_messages())
    }

    /// The core is awake: senders need not wake it.
    pub(crate) fn set_awake(&self) {
        self.sleep_state.set_awake();
    }

    /// The eventfd that a sleeping core reads.
    pub(crate) fn eventfd(&self) -> Arc<OwnedFd> {
        self.eventfd.clone()
    }
}
