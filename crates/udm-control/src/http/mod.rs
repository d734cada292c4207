//! HTTP and JSON on the control socket.
//!
//! [`routes`] gives each verb of [`crate::api::verbs`] its handler. [`handlers`] calls the verbs.
//! [`socket`] is the socket's file, [`server`] serves its peers. No file here knows the effect of a
//! verb.
//!
//! **Who may do what.** The socket has mode 0600, and peers are checked by their credentials. With
//!  a group of readers, its members may use the verbs that change nothing ([`server`]).
//!  [`metrics_port`] serves the metrics alone over TCP.
//!
//! **Bounds.** If all
//! connections are taken, a new one replaces the quietest connection of the process that has most
//! ([`connections`]). A client that waits for an event keeps its connection for at most a minute, a
//! client of the event stream as long as it reads; at most half of the connections are used for
//! these. Heads and bodies have time limits. A few descriptors are kept in reserve, so a server
//! that has no free ones can still be controlled. [`concurrency`] limits requests that wait for
//! storage, per kind.

mod clones;
mod concurrency;
mod config;
pub mod connections;
mod error;
mod events;
#[doc(hidden)]
pub mod fuzz;
mod handlers;
pub mod metrics_port;
mod moves;
mod nvme;
mod openapi;
mod progress_stream;
mod routes;
pub mod server;
mod snapshots;
pub mod socket;
mod ublk;
mod vhost_user;

pub use concurrency::BLOCKING_MAX;

use crate::registry::DeviceRegistry;
use crate::stats::StartTime;
use axum::Router;
use axum::extract::DefaultBodyLimit;
use std::convert::Infallible;
use std::sync::Arc;

/// Maximum length of a body in bytes: the largest table with JSON escapes.
pub const BODY_MAX: usize = crate::verbs::TABLE_MAX * 2 + 4096;

/// Finishes merges that an earlier server began. Never returns.
pub async fn finish_resumed_merges(registry: &Arc<DeviceRegistry>) -> Infallible {
    snapshots::spawn_resumed_merge_finishers(registry, &concurrency::ConcurrencyLimits::new()).await
}

/// Lets moves of devices go on, also those that an earlier server began. Never returns.
pub async fn drive_moves(registry: &Arc<DeviceRegistry>) -> Infallible {
    moves::spawn_move_drivers(registry, &concurrency::ConcurrencyLimits::new()).await
}

/// Finishes clones that are completely hydrated (`udm serve --clone-finish`). Never returns.
pub async fn finish_hydrated_clones(registry: &Arc<DeviceRegistry>) -> Infallible {
    clones::finish_hydrated_clones(registry, &concurrency::ConcurrencyLimits::new()).await
}

/// Brings back clones that have not returned when the server started. Never returns.
pub async fn retry_waiting_clones(registry: &Arc<DeviceRegistry>) -> Infallible {
    clones::retry_waiting_clones(registry, &concurrency::ConcurrencyLimits::new()).await
}

/// The router of all routes.
pub fn router(registry: Arc<DeviceRegistry>) -> Router {
    let mut router = Router::new();
    for route in routes::all_http_routes() {
        router = router.route(&route.path, route.serve);
    }
    router
        .fallback(handlers::route_not_found)
        .method_not_allowed_fallback(handlers::method_not_allowed)
        .layer(DefaultBodyLimit::max(BODY_MAX))
        .with_state(concurrency::AppState {
            registry,
            limits: concurrency::ConcurrencyLimits::new(),
            began: StartTime::now(),
        })
}
