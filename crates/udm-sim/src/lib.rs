//! The deterministic world in which udm is tested.
//!
//! A [`World`](world::World) hands the unchanged targets, tables and mapped devices of udm their time, their chance and their outside: any number of cores
//! on one thread, disks that lie about nothing but promise little, paths that fail in every way, and a control side that suspends, reloads, sends messages
//! and pulls the plug. A [`Model`](model::Model) says after each request whether what came back can be. All of it is drawn from one
//! seed: the same plan gives the same run, event for event, and a failure can be replayed.
//!
//! * `plan`: what a run is. `run`: runs one, and makes a failure smaller.
//! * `world`, `turn`, `front`, `device`, `control`, `acts`, `rest`, `timers`: the world and what happens in it.
//! * `cores`, `env`, `disk`, `path`: what the code under test sees of it.
//! * `blueprint`, `tables`: what is built. `model`, `cells`, `stamp`, `log`: what must hold. `trace`: what happened. `totals`: how much of it.
#![forbid(unsafe_code)]

mod acts;
pub mod blueprint;
pub mod cells;
pub mod chance;
mod control;
pub mod cores;
mod device;
pub mod disk;
pub mod env;
mod front;
pub mod log;
pub mod model;
pub mod path;
pub mod plan;
mod rest;
pub mod run;
pub mod stamp;
pub mod tables;
mod timers;
pub mod totals;
pub mod trace;
mod turn;
pub mod world;

pub use plan::{Class, Plan, Without};
pub use run::{Failure, run, shrink};
pub use totals::Totals;
