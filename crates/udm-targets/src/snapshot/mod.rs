//! `snapshot-origin` and `snapshot`: an instant of a device, kept while the device goes on.
//!
//! ```text
//! snapshot-origin <origin>
//! snapshot <origin> <store> <P|PO|N> <chunk> [<#features> <feature>...]
//! ```
//!
//! A snapshot reads as its origin did when it was first resumed, and can be written. What differs
//! is in its *store* (the kernel says COW device), in chunks: `P` on the disk, in the kernel's
//! layout ([`udm_wire::cow`]), `N` for as long as the table is there. Writes of the origin through
//! a `snapshot-origin` are copied first; writes past it are not seen.
//!
//! * [`map`]: where each chunk is. [`readers`]: who may still read the origin. [`space`]: what of
//!   the store is free. [`growth`]: a store that becomes larger. [`commits`]: the records of a
//!   persistent store. [`state`]: a snapshot, of these. [`family`]: an origin and its snapshots.
//! * [`engine`] copies, a lane's part each, with [`jobs`]; [`origin_lane`] and [`lane`] say what.
//! * [`checkpoints`] tells what has changed since an instant, from the maps.
//! * [`args`], [`load`], [`seat`], [`settings`], [`target`], [`origin`]: the control half.
//!   [`merge`]: a snapshot brought back into its origin.
//!
//! Where udm does more than the kernel is in docs/targets.md.

mod args;
mod checkpoints;
mod commits;
mod engine;
mod family;
mod growth;
mod jobs;
mod lane;
mod load;
mod map;
pub mod merge;
pub mod origin;
mod origin_lane;
mod readers;
mod seat;
mod settings;
mod space;
mod state;
mod tags;
pub mod target;
mod whole;
