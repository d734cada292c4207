//! The end of a clone: its destination takes its place.

use super::record::{record_finish, undo_finish};
use super::{clone_error, find_clone};
use crate::TableLoadControlIo;
use crate::error::VerbError;
use crate::registry::{BaseDir, DeviceRegistry};
use crate::verbs::reload::replace_live_table;
use crate::verbs::{CancelToken, block_on_verb};
use udm_core::control_io;
use udm_core::errno::{EBUSY, EINVAL};

/// Replaces the table of the clone `name` by a linear one over its destination. Requests pause
/// meanwhile, and none fails. Afterwards the source and the metadata are not used. May block.
///
/// All of the destination is durable when the table changes: the source may be gone afterwards, so
/// nothing can be copied again. A clone whose metadata cannot be written can be finished too,
/// because its regions are in the destination all the same.
///
/// # Errors
/// ENXIO if there is no such device, EINVAL if it is not a clone. EBUSY if regions are not
/// hydrated, if the device is suspended or has a table in its inactive slot, or if its table is
/// replaced meanwhile. The error of the
/// destination if it cannot be flushed. The clone continues then.
pub fn finish_clone(
    registry: &DeviceRegistry,
    name: &str,
    cancel_token: &CancelToken,
) -> Result<(), VerbError> {
    let (mapped, table, report) = find_clone(registry, name)?;
    if report.unhydrated() > 0 {
        let (left, all) = (report.unhydrated(), report.regions);
        let why = format!("{left} of {all} regions are not hydrated yet: wait for the state done");
        return Err(clone_error(name, EBUSY, why));
    }
    if table.is_set_read_only() {
        let why = "its table was loaded read-only: load and resume a linear table in its place";
        return Err(clone_error(name, EINVAL, why));
    }
    let io = TableLoadControlIo::new(registry.cores()).until(cancel_token);
    control_io::flush_device(&io, &report.destination.device).map_err(|error| {
        let why = format!("the destination cannot be flushed: {}", error.text);
        clone_error(name, error.errno, why)
    })?;
    // If the server ends between the record and the change of the table, the clone returns as its
    // destination, which is complete.
    let recorded = record_finish(registry, &mapped, &report)?;
    let linear = format!("0 {} linear {} 0", report.len.0, report.destination.number);
    let folder = BaseDir::none();
    // Another table may have a clone that is not complete, or be none.
    let reload = replace_live_table(registry, &mapped, name, Some(&table), (&linear, &folder), cancel_token);
    block_on_verb(reload).map(drop).map_err(|error| {
        undo_finish(registry, recorded);
        error.at(None)
    })
}
