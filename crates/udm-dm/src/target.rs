//! The control half of a target, and what its constructor is given.
//!
//! A target is one line of a table: a private struct that implements [`Target`], a constructor, and
//! a lane. A list of [`TargetType`]s names those that there are.

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

/// A device that a table line names, looked up.
#[derive(Clone)]
pub struct DeviceRef {
    /// Its number, printed in `table` and `status`.
    pub number: DevNo,
    /// The word that the table used, or the name that the mapped device had then: for errors of the
    /// load.
    pub name: String,
    /// The device.
    pub device: Arc<dyn Device>,
    /// Whatever the resolver wants to see dropped when the table lets go of the device: it counts
    /// the uses of mapped devices so.
    pub hold: Option<Arc<dyn Any + Send + Sync>>,
}

impl DeviceRef {
    /// What it is called now, for the log: a mapped device may have another name since.
    #[must_use]
    pub fn current_name(&self) -> String {
        self.device.stacked().map_or_else(|| self.name.clone(), |device| device.name())
    }
}

/// The limits of the devices below a table, as it has to see them.
#[derive(Clone, Copy)]
pub struct LowerLimits<'a>(pub(crate) Option<&'a HashMap<DeviceId, Limits>>);

impl LowerLimits<'_> {
    /// As they are.
    pub const NOW: LowerLimits<'static> = LowerLimits(None);

    /// Those of `device`: as they will be when it takes a new table in the same change, else as
    /// they are.
    #[must_use]
    pub fn limits(&self, device: &DeviceRef) -> Limits {
        let coming = self.0.and_then(|coming| coming.get(&device.device.id()));
        coming.cloned().unwrap_or_else(|| device.device.limits())
    }
}

/// Looks up the devices that table lines and messages name: a path, a URI, `major:minor` or
/// `@name`.
pub trait Resolver {
    /// The device for `word`, opened if need be.
    ///
    /// # Errors
    /// An errno (ENOENT for an unknown name, ENXIO for unknown numbers, the backend's own
    /// otherwise) and why.
    fn get(&mut self, word: &str) -> Result<DeviceRef, LookupError>;

    /// Where it is kept that a store on `device`, which it gave, must not be believed; `None` where
    /// nothing is kept.
    fn mark(&self, device: &DeviceRef) -> Option<Arc<dyn InvalidStoreMark>> {
        let _ = device;
        None
    }
}

/// Why a device could not be had.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LookupError {
    /// The errno, positive.
    pub errno: i32,
    /// The precise reason, for a person; empty when the errno says it all.
    pub reason: String,
}

/// What a target's constructor is given: its line, split into words.
pub struct TargetArgs<'a> {
    /// Where the target starts in the mapped device.
    pub start: Sector,
    /// Its length.
    pub len: Sectors,
    /// The words behind the type, backslashes already taken off.
    pub args: &'a [String],
    /// Looks devices up.
    pub resolver: &'a mut dyn Resolver,
    /// Reads and writes what has to be known of the devices, or be on them, before a lane is open.
    pub io: &'a dyn ControlIo,
    /// How many cores there are (io-affinity masks).
    pub cores: usize,
}

/// What a target reports to the device it is part of.
pub trait TargetHost: Send + Sync {
    /// Raises the device's event counter: `wait` returns. Called from the data path when a path
    /// fails: an atomic add.
    fn event(&self);
    /// Has who listens told of a change of state; it is put into words only where somebody does.
    /// Waits for nobody.
    fn tell(&self, change: &dyn Fn() -> StateChange) {
        let _ = change;
    }
    /// The device's name, for the log; its number where the name is being changed. Waits for
    /// nobody.
    fn device(&self) -> String;
    /// Has every lane of the device polled once: what they wait for has changed. For rare events: a
    /// letter to each core.
    fn kick(&self, cores: &dyn Cores);
    /// The time, for who asks how long something has lasted: of the control side's clock, and 0
    /// where it has said by none.
    fn now(&self) -> Nanos {
        Nanos(0)
    }
    /// What is done for the device besides requests.
    fn path_maintenance(&self) -> PathMaintenance {
        PathMaintenance::default()
    }
    /// The device itself, for as long as it is there. Whoever keeps it keeps the table alive that
    /// it asks from.
    fn mapped(&self) -> Option<Arc<MappedDevice>> {
        None
    }
}

/// What is done for devices besides their requests, where the kernel leaves it to a daemon.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PathMaintenance {
    /// How paths are checked, and what follows; `None` leaves it to messages, as the kernel does.
    pub paths: Option<Arc<MultipathSettings>>,
    /// What paths of multipath targets are watched for, as of the load of a table.
    pub watch: PathWatchOptions,
}

/// What the paths of a multipath target are watched for: by default nothing, as with the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PathWatchOptions {
    /// A path that keeps a request for longer is failed, and reads go elsewhere.
    pub deadline: Option<Nanos>,
    /// A read that takes longer than most is sent to a second path too.
    pub hedge_reads: bool,
    /// A path that is much slower than the others of its group is put out of use for a while.
    pub eject_slow: bool,
}

