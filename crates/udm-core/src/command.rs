//! Commands to lanes: how the control half changes the data path without a lock.
//!
//! [`CoreCommandSender::broadcast`] sends a command to every core, which puts it into the
//! [`crate::LaneInbox`] of each lane of the device. The lane finds it in its next `submit` or
//! `poll`, by a test of a plain flag. The reply is an [`AckOnLastDrop`]: each receiver holds a
//! clone, and dropping the last clone means that all are done. A core with no lane of the device
//! drops its clone at once.

use crate::{BioTaskFactory, BioTaskHandle, CoreId, DeviceId, DrainMode};
use std::any::Any;
use std::sync::{Arc, Mutex};

/// A command to the lanes of a mapped device. The state machine is in udm-dm, `mapped/lane.rs`.
#[derive(Clone)]
pub enum LaneCommand {
    /// Opens the lane of `table`, without using it yet. An error goes into `failure`.
    Prepare {
        /// The new table, of the type that the lanes of the device know.
        table: Arc<dyn Any + Send + Sync>,
        /// Number of the load; a `Resume` with the same number uses the lane.
        generation: u64,
        /// Receives the first error.
        failure: FirstLaneError,
        /// Dropped when done.
        ack: AckOnLastDrop,
    },
    /// Drops the lane that a `Prepare` opened, because the resume was cancelled.
    Unprepare {
        /// Number of the load.
        generation: u64,
        /// Dropped when done.
        ack: AckOnLastDrop,
    },
    /// Queues new bios; drops `ack` when nothing is in flight any more.
    Suspend {
        /// How to treat bios that are held back.
        how: DrainMode,
        /// Dropped when the lane is empty.
        ack: AckOnLastDrop,
    },
    /// Uses the table of `generation` (prepared before, or live already) and submits the queued
    /// bios.
    Resume {
        /// Number of the load whose table is used.
        generation: u64,
        /// Dropped when done.
        ack: AckOnLastDrop,
    },
    /// Only causes a `poll`: a condition that lanes wait for has changed.
    Kick,
}

/// All cores, as seen by senders of commands.
pub trait CoreCommandSender: Send + Sync {
    /// Delivers `command` to the lanes of `device` on every core.
    fn broadcast(&self, device: DeviceId, command: LaneCommand);

    /// Requests one poll of each lane or front end on `core` that has a lane inbox for `id`; see
    /// [`crate::WaitQueue`].
    fn wake_up(&self, core: CoreId, id: DeviceId);

    /// Starts a task on a core of the implementation's choice. If no core runs tasks, the task is
    /// dropped.
    fn start(&self, make: BioTaskFactory) -> BioTaskHandle;
}

/// A token held by each receiver that has yet to reply. Dropping the last clone runs the callback.
#[derive(Clone)]
pub struct AckOnLastDrop(
    #[expect(dead_code, reason = "dropping it runs the callback")] Arc<LastDropCallback>,
);

struct LastDropCallback(Option<Box<dyn FnOnce() + Send + Sync>>);

impl AckOnLastDrop {
    /// Creates a token. The thread that drops the last clone runs `then`.
    pub fn new(then: impl FnOnce() + Send + Sync + 'static) -> AckOnLastDrop {
        AckOnLastDrop(Arc::new(LastDropCallback(Some(Box::new(then)))))
    }
}

impl Drop for LastDropCallback {
    fn drop(&mut self) {
        if let Some(then) = self.0.take() {
            then();
        }
    }
}

/// The first error of a command, set by lanes of any core.
#[derive(Clone, Default)]
pub struct FirstLaneError(Arc<Mutex<Option<crate::DeviceControlError>>>);

impl FirstLaneError {
    /// Stores `error` unless an error is stored already. Takes a lock; used only when a lane is
    /// opened.
    pub fn set(&self, error: crate::DeviceControlError) {
        self.0.lock().unwrap_or_else(|e| e.into_inner()).get_or_insert(error);
    }

    /// Removes and returns the error.
    #[must_use]
    pub fn take(&self) -> Option<crate::DeviceControlError> {
        self.0.lock().unwrap_or_else(|e| e.into_inner()).take()
    }
}
