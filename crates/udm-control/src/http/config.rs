//! The route of the configuration file.

use super::concurrency::AppState;
use super::error::QueryParams;
use super::handlers::{Answer, CancelGuard};
use crate::api;
use crate::{config, verbs};
use axum::Json;
use axum::extract::State;

/// Reads the file and applies it; cancelled if the client disconnects.
pub(super) async fn reconfigure(
    State(AppState { registry, gates, .. }): State<AppState>,
    QueryParams(how): QueryParams<api::ReconfigureQuery>,
) -> Answer<api::Reconfigured> {
    let asked = CancelGuard::default();
    let cancel_token = asked.0.clone();
    let dry_run = how.dry_run.unwrap_or(false);
    let verb = move || verbs::wait(config::reconfigure(&registry, dry_run, &cancel_token));
    Ok(Json(gates.reconfigures.run("reconfigure", verb).await?))
}
