//! The handlers of the NVMe/TCP target.

use crate::api;
use crate::registry::DeviceRegistry;
use crate::verbs;
use axum::Json;
use axum::extract::State;
use std::sync::Arc;

pub(super) async fn handle_list_nvme_subsystems(
    State(registry): State<Arc<DeviceRegistry>>,
) -> Json<api::NvmeSubsystemList> {
    Json(api::NvmeSubsystemList { subsystems: verbs::list_nvme_subsystems(&registry) })
}
