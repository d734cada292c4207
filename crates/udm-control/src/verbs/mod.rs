//! The verbs: dmsetup's operations on devices, with the kernel's semantics and errors.
//!
//! Contract: verbs need no reactor, so the simulator runs them too. Devices are locked in the order
//! of their numbers (`turns`). `call_off` defines how a verb is cancelled.

mod call_off;
mod change;
mod events;
mod hold;
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
mod turns;
mod wait;

pub(crate) use call_off::Pending;
pub use call_off::{CallOff, interrupted};
pub use change::{
    Called, call_off_all, create, create_until, create_with, resume, resume_until, suspend, suspend_until,
};
pub(crate) use change::{Created, make, reload};
pub use events::wait_event;
pub use multipath::{Grouped, create_multipath_until};
pub use power::turn_power;
pub use queue::change_queues;
pub use remove::{Removal, remove, remove_until, see_to_deferred};
pub use rename::rename;
pub(crate) use show::{OPS, shown};
pub use show::{info, ls, status, statuses, table, tables, version};
pub(crate) use snapshot::Note;
pub(crate) use tables::lines_of;
pub use tables::{TABLE_MAX, clear, command_path, device, load, load_until, message, message_from};
pub use wait::{wait, wait_with};
