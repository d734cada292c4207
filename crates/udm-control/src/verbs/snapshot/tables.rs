//! What tables say of persistent snapshots: which disks they write, and which snapshots they have.

use crate::registry::{Mapped, Registry};
use crate::state_folder::StoreId;
use crate::state_folder::records::{RecordState, SnapshotRecord};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};
use udm_core::bugs::{self, Bug};
use udm_core::{DevNo, Device, Sectors};
use udm_dm::{SnapshotReport, SnapshotState, Table};
use udm_wire::words::escape;

/// A device that a table writes.
pub(super) struct WritableDisk {
    /// Which device of the change has the table.
    pub place: usize,
    /// The disk.
    pub disk: StoreId,
    /// Its number.
    pub number: DevNo,
    /// What is written is copied to the disk's snapshots first.
    pub copies: bool,
}

/// The disks that `tables` can write: of each table but one for reading alone, all that it uses
/// but the origin of a snapshot.
pub(super) fn writable_disks(registry: &Registry, tables: &[Option<Arc<Table>>]) -> Vec<WritableDisk> {
    let mut found = Vec::new();
    for (place, table) in tables.iter().enumerate() {
        let Some(table) = table.as_ref().filter(|table| !table.limits().read_only) else { continue };
        for entry in table.targets() {
            let only_read = (entry.target.type_name() == "snapshot")
                .then(|| entry.target.snapshot().map(|view| view.report().origin.number))
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

/// The persistent snapshots in `table`, those that are being merged too.
pub(super) fn persistent_snapshots(table: &Table) -> impl Iterator<Item = (SnapshotReport, Sectors)> + '_ {
    let found =
        table.targets().iter().filter_map(|entry| Some((entry.target.snapshot()?.report(), entry.len)));
    found.filter(|(report, _)| report.kind != "N")
}

fn seconds_now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// What is to be recorded of a snapshot that becomes live in `mapped`; `None` for one of a disk, or
/// on a store, that is gone with the program.
pub(super) fn record(
    registry: &Registry,
    mapped: &Mapped,
    report: &SnapshotReport,
    len: Sectors,
) -> Option<SnapshotRecord> {
    let (origin, store) = (registry.disk_id(&report.origin)?, registry.disk_id(&report.store)?);
    let note = mapped.note();
    let words =
        [&report.origin, &report.store].map(|device| escape(&registry.uri_of(device.number)).into_owned());
    Some(SnapshotRecord {
        name: mapped.device.name(),
        uuid: mapped.device.uuid(),
        origin,
        store,
        table: format!("0 {} snapshot {} {} {} {}", len.0, words[0], words[1], report.kind, report.chunk.0),
        by_name: note.by_name,
        made: seconds_now(),
        made_store: note.store.clone(),
        was_linear: note.origin_was_linear,
        merging: report.state.is_merge() && !bugs::on(Bug::MergeNotRecorded),
        state: RecordState::Detached { origin: None },
    })
}

/// True when one of `tables` has the snapshot in `store`. One that was taken over by another table
/// has it no more.
pub(super) fn is_live(tables: &[Option<Arc<Table>>], registry: &Registry, store: &StoreId) -> bool {
    tables.iter().flatten().any(|table| {
        let has_it = |report: &SnapshotReport| {
            report.state != SnapshotState::Invalid || bugs::on(Bug::SpentTableCounts)
        };
        let mut stores =
            persistent_snapshots(table).filter(|(report, _)| has_it(report)).map(|(report, _)| report.store);
        stores.any(|found| registry.disk_id_cached(found.number).is_some_and(|id| id.is(store)))
    })
}
