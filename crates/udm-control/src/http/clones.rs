//! The handlers of the clone routes.

use super::concurrency::{AppState, ConcurrencyLimits};
use super::error::{DeviceNameExtractor, JsonBody};
use super::handlers::{JsonResult, StatusCodeResult, VerbCancelGuard, base_dir};
use crate::api;
use crate::registry::DeviceRegistry;
use crate::verbs::{CancelToken, clone};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use std::collections::HashSet;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use udm_dm::CloneHydrationState;

/// Interval at which a server looks for clones that can be finished.
const FINISH_INTERVAL: Duration = Duration::from_millis(500);

pub(super) async fn handle_list_clones(State(registry): State<Arc<DeviceRegistry>>) -> Json<api::CloneList> {
    Json(api::CloneList { clones: clone::list_all_clones(&registry) })
}

pub(super) async fn handle_get_clone(
    State(registry): State<Arc<DeviceRegistry>>,
    DeviceNameExtractor(name): DeviceNameExtractor,
) -> JsonResult<api::CloneDescription> {
    Ok(Json(clone::describe_clone_by_name(&registry, &name)?))
}

pub(super) async fn handle_get_clone_profile(
    State(registry): State<Arc<DeviceRegistry>>,
    DeviceNameExtractor(name): DeviceNameExtractor,
) -> JsonResult<api::CloneBootProfile> {
    Ok(Json(clone::clone_boot_profile(&registry, &name)?))
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

pub(super) async fn handle_forget_clone(
    State(AppState { registry, limits, .. }): State<AppState>,
    DeviceNameExtractor(name): DeviceNameExtractor,
) -> StatusCodeResult {
    let clone = name.clone();
    limits.loads.run(&name, move || clone::forget_absent_clone(&registry, &clone)).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Brings back clones that have not returned when the server started, or their sources. Never
/// returns.
pub(super) async fn retry_waiting_clones(
    registry: &Arc<DeviceRegistry>,
    limits: &Arc<ConcurrencyLimits>,
) -> Infallible {
    loop {
        for waiting in registry.clones.due().await {
            let (of, name) = (Arc::clone(registry), waiting.record.name.clone());
            let retry = move || {
                clone::retry_clone(&of, &waiting);
                Ok(())
            };
            if let Err(error) = limits.loads.run(&name, retry).await {
                tracing::warn!("{name}: the clone is not tried again: {}", error.story());
            }
        }
    }
}

/// Finishes each clone of `registry` when all of its source is in the destination. A clone that
/// cannot be finished now is tried again, with one line in the log. Never returns.
pub(super) async fn finish_hydrated_clones(
    registry: &Arc<DeviceRegistry>,
    limits: &Arc<ConcurrencyLimits>,
) -> Infallible {
    let mut warned: HashSet<String> = HashSet::new();
    loop {
        let mut complete = clone::list_clones(registry);
        complete.retain(|one| one.state == CloneHydrationState::Done.text());
        warned.retain(|name| complete.iter().any(|one| one.name == *name));
        for one in complete {
            let (of, name) = (Arc::clone(registry), one.name.clone());
            let finish = move || clone::finish_clone(&of, &name, &CancelToken::default());
            match limits.loads.run(&one.name, finish).await {
                Ok(()) => {
                    let api::CloneDescription { name, destination, source, metadata, .. } = one;
                    // The operator must know, because no command has changed this table.
                    tracing::warn!(
                        "{name}: the clone is finished: it is linear over {destination}, and {source} and {metadata} are not used any more"
                    );
                }
                Err(refusal) => {
                    if warned.insert(one.name) {
                        tracing::warn!("the clone cannot be finished yet: {}", refusal.story());
                    }
                }
            }
        }
        tokio::time::sleep(FINISH_INTERVAL).await;
    }
}
