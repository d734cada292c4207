//! The disks that tables can write, and the persistent snapshots that they have.

use crate::registry::{DeviceRegistry, RegisteredDevice};
use crate::state_folder::StableDiskId;
use crate::state_folder::records::{SnapshotRecord, SnapshotRecordState};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};
use udm_core::{DevNo, Device, Sectors};
use udm_dm::{SnapshotReport, SnapshotState, Table};
use udm_wire::words::escape_table_word;

/// A disk that a table can write.
pub(super) struct WritableDisk {
    /// Index of the device that has the table, in the list of the change.
    pub place: usize,
    /// Identity of the disk.
    pub disk: StableDiskId,
    /// Device number of the disk.
    pub number: DevNo,
    /// If true, writes are copied to the disk's snapshots first.
    pub copies: bool,
}

/// The disks that `tables` can write: all devices of tables that are not read-only, except the
/// origin of a snapshot.
pub(super) fn writable_disks(registry: &DeviceRegistry, tables: &[Option<Arc<Table>>]) -> Vec<WritableDisk> {
    let mut found = Vec::new();
    for (place, table) in tables.iter().enumerate() {
        let Some(table) = table.as_ref().filter(|table| !table.limits().read_only) else { continue };
        for entry in table.targets() {
            let only_read = (entry.target.type_name() == "snapshot")
                .then(|| entry.target.as_snapshot().map(|view| view.report().origin.number))
                .flatten();
            let copies = matches!(entry.target.type_name(), "snapshot-origin" | "snapshot-merge");
            for used in entry.target.devices() {
                let number = used.device.number;
                let disk = registry.disk_id_cached(number).filter(|_| Some(number) != only_read);
                found.extend(disk.map(|disk| WritableDisk { place, disk, number, copies }));
            }
        }
    }
    found
}

/// The persistent snapshots in `table`, including those being merged.
pub(super) fn persistent_snapshots(table: &Table) -> impl Iterator<Item = (SnapshotReport, Sectors)> + '_ {
    let found =
        table.targets().iter().filter_map(|entry| Some((entry.target.as_snapshot()?.report(), entry.len)));
    found.filter(|(report, _)| report.kind != "N")
}

fn seconds_now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// The record for a snapshot that becomes live in `mapped`. `None` if its disk or its store ends
/// with the process.
pub(super) fn build_snapshot_record(
    registry: &DeviceRegistry,
    mapped: &RegisteredDevice,
    report: &SnapshotReport,
    len: Sectors,
) -> Option<SnapshotRecord> {
    let (origin, store) = (registry.disk_id(&report.origin)?, registry.disk_id(&report.store)?);
    let info = mapped.snapshot_info();
    let words = [&report.origin, &report.store]
        .map(|device| escape_table_word(&registry.uri_of(device.number)).into_owned());
    Some(SnapshotRecord {
        name: mapped.device.name(),
        uuid: mapped.device.uuid(),
        origin,
        store,
        table: format!("0 {} snapshot {} {} {} {}", len.0, words[0], words[1], report.kind, report.chunk.0),
        by_name: info.by_name,
        made: seconds_now(),
        made_store: info.store.clone(),
        was_linear: info.origin_was_linear,
        merging: report.state.is_merge(),
        throttle: None,
        vhost_user: Vec::new(),
        ublk: None,
        is_foreign: false,
        state: SnapshotRecordState::Detached { origin: None },
    })
}

/// True if one of `tables` has the snapshot in `store`. If another table took the snapshot over,
/// the old one does not count.
pub(super) fn is_snapshot_in_tables(
    tables: &[Option<Arc<Table>>],
    registry: &DeviceRegistry,
    store: &StableDiskId,
) -> bool {
    tables.iter().flatten().any(|table| {
        let has_it = |report: &SnapshotReport| report.state != SnapshotState::Invalid;
        let mut stores =
            persistent_snapshots(table).filter(|(report, _)| has_it(report)).map(|(report, _)| report.store);
        stores.any(|found| registry.disk_id_cached(found.number).is_some_and(|id| id.is(store)))
    })
}
