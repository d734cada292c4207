//! The content that each disk and snapshot may have.
//!
//! A sector is a register: it holds the last value written, or one of several if this is not known.
//! Clients have at most one request in flight per sector of a disk or snapshot. A new snapshot
//! equals its origin at some time between two inspections, and then changes on its own. A merge
//! makes an origin equal to the snapshot, at some time between two inspections.

use std::path::PathBuf;
use udm_core::DeviceId;

/// State of a sector.
#[derive(Clone, Debug, Default)]
struct SectorState {
    /// Values that the sector may hold.
    can: Vec<u64>,
    /// Value of the write in progress.
    writing: Option<u64>,
    /// Values that were written or replaced since the last inspection.
    recent: Vec<u64>,
    /// True if the sector may hold any value.
    any: bool,
}

/// The content of a disk or snapshot.
#[derive(Clone, Debug)]
pub(super) struct DiskImage(Vec<SectorState>);

/// A read that returned an impossible value.
pub(super) struct ReadMismatch {
    pub(super) sector: u64,
    pub(super) found: u64,
    pub(super) can: Vec<u64>,
}

fn add_stamp_if_missing(list: &mut Vec<u64>, stamp: u64) {
    if !list.contains(&stamp) {
        list.push(stamp);
    }
}

impl DiskImage {
    pub(super) fn new(sectors: u64, first: impl Fn(u64) -> u64) -> DiskImage {
        DiskImage(
            (0..sectors).map(|at| SectorState { can: vec![first(at)], ..SectorState::default() }).collect(),
        )
    }

    /// Creates an image whose content is not known.
    pub(super) fn anything(sectors: u64) -> DiskImage {
        DiskImage((0..sectors).map(|_| SectorState { any: true, ..SectorState::default() }).collect())
    }

    pub(super) fn sectors(&self) -> u64 {
        self.0.len() as u64
    }

    /// Marks the content from sector `sectors` on as unknown.
    pub(super) fn cut(&mut self, sectors: u64) {
        self.0.iter_mut().skip(sectors as usize).for_each(|cell| cell.any = true);
    }

    fn range(&mut self, sector: u64, sectors: u64) -> impl Iterator<Item = (u64, &mut SectorState)> {
        (0..).zip(self.0.iter_mut().skip(sector as usize).take(sectors as usize))
    }

    /// Records the start of a write: `stamp` to the first sector, `stamp + 1` to the next, and so
    /// on.
    pub(super) fn begin(&mut self, sector: u64, sectors: u64, stamp: u64) {
        for (i, cell) in self.range(sector, sectors) {
            cell.writing = Some(stamp + i);
            add_stamp_if_missing(&mut cell.recent, stamp + i);
        }
    }

    /// Records the end of a write. A failed write may or may not have happened.
    pub(super) fn end(&mut self, sector: u64, sectors: u64, ok: bool) {
        for (_, cell) in self.range(sector, sectors) {
            let Some(stamp) = cell.writing.take() else { continue };
            if ok {
                // The replaced value is recent, because a snapshot created meanwhile may have it.
                let was = std::mem::replace(&mut cell.can, vec![stamp]);
                cell.any = false;
                was.into_iter().for_each(|was| add_stamp_if_missing(&mut cell.recent, was));
            } else {
                add_stamp_if_missing(&mut cell.can, stamp);
            }
        }
    }

    /// Ends all writes in progress. Each may or may not have happened.
    pub(super) fn kill(&mut self) {
        let sectors = self.sectors();
        self.end(0, sectors, false);
    }

    /// Checks the value `found` of a read.
    pub(super) fn read(&mut self, sector: u64, found: u64) -> Result<(), ReadMismatch> {
        let Some(cell) = self.0.get_mut(sector as usize) else { return Ok(()) };
        if cell.any || cell.can.contains(&found) {
            (cell.can, cell.any) = (vec![found], false);
            return Ok(());
        }
        Err(ReadMismatch { sector, found, can: cell.can.clone() })
    }

    /// Marks an inspection: only later changes are recent.
    pub(super) fn looked(&mut self) {
        for cell in &mut self.0 {
            cell.recent.clear();
            cell.recent.extend(cell.writing);
        }
    }

    /// Returns the image at some time since the last inspection.
    pub(super) fn instant(&self) -> DiskImage {
        let of = |cell: &SectorState| {
            let mut can = cell.can.clone();
            cell.recent.iter().for_each(|stamp| add_stamp_if_missing(&mut can, *stamp));
            SectorState { can, any: cell.any, ..SectorState::default() }
        };
        DiskImage(self.0.iter().map(of).collect())
    }

    /// Records that the content became `other` at some time since the last inspection. Writes after
    /// that time remain.
    pub(super) fn turn_into(&mut self, other: &DiskImage) {
        for (cell, other) in self.0.iter_mut().zip(&other.0) {
            // Recent values may have been written after the change.
            let acknowledged = cell.can.iter().filter(|stamp| cell.recent.contains(stamp)).copied();
            let acknowledged: Vec<u64> = acknowledged.collect();
            cell.can.clone_from(&other.can);
            cell.any = other.any;
            acknowledged.into_iter().for_each(|stamp| add_stamp_if_missing(&mut cell.can, stamp));
        }
    }
}