impl PathWatchOptions {
    /// True when there is something to watch for.
    #[must_use]
    pub fn is_on(&self) -> bool {
        *self != PathWatchOptions::default()
    }
}

/// The control half of one table line.
///
/// The mapped device calls its hooks in the kernel's order, each when the one before is over on all
/// devices of the change:
///
/// | hook | of which table | meanwhile |
/// |---|---|---|
/// | `preresume` | one that is to become live, or to go on behind a suspend | nothing is opened or stopped for it |
/// | `presuspend` | the live one | the cores take bios |
/// | `postsuspend` | the live one | this device stands still |
/// | `retired` | one that was live and never will be again | this device and all partners stand still |
/// | `resume` | the live one, the new one if there is | the same |
///
/// Behind them the lanes of the live tables are told to begin ([`Lane::begin`]) and the cores go
/// on. A change that is called off ends with `resume` of what was live, if it had been suspended.
pub trait Target: Send + Sync {
    /// The name of its type, as tables spell it.
    fn type_name(&self) -> &'static str;

    /// Opens the data-path half of a target that is not data. The lane is given bios whose sectors
    /// count from the start of the **mapped device**'s target (0 is the target's first sector),
    /// never beyond its end.
    ///
    /// # Errors
    /// When a device below can't be opened on this core.
    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, OpenError> {
        let _ = cx;
        unreachable!("a {} target is data and has no lane", self.type_name())
    }

    /// The arguments as `table` prints them: what stands behind `START LEN TYPE `, byte for byte as
    /// the kernel prints it (multipath ends in a space).
    fn table(&self) -> String;

    /// What `status` prints behind `START LEN TYPE `; empty for targets without a status.
    fn status(&self) -> String {
        String::new()
    }

