//! The deterministic world in which udm is tested.
//!
//! A [`World`](world::World) hands the unchanged targets, tables and mapped devices of udm their
//! time, their chance and their outside: any number of cores on one thread, disks that lie about
//! nothing but promise little, paths that fail in every way, and a control side that suspends,
//! reloads, sends messages and pulls the plug. A [`Model`](model::Model) says after each request
//! whether what came back can be. All of it is drawn from one seed: the same plan gives the same
//! run, event for event, and a failure can be replayed.
//!
//! * `plan`: what a run is. `run`: runs one, and makes a failure smaller.
//! * `machine`, `turn`, `between`, `tasks`, `timers`, `front`, `control_io`: what every world runs
//!   on: cores and their turns.
//! * `world`, `device`, `control`, `changes`, `acts`, `outside`, `rest`: a world of targets and
//!   what happens in it.
//! * `cores`, `env`, `disk`, `path`, `fate`, `effect`, `faulty`, `null_cache`, `beside`: what the
//!   code under test sees of it.
//! * `blueprint`, `vary`, `tables`: what is built. `map`, `limits`: what that means.
//! * `snap`: worlds of origins and their snapshots.
//! * `nbd`: worlds of the NBD server and its clients.
//! * `nbd_client`: worlds of the NBD client and its servers.
//! * `verbs`: worlds of the registry and its verbs.
//! * `lives`: worlds of servers that follow each other over the same disks and state folder.
//! * `waiting`, `lines`: futures that go on when a world lets them, and what udm logs meanwhile.
//! * `model`, `reads`, `excuse`, `cells`, `stamp`, `bad`, `log`: what must hold. `trace`: what
//!   happened. `totals`: how much of it.
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
