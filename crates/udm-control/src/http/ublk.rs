//! The handlers of block devices of this machine.

use super::concurrency::AppState;
use super::error::{DeviceNameExtractor, JsonBody, QueryParams};
use super::handlers::{JsonResult, StatusCodeResult};
use crate::api;
use crate::registry::DeviceRegistry;
use crate::verbs;
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use std::sync::Arc;

pub(super) async fn handle_list_ublk_disks(
    State(registry): State<Arc<DeviceRegistry>>,
) -> Json<api::UblkDiskList> {
    Json(api::UblkDiskList { disks: verbs::list_ublk_disks(&registry) })
}

pub(super) async fn handle_add_ublk_disk(
    State(AppState { registry, limits, .. }): State<AppState>,
    DeviceNameExtractor(name): DeviceNameExtractor,
    JsonBody(body): JsonBody<api::AddUblkDiskRequest>,
) -> JsonResult<api::UblkDiskDescription> {
    let device = name.clone();
    let add = move || verbs::add_ublk_disk(&registry, &device, &body);
    Ok(Json(limits.messages.run(&name, add).await?))
}

pub(super) async fn handle_remove_ublk_disk(
    State(AppState { registry, limits, .. }): State<AppState>,
    DeviceNameExtractor(name): DeviceNameExtractor,
    QueryParams(query): QueryParams<api::RemoveUblkDiskQuery>,
) -> StatusCodeResult {
    let device = name.clone();
    let remove = move || verbs::remove_ublk_disk(&registry, &device, query.force == Some(1));
    limits.messages.run(&name, remove).await?;
    Ok(StatusCode::NO_CONTENT)
}
