//! The handlers of the move routes, and the task that lets moves go on.

use super::concurrency::{AppState, ConcurrencyLimits};
use super::error::{DeviceNameExtractor, JsonBody};
use super::handlers::{JsonResult, StatusCodeResult, VerbCancelGuard, base_dir};
use crate::api;
use crate::registry::DeviceRegistry;
use crate::verbs::moves::{self, MoveJob, MovePoll};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

/// The pause after a step that was refused, because too many verbs are under way.
const PAUSE: Duration = Duration::from_millis(50);

pub(super) async fn handle_list_moves(State(registry): State<Arc<DeviceRegistry>>) -> Json<api::MoveList> {
    Json(api::MoveList { moves: moves::list_moves(&registry) })
}

pub(super) async fn handle_get_move(
    State(registry): State<Arc<DeviceRegistry>>,
    DeviceNameExtractor(name): DeviceNameExtractor,
) -> JsonResult<api::MoveDescription> {
    Ok(Json(moves::describe_move_by_name(&registry, &name)?))
}

pub(super) async fn handle_start_move(
    State(AppState { registry, limits, .. }): State<AppState>,
    DeviceNameExtractor(name): DeviceNameExtractor,
    JsonBody(request): JsonBody<api::StartMoveRequest>,
) -> JsonResult<api::MoveDescription> {
    let folder = base_dir(request.folder.as_deref())?;
    let guard = VerbCancelGuard::default();
    let (cancel_token, device) = (guard.0.clone(), name.clone());
    let start = move || moves::start_move(&registry, &device, &request, &folder, &cancel_token);
    Ok(Json(limits.loads.run(&name, start).await?))
}

pub(super) async fn handle_pause_move(
    State(AppState { registry, limits, .. }): State<AppState>,
    DeviceNameExtractor(name): DeviceNameExtractor,
    JsonBody(request): JsonBody<api::PauseMoveRequest>,
) -> JsonResult<api::MoveDescription> {
    let device = name.clone();
    let pause = move || moves::pause_move(&registry, &device, request.paused);
    Ok(Json(limits.loads.run(&name, pause).await?))
}

pub(super) async fn handle_stop_move(
    State(AppState { registry, limits, .. }): State<AppState>,
    DeviceNameExtractor(name): DeviceNameExtractor,
) -> JsonResult<api::MoveDescription> {
    let device = name.clone();
    Ok(Json(limits.loads.run(&name, move || moves::stop_move(&registry, &device)).await?))
}

pub(super) async fn handle_forget_old_place(
    State(AppState { registry, limits, .. }): State<AppState>,
    JsonBody(request): JsonBody<api::ForgetOldPlaceRequest>,
) -> StatusCodeResult {
    let folder = base_dir(request.folder.as_deref())?;
    let device = request.device.clone();
    let forget = move || moves::forget_old_place(&registry, &request.device, &folder);
    limits.loads.run(&device, forget).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Lets each move go on. Never returns.
pub(super) async fn spawn_move_drivers(
    registry: &Arc<DeviceRegistry>,
    limits: &Arc<ConcurrencyLimits>,
) -> Infallible {
    loop {
        let job = registry.next_move().await;
        tokio::spawn(drive_move(Arc::clone(registry), Arc::clone(limits), job));
    }
}

async fn drive_move(registry: Arc<DeviceRegistry>, limits: Arc<ConcurrencyLimits>, job: Arc<MoveJob>) {
    loop {
        match moves::poll_move(&registry, &job) {
            MovePoll::Over => return,
            MovePoll::Wait(pause) => tokio::time::sleep(pause).await,
            MovePoll::Step => {
                let (of, step) = (Arc::clone(&registry), Arc::clone(&job));
                let done = limits.loads.run(&job.name(), move || moves::run_move_step(&of, &step)).await;
                if done.is_err() {
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
    }
}
