//! I/O of the control side: what a table's constructors read and write before any lane of the new
//! table is open, such as the metadata of a store.
//!
//! A target does no I/O by itself: it is handed a [`ControlIo`], and so runs unchanged where the
//! bios go through the rings of real cores and where they go through a simulated world. An
//! [`Errand`] is what all of these have in common, and [`Started`] what those with cores have.
//! [`read`], [`write()`], [`flush`] and [`read_all`] are for those who have bytes and want no bios.
//!
//! Contract: nothing is kept from one run to the next. What is to be on the device before something
//! else is sent in a later run, behind a flush where it must last.

mod errand;
mod run;
mod whole;

pub use errand::Errand;
pub use run::{Answer, Started};
pub use whole::{flush, read, read_all, write};

use crate::{Batch, Device};
use std::sync::Arc;

/// I/O of the control side: what is read and written when a table is loaded. Blocks the calling
/// thread, which serves nobody meanwhile.
pub trait ControlIo {
    /// Does `bios` on `device`, any number at a time and in any order, and gives them back in the
    /// order in which they were given, each with its status. They are reads, writes and flushes;
    /// one that is longer than the device takes, or out of its range, ends with an error and is
    /// not sent. A flush covers what earlier runs wrote. The cookie is the run's own.
    ///
    /// # Errors
    /// When there is no lane to be had; when the device does not answer (ETIMEDOUT); when the load
    /// is called off, or the program ends. What was sent may take effect all the same, and later.
    fn run(&self, device: &Arc<dyn Device>, bios: Batch) -> Answer;
}
