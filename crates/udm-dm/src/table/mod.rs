//! A table: the targets that make up a device, in order and without gaps.
//!
//! A [`Table`] is built once from its lines and never changes. State that changes, such as path
//! states and exceptions, belongs to the targets. A table is a [`Device`]: its lanes pass bios to
//! the lanes of its targets. Name, suspend and reload belong to the mapped device.
//!
//! **Checks.** [`Table::build`] checks a table as the kernel does, with the kernel's texts. The
//! kernel checks only the first load; a later faulty table fails at resume and leaves the device
//! suspended. udm checks every load, and again at resume.
//!
//! **Limits.** A table takes the limits of the devices below when it is built, when it is loaded,
//! and last when it becomes live. From then on they hold for all its lanes until the device gets
//! another table, as in the kernel. If a device below is reloaded, its own boundary checks each
//! request: a write to a device that is now read-only fails there. Clients keep the geometry that
//! they were told.
//!
//! **Exclusive disks.** A target says which disks it needs alone (`DeviceRange::alone`). The load
//! claims them, under any name, and the table holds the claim until it is dropped. A load by
//! another device is EBUSY, unless both bring one key, a value that they share. The same device may
//! load the disk again, because its old table ends before the new one begins. A mapped device is
//! claimed as itself, not the disks below it. Claims are state of the disk (`SharedDiskState`).
//! Disks that keep no data (`null`, `pattern`) grant every claim.
//!
//! **The data path** (`lane`, `router`, `map`):
//!
//! * Linear and striped targets have no lane. The table computes the place of each sector itself. A
//!   batch is distributed once to the devices below.
//! * The kind of table (one target, linear lines, stripes, a mixture) is examined once per batch.
//! * An index finds the line of a sector, and division by a chunk size is a multiplication. So the
//!   cost of a bio hardly depends on the number of lines.
//! * All linear lines of one device share a child, so a batch over many lines stays one batch per
//!   device (`child_layout`). Each stripe has its own child, so errors are counted per stripe.
//! * A bio that comes back is assigned to its line by its sector on the device, through a reverse
//!   index (`reverse_map`). Lines that overlap on their device have a child each.
//! * A bio that crosses targets or exceeds a limit goes through the
//!   [`Splitter`](crate::split::BioSplitter).

mod build;
mod check;
mod child_layout;
mod device_lane;
mod lane;
mod map;
mod reverse_map;
mod router;
mod run_index;

use crate::device_ref::{DeviceRange, LowerLimits, ResolvedDevice};
use crate::error::TargetError;
use crate::mapped::MappedDevice;
use crate::target::{ChangeTracker, DeviceNameResolver, DmQueueMode, Target, TargetType};
use check::TableLimits;
pub use device_lane::WholeDeviceLane;
pub(crate) use lane::TableLane;
use std::fmt::Write;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use udm_core::errno::EBUSY;
use udm_core::{
    ChangeTrackingCheckpoint, ControlIo, Cx, DevNo, Device, DeviceControlError, DeviceId, DiskClaim, Extents,
    Lane, Limits, RangeChangeStatus, Sector, Sectors, SharedDiskState,
};

/// One target of a table and its range.
pub struct TableEntry {
    /// The first sector that the target maps.
    pub start: Sector,
    /// Length of the target.
    pub len: Sectors,
    /// The target.
    pub target: Arc<dyn Target>,
}

impl TableEntry {
    /// The first sector after the target.
    #[must_use]
    pub fn end(&self) -> Sector {
        self.start + self.len
    }
}

/// A table of at least one target.
pub struct Table {
    id: DeviceId,
    entries: Vec<TableEntry>,
    /// Read when a lane is opened or a caller asks for limits; never on the data path.
    table_limits: Mutex<Arc<TableLimits>>,
    /// The disks that this table has claimed for its device alone.
    claims: Mutex<Vec<DiskClaim>>,
    /// True if the device is read-only, whatever is below.
    read_only: AtomicBool,
}

