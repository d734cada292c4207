//! I/O of the control half: metadata that a target reads and writes when a table is loaded.
//!
//! The header of a snapshot store, for example, is checked before a lane of the new table is open.
//! A target gets a [`ControlIo`] for this and does no other I/O. So the same target code runs over
//! the rings of real cores and in the simulator.
//!
//! * [`read_sectors`], [`write_sectors()`], [`flush_device`] and [`read_sector_ranges`] are for
//!   callers that have bytes, not bios.
//! * [`ControlIoBatch`] tracks the bios of one run. All implementations share it.
//! * [`ControlIoRunGuard`] is a run that a core executes as a task.
//!
//! Contract: runs are independent. If one write must reach the device before another, the caller
//! sends it in an earlier run; if it must be durable first, the caller also sends a flush.

mod bytes_io;
mod run_task;
mod transfer;

pub use bytes_io::{flush_device, read_sector_ranges, read_sectors, write_sectors};
pub use run_task::{ControlIoResult, ControlIoRunGuard};
pub use transfer::ControlIoBatch;

use crate::{Batch, Device};
use std::sync::Arc;

/// I/O of the control half, such as metadata read and written when a table is loaded. Blocks the
/// calling thread.
pub trait ControlIo {
    /// Runs `bios` on `device`, several at a time and in any order. Returns them in their original
    /// order, each with its status. The bios are reads, writes and flushes. A bio that exceeds the
    /// device's limits or size fails and is not sent. A flush covers writes of earlier runs. The
    /// run overwrites the cookies.
    ///
    /// # Errors
    /// No lane can be opened; the device does not answer (ETIMEDOUT); the load is cancelled; the
    /// program ends. Bios that were sent may still take effect, even later.
    fn run(&self, device: &Arc<dyn Device>, bios: Batch) -> ControlIoResult;
}
