//! The route of the configuration file.

use super::concurrency::AppState;
use super::error::QueryParams;
use super::handlers::{CancelGuard, JsonResult};
use crate::api;
use crate::{config, verbs};
use axum::Json;
use axum::extract::State;

/// Reads the file and applies it; cancelled if the client disconnects.
pub(super) async fn reconfigure(
    State(AppState { registry, limits, .. }): State<AppState>,
    QueryParams(how): QueryParams<api::ReconfigureQuery>,
) -> JsonResult<api::Reconfigured> {
    let guard = CancelGuard::default();
    let cancel_token = guard.0.clone();
    let dry_run = how.dry_run.unwrap_or(false);
    let verb = move || verbs::wait(config::reconfigure(&registry, dry_run, &cancel_token));
    Ok(Json(limits.reconfigures.run("reconfigure", verb).await?))
}
