//! Requests and replies of the control socket, as plain structs, and the one list of its verbs
//! ([`verbs`]). Sizes are in bytes, times in
//! nanoseconds, names are stable.
//!
//! The structs import nothing of the crate, so every other part may use them. `/openapi.json` is
//! generated from them, doc comments included, so it always matches the server. Requests with
//! unknown members are refused. Clients ignore unknown members of replies, so an older client works
//! with a newer server.

mod clones;
mod config;
mod devices;
mod events;
mod moves;
mod nvme;
mod paths;
mod queue;
mod server;
mod snapshots;
mod stats;
mod tables;
mod throttle;
mod ublk;
pub mod verbs;
mod vhost_user;

pub use clones::*;
pub use config::*;
pub use devices::*;
pub use events::*;
pub use moves::*;
pub use nvme::*;
pub use paths::*;
pub use queue::*;
pub use server::*;
pub use snapshots::*;
pub use stats::*;
pub use tables::*;
pub use throttle::*;
pub use ublk::*;
pub use vhost_user::*;
