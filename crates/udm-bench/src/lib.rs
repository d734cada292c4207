//! Measurements: load on a device, with fio's options and fio's report, and comparisons of layers.
//!
//! Each job is a thread that attaches as a core and drives the lane of the device itself. Any
//! program that links udm can do this. There is no socket, no protocol and no other thread. Jobs
//! can also be clients of an NBD server ([`LoadMeasurementPlan::measure_nbd`]) or machines of a
//! vhost-user-blk server ([`LoadMeasurementPlan::measure_vhost_user`]).
//! [`compare_dm_layers()`] compares layers with each other, [`lab`] repeats published experiments.
//!
//! This crate reads no command line, handles no signals and prints nothing; `udm bench` does.
#![deny(unsafe_code)]

mod clock;
mod compare;
mod connection;
mod cores;
mod device_contest;
mod drain_deadline;
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
pub mod page;
mod passes;
mod path_sampler;
mod payload;
mod per_direction;
mod percentiles;
mod plan;
mod progress;
mod region;
mod report;
mod request_pacing;
mod request_source;
mod run;
mod snapshots;
mod stats;
#[cfg(test)]
mod tests;
mod timeline;
pub mod units;
mod verify;
mod vhost_user;

pub use compare::{
    DmLayerComparison, DmLayerComparisonOptions, DmLayerComparisonRow, PATHS_MAX, compare_dm_layers,
};
pub use jobs::{BenchJob, JobDevice, JobFile, TEXT_MAX, parse_job_file};
pub use load::{BytesOrPercent, FioBool, FioLoadOptions, FioRwMode, VerifyMethod};
pub use mapped::{MappedDevices, NamedTable, PathTotals, make_mapped_devices};
pub use options::{IgnoredOptions, JobOptions, WAY_OUT};
pub use path_sampler::PathSampler;
pub use progress::JobProgressCounters;
pub use report::BenchReport;
pub use run::{LoadMeasurementPlan, measure_jobs};
pub use snapshots::{
    ExceptionLookupCost, FirstChunkWriteResult, SnapshotCostOptions, SnapshotCostResults,
    SteadyOriginWriteCosts, measure_snapshot_costs,
};
