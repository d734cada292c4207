//! The route of the configuration file.

use super::concurrency::AppState;
use super::error::QueryParams;
use super::handlers::{JsonResult, VerbCancelGuard};
use crate::api;
use crate::{config, verbs};
use axum::Json;
use axum::extract::State;

/// Reads the file and applies it; cancelled if the client disconnects.
pub(super) async fn handle_reconfigure_server(
    State(AppState { registry, limits, .. }): State<AppState>,
    QueryParams(how): QueryParams<api::ReconfigureQuery>,
) -> JsonResult<api::ReconfigureReport> {
    let guard = VerbCancelGuard::default();
    let cancel_token = guard.0.clone();
    let dry_run = how.dry_run.unwrap_or(false);
    let verb = move || verbs::block_on_verb(config::apply_config_file(&registry, dry_run, &cancel_token));
    Ok(Json(limits.reconfigures.run("reconfigure", verb).await?))
}
