//! Clones by name: list them, create them with their files, and end them as linear devices.
//!
//! * `list`: describes clones. `finish`: replaces the clone by its destination.
//! * `create`: creates a clone. `files`: its destination and metadata, made or checked before.
//!
//! A clone is a device whose table is one `clone` line. Clones that are a part of a longer table
//! are served as any target, but these verbs do not list or change them.

mod create;
pub(super) mod files;
mod finish;
mod list;

pub use create::create_clone;
pub use finish::finish_clone;
pub use list::{clone_boot_profile, describe_clone_by_name, list_clones};

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