    /// Limits of this target alone, stacked over its devices, which are as `below` says; `size` is
    /// the target's length.
    fn limits(&self, below: LowerLimits<'_>) -> Limits;

    /// What its sectors hold, as [`Device::extents`]; `from` counts from the target's start.
    fn extents(&self, from: Sector, len: Sectors, out: &mut Extents) {
        let _ = from;
        out.push(len, ExtentKind::Data);
    }

    /// The instants since which it knows what has changed, as [`Device::checkpoints`].
    fn checkpoints(&self) -> Vec<Checkpoint> {
        Vec::new()
    }

    /// What has changed since one of them, as [`Device::changed`]; `from` counts from the target's
    /// start.
    fn changed(&self, since: &Checkpoint, from: Sector, len: Sectors, out: &mut Extents<ChangeStatus>) {
        let _ = (since, from);
        out.push(len, ChangeStatus::Changed);
    }

    /// The devices below with the range used of each, for checks of size and alignment and for
    /// `deps`.
    fn devices(&self) -> Vec<DeviceRange>;

    /// The devices that its lanes open besides those of [`Target::devices`], which no word of its
    /// table names: an origin's open the stores of its snapshots. They lie below it all the same.
    fn extra_devices(&self) -> Vec<DeviceRef> {
        Vec::new()
    }

    /// A target that only adds a constant is data: the table lane applies it without a call.
    /// Asked when a lane is opened.
    fn as_linear(&self) -> Option<(DeviceRef, Sector)> {
        None
    }

    /// And so is one that only deals its sectors out over several devices.
    fn as_striped(&self) -> Option<StripeSet> {
        None
    }

    /// The longest run of sectors that one bio may cover, counted from the target's start (striped:
    /// chunk). Bios are cut at its multiples. `None` when it takes any length. A lane goes by what
    /// it was when it began.
    fn max_io_len(&self) -> Option<Sectors> {
        None
    }

    /// True when discards are cut at its multiples, too.
    fn cuts_discards(&self) -> bool {
        false
    }

    /// True when a flush may go to each device below once, past the map and whatever else uses the
    /// device (kernel `flush_bypasses_map`). A table of such targets alone sends one flush per
    /// distinct device.
    fn flush_bypasses_map(&self) -> bool {
        false
    }

    /// True when its devices are paths to one disk: what is written through one is read through
    /// another.
    fn is_over_one_disk(&self) -> bool {
        false
    }

    /// How requests reach it. A device keeps the kind that its first table gave it.
    fn kind(&self) -> DmQueueMode {
        DmQueueMode::Bio
    }

    /// True when messages are EBUSY while the device is suspended. The kernel leaves that to each
    /// target, and multipath's is the only one.
    fn refuses_messages_while_suspended(&self) -> bool {
        false
    }

    /// Acts on a message, already split into words.
    ///
    /// # Errors
    /// EINVAL for what it does not know; the target's own otherwise. Nothing has changed then.
    fn message(&self, words: &[String], resolver: &mut dyn Resolver) -> Result<String, TargetError> {
        let _ = (words, resolver);
        Err(TargetError::new(format!("Target type {} does not support messages", self.type_name())))
    }

    /// Fails or reinstates each path over device `number`, for an administrator.
    ///
    /// # Errors
    /// EINVAL when it has no such path.
    fn command_path(&self, number: DevNo, command: PathCommand) -> Result<(), TargetError> {
        let _ = (number, command);
        Err(TargetError::new(format!("Target type {} has no paths", self.type_name())))
    }

    /// What messages set going and the cores have yet to finish; it ends when everything that was
    /// asked for until now is done. `None` when a message is done as soon as it is answered.
    fn pending_completion(&self) -> Option<CompletionHandle> {
        None
    }

    /// True for a target whose lanes have something to do at a resume and a suspend, whether
    /// somebody uses the device or not: a log to begin and to end. A lane is opened for it then.
    fn needs_own_lane(&self) -> bool {
        false
    }

    /// The paths below and what each has served; empty for targets without paths.
    fn path_reports(&self) -> Vec<PathReport> {
        Vec::new()
    }

    /// How its paths are looked after; `None` where they are not, and for targets without paths.
    fn path_maintenance_report(&self) -> Option<PathMaintenanceReport> {
        None
    }

    /// What it says as the instant of another device; `None` for all other targets.
    fn snapshot(&self) -> Option<&dyn SnapshotInfo> {
        None
    }

    /// What its upkeep takes. They are started at each resume and stopped before the next suspend.
    fn tasks(&self, path_maintenance: &PathMaintenance) -> Vec<TaskFactory> {
        let _ = path_maintenance;
        Vec::new()
    }

    /// Given once, when the table is loaded into a device.
    fn attach(&self, notify: Arc<dyn TargetHost>) {
        let _ = notify;
    }

    /// Before the cores stop taking bios. `noflush` as in `dmsetup suspend --noflush`.
    fn presuspend(&self, noflush: bool) {
        let _ = noflush;
    }

    /// All lanes are empty.
    fn postsuspend(&self) {}

    /// The table is about to become live in `device`, or to go on there. What fails here fails with
    /// everything as it was. That it went well says nothing: the change can fail elsewhere or be
    /// called off. It is not asked of a table that is only renewed ([`Target::dependents`]).
    ///
    /// # Errors
    /// The target's own.
    fn preresume(&self, device: DeviceId) -> Result<(), TargetError> {
        let _ = device;
        Ok(())
    }

    /// Before the cores take bios again.
    fn resume(&self) {}

    /// The table was live and has been replaced, or its device is being removed: this is its end.
    /// Not called where a process ends with its devices in place.
    fn retired(&self) {}

    /// The same where its device is removed: no table takes its place, also not one that waits.
    fn removed(&self) {
        self.retired();
    }

    /// Other devices, whose lanes look at this target when they are opened and begin: where such a
    /// table is live, and where one waits. When this one becomes live, or is gone, they are
    /// *renewed* in the same change: new lanes of their live tables take the place of the old ones,
    /// while neither has anything in flight. One that is suspended is renewed when it is resumed.
    fn dependents(&self) -> Vec<Arc<MappedDevice>> {
        Vec::new()
    }

    /// True for types that must be alone in their table (kernel `DM_TARGET_SINGLETON`). While such
    /// a target is live, its device takes only tables of the same type, or of targets that fit
    /// everywhere ([`DmQueueMode::Any`]).
    fn singleton(&self) -> bool {
        false
    }
}

/// Makes a target from its table line. Errors are the kernel's texts, with or without the type in
/// front (`linear: `): the table puts it there where it is missing.
pub type TargetConstructor = fn(&mut TargetArgs<'_>) -> Result<Arc<dyn Target>, TargetError>;

/// One kind of target.
pub struct TargetType {
    /// The word that tables use.
    pub name: &'static str,
    /// The version of the kernel's target (6.12) whose table and status texts these are, for
    /// `dmsetup targets`.
    pub version: [u32; 3],
    /// Its constructor.
    pub new: TargetConstructor,
}

/// How requests reach a target, in the kernel's terms. udm passes bios in every case; the kinds
/// decide which table may replace which.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DmQueueMode {
    /// Bio by bio: nearly all targets, and multipath with `queue_mode bio`.
    Bio,
    /// Request by request: multipath by default.
    Request,
    /// Whatever the device is already (the error target).
    Any,
}

impl DmQueueMode {
    /// The kernel's number for it (`enum dm_queue_mode`), as error texts print it.
    #[must_use]
    pub const fn number(self) -> u32 {
        match self {
            DmQueueMode::Any => 0,
            DmQueueMode::Bio => 1,
            DmQueueMode::Request => 2,
        }
    }
}

/// A decimal number as the kernel's constructors read it: digits alone, no sign, within 64 bits.
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
    /// How many.
    pub len: Sectors,
    /// No other device may use the disk so, but those that it is shared with: it holds what makes
    /// sense only to whoever wrote it. The disk is claimed while the table is loaded, under
    /// whatever name. A mapped device is claimed as such, not what lies below it.
    pub alone: Option<Exclusivity>,
}

impl DeviceRange {
    /// `len` sectors from `start` on, which others may use too.
    #[must_use]
    pub fn new(device: &DeviceRef, start: Sector, len: Sectors) -> DeviceRange {
        DeviceRange { device: device.clone(), start, len, alone: None }
    }
}
