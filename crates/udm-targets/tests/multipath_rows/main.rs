//! The kernel's behaviour with multipath, one test per row (docs/internals/kernel-rows.md). Paths
//! are `253:0` to `253:3`, as in the recordings; a read has 4 KiB.

#[path = "../multipath_rig/mod.rs"]
mod multipath_rig;

mod errors;
mod groups;
mod refusals;
mod selectors;
mod suspend;
mod tables;
