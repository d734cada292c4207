//! The TCP port of `--metrics`.

use super::args::ServeArgs;
use anyhow::{Context, Result};
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::net::TcpListener;
use udm_control::http::metrics_port::{bind_port_of_ending_server, serve_metrics_port};
use udm_control::registry::DeviceRegistry;

/// The port, if the options name one.
pub(super) enum MetricsPort {
    /// There is none.
    None,
    /// It is bound.
    Bound(TcpListener),
    /// The server that hands over still has it.
    Awaited(SocketAddr),
}

impl MetricsPort {
    /// Binds the port, unless it comes from a server that ends later.
    ///
    /// # Errors
    /// The address is not available.
    pub async fn new(args: &ServeArgs, is_taken_over: bool) -> Result<MetricsPort> {
        match args.metrics {
            None => Ok(MetricsPort::None),
            Some(address) if is_taken_over => Ok(MetricsPort::Awaited(address)),
            Some(address) => {
                let listener = TcpListener::bind(address).await;
                Ok(MetricsPort::Bound(listener.with_context(|| format!("serve: metrics: {address}"))?))
            }
        }
    }

    /// Serves the metrics until the future is dropped.
    pub async fn serve(self, registry: &Arc<DeviceRegistry>) -> Infallible {
        let listener = match self {
            MetricsPort::None => return std::future::pending().await,
            MetricsPort::Bound(listener) => Ok(listener),
            MetricsPort::Awaited(address) => bind_port_of_ending_server(address).await,
        };
        match listener {
            Ok(listener) => serve_metrics_port(listener, Arc::clone(registry)).await,
            Err(error) => tracing::error!("metrics: {error}: the metrics are not served over TCP"),
        }
        std::future::pending().await
    }
}
