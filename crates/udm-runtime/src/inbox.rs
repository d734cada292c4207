//! A core's inbox, and how a sleeping core is woken.
//!
//! Any thread may post; the core alone takes. The order of one sender's letters is kept. The knock
//! costs a system call only when the core sleeps ([`Parking`]).

use crate::parking::{Core, Parking};
use crossbeam_queue::SegQueue;
use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// A queue of letters of any kind, with a bell. One to a core.
pub(crate) struct Mailbox<T> {
    queue: SegQueue<T>,
    parking: Parking,
    bell: Arc<OwnedFd>,
}

/// What cores send each other.
pub(crate) type Inbox = Mailbox<crate::cluster::Mail>;

impl<T> Mailbox<T> {
    pub(crate) fn new() -> io::Result<Mailbox<T>> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC)?;
        Ok(Mailbox { queue: SegQueue::new(), parking: Parking::new(), bell: Arc::new(bell) })
    }

    /// Puts a letter in and wakes the core if it sleeps. What is for a core that is gone is
    /// dropped.
    pub(crate) fn post(&self, letter: T) {
        self.queue.push(letter);
        loop {
            match self.parking.posted() {
                Core::Awake => return,
                // The counter can't overflow: it is written once for each time that the core goes
                // to sleep.
                Core::Sleeps => {
                    let _ = rustix::io::write(&*self.bell, &1u64.to_ne_bytes());
                    return;
                }
                Core::Gone if self.parking.while_gone(|| self.empty()) => return,
                Core::Gone => {}
            }
        }
    }

    /// The core is gone: what is in the inbox, and what comes, is dropped.
    pub(crate) fn leave(&self) {
        self.parking.leave();
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
    pub(crate) fn has_mail(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Announces that the core is about to sleep. False when it must not: there is a letter.
    pub(crate) fn try_sleep(&self) -> bool {
        self.parking.try_sleep(|| self.has_mail())
    }

    /// The core is awake again: nobody needs to ring.
    pub(crate) fn awake(&self) {
        self.parking.awake();
    }

    /// What a sleeping core reads.
    pub(crate) fn eventfd(&self) -> Arc<OwnedFd> {
        self.bell.clone()
    }
}
