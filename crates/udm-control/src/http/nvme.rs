//! The handlers of the NVMe/TCP target.

use super::concurrency::AppState;
use super::error::JsonBody;
use super::handlers::JsonResult;
use crate::api;
use crate::registry::DeviceRegistry;
use crate::verbs;
use axum::Json;
use axum::extract::State;
use std::sync::Arc;

fn list_nvme(registry: &DeviceRegistry) -> api::NvmeSubsystemList {
    let (subsystems, paths) = (verbs::list_nvme_subsystems(registry), verbs::list_nvme_paths(registry));
    api::NvmeSubsystemList { subsystems, paths }
}

pub(super) async fn handle_list_nvme_subsystems(
    State(registry): State<Arc<DeviceRegistry>>,
) -> Json<api::NvmeSubsystemList> {
    Json(list_nvme(&registry))
}

pub(super) async fn handle_set_nvme_ana_state(
    State(AppState { registry, .. }): State<AppState>,
    JsonBody(body): JsonBody<api::SetNvmeAnaStateRequest>,
) -> JsonResult<api::NvmeSubsystemList> {
    verbs::set_nvme_ana_state(&registry, &body)?;
    Ok(Json(list_nvme(&registry)))
}
