//! The handlers of the clone routes.

use super::concurrency::AppState;
use super::error::{DeviceNameExtractor, JsonBody};
use super::handlers::{JsonResult, StatusCodeResult, VerbCancelGuard, base_dir};
use crate::api;
use crate::registry::DeviceRegistry;
use crate::verbs::clone;
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use std::sync::Arc;

pub(super) async fn handle_list_clones(State(registry): State<Arc<DeviceRegistry>>) -> Json<api::CloneList> {
    Json(api::CloneList { clones: clone::list_clones(&registry) })
}

pub(super) async fn handle_get_clone(
    State(registry): State<Arc<DeviceRegistry>>,
    DeviceNameExtractor(name): DeviceNameExtractor,
) -> JsonResult<api::CloneDescription> {
    Ok(Json(clone::describe_clone_by_name(&registry, &name)?))
}

pub(super) async fn handle_create_clone(
    State(AppState { registry, limits, .. }): State<AppState>,
    JsonBody(new): JsonBody<api::CreateCloneRequest>,
) -> JsonResult<api::CloneDescription> {
    let folder = base_dir(new.folder.as_deref())?;
    let name = new.name.clone();
    let guard = VerbCancelGuard::default();
    let cancel_token = guard.0.clone();
    let create = move || clone::create_clone(&registry, &new, &folder, &cancel_token);
    Ok(Json(limits.loads.run(&name, create).await?))
}

pub(super) async fn handle_finish_clone(
    State(AppState { registry, limits, .. }): State<AppState>,
    DeviceNameExtractor(name): DeviceNameExtractor,
) -> StatusCodeResult {
    let guard = VerbCancelGuard::default();
    let (cancel_token, device) = (guard.0.clone(), name.clone());
    limits.loads.run(&name, move || clone::finish_clone(&registry, &device, &cancel_token)).await?;
    Ok(StatusCode::NO_CONTENT)
}
