//! The deterministic simulator in which udm is tested.
//!
//! A [`MappedDeviceStackWorld`](world::MappedDeviceStackWorld) gives the unchanged targets, tables
//! and mapped devices their time, random numbers and I/O. It runs any number of cores on one
//! thread. Its paths fail in every way. Its disks keep their contract and use all its freedom: they
//! reorder writes, lose their cache, and complete late. Its control side suspends, reloads, sends
//! messages and cuts the power. A [`DeviceModel`](model::DeviceModel) checks each result. One seed
//! gives one run, event for event, so a failure can be replayed.
//!
//! At each access to shared state a lane passes a point (`udm_core::interleave`), where the
//! simulator may run another core. In other builds a point is empty. The turn of a core, its ring,
//! the NBD server and client, the registry and the verbs run here too. Their kernel
//! ([`udm_runtime::SimulatedKernel`]), clock, sockets and file system are simulated. The price in
//! udm is one branch per call of the ring. docs/internals/simulator.md describes worlds, seeds and
//! planted bugs.
//!
//! * `plan`: the description of a run. `run`: executes a run and shrinks a failure.
//! * `machine`, `turn`, `preemption`, `tasks`, `timers`, `front_end`, `control_io`: cores and their
//!   turns, for every world.
//! * `world`, `device`, `control`, `changes`, `actions`, `disk_events`, `quiescence`: a world of
//!   targets and its actions.
//! * `cores`, `environment`, `disk`, `path`, `path_faults`, `write_effects`, `faulty_path`,
//!   `null_cache`, `helper_threads`: the environment of the tested code.
//! * `blueprint`, `table_variants`, `tables`: random stacks. `table_map`, `expected_limits`: the
//!   mapping and the limits of tables.
//! * `power_cuts`: what the next two share. `snapshots`: worlds of origins and snapshots. `clones`:
//!   worlds of a clone.
//! * `nbd`: worlds of the NBD server and its clients.
//! * `nbd_client`: worlds of the NBD client and its servers. `nvme`: worlds of the NVMe/TCP target
//!   and its hosts. `nvme_client`: worlds of the NVMe/TCP initiator and its targets. `remote_disk`:
//!   what the worlds of clients share.
//! * `verbs`: worlds of the registry and its verbs.
//! * `vhost_user`: worlds of disks of virtual machines.
//! * `lifecycle`: worlds of servers that run one after another over the same disks and state
//!   folder.
//! * `wakeable`, `log_capture`: futures that a world resumes, and captured log lines.
//! * `model`, `read_check`, `allowed_errors`, `register_model`, `stamp`, `dust_model`,
//!   `write_log_model`: the rules. `trace`: the history. `totals`: the counters.
#![forbid(unsafe_code)]

mod actions;
mod allowed_errors;
pub mod blueprint;
mod changes;
pub mod clones;
mod control;
pub mod control_io;
pub mod cores;
pub mod counts;
mod device;
pub mod disk;
mod disk_events;
mod dust_model;
pub mod environment;
pub mod expected_limits;
mod faulty_path;
mod front_end;
pub mod helper_threads;
pub mod lifecycle;
mod log_capture;
pub mod machine;
pub mod model;
pub mod nbd;
pub mod nbd_client;
mod null_cache;
pub mod nvme;
pub mod nvme_client;

pub mod path;
mod path_faults;
pub mod plan;
mod power_cuts;
mod preemption;
mod queues;
mod quiescence;
mod read_check;
pub mod register_model;
mod remote_disk;
pub mod rng;
pub mod run;
mod slow_path;
pub mod snapshots;
pub mod stamp;
pub mod table_map;
mod table_variants;
pub mod tables;
pub mod tasks;
mod throttles;
mod timers;
pub mod totals;
pub mod trace;
pub mod turn;
pub mod verbs;
pub mod vhost_user;
mod wakeable;
pub mod world;
pub mod write_effects;
pub mod write_log_model;

pub use plan::{DisturbanceClass, ExcludedDisturbances, RunPlan};
pub use run::{RunFailure, run};
pub use totals::RunTotals;
