//! The file of a server, over HTTP.

use super::api;
use super::error::Params;
use super::gates::Shared;
use super::handlers::{Answer, Asked};
use crate::{config, verbs};
use axum::Json;
use axum::extract::State;
use serde::Deserialize;

/// What stands behind `?`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct How {
    dry_run: Option<bool>,
}

/// Reads the file and applies it; called off when the client hangs up.
pub(super) async fn reconfigure(
    State(Shared { registry, gates, .. }): State<Shared>,
    Params(how): Params<How>,
) -> Answer<api::Reconfigured> {
    let asked = Asked::default();
    let off = asked.0.clone();
    let dry_run = how.dry_run.unwrap_or(false);
    let verb = move || verbs::wait(config::reconfigure(&registry, dry_run, &off));
    Ok(Json(gates.reconfigures.run("reconfigure", verb).await?))
}
