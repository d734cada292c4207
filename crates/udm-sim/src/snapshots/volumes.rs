//! Origins and snapshots, as the model knows them.

use crate::device::next_readback;
use crate::front_end::RequestTarget;
use crate::model::RefusalRules;
use crate::register_model::RegisterModel;
use crate::table_map::TableMap;
use std::cell::Cell;
use std::sync::{Arc, Weak};
use udm_core::{Device as _, Limits, Sectors};
use udm_dm::{MappedDevice, Table};

/// An origin or a snapshot: a disk of its own in [`RegisterModel`], over the disk of the same number, which
/// is what it holds or its store.
pub(super) struct SnapVolume {
    /// The side that it is a snapshot of; itself for an origin.
    pub origin: usize,
    /// Sectors that its device shows, and those of a block.
    pub sectors: u64,
    pub block: u64,
    /// The device of its table.
    pub mapped: Option<Arc<MappedDevice>>,
    /// A device below an origin, and its table, where there is one.
    pub floor: Option<Arc<MappedDevice>>,
    pub floor_lines: Option<String>,
    /// A `snapshot-origin` over a snapshot that can have snapshots itself: then it is this one that
    /// is asked.
    pub upper: Option<Arc<MappedDevice>>,
    /// It gets one.
    pub stacked: bool,
    /// What stands behind the type in its line: of a snapshot, and of what is an origin.
    pub line: String,
    pub base: String,
    /// A table that takes the instant when it becomes live.
    pub coming: Option<PendingSnapshot>,
    /// Its instant is taken.
    pub live: bool,
    /// When it became so: twice the step.
    pub since: u64,
    /// Its store may become full, and shows so many sectors at first.
    pub small: bool,
    pub shown: u64,
    /// Its store grows by itself; not as far as it may need.
    pub grows: bool,
    pub tight: bool,
    /// How often growth has begun to fail since the device was made.
    pub stuck: u32,
    /// What becomes of a write then.
    pub on_full: StoreFullPolicy,
    /// It may be invalid or overflowed for that: it was full before it was told what to do.
    pub ends_full: bool,
    /// Requests are sent to it.
    pub open: bool,
    /// Its store said that it is invalid, at this time: it stays so.
    pub invalid: Option<u64>,
    /// The snapshot that is brought back into it.
    pub merging: Option<usize>,
    /// A snapshot of it may have refused a write of that meanwhile, for want of room.
    pub refused: bool,
    /// The power has not failed since that began: where nothing else fails, of no chunk there is an
    /// older copy below.
    pub whole_runs: bool,
    /// What the model takes its requests to mean; and those discards that go on to the origin, to
    /// all sides that share its disk.
    pub map: Arc<TableMap>,
    pub limits: Limits,
    /// The next sector to be read back.
    pub check: Cell<u64>,
    /// Where requests like to go.
    pub hot: u64,
}

/// What becomes of a write for which the store has no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StoreFullPolicy {
    Invalidate,
    Pause,
    Fail,
}

/// A table that takes an instant when it becomes live.
pub(super) struct PendingSnapshot {
    /// In this device.
    pub device: Arc<MappedDevice>,
    pub table: Weak<Table>,
    /// Of this side.
    pub from: usize,
    /// The sides that take theirs in the same change.
    pub group: Vec<usize>,
}

impl SnapVolume {
    /// Side number `side`, without a device.
    pub(super) fn new(
        side: usize,
        origin: usize,
        sectors: u64,
        block: u64,
        cells: &RegisterModel,
    ) -> SnapVolume {
        let at = (0..sectors).map(|sector| cells.index(side, sector)).collect();
        let map = TableMap { cells: at, disks: vec![side], bare: false, lossy: Vec::new(), clears: true };
        SnapVolume {
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

    /// A write of its origin may fail, since it has no room.
    pub(super) fn refuses(&self) -> bool {
        (self.small || self.grows) && self.on_full == StoreFullPolicy::Fail
    }

    /// Its store is a new one.
    pub(super) fn begin_growth(&mut self) {
        self.small = if self.grows { self.tight } else { self.small };
        self.stuck = 0;
    }

    /// The device that is asked, and that has the table of an origin.
    pub(super) fn door(&self) -> Option<&Arc<MappedDevice>> {
        self.upper.as_ref().or(self.mapped.as_ref())
    }

    /// What the device at the door can take by now.
    pub(super) fn look_at_limits(&mut self) {
        if let Some(door) = self.door() {
            self.limits = door.limits();
        }
    }

    pub(super) fn rules(&self) -> RefusalRules {
        RefusalRules { block: self.block, read_only: false }
    }

    pub(super) fn is_persistent(&self) -> bool {
        self.line.contains(" P")
    }

    /// Discards of it go on to the origin.
    pub(super) fn passes_discards(&self) -> bool {
        self.line.contains("passdown")
    }
}

impl RequestTarget for SnapVolume {
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

/// What a side may fail for.
pub(super) struct ErrorCauses {
    /// The disks that it needs.
    pub disks: Vec<usize>,
    /// It can't be had any more, or no longer be written, for a reason that is known.
    pub lost: bool,
}
