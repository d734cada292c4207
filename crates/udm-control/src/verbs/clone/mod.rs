//! Clones by name: list them, create them with their files, and end them as linear devices.
//!
//! * `list`: describes clones. `finish`: replaces the clone by its destination.
//! * `create`: creates a clone. `files`: its destination and metadata, made or checked before.
//! * `record`: clones in the state folder. `restore`: their return when a server starts.
//!   `stand_in`: takes the place of a source that is away. `waiting`: clones that have not
//!   returned.
//!
//! A clone is a device whose table is one `clone` line. Clones that are a part of a longer table
//! are served as any target, but these verbs do not list or change them.

mod create;
pub(super) mod files;
mod finish;
mod list;
pub(crate) mod record;
mod restore;
pub(crate) mod stand_in;
mod waiting;

pub use create::create_clone;
pub use finish::finish_clone;
pub use list::{clone_boot_profile, describe_clone_by_name, list_all_clones, list_clones};
pub(crate) use restore::retry_clone;
pub use restore::{forget_absent_clone, restore_clones};
pub(crate) use waiting::WaitingClones;

use crate::error::VerbError;
use crate::registry::{DeviceRegistry, RegisteredDevice};
use std::sync::Arc;
use udm_core::errno::EINVAL;
use udm_dm::{CloneReport, Table, TargetError};

/// The report of the clone in a table of one line.
fn clone_report(table: &Table) -> Option<CloneReport> {
    match table.targets() {
        [entry] => Some(entry.target.as_clone()?.report()),
        _ => None,
    }
}

/// True for a clone, also for one that was finished in this server or an earlier one.
pub(crate) fn is_clone(registry: &DeviceRegistry, mapped: &RegisteredDevice) -> bool {
    let is_recorded = || registry.state_folder()?.own_clone(&mapped.device.name()).map(|_| ());
    mapped.device.live().is_some_and(|live| clone_report(&live).is_some()) || is_recorded().is_some()
}

/// Looks up the clone `name`.
///
/// # Errors
/// ENXIO if there is no such device, EINVAL if it is not a clone.
fn find_clone(
    registry: &DeviceRegistry,
    name: &str,
) -> Result<(Arc<RegisteredDevice>, Arc<Table>, CloneReport), VerbError> {
    let mapped = registry.find(name)?;
    let table = mapped.device.live();
    let found = table.and_then(|table| clone_report(&table).map(|report| (table, report)));
    let (table, report) = found.ok_or_else(|| clone_error(name, EINVAL, "it is not a clone"))?;
    Ok((mapped, table, report))
}

fn clone_error(name: &str, errno: i32, why: impl Into<String>) -> VerbError {
    VerbError::new(name, TargetError::errno(errno).because(why))
}
