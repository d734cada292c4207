//! What a kernel does with multipath, one test per row (docs/internals/kernel-rows.md). Paths are
//! called `253:0` to `253:3`, as in the recordings; a read is of 4 KiB.

#[path = "../multipath_rig/mod.rs"]
mod multipath_rig;

mod errors;
mod groups;
mod refusals;
mod selectors;
mod suspend;
mod tables;
