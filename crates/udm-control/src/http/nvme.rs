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
use std::time::{Duration, Instant};

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

/// The longest wait for the requests of a controller that is reset. A host that waits for the
/// quiesce time instead, 65 s at most, does not need the answer any more.
const RESET_MAX: Duration = Duration::from_secs(65);

/// Pause between looks at a reset.
const RESET_PAUSE: Duration = Duration::from_millis(2);

pub(super) async fn handle_reset_nvme_controller(
    State(registry): State<Arc<DeviceRegistry>>,
    JsonBody(body): JsonBody<api::ResetNvmeControllerRequest>,
) -> JsonResult<api::ResetNvmeControllerReply> {
    let reply =
        |outcome: &str, why: String| Ok(Json(api::ResetNvmeControllerReply { outcome: outcome.into(), why }));
    let is_done = match verbs::reset_nvme_controller(&registry, &body)? {
        Ok(is_done) => is_done,
        Err(why) => return reply("refused", why),
    };
    let end = Instant::now() + RESET_MAX;
    while !is_done() {
        if Instant::now() >= end {
            return reply("late", "its requests are still at a disk".into());
        }
        tokio::time::sleep(RESET_PAUSE).await;
    }
    reply("done", String::new())
}
