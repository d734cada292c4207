//! Messages to lanes: how the control half changes the data path without a lock.
//!
//! A command goes to every core ([`Cores::broadcast`]), there to the [`crate::LaneInbox`] of each lane
//! of the device, and the lane finds it at its next `submit` or `poll` by one test of a plain flag.
//! The answer is an [`Ack`]: a token of which every receiver holds a clone; when the last clone is
//! dropped, all have done what was asked. A core with no lane of the device drops its clone at
//! once.

use crate::{CoreId, DeviceId, Drain, TaskFactory, TaskHandle};
use std::any::Any;
use std::sync::{Arc, Mutex};

/// Something for the lanes of a mapped device to do. See the state machine in udm-dm,
/// `mapped/lane.rs`.
#[derive(Clone)]
pub enum LaneCommand {
    /// Open the lane of `table`, without using it yet. A failure goes into `failure`.
    Prepare {
        /// The new table, of the type that the lanes of the device know.
        table: Arc<dyn Any + Send + Sync>,
        /// Which load it is; a `Resume` with the same number uses it.
        generation: u64,
        /// Where an error is put.
        failure: FirstError,
        /// Dropped when done.
        ack: Ack,
    },
    /// Drop the lane that a `Prepare` opened: the resume was called off.
    Unprepare {
        /// Which load it was.
        generation: u64,
        /// Dropped when done.
        ack: Ack,
    },
    /// Park new bios; drop the token when nothing is in flight any more.
    Suspend {
        /// What to do with bios that are held back.
        how: Drain,
        /// Dropped when the lane is empty.
        ack: Ack,
    },
    /// Take the table of `generation` (prepared before, or the one in use) and let parked bios go.
    Resume {
        /// The table to use.
        generation: u64,
        /// Dropped when done.
        ack: Ack,
    },
    /// Nothing but a `poll`: something that lanes wait for has changed.
    Kick,
}

/// All cores, for those that send them commands.
pub trait Cores: Send + Sync {
    /// Delivers `command` to the lanes of `device` on every core.
    fn broadcast(&self, device: DeviceId, command: LaneCommand);

    /// Has what holds a port of `id` on `core` visited once: see [`crate::WaitQueue`].
    fn wake_up(&self, core: CoreId, id: DeviceId);

    /// Starts a task, on a core of its choice. Where there are no cores that have any, it is
    /// dropped.
    fn start(&self, make: TaskFactory) -> TaskHandle;
}

/// A token held by everyone who has yet to answer. The last drop runs the callback.
#[derive(Clone)]
pub struct Ack(#[expect(dead_code, reason = "held for its drop")] Arc<AckInner>);

struct AckInner(Option<Box<dyn FnOnce() + Send + Sync>>);

impl Ack {
    /// A token whose last drop runs `then`, on whichever thread drops it.
    pub fn new(then: impl FnOnce() + Send + Sync + 'static) -> Ack {
        Ack(Arc::new(AckInner(Some(Box::new(then)))))
    }
}

impl Drop for AckInner {
    fn drop(&mut self) {
        if let Some(then) = self.0.take() {
            then();
        }
    }
}

/// Where the lanes put the first error of a command.
#[derive(Clone, Default)]
pub struct FirstError(Arc<Mutex<Option<crate::OpenError>>>);

impl FirstError {
    /// Keeps `error` unless there is one already. Control path: opening a lane.
    pub fn set(&self, error: crate::OpenError) {
        self.0.lock().unwrap_or_else(|e| e.into_inner()).get_or_insert(error);
    }

    /// Takes the error out.
    #[must_use]
    pub fn take(&self) -> Option<crate::OpenError> {
        self.0.lock().unwrap_or_else(|e| e.into_inner()).take()
    }
}
