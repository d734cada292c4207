//! The NVMe/TCP target, as the program that runs it offers it to the registry.

use crate::api::{NvmeConnectionStats, NvmeSubsystem, SetNvmeAnaStateRequest};

/// Serves devices to NVMe/TCP hosts.
pub trait NvmeTarget: Send + Sync {
    /// The subsystem with its namespaces and controllers.
    fn describe(&self) -> NvmeSubsystem;

    /// Sets ANA states.
    ///
    /// # Errors
    /// There is no such port or state: one line for users.
    fn set_ana_state(&self, request: &SetNvmeAnaStateRequest) -> Result<(), String>;

    /// Counters of connections.
    fn stats(&self) -> NvmeConnectionStats;
}
