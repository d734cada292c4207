//! The control half of a target, and all that it exchanges with its table and device.
//!
//! A target is one line of a table: a private struct that implements [`Target`], a constructor, and
//! a lane. A list of [`TargetType`]s names all available types. [`Target`] has only questions that
//! concern every target, and hooks. Questions for some targets are traits of their own (*facets*),
//! which a target returns if it implements them. So neither tables nor mapped devices know a type
//! of target.
//!
//! * `args`: the words of a line, and the lookup of devices.
//! * `features`, `data_path`: how the table treats a target and its bios.
//! * `host`: the device that the target belongs to.
//! * `change_tracker`, `clone`, `mirror`, `multipath`, `snapshot`: the facets, with their reports.

mod args;
mod change_tracker;
mod clone;
mod data_path;
mod features;
mod host;
mod mirror;
mod multipath;
mod snapshot;

pub use crate::device_ref::{DeviceLookupError, DeviceRange, LowerLimits, ResolvedDevice};
pub use args::{DeviceNameResolver, TargetArgs, parse_decimal_u64};
pub use change_tracker::ChangeTracker;
pub use clone::{CloneHydrationState, CloneReport, CloneTargetQueries};
pub use data_path::TargetDataPath;
pub use features::{DmQueueMode, TargetFeatures};
pub use host::{SettingsOutsideTable, TargetHostServices};
pub use mirror::{
    MirrorFailure, MirrorLegReport, MirrorLogReport, MirrorPhase, MirrorReport, MirrorTargetQueries,
};
pub use multipath::{
    MultipathTarget, PathCheckResult, PathCommand, PathLatencyAndHedgeReport, PathReport,
    QueueingAndFailbackReport,
};
pub use snapshot::{SnapshotReport, SnapshotState, SnapshotTargetQueries};

use crate::completion::TargetMessageWaitHandle;
use crate::error::TargetError;
use crate::mapped::MappedDevice;
use std::sync::Arc;
use udm_core::{
    BioTaskFactory, Cx, DeviceControlError, DeviceId, ExtentKind, Extents, Lane, Limits, Sector, Sectors,
};

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

    /// The arguments as `table` prints them after `START LEN TYPE `, byte for byte as in the kernel
    /// (multipath ends in a space).
    fn table(&self) -> String;

    /// The output of `status` after `START LEN TYPE `; empty for targets without a status.
    fn status(&self) -> String {
        String::new()
    }

    /// Opens the data path of a target with [`TargetDataPath::OwnLane`]. The sectors of the lane's
    /// bios count from the target's first sector (0), and never exceed its end.
    ///
    /// # Errors
    /// If a device below cannot be opened on this core.
    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        let _ = cx;
        unreachable!("a {} target is data and has no lane", self.type_name())
    }

    /// The route of bios to this target. A target that only adds an offset or distributes its
    /// sectors over several devices has no lane: the table maps its bios itself, without a call.
    /// Read when a lane is opened; the answer may differ for the next lane.
    fn data_path(&self) -> TargetDataPath {
        TargetDataPath::OwnLane
    }

    /// The longest range of one bio (striped: the chunk). Bios are cut at its multiples, counted
    /// from the target's start. `None` if any length is accepted. A lane reads the value when it
    /// begins.
    fn max_io_len(&self) -> Option<Sectors> {
        None
    }

    /// State of the target that a new table with the same text would not have, in a few words, such
    /// as "2 bad blocks". `None` if the text and the devices below say all that requests depend on.
    /// An upgrade in place is refused while there is such state.
    fn state_outside_table(&self) -> Option<String> {
        None
    }

    /// The fixed features of the target.
    fn features(&self) -> TargetFeatures {
        TargetFeatures::default()
    }

    /// The devices below and the range used of each, for checks of size and alignment and for
    /// `deps`.
    fn devices(&self) -> Vec<DeviceRange>;

    /// Devices that the lanes open besides [`Target::devices`], which no word of the table names.
    /// For example, an origin opens the stores of its snapshots. They are also below the target.
    fn extra_devices(&self) -> Vec<ResolvedDevice> {
        Vec::new()
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

    /// The changes since checkpoints; `None` for targets that keep no checkpoints.
    fn as_change_tracker(&self) -> Option<&dyn ChangeTracker> {
        None
    }

    /// The paths of the target; `None` for targets without paths.
    fn as_multipath(&self) -> Option<&dyn MultipathTarget> {
        None
    }

    /// The snapshot interface of the target; `None` for targets that are not snapshots.
    fn as_snapshot(&self) -> Option<&dyn SnapshotTargetQueries> {
        None
    }

    /// The clone interface of the target; `None` for targets that are not clones.
    fn as_clone(&self) -> Option<&dyn CloneTargetQueries> {
        None
    }

    /// The mirror interface of the target; `None` for targets that are not mirrors.
    fn as_mirror(&self) -> Option<&dyn MirrorTargetQueries> {
        None
    }

    /// Executes a message, already split into words.
    ///
    /// # Errors
    /// EINVAL for an unknown message; other errors of the target. Nothing has changed then.
    fn message(
        &self,
        words: &[String],
        resolver: &mut dyn DeviceNameResolver,
    ) -> Result<String, TargetError> {
        let _ = (words, resolver);
        Err(TargetError::new(format!("Target type {} does not support messages", self.type_name())))
    }

    /// A handle for work that messages started and cores have not finished. It ends when all work
    /// requested so far is done. `None` if a message is done when it is answered.
    fn pending_completion(&self) -> Option<TargetMessageWaitHandle> {
        None
    }

    /// The tasks of the target, such as checks of its paths. They start at each resume and stop
    /// before the next suspend.
    fn tasks(&self) -> Vec<BioTaskFactory> {
        Vec::new()
    }

    /// Called once, when the table is loaded into a device.
    fn attach(&self, notify: Arc<dyn TargetHostServices>) {
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
    /// called for a table that is only renewed ([`Target::partners`]).
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
    fn partners(&self) -> Vec<Arc<MappedDevice>> {
        Vec::new()
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
