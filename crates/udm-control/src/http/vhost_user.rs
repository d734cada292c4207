//! The handlers of sockets of virtual machines.

use super::concurrency::AppState;
use super::error::{DeviceNameExtractor, JsonBody, QueryParams};
use super::handlers::{JsonResult, StatusCodeResult};
use crate::api;
use crate::registry::DeviceRegistry;
use crate::verbs;
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use std::path::Path;
use std::sync::Arc;

pub(super) async fn handle_list_vhost_user_sockets(
    State(registry): State<Arc<DeviceRegistry>>,
) -> Json<api::VhostUserSocketList> {
    Json(api::VhostUserSocketList { sockets: verbs::list_vhost_user_sockets(&registry) })
}

pub(super) async fn handle_add_vhost_user_socket(
    State(AppState { registry, limits, .. }): State<AppState>,
    DeviceNameExtractor(name): DeviceNameExtractor,
    JsonBody(body): JsonBody<api::AddVhostUserSocketRequest>,
) -> JsonResult<api::VhostUserSocketDescription> {
    let device = name.clone();
    let add = move || verbs::add_vhost_user_socket(&registry, &device, Path::new(&body.path));
    Ok(Json(limits.messages.run(&name, add).await?))
}

pub(super) async fn handle_remove_vhost_user_socket(
    State(AppState { registry, limits, .. }): State<AppState>,
    DeviceNameExtractor(name): DeviceNameExtractor,
    QueryParams(query): QueryParams<api::RemoveVhostUserSocketQuery>,
) -> StatusCodeResult {
    let (device, force) = (name.clone(), query.force == Some(1));
    let remove = move || verbs::remove_vhost_user_socket(&registry, &device, Path::new(&query.path), force);
    limits.messages.run(&name, remove).await?;
    Ok(StatusCode::NO_CONTENT)
}
