//! The wakeup of a core that sleeps in its ring.

use crate::ring::{Ring, RingCompletion, RingOp, RingUser};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use udm_core::{Buf, Segments};

/// A read of the inbox's eventfd that is always in flight, so that a message wakes a sleeping core.
pub(crate) struct EventFdRead {
    user: RingUser,
    fd: Arc<OwnedFd>,
    done: Vec<RingCompletion>,
}

impl EventFdRead {
    /// Submits the read of `fd`, the eventfd of an inbox.
    pub(crate) fn new(ring: &Ring, fd: Arc<OwnedFd>) -> EventFdRead {
        let read = EventFdRead { user: ring.user(), fd, done: Vec::new() };
        read.arm(Segments::from(Buf::zeroed(8)));
        read
    }

    fn arm(&self, data: Segments) {
        self.user.push(0, RingOp::Read { fd: self.fd.clone(), offset: 0, data, cached: false });
    }

    /// Submits the read again after it completed.
    pub(crate) fn rearm(&mut self) {
        self.user.take(&mut self.done);
        if let Some(done) = self.done.pop() {
            self.arm(done.data);
        }
    }
}
