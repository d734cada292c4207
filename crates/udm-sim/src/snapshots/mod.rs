//! Worlds of origins and their snapshots.
//!
//! There are one or two origins over simulated disks, and up to three snapshots of them. Snapshots
//! are transient, or persistent on disks with a volatile cache. They are created, reloaded, merged
//! and removed while cores send requests to all devices. The model of a device is a list of
//! registers ([`crate::register_model`]). When a snapshot becomes live, its registers are copied
//! from its origin. From then on each changes alone. So a read of a snapshot must return the data
//! of that instant with the snapshot's own writes, or fail with a reason. A read of the origin must
//! return the writes to it.
//!
//! * `world`: the world and its turns. `volumes`: the model of an origin or a snapshot. `control`,
//!   `verbs`: actions on devices. `power`: quiescence, power cuts, and the state after them.
//!   `helper_threads`: work outside of cores. `changed_maps`: the changed chunks that devices
//!   report. `counts`: the counters.

mod changed_maps;
mod control;
mod counts;
mod helper_threads;
mod power;
mod verbs;
mod volumes;
mod world;

pub use counts::SnapshotCounts;
pub(crate) use world::SnapshotWorld;
