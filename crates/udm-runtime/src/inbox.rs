//! A core's inbox, and how a sleeping core is woken.
//!
//! Any thread may post; the core alone takes. The order of one sender's letters is kept. The knock
//! costs a system call only when the core sleeps ([`SleepState`]).

use crate::sleep_state::{ReceiverState, SleepState};
use crossbeam_queue::SegQueue;
use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// A queue of letters of any kind, with a bell. One to a core.
pub(crate) struct MessageQueue<T> {
    queue: SegQueue<T>,
    parking: SleepState,
    bell: Arc<OwnedFd>,
}

/// What cores send each other.
pub(crate) type Inbox = MessageQueue<crate::core_set::CoreMessage>;

impl<T> MessageQueue<T> {
    pub(crate) fn new() -> io::Result<MessageQueue<T>> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC)?;
        Ok(MessageQueue { queue: SegQueue::new(), parking: SleepState::new(), bell: Arc::new(bell) })
    }

    /// Puts a letter in and wakes the core if it sleeps. What is for a core that is gone is
    /// dropped.
    pub(crate) fn send(&self, message: T) {
        self.queue.push(message);
        loop {
            match self.parking.after_send() {
                ReceiverState::Awake => return,
                // The counter can't overflow: it is written once for each time that the core goes
                // to sleep.
                ReceiverState::Sleeping => {
                    let _ = rustix::io::write(&*self.bell, &1u64.to_ne_bytes());
                    return;
                }
                ReceiverState::Detached if self.parking.discard_if_detached(|| self.empty()) => return,
                ReceiverState::Detached => {}
            }
        }
    }

    /// The core is gone: what is in the inbox, and what comes, is dropped.
    pub(crate) fn stop_receiving(&self) {
        self.parking.stop_receiving();
        self.empty();
    }

    /// A core takes the place of one that is gone.
    pub(crate) fn join(&self) {
        self.parking.join();
    }

    fn empty(&self) {
        while self.queue.pop().is_some() {}
    }

    /// The oldest letter. The core only.
    pub(crate) fn take(&self) -> Option<T> {
        self.queue.pop()
    }

    /// True when there is a letter.
    pub(crate) fn has_messages(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Announces that the core is about to sleep. False when it must not: there is a letter.
    pub(crate) fn try_sleep(&self) -> bool {
        self.parking.try_sleep(|| self.has_messages())
    }

    /// The core is awake again: nobody needs to ring.
    pub(crate) fn set_awake(&self) {
        self.parking.set_awake();
    }

    /// What a sleeping core reads.
    pub(crate) fn eventfd(&self) -> Arc<OwnedFd> {
        self.bell.clone()
    }
}
