//! The NVMe/TCP target, and the namespaces of other targets.

use crate::api;
use crate::error::VerbError;
use crate::nvme_target::NvmeResetProgress;
use crate::registry::DeviceRegistry;
use udm_core::errno::{EINVAL, ENXIO};
use udm_dm::TargetError;

/// The subsystem of the target, if there is one.
#[must_use]
pub fn list_nvme_subsystems(registry: &DeviceRegistry) -> Vec<api::NvmeSubsystem> {
    registry.nvme_target().map(|target| target.describe()).into_iter().collect()
}

/// The namespaces of other controllers that tables use, by URI.
#[must_use]
pub fn list_nvme_paths(registry: &DeviceRegistry) -> Vec<api::NvmePath> {
    let reports = registry.opener().nvme_path_reports().into_iter();
    let path = |one: udm_backends::nvme::NvmePathReport| api::NvmePath {
        uri: one.uri,
        state: one.state.to_owned(),
        cntlid: one.controller,
        ana: one.ana.to_owned(),
        lanes: one.lanes as u64,
        associations: one.associations,
        losses: one.losses,
        held_writes: one.held_writes,
        writes_after_reset: one.writes_after_reset,
        writes_after_time: one.writes_after_time,
        resets: one.resets,
        failed_resets: one.failed_resets,
    };
    reports.map(path).collect()
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
    let Some(target) = registry.nvme_target() else { return Err(no_target(device)) };
    if let Some(name) = &request.device
        && !target.describe().namespaces.iter().any(|one| one.device == *name)
    {
        let why = "it is not served to NVMe hosts: udm nvme ls shows the devices that are";
        return Err(refuse(ENXIO, why.into()));
    }
    target.set_ana_state(request).map_err(|why| refuse(EINVAL, why))
}

/// Begins to reset a controller for another server of the subsystem. The inner error says why the
/// target refuses.
///
/// # Errors
/// ENXIO if the server has no target.
pub fn reset_nvme_controller(
    registry: &DeviceRegistry,
    request: &api::ResetNvmeControllerRequest,
) -> Result<Result<NvmeResetProgress, String>, VerbError> {
    let target = registry.nvme_target().ok_or_else(|| no_target("nvme"))?;
    Ok(target.reset_controller(request))
}

fn no_target(device: &str) -> VerbError {
    let why = "the server has no NVMe/TCP target: serve with --nvme ADDRESS:PORT";
    VerbError::new(device, TargetError::errno(ENXIO).because(why))
}
