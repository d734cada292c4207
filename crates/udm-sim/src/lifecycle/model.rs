//! What each disk and each snapshot must read.
//!
//! A sector is a register: it holds what was written last, or one of several if that is not known.
//! Clients have one request at a time on a sector of a disk or a snapshot. A snapshot is what its
//! origin was at some time between two looks at the devices, and goes its own way from there; a
//! merge makes an origin what the snapshot was, at some time between two looks.

use std::path::PathBuf;
use udm_core::DeviceId;

/// A sector.
#[derive(Clone, Debug, Default)]
struct SectorState {
    /// What it may hold.
    can: Vec<u64>,
    /// What is being written.
    writing: Option<u64>,
    /// What was being written at some time since the last look.
    recent: Vec<u64>,
    /// It may hold anything.
    any: bool,
}

/// The sectors of a disk, or of a snapshot.
#[derive(Clone, Debug)]
pub(super) struct DiskImage(Vec<SectorState>);

/// What a read found that can't be.
pub(super) struct ReadMismatch {
    pub(super) sector: u64,
    pub(super) found: u64,
    pub(super) can: Vec<u64>,
}

fn add(list: &mut Vec<u64>, stamp: u64) {
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

    /// Nobody knows what it holds.
    pub(super) fn anything(sectors: u64) -> DiskImage {
        DiskImage((0..sectors).map(|_| SectorState { any: true, ..SectorState::default() }).collect())
    }

    pub(super) fn sectors(&self) -> u64 {
        self.0.len() as u64
    }

    /// The sectors from this one on are no part of it any more: nobody knows what they hold.
    pub(super) fn cut(&mut self, sectors: u64) {
        self.0.iter_mut().skip(sectors as usize).for_each(|cell| cell.any = true);
    }

    fn range(&mut self, sector: u64, sectors: u64) -> impl Iterator<Item = (u64, &mut SectorState)> {
        (0..).zip(self.0.iter_mut().skip(sector as usize).take(sectors as usize))
    }

    /// A write begins: `stamp` to the first sector, and so on.
    pub(super) fn begin(&mut self, sector: u64, sectors: u64, stamp: u64) {
        for (i, cell) in self.range(sector, sectors) {
            cell.writing = Some(stamp + i);
            add(&mut cell.recent, stamp + i);
        }
    }

    /// A write is over; one that failed may have happened or not.
    pub(super) fn end(&mut self, sector: u64, sectors: u64, ok: bool) {
        for (_, cell) in self.range(sector, sectors) {
            let Some(stamp) = cell.writing.take() else { continue };
            if ok {
                // What it was is recent: a snapshot that came meanwhile may have that.
                let was = std::mem::replace(&mut cell.can, vec![stamp]);
                cell.any = false;
                was.into_iter().for_each(|was| add(&mut cell.recent, was));
            } else {
                add(&mut cell.can, stamp);
            }
        }
    }

    /// All writes that are under way may have happened or not, and will not any more.
    pub(super) fn kill(&mut self) {
        let sectors = self.sectors();
        self.end(0, sectors, false);
    }

    /// A read has returned `found`.
    pub(super) fn read(&mut self, sector: u64, found: u64) -> Result<(), ReadMismatch> {
        let Some(cell) = self.0.get_mut(sector as usize) else { return Ok(()) };
        if cell.any || cell.can.contains(&found) {
            (cell.can, cell.any) = (vec![found], false);
            return Ok(());
        }
        Err(ReadMismatch { sector, found, can: cell.can.clone() })
    }

    /// Somebody has looked: what comes from here on is recent.
    pub(super) fn looked(&mut self) {
        for cell in &mut self.0 {
            cell.recent.clear();
            cell.recent.extend(cell.writing);
        }
    }

    /// As it was at some time since the last look.
    pub(super) fn instant(&self) -> DiskImage {
        let of = |cell: &SectorState| {
            let mut can = cell.can.clone();
            cell.recent.iter().for_each(|stamp| add(&mut can, *stamp));
            SectorState { can, any: cell.any, ..SectorState::default() }
        };
        DiskImage(self.0.iter().map(of).collect())
    }

    /// At some time since the last look it has become `other`, and what was written behind that is
    /// in it.
    pub(super) fn turn_into(&mut self, other: &DiskImage) {
        for (cell, other) in self.0.iter_mut().zip(&other.0) {
            // What was there may be what was acknowledged behind it.
            let acknowledged = cell.can.iter().filter(|stamp| cell.recent.contains(stamp)).copied();
            let acknowledged: Vec<u64> = acknowledged.collect();
            cell.can.clone_from(&other.can);
            cell.any = other.any;
            acknowledged.into_iter().for_each(|stamp| add(&mut cell.can, stamp));
        }
    }
}

