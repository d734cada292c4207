//! Waits of a session for its queues.

use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::Duration;

/// Pause between two lines of the log about queues whose requests do not complete.
const WAIT_REPORT: Duration = Duration::from_secs(10);

/// How a session waits for its queues.
#[derive(Clone, Copy, Debug)]
pub(super) enum QueueWait {
    /// Its thread sleeps.
    Block,
    /// It calls this function, which runs the cores, until it returns false: they have ended.
    Step(fn() -> bool),
}

impl QueueWait {
    /// Receives a value from queues of the disk `name`; `None` if the cores have ended.
    pub(super) fn receive<T>(self, receiver: &Receiver<T>, name: &str) -> Option<T> {
        loop {
            match self {
                QueueWait::Block => match receiver.recv_timeout(WAIT_REPORT) {
                    Ok(value) => return Some(value),
                    Err(RecvTimeoutError::Disconnected) => return None,
                    Err(RecvTimeoutError::Timeout) => {
                        tracing::warn!("vhost-user {name}: waits for requests that the disk does not answer");
                    }
                },
                QueueWait::Step(run) => match receiver.try_recv() {
                    Ok(value) => return Some(value),
                    Err(TryRecvError::Empty) if run() => {}
                    Err(_) => return None,
                },
            }
        }
    }
}
