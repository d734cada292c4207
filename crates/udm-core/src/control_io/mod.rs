//! I/O of the control half: metadata that a target reads and writes when a table is loaded.
//!
//! The header of a snapshot store, for example, is checked before a lane of the new table is open.
//! A target gets a [`ControlIo`] for this and does no other I/O. So the same target code runs over
//! the rings of real cores and in the simulator.
//!
//! * [`read`], [`write()`], [`flush`] and [`read_all`] are for callers that have bytes, not bios.
//! * [`ControlTransfer`] tracks the bios of one run. All implementations share it.
//! * [`RunHandle`] is a run that a core executes as a task.
//!
//! Contract: runs are independent. If one write must reach the device before another, the caller
//! sends it in an earlier run; if it must be durable first, the caller also sends a flush.

mod bytes_io;
mod run_task;
mod transfer;

pub use bytes_io::{flush, read, read_all, write};
pub use run_task::{RunHandle, RunResult};
pub use transfer::ControlTransfer;

use crate::{Batch, Device};
use std::sync::Arc;

/// I/O of the control side: what is read and written when a table is loaded. Blocks the calling
/// thread, which serves nobody meanwhile.
pub trait ControlIo {
    /// Does `bio_faults` on `device`, any number at a time and in any order, and gives them back in the
    /// order in which they were given, each with its status. They are reads, writes and flushes;
    /// one that is longer than the device takes, or out of its range, ends with an error and is
    /// not sent. A flush covers what earlier runs wrote. The cookie is the run's own.
    ///
    /// # Errors
    /// When there is no lane to be had; when the device does not answer (ETIMEDOUT); when the load
    /// is called off, or the program ends. What was sent may take effect all the same, and later.
    fn run(&self, device: &Arc<dyn Device>, bios: Batch) -> RunResult;
}
