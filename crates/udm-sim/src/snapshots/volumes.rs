//! The model of origins and snapshots.

use crate::device::next_readback;
use crate::front_end::WorkloadDevice;
use crate::model::RequestRefusalRules;
use crate::register_model::SectorRegisterModel;
use crate::table_map::ModelTableMap;
use std::cell::Cell;
use std::sync::{Arc, Weak};
use udm_core::{Device as _, Limits, Sectors};
use udm_dm::{MappedDevice, Table};

/// An origin or a snapshot. It has a disk of its own in [`SectorRegisterModel`], over the real disk
/// of the same number: the data of an origin, or the store of a snapshot.
pub(super) struct OriginOrSnapshot {
    /// The volume of which this is a snapshot; the volume itself for an origin.
    pub origin: usize,
    /// Size of the device in sectors; `block` has the sectors per block.
    pub sectors: u64,
    pub block: u64,
    /// The mapped device with the table.
    pub mapped: Option<Arc<MappedDevice>>,
    /// The device below an origin, if any; `floor_lines` is its table.
    pub floor: Option<Arc<MappedDevice>>,
    pub floor_lines: Option<String>,
    /// The `snapshot-origin` device over a snapshot that may itself have snapshots. Requests go to
    /// this device.
    pub upper: Option<Arc<MappedDevice>>,
    /// True if an upper device must be created.
    pub stacked: bool,
    /// Arguments of the snapshot line; `base` has those of the line as an origin.
    pub line: String,
    pub base: String,
    /// A table that creates the snapshot when it becomes live.
    pub coming: Option<SnapshotCreatingTable>,
    /// True if the snapshot exists.
    pub live: bool,
    /// Creation time of the snapshot: twice the step.
    pub since: u64,
    /// True if the store may become full; `shown` is its initial size in sectors.
    pub small: bool,
    pub shown: u64,
    /// True if the store grows automatically; `tight` if not as far as it may need.
    pub grows: bool,
    pub tight: bool,
    /// Number of growth failures since the device was created.
    pub stuck: u32,
    /// Policy for a write that does not fit into the store.
    pub on_full: StoreFullPolicy,
    /// True if a full store may make the snapshot invalid or overflowed, because it was full before
    /// the policy was set.
    pub ends_full: bool,
    /// True if requests are sent to the device.
    pub open: bool,
    /// Time at which the store was reported invalid, which is permanent.
    pub invalid: Option<u64>,
    /// The snapshot that is being merged into this volume.
    pub merging: Option<usize>,
    /// True if a snapshot of this volume may have refused a write of the merge for lack of space.
    pub refused: bool,
    /// True if the power was not cut since the merge began. Without other faults, no chunk then has
    /// an older copy below.
    pub whole_runs: bool,
    /// Mapping of requests in the model; discards that are passed to the origin reach all volumes
    /// on the same disk.
    pub map: Arc<ModelTableMap>,
    pub limits: Limits,
    /// Next sector to read back.
    pub check: Cell<u64>,
    /// Start of the region that requests prefer.
    pub hot: u64,
}

/// Policy for a write for which the store has no space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StoreFullPolicy {
    Invalidate,
    Pause,
    Fail,
}

/// A table that creates a snapshot when it becomes live.
pub(super) struct SnapshotCreatingTable {
    /// Device of the table.
    pub device: Arc<MappedDevice>,
    pub table: Weak<Table>,
    /// Volume whose content is copied.
    pub from: usize,
    /// Volumes that become snapshots in the same change.
    pub group: Vec<usize>,
}

impl OriginOrSnapshot {
    /// Creates volume `side` without a device.
    pub(super) fn new(
        side: usize,
        origin: usize,
        sectors: u64,
        block: u64,
        cells: &SectorRegisterModel,
    ) -> OriginOrSnapshot {
        let at = (0..sectors).map(|sector| cells.index(side, sector)).collect();
        let map =
            ModelTableMap { cells: at, disks: vec![side], bare: false, lossy: Vec::new(), clears: true };
        OriginOrSnapshot {
            origin,
            sectors,
            block,
            mapped: None,
            floor: None,
            floor_lines: None,
            upper: None,
            stacked: false,
            line: String::new(),
            base: String::new(),
            coming: None,
            live: false,
            since: 0,
            small: false,
            shown: 0,
            grows: false,
            tight: false,
            stuck: 0,
            on_full: StoreFullPolicy::Invalidate,
            ends_full: false,
            open: false,
            invalid: None,
            merging: None,
            refused: false,
            whole_runs: false,
            map: Arc::new(map),
            limits: Limits::new(Sectors(sectors)),
            check: Cell::new(u64::MAX),
            hot: 0,
        }
    }

    /// True if a write of the origin may fail for lack of space in the store.
    pub(super) fn refuses(&self) -> bool {
        (self.small || self.grows) && self.on_full == StoreFullPolicy::Fail
    }

    /// Resets the growth state for a new store.
    pub(super) fn begin_growth(&mut self) {
        self.small = if self.grows { self.tight } else { self.small };
        self.stuck = 0;
    }

    /// The top device, to which requests go and which has the table as an origin.
    pub(super) fn door(&self) -> Option<&Arc<MappedDevice>> {
        self.upper.as_ref().or(self.mapped.as_ref())
    }

    /// Updates the limits of the top device.
    pub(super) fn look_at_limits(&mut self) {
        if let Some(door) = self.door() {
            self.limits = door.limits();
        }
    }

    pub(super) fn rules(&self) -> RequestRefusalRules {
        RequestRefusalRules { block: self.block, read_only: false }
    }

    pub(super) fn is_persistent(&self) -> bool {
        self.line.contains(" P")
    }

    /// True if discards are passed to the origin.
    pub(super) fn passes_discards(&self) -> bool {
        self.line.contains("passdown")
    }
}

impl WorkloadDevice for OriginOrSnapshot {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn hot(&self) -> u64 {
        self.hot
    }

    fn next_readback(&self, most: u64) -> Option<(u64, u64)> {
        next_readback(&self.check, self.sectors, most)
    }
}

/// Reasons for which a volume may fail requests.
pub(super) struct VolumeErrorReasons {
    /// The disks that the volume needs.
    pub disks: Vec<usize>,
    /// True if the volume is not usable or not writable for a known reason.
    pub lost: bool,
}
