//! The NVMe/TCP target.

use crate::api;
use crate::registry::DeviceRegistry;

/// The subsystem of the target, if there is one.
#[must_use]
pub fn list_nvme_subsystems(registry: &DeviceRegistry) -> Vec<api::NvmeSubsystem> {
    registry.nvme_target().map(|target| target.describe()).into_iter().collect()
}
