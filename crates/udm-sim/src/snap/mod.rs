//! Worlds of origins and their snapshots.
//!
//! One or two origins over simulated disks, up to three snapshots of them, persistent on disks with
//! a volatile cache or transient, made, reloaded, merged and removed while cores send requests to
//! all of them. What a device holds is a list of registers ([`crate::cells`]); when a snapshot
//! becomes live its registers are those of its origin at that instant, and from then on each goes
//! its own way. So a read of a snapshot must be its instant with what was written to it, or fail,
//! with a cause; and a read of the origin must be what was written there, whatever its snapshots
//! are up to.
//!
//! * `world`: the world and its turns. `sides`: what is known of an origin or a snapshot.
//!   `control`, `verbs`: what is done to devices. `power`: rests, power cuts, and what comes back
//!   after them. `beside`: what is done by no core. `maps`: what has changed, as devices
//!   say. `counts`: how much of it.

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
