//! A session of the simulator: it handles a message when it is told to.

use super::channel::VhostUserChannel;
use super::queue_wait::QueueWait;
use super::session::{SessionStep, VhostUserSession};
use crate::nbd::Exports;
use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use udm_runtime::ProcessCores;

/// A session of one front end, without a thread.
pub struct SteppedVhostUserSession(VhostUserSession);

impl SteppedVhostUserSession {
    /// A session of the connected `socket` for the export `name` of `exports`; `None` if there is
    /// no such export. Where a session of the program waits for its queues, this one calls `run`,
    /// which runs the cores; false ends the wait.
    ///
    /// # Errors
    /// The system has no descriptors left.
    pub fn new(
        socket: OwnedFd,
        core_set: &Arc<ProcessCores>,
        exports: &Arc<Exports>,
        name: &str,
        run: fn() -> bool,
    ) -> io::Result<Option<SteppedVhostUserSession>> {
        let Some(export) = exports.acquire(name) else { return Ok(None) };
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let (stop, event) = (Arc::new(eventfd(0, flags)?), Arc::new(eventfd(0, flags)?));
        let channel = VhostUserChannel { socket, stop, event };
        let wait = QueueWait::Step(run);
        Ok(Some(SteppedVhostUserSession(VhostUserSession::new(channel, Arc::clone(core_set), export, wait))))
    }

    /// Handles a message. One must have arrived, or the front end must have closed the connection.
    /// Returns false if it has.
    ///
    /// # Errors
    /// The front end has broken the protocol.
    pub fn step(&mut self) -> io::Result<bool> {
        Ok(matches!(self.0.step()?, SessionStep::Handled))
    }

    /// Ends the session. Afterwards no request of it is in flight.
    pub fn end(mut self) {
        self.0.stop_all();
    }
}
