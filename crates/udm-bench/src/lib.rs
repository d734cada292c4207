//! Measurements: load on a device, in fio's words and with fio's report, and comparisons of layers.
//!
//! Each job is a thread that attaches as a core and drives the device's lane itself, as any program
//! that links udm can. There is no socket, no protocol and no other thread. Or the jobs are clients
//! of an NBD server ([`Run::measure_nbd`]). [`compare()`] measures layers against each other,
//! [`lab`] repeats published experiments.
//!
//! This crate reads no command line, takes no signals and prints nothing: `udm bench` does.
#![forbid(unsafe_code)]

mod carry;
mod clock;
mod compare;
mod contest;
mod cores;
mod distribution;
mod end;
pub mod fuzz;
mod html;
mod job;
mod jobs;
mod json;
pub mod lab;
mod load;
mod mapped;
mod nbd;
mod one_mutex_origin;
mod options;
mod pace;
pub mod page;
mod parts;
mod passes;
mod path_watch;
mod percentiles;
mod plan;
mod progress;
mod region;
mod report;
mod run;
mod sizes;
mod snapshots;
mod source;
mod stats;
#[cfg(test)]
mod tests;
pub mod units;
mod verify;

pub use compare::{CompareOptions, Comparison, PATHS_MAX, Row, compare};
pub use jobs::{Job, JobDevice, JobFile, TEXT_MAX, read_jobs};
pub use load::{Load, Part, RateProcess, ReadWrite, Switch, Verify};
pub use mapped::{Mapped, PathTotals, Table, make_mapped};
pub use options::{Ignored, JobOptions, WAY_OUT};
pub use path_watch::PathWatch;
pub use progress::Progress;
pub use report::Report;
pub use run::{Run, measure_jobs};
pub use snapshots::{FirstWrites, LaterWrites, Lookups, SnapshotCosts, SnapshotOptions, snapshots};
