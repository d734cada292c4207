//! `/metrics` on a TCP port of its own, for Prometheus on another machine.
//!
//! Contract: the port answers `GET /metrics` and nothing else; nothing can be changed through it.
//! It asks nobody who they are. At most [`CONNECTIONS_MAX`] connections are open, with the time
//! limits of the control socket, and new ones replace quiet ones.

use super::connections::EvictingConnectionLimit;
use super::server::{PeerAccess, serve_peer_until_idle};
use super::{concurrency, handlers};
use crate::api::verbs;
use crate::registry::DeviceRegistry;
use crate::stats::StartTime;
use axum::Router;
use axum::routing::get;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;

/// Maximum number of open connections.
const CONNECTIONS_MAX: usize = 16;

/// Pause before another attempt to bind a port, or to accept a connection.
const PAUSE: Duration = Duration::from_millis(100);

/// Time for which the port of a server that hands over is waited for.
const BIND_MAX: Duration = Duration::from_secs(30);

/// Binds the port of a server that is about to end, which still has it.
///
/// # Errors
/// The system's error after the last attempt.
pub async fn bind_port_of_ending_server(address: SocketAddr) -> io::Result<TcpListener> {
    let end = tokio::time::Instant::now() + BIND_MAX;
    loop {
        match TcpListener::bind(address).await {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && tokio::time::Instant::now() < end => {
                tokio::time::sleep(PAUSE).await;
            }
            done => return done,
        }
    }
}

/// Serves the metrics of `registry` on `listener` until the future is dropped.
pub async fn serve_metrics_port(listener: TcpListener, registry: Arc<DeviceRegistry>) {
    let router = metrics_router(registry);
    let connections = EvictingConnectionLimit::new(CONNECTIONS_MAX);
    for number in 0.. {
        connections.wait_for_slot().await;
        let stream = loop {
            match listener.accept().await {
                Ok((stream, _)) => break stream,
                Err(error) => {
                    tracing::debug!(%error, "metrics port: accept");
                    tokio::time::sleep(PAUSE).await;
                }
            }
        };
        // All peers of the port count as one.
        let slot = connections.open_slot(number, 0);
        let access = PeerAccess::Reads(router.clone());
        tokio::spawn(serve_peer_until_idle(stream, access, slot, "metrics port"));
    }
}

fn metrics_router(registry: Arc<DeviceRegistry>) -> Router {
    Router::new()
        .route(&verbs::METRICS.path, get(handlers::metrics))
        .fallback(handlers::route_not_found)
        .method_not_allowed_fallback(handlers::method_not_allowed)
        .with_state(concurrency::AppState {
            registry,
            limits: concurrency::ConcurrencyLimits::new(),
            began: StartTime::now(),
        })
}