impl Table {
    /// Builds a table from `lines`, with targets of the given `types`. `resolver` opens the devices
    /// that the lines name. Constructors read and write metadata through `io`.
    ///
    /// # Errors
    /// The first line that is refused, in the kernel's words ([`TargetError::line`] has its index),
    /// or wrong sizes or alignment of the devices below.
    pub fn build(
        types: &[TargetType],
        lines: &[udm_wire::table::TableLine],
        resolver: &mut dyn DeviceNameResolver,
        io: &dyn ControlIo,
        cores: usize,
    ) -> Result<Arc<Table>, TargetError> {
        let entries = build::build_table_entries(types, lines, resolver, io, cores)?;
        let table_limits = Mutex::new(Arc::new(check::table_limits(&entries, LowerLimits::NOW)?));
        let (id, read_only) = (DeviceId::new(), AtomicBool::new(false));
        Ok(Arc::new(Table { id, entries, table_limits, claims: Mutex::default(), read_only }))
    }

    /// A table with only `target`, of `len` sectors, for a target's own use of a device. Its lanes
    /// cut bios by the device's limits, and flush around writes if the device needs it.
    ///
    /// # Errors
    /// As [`Table::build`].
    pub fn single_target(target: Arc<dyn Target>, len: Sectors) -> Result<Table, TargetError> {
        let entries = vec![TableEntry { start: Sector(0), len, target }];
        let table_limits = Mutex::new(Arc::new(check::table_limits(&entries, LowerLimits::NOW)?));
        let (id, read_only) = (DeviceId::new(), AtomicBool::new(false));
        Ok(Table { id, entries, table_limits, claims: Mutex::default(), read_only })
    }

    /// Makes the device read-only, whatever is below (the kernel's `DM_READONLY_FLAG`). For a table
    /// that is not loaded yet; effective from the next check.
    pub fn set_read_only(&self) {
        self.read_only.store(true, Relaxed);
    }

    /// True if [`Table::set_read_only`] was called.
    #[must_use]
    pub fn is_set_read_only(&self) -> bool {
        self.read_only.load(Relaxed)
    }

    /// The targets, in order.
    #[must_use]
    pub fn targets(&self) -> &[TableEntry] {
        &self.entries
    }

    /// The target of a table of one line.
    #[must_use]
    pub fn only_target(&self) -> Option<&TableEntry> {
        match &self.entries[..] {
            [entry] => Some(entry),
            _ => None,
        }
    }

    /// The index of the target that maps `sector`; `None` beyond the end.
    #[must_use]
    pub fn find(&self, sector: Sector) -> Option<usize> {
        let i = self.entries.partition_point(|e| e.end() <= sector);
        (i < self.entries.len()).then_some(i)
    }

    /// The output of `dmsetup table`: one line per target, without a newline at the end.
    #[must_use]
    pub fn text(&self) -> String {
        self.print(|target| target.table())
    }

    /// The output of `dmsetup status`: one line per target, without a newline at the end.
    #[must_use]
    pub fn status(&self) -> String {
        self.print(|target| target.status())
    }

    fn print(&self, args: impl Fn(&dyn Target) -> String) -> String {
        let mut text = String::new();
        for entry in &self.entries {
            let end = if text.is_empty() { "" } else { "\n" };
            let kind = entry.target.type_name();
            let args = args(&*entry.target);
            // As in dmsetup, a type without arguments is followed by a space.
            let _ = write!(text, "{end}{} {} {kind} {args}", entry.start, entry.len);
        }
        text
    }

    /// Checks sizes and alignment against the devices below, and takes their limits for lanes that
    /// open from now on. For a table that is not live.
    ///
    /// # Errors
    /// The kernel's texts, such as `nullb0 too small for target: start=8, len=2097152,
    /// dev_size=2097152`. The limits are then unchanged.
    pub fn check(&self, below: LowerLimits<'_>) -> Result<(), TargetError> {
        let mut table_limits = check::table_limits(&self.entries, below)?;
        table_limits.whole.read_only |= self.read_only.load(Relaxed);
        let table_limits = Arc::new(table_limits);
        *self.table_limits.lock().unwrap_or_else(PoisonError::into_inner) = table_limits;
        Ok(())
    }

