//! Paths that are watched: deadlines, hedged reads, and paths that are put out of use for being
//! slow. Over disks that hold what they are told to, on a clock that the test moves.

#[path = "../multipath_rig/mod.rs"]
mod multipath_rig;

mod budget;
mod deadlines;
mod ejections;
mod hedges;
mod rig;
