//! The NVMe/TCP target.

use crate::api;
use crate::error::VerbError;
use crate::registry::DeviceRegistry;
use udm_core::errno::{EINVAL, ENXIO};
use udm_dm::TargetError;

/// The subsystem of the target, if there is one.
#[must_use]
pub fn list_nvme_subsystems(registry: &DeviceRegistry) -> Vec<api::NvmeSubsystem> {
    registry.nvme_target().map(|target| target.describe()).into_iter().collect()
}

/// Sets the ANA state of a device, or of all, on a port, or on all.
///
/// # Errors
/// ENXIO if the server has no target or the device is not served to NVMe hosts. EINVAL for an
/// unknown port or state.
pub fn set_nvme_ana_state(
    registry: &DeviceRegistry,
    request: &api::SetNvmeAnaStateRequest,
) -> Result<(), VerbError> {
    let device = request.device.as_deref().unwrap_or("nvme");
    let refuse = |errno, why: String| VerbError::new(device, TargetError::errno(errno).because(why));
    let Some(target) = registry.nvme_target() else {
        return Err(refuse(
            ENXIO,
            "the server has no NVMe/TCP target: serve with --nvme ADDRESS:PORT".into(),
        ));
    };
    if let Some(name) = &request.device
        && !target.describe().namespaces.iter().any(|one| one.device == *name)
    {
        let why = "it is not served to NVMe hosts: udm nvme ls shows the devices that are";
        return Err(refuse(ENXIO, why.into()));
    }
    target.set_ana_state(request).map_err(|why| refuse(EINVAL, why))
}
