//! The control half of a target, and the arguments of its constructor.
//!
//! A target is one line of a table: a private struct that implements [`Target`], a constructor, and
//! a lane. A list of [`TargetType`]s names all available types.

use crate::completion::CompletionHandle;
use crate::device_events::StateChange;
use crate::error::TargetError;
use crate::invalid_store::InvalidStoreMark;
use crate::mapped::MappedDevice;
use crate::report::{PathCommand, PathMaintenanceReport, PathReport};
use crate::snapshot::SnapshotInfo;
use crate::stripes::StripeSet;
use std::any::Any;
use std::collections::HashMap;
use std::sync::Arc;
use udm_core::{
    ChangeStatus, Checkpoint, ControlIo, Cores, Cx, DevNo, Device, DeviceId, Exclusivity, ExtentKind,
    Extents, Lane, Limits, Nanos, OpenError, Sector, Sectors, TaskFactory,
};
use udm_wire::multipath_conf::MultipathSettings;

/// A device that a table line names, after lookup.
#[derive(Clone)]
pub struct DeviceRef {
    /// Number of the device, printed in `table` and `status`.
    pub number: DevNo,
    /// The word in the table, or the name that the mapped device had at that time. Used in errors
    /// of the load.
    pub name: String,
    /// The device.
    pub device: Arc<dyn Device>,
    /// A value of the resolver that is dropped when the table releases the device. The resolver
    /// counts the uses of mapped devices with it.
    pub hold: Option<Arc<dyn Any + Send + Sync>>,
}

impl DeviceRef {
    /// The current name, for the log: a mapped device may have been renamed since.
    #[must_use]
    pub fn current_name(&self) -> String {
        self.device.stacked().map_or_else(|| self.name.clone(), |device| device.name())
    }
}

/// The limits of the devices below a table, as the table must see them.
#[derive(Clone, Copy)]
pub struct LowerLimits<'a>(pub(crate) Option<&'a HashMap<DeviceId, Limits>>);

impl LowerLimits<'_> {
    /// The current limits.
    pub const NOW: LowerLimits<'static> = LowerLimits(None);

    /// The limits of `device`: the coming ones, if it gets a new table in the same change, else the
    /// current ones.
    #[must_use]
    pub fn limits(&self, device: &DeviceRef) -> Limits {
        let coming = self.0.and_then(|coming| coming.get(&device.device.id()));
        coming.cloned().unwrap_or_else(|| device.device.limits())
    }
}

/// Looks up the devices that table lines and messages name: a path, a URI, `major:minor` or
/// `@name`.
pub trait Resolver {
    /// Looks up the device for `word`, and opens it if necessary.
    ///
    /// # Errors
    /// An errno and the reason: ENOENT for an unknown name, ENXIO for unknown numbers, otherwise
    /// the errno of the backend.
    fn get(&mut self, word: &str) -> Result<DeviceRef, LookupError>;

    /// The mark that records a store on `device` as invalid. `device` came from this resolver.
    /// `None` if no marks are kept.
    fn mark(&self, device: &DeviceRef) -> Option<Arc<dyn InvalidStoreMark>> {
        let _ = device;
        None
    }
}

/// The reason why a device could not be opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LookupError {
    /// The errno, positive.
    pub errno: i32,
    /// The precise reason, for a person; empty if the errno says everything.
    pub reason: String,
}

/// Arguments of a target's constructor: its line, split into words.
pub struct TargetArgs<'a> {
    /// First sector of the target in the mapped device.
    pub start: Sector,
    /// Length of the target.
    pub len: Sectors,
    /// The words after the type, without the escaping backslashes.
    pub args: &'a [String],
    /// Looks up devices.
    pub resolver: &'a mut dyn Resolver,
    /// Reads and writes metadata on devices before a lane is open.
    pub io: &'a dyn ControlIo,
    /// Number of cores (io-affinity masks).
    pub cores: usize,
}

