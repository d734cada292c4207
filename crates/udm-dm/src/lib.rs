//! The mechanism of the device mapper over lanes: mapped devices, tables, the trait of targets, and
//! the splitting of requests.
//!
//! There is no I/O, no thread, no clock and no `unsafe` here. A table sees the devices below as
//! [`udm_core::Device`] and time through [`udm_core::Cx`]. So the simulator runs this crate
//! unchanged. The crate knows no target by name: the program that builds a table passes the list of
//! [`TargetType`]s (`udm_targets::TARGETS`).
//!
//! * [`target`]: the [`target::Target`] trait, its hooks, and the input of a constructor.
//! * [`table`]: a table, its checks, its limits and its lane.
//! * [`mapped`]: mapped devices, suspend, resume, and changes of several devices.
//! * [`split`]: bios that are sent in several fragments.
//! * [`legs`]: the lanes below a lane that has several.
//! * [`stripes`]: the arithmetic of chunks that are dealt out over devices.
//! * [`pending`]: work that a message started and that cores have not finished.
//! * [`snapshot`], [`StoreMark`]: the interface of snapshots to the control half.
//! * [`News`], [`Listener`]: device events and their receiver.
//! * `divisor`: division by a fixed number as a multiplication, for chunk sizes.
//! * `testing`: disks, cores and resolvers for tests of targets.
//!
//! **Splitting.** Fragments come from a bounded pool that belongs to one splitter, so splitters on
//! top of each other cannot block each other. Bios that are being split take turns, a few fragments
//! each, and none holds more than a quarter of the pool. So a short bio does not wait for a long
//! one. Every other turn belongs to flushes.
//!
//! **Legs.** While bios come back, only legs with bios in flight are polled. The other legs are
//! polled when a poll brings nothing, and in every 64th poll.
//!
//! **The cost of a request** is counted in instructions (docs/internals/instructions.md), and a test checks
//! the table there. A batch of one bio is passed on in the batch in which it came, down to the
//! backend. This needs one branch per layer. The single bio and the loop over many call the same
//! functions.
#![forbid(unsafe_code)]

#[doc(hidden)]
pub mod divisor;
pub mod error;
pub mod legs;
pub mod mapped;
mod marks;
mod news;
pub mod pending;
mod report;
pub mod snapshot;
pub mod split;
pub mod stripes;
pub mod table;
pub mod target;
#[doc(hidden)]
pub mod testing;

pub use error::TargetError;
pub use mapped::{Change, Changes, DeviceInfo, MappedDevice, NameOf, QueueBy, Refused, Wake, lies_on};
pub use marks::StoreMark;
pub use news::{Listener, News, NewsKind, StateChange};
pub use pending::Pending;
pub use report::{CheckState, PathCommand, PathReport, UpkeepReport, WatchReport};
pub use snapshot::{SnapshotReport, SnapshotState, SnapshotView};
pub use table::{Entry, Table};
pub use target::{
    Below, Constructor, DeviceRef, Kind, LookupError, Notify, PathWatch, Resolver, Target, TargetArgs,
    TargetType, Upkeep, Used,
};
pub use udm_core::{ControlIo, control_io};
