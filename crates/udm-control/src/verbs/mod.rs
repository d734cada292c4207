//! The verbs: dmsetup's operations on devices, with the kernel's semantics and errors.
//!
//! Contract: verbs need no reactor, so the simulator runs them too. Devices are locked in the order
//! of their numbers (`device_locks`). `cancel` defines how a verb is cancelled.

mod cancel;
mod change;
mod device_locks;
mod events;
mod lane_guard;
mod multipath;
#[cfg(test)]
mod partners_tests;
mod power;
mod queue;
mod remove;
mod rename;
mod show;
pub mod snapshot;
mod tables;
mod wait;

pub(crate) use cancel::PendingVerbs;
pub use cancel::{CancelToken, interrupted};
pub(crate) use change::{CreatedDevice, create_device, reload};
pub use change::{
    DeviceSpec, cancel_all, create, create_cancellable, create_with, resume, resume_cancellable, suspend,
    suspend_cancellable,
};
pub use events::wait_event;
pub use multipath::{MultipathOptions, create_multipath_cancellable};
pub use power::turn_power;
pub use queue::change_queues;
pub use remove::{RemoveOptions, remove, remove_cancellable, run_deferred_removals};
pub use rename::rename;
pub(crate) use show::{OPS, device_and_paths};
pub use show::{info, ls, status, statuses, table, tables, version};
pub(crate) use snapshot::SnapshotInfo;
pub(crate) use tables::lines_of;
pub use tables::{
    TABLE_MAX, clear, command_path, load, load_cancellable, message, message_from, resolve_device,
};
pub use wait::{wait, wait_with};