/// The interface of a target to its mapped device.
pub trait TargetHost: Send + Sync {
    /// Increases the device's event counter, so `wait` returns. Called on the data path when a path
    /// fails; costs an atomic add.
    fn event(&self);
    /// Sends a device event. `change` formats it, only if a client listens. Never blocks.
    fn emit(&self, change: &dyn Fn() -> StateChange) {
        let _ = change;
    }
    /// Name of the device, for the log; its number if the name is being changed. Never blocks.
    fn device(&self) -> String;
    /// Polls every lane of the device once, because a condition that lanes wait for has changed.
    /// Sends a message to each core, so only for rare events.
    fn kick(&self, cores: &dyn Cores);
    /// Current time of the control half's clock; 0 if none was set.
    fn now(&self) -> Nanos {
        Nanos(0)
    }
    /// The path maintenance of the device.
    fn path_maintenance(&self) -> PathMaintenance {
        PathMaintenance::default()
    }
    /// The device itself, if it still exists. Holding the returned `Arc` keeps the device and its
    /// tables alive.
    fn mapped(&self) -> Option<Arc<MappedDevice>> {
        None
    }
}

/// Maintenance of paths besides requests, which the kernel leaves to a daemon.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PathMaintenance {
    /// Settings of path checks and their consequences. `None` leaves the maintenance to messages,
    /// as the kernel does.
    pub paths: Option<Arc<MultipathSettings>>,
    /// Options of the path watch, read when a table is loaded.
    pub watch: PathWatchOptions,
}

/// Options of the path watch of a multipath target. By default all are off, as in the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PathWatchOptions {
    /// If a path holds a request longer than this, the path fails and its reads go to another path.
    pub deadline: Option<Nanos>,
    /// If a read takes longer than most, it is also sent to a second path.
    pub hedge_reads: bool,
    /// If a path is much slower than the others of its group, it is ejected for some time.
    pub eject_slow: bool,
}

impl PathWatchOptions {
    /// True if at least one option is set.
    #[must_use]
    pub fn is_on(&self) -> bool {
        *self != PathWatchOptions::default()
    }
}

/// The control half of one table line.
///
/// The mapped device calls the hooks in the kernel's order. Each hook runs after the previous one
/// is done on all devices of the change:
///
/// | hook | of which table | meanwhile |
/// |---|---|---|
/// | `preresume` | one that is to become live, or to continue after a suspend | nothing is opened or stopped for it |
/// | `presuspend` | the live one | the cores take bios |
/// | `postsuspend` | the live one | this device is quiesced |
/// | `retired` | one that was live and never will be again | this device and all partners are quiesced |
/// | `resume` | the live one, the new one if there is | this device and all partners are quiesced |
///
/// After these hooks, the lanes of the live tables begin ([`Lane::begin`]) and the cores continue.
/// A cancelled change ends with `resume` of the live table, if it had been suspended.
pub trait Target: Send + Sync {
    /// The name of the type, as in tables.
    fn type_name(&self) -> &'static str;

    /// Opens the data path of a target. Not called if [`Target::as_linear`] or
    /// [`Target::as_striped`] returns a value. The sectors of the lane's bios count from the
    /// target's first sector (0), and never exceed its end.
    ///
    /// # Errors
    /// If a device below cannot be opened on this core.
    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, OpenError> {
        let _ = cx;
        unreachable!("a {} target is data and has no lane", self.type_name())
    }

    /// The arguments as `table` prints them after `START LEN TYPE `, byte for byte as in the kernel
    /// (multipath ends in a space).
    fn table(&self) -> String;

    /// The output of `status` after `START LEN TYPE `; empty for targets without a status.
    fn status(&self) -> String {
        String::new()
    }

