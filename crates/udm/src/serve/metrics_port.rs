//! The TCP port of `--metrics`.

use super::args::ServeArgs;
use anyhow::{Context, Result};
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use udm_control::http::metrics_port::{BoundMetricsPort, serve_metrics_port};
use udm_control::registry::DeviceRegistry;

/// The port, if the options name one.
pub(super) enum MetricsPort {
    /// There is none.
    None,
    /// It is bound.
    Bound(BoundMetricsPort),
    /// It is waited for: the server that hands over has it and does not share it.
    Awaited(SocketAddr),
}

impl MetricsPort {
    /// Binds the port.
    ///
    /// # Errors
    /// The address is not available.
    pub fn new(args: &ServeArgs, is_taken_over: bool) -> Result<MetricsPort> {
        let Some(address) = args.metrics else { return Ok(MetricsPort::None) };
        if is_taken_over {
            let beside = BoundMetricsPort::try_bind_beside(address);
            return Ok(beside.map_or(MetricsPort::Awaited(address), MetricsPort::Bound));
        }
        let port = BoundMetricsPort::bind(address);
        Ok(MetricsPort::Bound(port.with_context(|| format!("serve: metrics: {address}"))?))
    }

    /// Serves the metrics until the future is dropped.
    pub async fn serve(self, registry: &Arc<DeviceRegistry>) -> Infallible {
        let port = match self {
            MetricsPort::None => return std::future::pending().await,
            MetricsPort::Bound(port) => Ok(port),
            MetricsPort::Awaited(address) => BoundMetricsPort::bind_beside_ending_server(address).await,
        };
        match port {
            Ok(port) => serve_metrics_port(port, Arc::clone(registry)).await,
            Err(error) => tracing::error!("metrics: {error}: the metrics are not served over TCP"),
        }
        std::future::pending().await
    }
}