/// What has become of a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SnapshotFate {
    /// It must be its instant, or be waited for.
    Kept,
    /// A user took it away from an origin in use, and was told so: it may be lost once that is
    /// written, and is not waited for.
    Released,
    /// It was given up, and the log says so.
    Lost,
    /// It is on its way back into its origin, or is there.
    Merged,
    /// A user has removed it.
    Gone,
}

/// A persistent snapshot, known by its store.
#[derive(Clone, Debug)]
pub(super) struct Snapshot {
    pub(super) store: PathBuf,
    pub(super) disk: usize,
    pub(super) image: DiskImage,
    pub(super) fate: SnapshotFate,
    /// Some device has it just now.
    pub(super) attached: bool,
    /// The same, at the look before.
    pub(super) was_attached: bool,
    /// The device that has it, or had it last.
    pub(super) holder: Option<DeviceId>,
    /// The verbs that were to remove it, or to merge it, and were not refused.
    pub(super) removals: Vec<u64>,
    pub(super) merges: Vec<u64>,
    /// The verbs that were under way when its device let it go.
    pub(super) released_by: Vec<u64>,
    /// Its origin was written since it was let go.
    pub(super) passed: bool,
    /// Its merge was seen to be over.
    pub(super) over: bool,
    /// A server that may give up what it does not have has run without it.
    pub(super) may_be_lost: bool,
}

impl Snapshot {
    /// One that is there now.
    pub(super) fn new(store: PathBuf, disk: usize, image: DiskImage) -> Snapshot {
        Snapshot {
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

/// A disk with its snapshots.
pub(super) struct Origin {
    pub(super) path: PathBuf,
    pub(super) image: DiskImage,
}

/// What clients read and write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ClientTarget {
    Disk(usize),
    Snapshot(usize),
}

/// See the module.
pub(super) struct LifecycleModel {
    pub(super) origins: Vec<Origin>,
    pub(super) snapshots: Vec<Snapshot>,
    /// The verbs under way.
    pub(super) under_way: Vec<u64>,
    stamp: u64,
}

impl LifecycleModel {
    pub(super) fn new() -> LifecycleModel {
        LifecycleModel { origins: Vec::new(), snapshots: Vec::new(), under_way: Vec::new(), stamp: 1 }
    }

    pub(super) fn image(&mut self, of: ClientTarget) -> &mut DiskImage {
        match of {
            ClientTarget::Disk(disk) => &mut self.origins[disk].image,
            ClientTarget::Snapshot(at) => &mut self.snapshots[at].image,
        }
    }

    /// Stamps for a write.
    pub(super) fn stamps(&mut self, sectors: u64) -> u64 {
        self.stamp += sectors;
        self.stamp - sectors
    }

    pub(super) fn images(&mut self) -> impl Iterator<Item = &mut DiskImage> {
        let disks = self.origins.iter_mut().map(|origin| &mut origin.image);
        disks.chain(self.snapshots.iter_mut().map(|snapshot| &mut snapshot.image))
    }

    /// Of a request that begins: why nobody may write to the disk now.
    pub(super) fn write_begins(&mut self, of: ClientTarget) -> Result<(), String> {
        let ClientTarget::Disk(disk) = of else { return Ok(()) };
        for one in self.snapshots.iter_mut().filter(|one| one.disk == disk && !one.attached) {
            let tells = one.released_by.iter().any(|id| self.under_way.contains(id));
            match one.fate {
                SnapshotFate::Kept if one.removals.is_empty() && one.merges.is_empty() && !tells => {
                    let (origin, store) = (self.origins[disk].path.display(), one.store.display());
                    return Err(format!(
                        "{origin} is written without its snapshot in {store}, and nobody was told so"
                    ));
                }
                _ => one.passed = true,
            }
        }
        Ok(())
    }

    /// A verb is over, and the log has been read: of what it let go, and others go on without, that
    /// has told.
    pub(super) fn is_over(&mut self, id: u64) -> Result<(), String> {
        self.under_way.retain(|other| *other != id);
        for one in
            self.snapshots.iter().filter(|one| one.fate == SnapshotFate::Kept && !one.attached && one.passed)
        {
            let tells = one.released_by.iter().any(|id| self.under_way.contains(id));
            if !tells && one.removals.is_empty() && one.merges.is_empty() {
                return Err(format!("{} was let go, and nobody was told so", one.store.display()));
            }
        }
        Ok(())
    }

    /// The snapshot in `store`; the latest, if there were several.
    pub(super) fn in_store(&self, store: &str) -> Option<usize> {
        let is_it = |one: &Snapshot| one.store.to_str() == Some(store);
        self.snapshots.iter().rposition(is_it)
    }
}