/// State of a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SnapshotFate {
    /// The snapshot must have its content; if it is missing, its origin must wait for it.
    Kept,
    /// A user detached the snapshot from an active origin, with a log line. A write of the origin
    /// may make it lost, and does not wait for it.
    Released,
    /// The snapshot was abandoned, with a log line.
    Lost,
    /// The snapshot is being merged into its origin, or was merged.
    Merged,
    /// A user removed the snapshot.
    Gone,
}

/// A persistent snapshot, identified by its store.
#[derive(Clone, Debug)]
pub(super) struct PersistentSnapshotModel {
    pub(super) store: PathBuf,
    pub(super) disk: usize,
    pub(super) image: DiskImage,
    pub(super) fate: SnapshotFate,
    /// True if a device has the snapshot now.
    pub(super) attached: bool,
    /// True if a device had the snapshot at the last inspection.
    pub(super) was_attached: bool,
    /// The device that has or last had the snapshot.
    pub(super) holder: Option<DeviceId>,
    /// Verbs that remove the snapshot and were not refused; `merges` has those that merge it.
    pub(super) removals: Vec<u64>,
    pub(super) merges: Vec<u64>,
    /// Verbs that were in progress when the device released the snapshot.
    pub(super) released_by: Vec<u64>,
    /// True if the origin was written since the release.
    pub(super) passed: bool,
    /// True if the merge was seen to complete.
    pub(super) over: bool,
    /// True if a server that may abandon missing snapshots ran without this one.
    pub(super) may_be_lost: bool,
}

impl PersistentSnapshotModel {
    /// Creates an attached snapshot.
    pub(super) fn new(store: PathBuf, disk: usize, image: DiskImage) -> PersistentSnapshotModel {
        PersistentSnapshotModel {
            store,
            disk,
            image,
            fate: SnapshotFate::Kept,
            attached: true,
            was_attached: true,
            holder: None,
            removals: Vec::new(),
            merges: Vec::new(),
            released_by: Vec::new(),
            passed: false,
            over: false,
            may_be_lost: false,
        }
    }
}

/// A disk with its content.
pub(super) struct OriginDiskModel {
    pub(super) path: PathBuf,
    pub(super) image: DiskImage,
}

/// A disk or snapshot that clients read and write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DiskOrSnapshot {
    Disk(usize),
    Snapshot(usize),
}

/// The model of all disks and snapshots.
pub(super) struct DiskAndSnapshotModel {
    pub(super) origins: Vec<OriginDiskModel>,
    pub(super) snapshots: Vec<PersistentSnapshotModel>,
    /// Verbs in progress.
    pub(super) running: Vec<u64>,
    stamp: u64,
}

impl DiskAndSnapshotModel {
    pub(super) fn new() -> DiskAndSnapshotModel {
        DiskAndSnapshotModel { origins: Vec::new(), snapshots: Vec::new(), running: Vec::new(), stamp: 1 }
    }

    pub(super) fn image(&mut self, of: DiskOrSnapshot) -> &mut DiskImage {
        match of {
            DiskOrSnapshot::Disk(disk) => &mut self.origins[disk].image,
            DiskOrSnapshot::Snapshot(at) => &mut self.snapshots[at].image,
        }
    }

    /// Reserves stamps for a write of `sectors` sectors.
    pub(super) fn stamps(&mut self, sectors: u64) -> u64 {
        self.stamp += sectors;
        self.stamp - sectors
    }

    pub(super) fn images(&mut self) -> impl Iterator<Item = &mut DiskImage> {
        let disks = self.origins.iter_mut().map(|origin| &mut origin.image);
        disks.chain(self.snapshots.iter_mut().map(|snapshot| &mut snapshot.image))
    }

    /// Records the start of a write.
    ///
    /// # Errors
    /// If the disk must not be written without a snapshot that is missing.
    pub(super) fn write_begins(&mut self, of: DiskOrSnapshot) -> Result<(), String> {
        let DiskOrSnapshot::Disk(disk) = of else { return Ok(()) };
        for one in self.snapshots.iter_mut().filter(|one| one.disk == disk && !one.attached) {
            let tells = one.released_by.iter().any(|id| self.running.contains(id));
            match one.fate {
                SnapshotFate::Kept if one.removals.is_empty() && one.merges.is_empty() && !tells => {
                    let (origin, store) = (self.origins[disk].path.display(), one.store.display());
                    return Err(format!(
                        "{origin} is written without its snapshot in {store}, and no log line says so"
                    ));
                }
                _ => one.passed = true,
            }
        }
        Ok(())
    }

    /// Records the end of a verb. The log lines up to now must name each snapshot that was released
    /// and bypassed.
    ///
    /// # Errors
    /// If a snapshot was bypassed without a log line.
    pub(super) fn is_over(&mut self, id: u64) -> Result<(), String> {
        self.running.retain(|other| *other != id);
        for one in
            self.snapshots.iter().filter(|one| one.fate == SnapshotFate::Kept && !one.attached && one.passed)
        {
            let tells = one.released_by.iter().any(|id| self.running.contains(id));
            if !tells && one.removals.is_empty() && one.merges.is_empty() {
                return Err(format!("{} was released, and no log line says so", one.store.display()));
            }
        }
        Ok(())
    }

    /// Returns the latest snapshot in `store`.
    pub(super) fn in_store(&self, store: &str) -> Option<usize> {
        let is_it = |one: &PersistentSnapshotModel| one.store.to_str() == Some(store);
        self.snapshots.iter().rposition(is_it)
    }
}
