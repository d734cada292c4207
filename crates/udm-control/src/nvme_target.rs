//! The NVMe/TCP target, as the program that runs it offers it to the registry.

use crate::api::{NvmeConnectionStats, NvmeSubsystem, ResetNvmeControllerRequest, SetNvmeAnaStateRequest};
use udm_frontends::nvme::NvmeHostIoReport;

/// A reset of a controller: returns true when no request of the controller can reach a disk any
/// more.
pub type NvmeResetProgress = Box<dyn Fn() -> bool + Send>;

/// Serves devices to NVMe/TCP hosts.
pub trait NvmeTarget: Send + Sync {
    /// The subsystem with its namespaces and controllers.
    fn describe(&self) -> NvmeSubsystem;

    /// Sets ANA states.
    ///
    /// # Errors
    /// There is no such port or state: one line for users.
    fn set_ana_state(&self, request: &SetNvmeAnaStateRequest) -> Result<(), String>;

    /// Begins to reset a controller of this target for another server of its subsystem.
    ///
    /// # Errors
    /// It is not one of this target, or not one of this host: one line.
    fn reset_controller(&self, request: &ResetNvmeControllerRequest) -> Result<NvmeResetProgress, String>;

    /// Counters of connections.
    fn stats(&self) -> NvmeConnectionStats;

    /// Counters of requests of hosts, by name.
    fn host_reports(&self) -> Vec<NvmeHostIoReport>;
}
