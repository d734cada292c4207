//! Snapshots by name: the operations of `lvcreate -s`, `lvconvert --merge` and `lvremove`, in one
//! step each.
//!
//! Contract: each verb works on tables that dmsetup's verbs can also read and change. A
//! [`SnapshotCreationInfo`] keeps the facts that tables lack: if the device was linear before, the
//! store that was made for a snapshot, and the time. All devices of one verb change together
//! ([`udm_dm::DeviceSetTransition`]), so the snapshots of a verb have one instant. Verbs on the
//! snapshots of one disk run one after the other. They may block on devices that they open.
//!
//! **Snapshots survive servers** (`attach`, `record_update`, `restore`,
//! [`records`](crate::state_folder::records)). A persistent snapshot has a record in the state
//! folder, from before it is live until it is removed or merged. Every change of devices is checked
//! against the records:
//!
//! * A table that can write the disk of a recorded snapshot becomes live only with or after that
//!   snapshot. Otherwise the snapshot would miss writes.
//! * Snapshots that were created by name are attached then. For other snapshots the table is
//!   refused; devices of the configuration file and the command line are retried after the others.
//! * A change writes its record before it begins and takes it back if it fails. The record has the
//!   origin's size and time of change. So a kill at any moment leaves a record that the next server
//!   waits for or checks.
//!
//! The cost: one directory scan per change of tables, and two syncs per change that adds or ends
//! snapshots.
//!
//! **Snapshots over a clone** (`image`) have no origin device: the clone is read-only instead.
//!
//! A merge begins as a handover to the origin's device. When it ends, the server restores the
//! origin's table, with or without a waiting client.

mod attach;
mod changes;
mod create;
mod image;
mod list;
mod merge;
mod origin;
mod record_update;
mod remove;
mod restore;
mod store;
mod tables;

pub use attach::LostSnapshotPolicy;
pub(super) use attach::SnapshotRecordTransaction;
pub use changes::{PAGE_MAX, list_changed_ranges};
pub use create::create_snapshots;
pub(crate) use image::attach_snapshots_of_clones;
pub use list::{describe_snapshot_by_name, list_live_snapshots, list_unattached_snapshots};
pub use merge::{PendingMerge, final_merge_state, finish_completed_merge, start_snapshot_merge};
pub use origin::find_devices_bypassing_origin;
pub(crate) use origin::{
    check_has_no_snapshots_by_name, follow_allowed_clients_of_origin, origin_table_if_linear_matches,
};
pub use remove::remove_snapshot;
pub(super) use restore::{attach_recorded_snapshots, restore_creation_info};

use crate::error::VerbError;
use crate::registry::{DeviceRegistry, RegisteredDevice};
use crate::state_folder::file_stamp::IdentifiedStoreFile;
use std::sync::Arc;
use std::time::Instant;
use udm_core::errno::EINVAL;
use udm_dm::{SnapshotReport, Table, TargetError};

/// Facts of a snapshot or an origin that its table lacks.
#[derive(Default)]
pub(crate) struct SnapshotCreationInfo {
    /// Creation time of a snapshot.
    pub made: Option<Instant>,
    /// The store, if it was created for this snapshot.
    pub store: Option<IdentifiedStoreFile>,
    /// True for a snapshot that was created by name.
    pub by_name: bool,
    /// True for a snapshot whose origin was linear before.
    pub origin_was_linear: bool,
    /// True while a snapshot is removed together with its record.
    pub is_discarded: bool,
    /// True for an origin that was linear before it had snapshots.
    pub was_linear: bool,
}

/// The report of the snapshot in a table of one line.
fn snapshot_report(table: &Table) -> Option<SnapshotReport> {
    match table.targets() {
        [entry] => Some(entry.target.as_snapshot()?.report()),
        _ => None,
    }
}

/// Looks up the snapshot `name`.
///
/// # Errors
/// ENXIO if there is no such device, EINVAL if it is not a snapshot.
fn find_snapshot(
    registry: &DeviceRegistry,
    name: &str,
) -> Result<(Arc<RegisteredDevice>, Arc<Table>, SnapshotReport), VerbError> {
    let mapped = registry.find(name)?;
    let (table, report) = current_snapshot_report(registry, name, &mapped)?;
    Ok((mapped, table, report))
}

/// The current table and report of a snapshot that was looked up before, even if it was renamed
/// since. Errors call it `name`.
///
/// # Errors
/// As [`find_snapshot`].
fn current_snapshot_report(
    registry: &DeviceRegistry,
    name: &str,
    mapped: &Arc<RegisteredDevice>,
) -> Result<(Arc<Table>, SnapshotReport), VerbError> {
    if !registry.is_active(mapped) {
        return Err(VerbError::missing(name));
    }
    let found = mapped.device.live().and_then(|table| snapshot_report(&table).map(|report| (table, report)));
    found.ok_or_else(|| verb_error_with_errno(name, EINVAL, "it is not a snapshot"))
}

fn verb_error_with_errno(name: &str, errno: i32, why: impl Into<String>) -> VerbError {
    VerbError::new(name, TargetError::errno(errno).because(why))
}
