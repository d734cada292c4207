//! A lane of a whole device, for a target that uses the device itself.

use super::Table;
use super::lane::TableLane;
use udm_core::{Batch, Cx, DeviceControlError, DrainMode, Lane, OwnWork};

/// The lane of a table with one linear target, which begins at sector 0 of its device
/// ([`Table::single_target`]). It cuts bios by the device's limits, and flushes around writes if
/// the device needs it.
pub struct WholeDeviceLane(TableLane);

impl WholeDeviceLane {
    /// Opens the lane of `table`.
    ///
    /// # Errors
    /// If the device cannot be opened on this core.
    pub fn open(table: &Table, cx: &mut Cx<'_>) -> Result<WholeDeviceLane, DeviceControlError> {
        TableLane::open_live(table, cx).map(WholeDeviceLane)
    }

    /// Submits reads and writes, without FUA or a flush, that a table above has checked against
    /// the limits of this device. They go to the device as bios of a linear table do.
    #[inline(always)]
    pub fn submit_checked(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        self.0.submit_checked(batch, cx);
    }
}

impl Lane for WholeDeviceLane {
    #[inline]
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        self.0.submit(batch, cx);
    }

    #[inline(always)]
    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        self.0.poll(done, cx);
    }

    fn drain(&mut self, how: DrainMode, back: &mut Batch, cx: &mut Cx<'_>) {
        self.0.drain(how, back, cx);
    }

    fn own_work(&self) -> OwnWork {
        self.0.own_work()
    }
}
