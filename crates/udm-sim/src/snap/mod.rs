//! Worlds of origins and their snapshots.
//!
//! There are one or two origins over simulated disks, and up to three snapshots of them. Snapshots
//! are transient, or persistent on disks with a volatile cache. They are made, reloaded, merged and
//! removed while cores send requests to all devices. The model of a device is a list of registers
//! ([`crate::cells`]). When a snapshot becomes live, its registers are those of its origin at that
//! instant; from then on each changes alone. So a read of a snapshot must return its instant with
//! its own writes, or fail with a cause. A read of the origin must return the writes to it.
//!
//! * `world`: the world and its turns. `sides`: the model of an origin or a snapshot. `control`,
//!   `verbs`: actions on devices. `power`: quiet moments, power cuts, and the state after them.
//!   `beside`: work outside cores. `maps`: the changed chunks that devices report. `counts`: the
//!   counts.

mod beside;
mod control;
mod counts;
mod maps;
mod power;
mod sides;
mod verbs;
mod world;

pub use counts::Counts;
pub(crate) use world::World;