    /// Claims the disks that the targets need alone for the device `id`, whose number is `number`,
    /// until the table is dropped.
    ///
    /// # Errors
    /// EBUSY if another device has claimed one of the disks, or if two lines of this table claim
    /// it. Nothing is claimed then.
    pub(crate) fn claim(&self, id: DeviceId, number: DevNo) -> Result<(), TargetError> {
        let lines = self.entries.iter().enumerate();
        let used: Vec<(usize, DeviceRange)> = lines
            .flat_map(|(line, entry)| entry.target.devices().into_iter().map(move |u| (line, u)))
            .collect();
        let mut known: Vec<&SharedDiskState> = Vec::new();
        let mut claims: Vec<DiskClaim> = Vec::new();
        for (line, used) in &used {
            let (Some(alone), Some(shared_disk_state)) =
                (&used.alone, used.device.device.shared_disk_state())
            else {
                continue;
            };
            let refuse = |who: &str| {
                let text = format!("{}: Device lookup failed", self.entries[*line].target.type_name());
                let reason = format!("{who} uses {} exclusively", used.device.name);
                let error = TargetError::new(text).with_errno(EBUSY).because(reason);
                TargetError { line: Some(*line), ..error }
            };
            let claim = shared_disk_state.claim(id, number, alone, &*used.device.device);
            claims.push(claim.map_err(|taken| refuse(&taken.to_string()))?);
            if known.iter().any(|&known| std::ptr::eq(known, shared_disk_state)) {
                return Err(refuse("another line of the table"));
            }
            known.push(shared_disk_state);
        }
        *self.claims.lock().unwrap_or_else(PoisonError::into_inner) = claims;
        Ok(())
    }

    fn table_limits(&self) -> Arc<TableLimits> {
        Arc::clone(&self.table_limits.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Asks all targets whether they can become live or continue in `device`.
    ///
    /// # Errors
    /// The error of the first target that refuses.
    pub(crate) fn preresume(&self, device: DeviceId) -> Result<(), TargetError> {
        self.entries.iter().enumerate().try_for_each(|(line, entry)| {
            entry.target.preresume(device).map_err(|error| TargetError { line: Some(line), ..error })
        })
    }

    /// The partners of the targets.
    pub(crate) fn partners(&self) -> Vec<Arc<MappedDevice>> {
        self.entries.iter().flat_map(|entry| entry.target.partners()).collect()
    }

    /// The devices that the targets use; a device appears once per use.
    pub fn devices(&self) -> impl Iterator<Item = ResolvedDevice> + '_ {
        self.entries.iter().flat_map(|entry| entry.target.devices()).map(|used| used.device)
    }

    /// The change tracker of a table of one line. Several lines would need a combined checkpoint,
    /// and no target keeps an instant of a part of the device.
    fn change_tracker(&self) -> Option<&dyn ChangeTracker> {
        self.only_target()?.target.as_change_tracker()
    }

    /// All devices that the lanes of this table open: those in [`Table::devices`], and the extra
    /// devices of the targets.
    pub(crate) fn opened(&self) -> impl Iterator<Item = ResolvedDevice> + '_ {
        self.devices().chain(self.entries.iter().flat_map(|entry| entry.target.extra_devices()))
    }

    /// How requests reach the targets; [`DmQueueMode::Any`] if all targets fit every mode.
    #[must_use]
    pub fn kind(&self) -> DmQueueMode {
        let modes = self.entries.iter().map(|e| e.target.features().queue_mode);
        modes.fold(DmQueueMode::Any, |all, one| match (all, one) {
            (all, DmQueueMode::Any) => all,
            (_, one) => one,
        })
    }

    /// The type of a target that must be alone; no other type may replace it while it is live.
    #[must_use]
    pub fn immutable_type(&self) -> Option<&'static str> {
        self.entries.iter().find(|e| e.target.features().singleton).map(|e| e.target.type_name())
    }
}

impl Device for Table {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        Ok(Box::new(TableLane::open_live(self, cx)?))
    }

    fn limits(&self) -> Limits {
        self.table_limits().whole
    }

    fn extents(&self, from: Sector, len: Sectors, out: &mut Extents) {
        let end = from + len;
        let first = self.find(from).unwrap_or(self.entries.len());
        for entry in self.entries[first..].iter().take_while(|entry| entry.start < end) {
            if out.is_full() {
                return;
            }
            let start = entry.start.max(from);
            entry.target.extents(Sector(start.0 - entry.start.0), entry.end().min(end) - start, out);
        }
    }

    fn checkpoints(&self) -> Vec<ChangeTrackingCheckpoint> {
        self.change_tracker().map_or_else(Vec::new, ChangeTracker::checkpoints)
    }

    fn changed(
        &self,
        since: &ChangeTrackingCheckpoint,
        from: Sector,
        len: Sectors,
        out: &mut Extents<RangeChangeStatus>,
    ) {
        match self.change_tracker() {
            Some(tracker) => tracker.changed(since, from, len, out),
            None => out.push(len, RangeChangeStatus::Changed),
        }
    }
}
