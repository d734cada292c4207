//! The mechanism of the device mapper over lanes: mapped devices, tables, the trait of targets, and
//! the splitting of requests.
//!
//! There is no I/O, no thread, no clock and no `unsafe` here. A table sees the devices below as
//! [`udm_core::Device`] and time through [`udm_core::Cx`]. So the simulator runs this crate
//! unchanged. The crate knows no target by name: the program that builds a table passes the list of
//! [`TargetType`]s (`udm_targets::TARGETS`).
//!
//! * [`target`]: the [`target::Target`] trait, its hooks, the input of a constructor, and the
//!   traits of targets with paths, snapshots or checkpoints.
//! * [`table`]: a table, its checks, its limits and its lane.
//! * [`mapped`]: mapped devices, suspend, resume, and changes of several devices.
//! * [`throttle`]: limits of the requests and bytes per second of a device.
//! * [`split`]: bios that are sent in several fragments.
//! * [`child_lanes`]: the lanes below a lane that has several.
//! * [`stripes`]: the arithmetic of chunks that are dealt out over devices.
//! * [`completion`]: work that a message started and that cores have not finished.
//! * [`InvalidStoreMark`]: a mark outside of a snapshot store that says that the store is invalid.
//! * [`DeviceEvent`], [`EventSink`]: device events and their receiver.
//! * `divisor`: division by a fixed number as a multiplication, for chunk sizes.
//! * `testing`: disks, cores and resolvers for tests of targets.
//!
//! **Splitting.** Fragments come from a bounded pool that belongs to one splitter, so splitters on
//! top of each other cannot block each other. Bios that are being split take turns, a few fragments
//! each, and none holds more than a quarter of the pool. So a short bio does not wait for a long
//! one. Every other turn belongs to flushes.
//!
//! **Children.** While bios come back, only children with bios in flight are polled. The other
//! children are polled when a poll brings nothing, and in every 64th poll.
//!
//! **The cost of a request** is counted in instructions (docs/internals/instructions.md), and a
//! test checks the table there. A batch of one bio is passed on in the batch in which it came, down
//! to the backend. This needs one branch per layer. The single bio and the loop over many call the
//! same functions.
#![forbid(unsafe_code)]

pub mod child_lanes;
pub mod completion;
mod device_events;
mod device_ref;
#[doc(hidden)]
pub mod divisor;
pub mod error;
mod invalid_store;
pub mod mapped;
pub mod split;
pub mod stripes;
pub mod table;
pub mod target;
#[doc(hidden)]
pub mod testing;
pub mod throttle;

pub use completion::TargetMessageWaitHandle;
pub use device_events::{DeviceEvent, DeviceEventDetails, EventKind, EventSink};
pub use device_ref::{DeviceLookupError, DeviceRange, LowerLimits, ResolvedDevice};
pub use error::TargetError;
pub use invalid_store::InvalidStoreMark;
pub use mapped::{
    DeviceInfo, DeviceNameReader, DeviceSetTransition, DeviceTransition, IndexedDeviceError, MappedDevice,
    QueueFactory, TransitionWakeFn, device_stack_contains,
};
pub use table::{Table, TableEntry, WholeDeviceLane};
pub use target::{
    ChangeTracker, CloneHydrationState, CloneReport, CloneTargetQueries, DeviceNameResolver, DmQueueMode,
    MirrorFailure, MirrorLegReport, MirrorLogReport, MirrorPhase, MirrorReport, MirrorTargetQueries,
    MultipathTarget, PathCheckResult, PathCommand, PathLatencyAndHedgeReport, PathReport,
    QueueingAndFailbackReport, SettingsOutsideTable, SnapshotReport, SnapshotState, SnapshotTargetQueries,
    Target, TargetArgs, TargetConstructor, TargetDataPath, TargetFeatures, TargetHostServices, TargetType,
};
pub use udm_core::{ControlIo, control_io};
