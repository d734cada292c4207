//! Mapped devices, tables and targets: what the kernel's device mapper does, over lanes.
//!
//! No I/O, no threads, no clock, no `unsafe`: a target sees the devices below as [`udm_core::Device`], time through [`udm_core::Cx`],
//! and nothing else, so that the simulator runs it unchanged.
#![forbid(unsafe_code)]

#[doc(hidden)]
pub mod bugs;
pub mod error;
pub mod error_target;
pub mod fault;
pub mod linear;
pub mod mapped;
pub mod multipath;
pub mod pending;
pub mod registry;
mod split;
pub mod striped;
pub mod table;
pub mod target;
#[doc(hidden)]
pub mod testing;
pub mod zero;

pub use error::TargetError;
pub use mapped::{Change, DeviceInfo, MappedDevice, Wake};
pub use pending::Pending;
pub use registry::{TARGETS, TargetType};
pub use table::{Entry, Table};
pub use target::{DeviceRef, Kind, LookupError, Notify, Resolver, Target, TargetArgs, Used};
