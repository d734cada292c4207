//! The mechanism of the device mapper, over lanes: mapped devices, tables, what a target is, and
//! the splitting of requests.
//!
//! No I/O, no threads, no clock, no `unsafe`: a table sees the devices below as
//! [`udm_core::Device`], time through [`udm_core::Cx`], and nothing else, so that the simulator
//! runs it unchanged. It knows no target by name: which there are, whoever builds a table says
//! ([`TargetType`]).
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
