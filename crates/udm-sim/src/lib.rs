//! The deterministic simulator in which udm is tested.
//!
//! A [`World`](world::World) gives the unchanged targets, tables and mapped devices their time,
//! chance and I/O. It has any number of cores on one thread, and paths that fail in every way. Its
//! disks keep the contract and use all its freedom: they reorder, lose their cache, and complete
//! late. Its control side suspends, reloads, sends messages and cuts the power. A
//! [`Model`](model::Model) checks each result. One seed gives one run, event for event, so a
//! failure can be replayed.
//!
//! At each access to shared state a lane passes a point (`udm_core::interleave`), where the
//! simulator may run another core. In other builds a point is nothing. The turn of a core, its
//! ring, the NBD server and client, the registry and the verbs run here too. Their kernel
//! ([`udm_runtime::MadeKernel`]), clock, sockets and file system are simulated. The price in udm is
//! a branch per call of the ring. docs/internals/simulator.md describes worlds, seeds and planted bugs.
//!
//! * `plan`: the description of a run. `run`: executes a run and shrinks a failure.
//! * `machine`, `turn`, `between`, `tasks`, `timers`, `front`, `control_io`: cores and their turns,
//!   for every world.
//! * `world`, `device`, `control`, `changes`, `acts`, `outside`, `rest`: a world of targets and its
//!   actions.
//! * `cores`, `env`, `disk`, `path`, `fate`, `effect`, `faulty`, `null_cache`, `beside`: the
//!   environment of the tested code.
//! * `blueprint`, `vary`, `tables`: random stacks. `map`, `limits`: their meaning.
//! * `snap`: worlds of origins and snapshots.
//! * `nbd`: worlds of the NBD server and its clients.
//! * `nbd_client`: worlds of the NBD client and its servers.
//! * `verbs`: worlds of the registry and its verbs.
//! * `lives`: worlds of servers that follow each other over the same disks and state folder.
//! * `waiting`, `lines`: futures that continue when a world lets them, and captured log lines.
//! * `model`, `reads`, `excuse`, `cells`, `stamp`, `bad`, `log`: the rules. `trace`: the history.
//!   `totals`: the counts.
#![forbid(unsafe_code)]

mod acts;
mod bad;
pub mod beside;
mod between;
pub mod blueprint;
pub mod cells;
pub mod chance;
mod changes;
mod control;
pub mod control_io;
pub mod cores;
pub mod counts;
mod device;
pub mod disk;
pub mod effect;
pub mod env;
mod excuse;
mod fate;
mod faulty;
mod front;
pub mod limits;
mod lines;
pub mod lives;
pub mod log;
pub mod machine;
pub mod map;
pub mod model;
pub mod nbd;
pub mod nbd_client;
mod null_cache;
mod outside;
pub mod path;
pub mod plan;
mod queues;
mod reads;
mod rest;
pub mod run;
mod slow;
pub mod snap;
pub mod stamp;
pub mod tables;
pub mod tasks;
mod timers;
pub mod totals;
pub mod trace;
pub mod turn;
mod vary;
pub mod verbs;
mod waiting;
pub mod world;

pub use plan::{Class, Plan, Without};
pub use run::{Failure, run, shrink};
pub use totals::Totals;