    /// The limits of this target, stacked over the limits of its devices (`below`). `size` is the
    /// length of the target.
    fn limits(&self, below: LowerLimits<'_>) -> Limits;

    /// Kinds of the target's sectors, as in [`Device::extents`]; `from` counts from the target's
    /// start.
    fn extents(&self, from: Sector, len: Sectors, out: &mut Extents) {
        let _ = from;
        out.push(len, ExtentKind::Data);
    }

    /// The checkpoints for which the target knows what has changed since, as in
    /// [`Device::checkpoints`].
    fn checkpoints(&self) -> Vec<Checkpoint> {
        Vec::new()
    }

    /// Ranges that have changed since a checkpoint, as in [`Device::changed`]; `from` counts from
    /// the target's start.
    fn changed(&self, since: &Checkpoint, from: Sector, len: Sectors, out: &mut Extents<ChangeStatus>) {
        let _ = (since, from);
        out.push(len, ChangeStatus::Changed);
    }

    /// The devices below and the range used of each, for checks of size and alignment and for
    /// `deps`.
    fn devices(&self) -> Vec<DeviceRange>;

    /// Devices that the lanes open besides [`Target::devices`], which no word of the table names.
    /// For example, an origin opens the stores of its snapshots. They are also below the target.
    fn extra_devices(&self) -> Vec<DeviceRef> {
        Vec::new()
    }

    /// The device and first sector of a target that only adds an offset. The table then maps its
    /// sectors itself, without a call. Read when a lane is opened.
    fn as_linear(&self) -> Option<(DeviceRef, Sector)> {
        None
    }

    /// The stripes of a target that only distributes its sectors over several devices, like
    /// [`Target::as_linear`].
    fn as_striped(&self) -> Option<StripeSet> {
        None
    }

    /// The longest range of one bio (striped: the chunk). Bios are cut at its multiples, counted
    /// from the target's start. `None` if any length is accepted. A lane reads the value when it
    /// begins.
    fn max_io_len(&self) -> Option<Sectors> {
        None
    }

    /// True if discards are also cut at these multiples.
    fn cuts_discards(&self) -> bool {
        false
    }

    /// True if a flush may bypass the map and go to each device below once, whatever else uses the
    /// device (kernel `flush_bypasses_map`). A table with only such targets sends one flush per
    /// distinct device.
    fn flush_bypasses_map(&self) -> bool {
        false
    }

    /// True if the devices are paths to one disk, so a write through one path is read through
    /// another.
    fn is_over_one_disk(&self) -> bool {
        false
    }

    /// How requests reach the target. The first table of a device fixes its kind.
    fn kind(&self) -> DmQueueMode {
        DmQueueMode::Bio
    }

    /// True if a message fails with EBUSY while the device is suspended. The kernel leaves this to
    /// each target; only multipath does it.
    fn refuses_messages_while_suspended(&self) -> bool {
        false
    }

    /// Executes a message, already split into words.
    ///
    /// # Errors
    /// EINVAL for an unknown message; other errors of the target. Nothing has changed then.
    fn message(&self, words: &[String], resolver: &mut dyn Resolver) -> Result<String, TargetError> {
        let _ = (words, resolver);
        Err(TargetError::new(format!("Target type {} does not support messages", self.type_name())))
    }

    /// Fails or reinstates each path over device `number`, for an administrator.
    ///
    /// # Errors
    /// EINVAL if there is no such path.
    fn command_path(&self, number: DevNo, command: PathCommand) -> Result<(), TargetError> {
        let _ = (number, command);
        Err(TargetError::new(format!("Target type {} has no paths", self.type_name())))
    }

    /// A handle for work that messages started and cores have not finished. It ends when all work
    /// requested so far is done. `None` if a message is done when it is answered.
    fn pending_completion(&self) -> Option<CompletionHandle> {
        None
    }

    /// True if the lanes have work at a resume and a suspend even if the device is not used, such
    /// as beginning and ending a log. A lane is then opened for this work.
    fn needs_own_lane(&self) -> bool {
        false
    }

    /// The paths below and their counters; empty for targets without paths.
    fn path_reports(&self) -> Vec<PathReport> {
        Vec::new()
    }

    /// State of the path maintenance; `None` without maintenance, and for targets without paths.
    fn path_maintenance_report(&self) -> Option<PathMaintenanceReport> {
        None
    }

    /// The snapshot interface of the target; `None` for targets that are not snapshots.
    fn snapshot(&self) -> Option<&dyn SnapshotInfo> {
        None
    }

    /// The tasks of the path maintenance. They start at each resume and stop before the next
    /// suspend.
    fn tasks(&self, path_maintenance: &PathMaintenance) -> Vec<TaskFactory> {
        let _ = path_maintenance;
        Vec::new()
    }

    /// Called once, when the table is loaded into a device.
    fn attach(&self, notify: Arc<dyn TargetHost>) {
        let _ = notify;
    }

    /// Called before the cores stop taking bios. `noflush` as in `dmsetup suspend --noflush`.
    fn presuspend(&self, noflush: bool) {
        let _ = noflush;
    }

    /// Called when all lanes are empty.
    fn postsuspend(&self) {}

    /// Called before the table becomes live in `device`, or continues there. If it fails, nothing
    /// has changed. Success is no guarantee, because the change may still fail or be cancelled. Not
    /// called for a table that is only renewed ([`Target::dependents`]).
    ///
    /// # Errors
    /// Errors of the target.
    fn preresume(&self, device: DeviceId) -> Result<(), TargetError> {
        let _ = device;
        Ok(())
    }

    /// Called before the cores take bios again.
    fn resume(&self) {}

    /// Called at the end of a table that was live: it was replaced, or its device is being removed.
    /// Not called if a process ends with its devices in place.
    fn retired(&self) {}

    /// As [`Target::retired`], if the device is removed: no table follows, and the inactive one is
    /// never resumed.
    fn removed(&self) {
        self.retired();
    }

    /// The partners: other devices whose lanes read the state of this target when they open and
    /// begin. This includes devices with such a table in the inactive slot. If this target becomes
    /// live or is retired, the partners are *renewed* in the same change. New lanes of their live
    /// tables replace the old ones while neither has a request in flight. A suspended partner is
    /// renewed at its resume.
    fn dependents(&self) -> Vec<Arc<MappedDevice>> {
        Vec::new()
    }

    /// True for types that must be alone in their table (kernel `DM_TARGET_SINGLETON`). While such
    /// a target is live, its device takes only tables of the same type, or tables that fit every
    /// kind ([`DmQueueMode::Any`]).
    fn singleton(&self) -> bool {
        false
    }
}

/// Creates a target from its table line. Errors are the kernel's texts, with or without the type in
/// front (`linear: `). The table adds the type if it is missing.
pub type TargetConstructor = fn(&mut TargetArgs<'_>) -> Result<Arc<dyn Target>, TargetError>;

/// One type of target.
pub struct TargetType {
    /// The name of the type in tables.
    pub name: &'static str,
    /// The version of the kernel's target (6.12) with the same table and status texts, for `dmsetup
    /// targets`.
    pub version: [u32; 3],
    /// The constructor.
    pub new: TargetConstructor,
}

/// How requests reach a target, in the kernel's terms. udm always passes bios; the kind only
/// decides which table may replace which.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DmQueueMode {
    /// Bio-based: nearly all targets, and multipath with `queue_mode bio`.
    Bio,
    /// Request-based: multipath by default.
    Request,
    /// Fits every kind (the error target).
    Any,
}

impl DmQueueMode {
    /// The kernel's number (`enum dm_queue_mode`), as error texts print it.
    #[must_use]
    pub const fn number(self) -> u32 {
        match self {
            DmQueueMode::Any => 0,
            DmQueueMode::Bio => 1,
            DmQueueMode::Request => 2,
        }
    }
}

/// Parses a decimal number as the kernel's constructors do: only digits, no sign, 64 bits.
#[must_use]
pub fn decimal(word: &str) -> Option<u64> {
    word.bytes().all(|b| b.is_ascii_digit()).then(|| word.parse().ok()).flatten()
}

/// A device below a target and the range used of it.
#[derive(Clone)]
pub struct DeviceRange {
    /// The device.
    pub device: DeviceRef,
    /// First sector used.
    pub start: Sector,
    /// Number of sectors used.
    pub len: Sectors,
    /// Exclusive use of the disk, because its content makes sense only to its writer. Devices with
    /// the same key may share it. The disk is claimed while the table is loaded, under any name. A
    /// mapped device is claimed as itself, not the disks below it.
    pub alone: Option<Exclusivity>,
}

impl DeviceRange {
    /// `len` sectors from `start`, which other devices may use too.
    #[must_use]
    pub fn new(device: &DeviceRef, start: Sector, len: Sectors) -> DeviceRange {
        DeviceRange { device: device.clone(), start, len, alone: None }
    }
}
