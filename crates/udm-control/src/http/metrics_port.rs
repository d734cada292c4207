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
use tokio::net::{TcpListener, TcpSocket};

/// Maximum number of open connections.
const CONNECTIONS_MAX: usize = 16;

/// Pause before another attempt to bind a port, or to accept a connection.
const PAUSE: Duration = Duration::from_millis(100);

/// Time for which the port of a server that hands over is waited for.
const BIND_MAX: Duration = Duration::from_secs(30);

/// Length of the queue of connections that are not accepted yet.
const BACKLOG: u32 = 16;

/// The port for metrics.
///
/// The server that takes over listens on it while the old one still does, so that nobody else can
/// take it in between. For this the socket has `SO_REUSEPORT`, which Linux grants to sockets of the
/// same user only. Who connects meanwhile waits until the new server serves; if the upgrade fails,
/// that connection is reset.
pub struct BoundMetricsPort(TcpListener);

impl BoundMetricsPort {
    /// Binds the port.
    ///
    /// # Errors
    /// The address is not available, or another socket has it.
    pub fn bind(address: SocketAddr) -> io::Result<BoundMetricsPort> {
        let socket = new_socket(address)?;
        socket.bind(address)?;
        // After `bind`, so that a second server with the same address is refused.
        socket.set_reuseport(true)?;
        socket.listen(BACKLOG).map(BoundMetricsPort)
    }

    /// Binds the port of a server that is about to end, at once or, if a program of an earlier
    /// version or another user has it, when it is free.
    ///
    /// # Errors
    /// The system's error after the last attempt.
    pub async fn bind_beside_ending_server(address: SocketAddr) -> io::Result<BoundMetricsPort> {
        let end = tokio::time::Instant::now() + BIND_MAX;
        loop {
            match BoundMetricsPort::try_bind_beside(address) {
                Err(error)
                    if error.kind() == io::ErrorKind::AddrInUse && tokio::time::Instant::now() < end =>
                {
                    tokio::time::sleep(PAUSE).await;
                }
                done => return done,
            }
        }
    }

    /// As [`Self::bind_beside_ending_server`], without waiting.
    ///
    /// # Errors
    /// The address is not available, or another program has it.
    pub fn try_bind_beside(address: SocketAddr) -> io::Result<BoundMetricsPort> {
        let socket = new_socket(address)?;
        socket.set_reuseport(true)?;
        socket.bind(address)?;
        socket.listen(BACKLOG).map(BoundMetricsPort)
    }
}

fn new_socket(address: SocketAddr) -> io::Result<TcpSocket> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    socket.set_reuseaddr(true)?;
    Ok(socket)
}

/// Serves the metrics of `registry` on `port` until the future is dropped.
pub async fn serve_metrics_port(BoundMetricsPort(listener): BoundMetricsPort, registry: Arc<DeviceRegistry>) {
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
