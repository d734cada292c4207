//! Watched paths: deadlines, hedged reads and ejection of slow paths. The disks hold requests on
//! demand, and the test moves the clock.

#[path = "../multipath_rig/mod.rs"]
mod multipath_rig;

mod budget;
mod deadlines;
mod ejections;
mod hedges;
mod rig;
