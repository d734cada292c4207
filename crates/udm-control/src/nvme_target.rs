//! The NVMe/TCP target, as the program that runs it offers it to the registry.

use crate::api::{NvmeConnectionStats, NvmeSubsystem};

/// Serves devices to NVMe/TCP hosts.
pub trait NvmeTarget: Send + Sync {
    /// The subsystem with its namespaces and controllers.
    fn describe(&self) -> NvmeSubsystem;

    /// Counters of connections.
    fn stats(&self) -> NvmeConnectionStats;
}
