//! The handlers of the snapshot routes. Except for simple queries they may block on storage, so
//! they run on other threads.

use super::concurrency::{AppState, ConcurrencyLimits};
use super::error::{DeviceNameExtractor, ErrorResponse, JsonBody, QueryParams};
use super::handlers::{JsonResult, StatusCodeResult, TOGETHER_MAX, VerbCancelGuard, base_dir};
use crate::api;
use crate::registry::DeviceRegistry;
use crate::verbs::snapshot::{self, PAGE_MAX, PendingMerge};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use udm_dm::SnapshotState;

/// Interval of checks whether a merge has ended.
const MERGE_STEP: Duration = Duration::from_millis(20);

/// Interval of checks of a failed merge, and of attempts to restore the origin's table.
const RETRY_STEP: Duration = Duration::from_secs(1);

pub(super) async fn handle_list_snapshots(
    State(AppState { registry, limits, .. }): State<AppState>,
) -> JsonResult<api::SnapshotList> {
    // Reading the state folder may block.
    let all = limits.metrics.run("snapshots", move || {
        let mut all = snapshot::list_live_snapshots(&registry);
        all.extend(snapshot::list_unattached_snapshots(&registry)?);
        Ok(all)
    });
    Ok(Json(api::SnapshotList { snapshots: all.await? }))
}

pub(super) async fn handle_get_snapshot(
    State(registry): State<Arc<DeviceRegistry>>,
    DeviceNameExtractor(name): DeviceNameExtractor,
) -> JsonResult<api::SnapshotDescription> {
    Ok(Json(snapshot::describe_snapshot_by_name(&registry, &name)?))
}

pub(super) async fn handle_create_snapshots(
    State(AppState { registry, limits, .. }): State<AppState>,
    JsonBody(new): JsonBody<api::CreateSnapshotsRequest>,
) -> JsonResult<api::SnapshotList> {
    let folder = base_dir(new.folder.as_deref())?;
    let refuse = |why: String| ErrorResponse::request(StatusCode::BAD_REQUEST, why);
    let Some(first) = new.snapshots.first() else {
        return Err(refuse("`snapshots` is empty: name them".into()));
    };
    if new.snapshots.len() > TOGETHER_MAX {
        let count = new.snapshots.len();
        return Err(refuse(format!("{count} snapshots at once, at most {TOGETHER_MAX} are allowed")));
    }
    let name = first.name.clone();
    let guard = VerbCancelGuard::within(new.timeout_ms, "no snapshot was made");
    let cancel_token = guard.0.clone();
    let made =
        limits.loads.run(&name, move || snapshot::create_snapshots(&registry, &new, &folder, &cancel_token));
    Ok(Json(api::SnapshotList { snapshots: made.await? }))
}

pub(super) async fn handle_remove_snapshot(
    State(AppState { registry, limits, .. }): State<AppState>,
    DeviceNameExtractor(name): DeviceNameExtractor,
    QueryParams(keep): QueryParams<api::RemoveSnapshotQuery>,
) -> StatusCodeResult {
    let guard = VerbCancelGuard::within(keep.timeout_ms, "the snapshot was not removed");
    let cancel_token = guard.0.clone();
    let device = name.clone();
    let keep = keep.keep_store.unwrap_or(false);
    limits
        .loads
        .run(&name, move || snapshot::remove_snapshot(&registry, &device, keep, &cancel_token))
        .await?;
    Ok(StatusCode::NO_CONTENT)
}

pub(super) async fn handle_merge_snapshot(
    State(AppState { registry, limits, .. }): State<AppState>,
    DeviceNameExtractor(name): DeviceNameExtractor,
) -> JsonResult<api::SnapshotDescription> {
    let guard = VerbCancelGuard::default();
    let cancel_token = guard.0.clone();
    let (device, of) = (name.clone(), Arc::clone(&registry));
    let ends = Arc::clone(&limits);
    let (begun, end) = limits
        .loads
        .run(&name, move || {
            let (begun, end) = snapshot::start_snapshot_merge(&of, &device, &cancel_token)?;
            Ok((begun, end))
        })
        .await?;
    tokio::spawn(finish_merge_when_complete(registry, ends, end));
    Ok(Json(begun))
}

/// Finishes merges that an earlier server began. Never returns.
pub(super) async fn spawn_resumed_merge_finishers(
    registry: &Arc<DeviceRegistry>,
    limits: &Arc<ConcurrencyLimits>,
) -> Infallible {
    loop {
        let end = registry.next_merge().await;
        tokio::spawn(finish_merge_when_complete(Arc::clone(registry), Arc::clone(limits), end));
    }
}

/// Restores the origin's table when the merge is complete. A failed merge is checked until it is
/// restarted. If the device gets another table, the merge is no longer handled here.
async fn finish_merge_when_complete(
    registry: Arc<DeviceRegistry>,
    limits: Arc<ConcurrencyLimits>,
    end: PendingMerge,
) {
    let (end, name) = (Arc::new(end.clone()), end.name().to_owned());
    let mut warned = false;
    loop {
        let pause = match snapshot::final_merge_state(&registry, &end) {
            None => MERGE_STEP,
            Some(SnapshotState::MergeFailed) => RETRY_STEP,
            Some(SnapshotState::Merged) => {
                let (of, merge) = (Arc::clone(&registry), Arc::clone(&end));
                match limits.loads.run(&name, move || snapshot::finish_completed_merge(&of, &merge)).await {
                    Ok(()) => return,
                    Err(refusal) if !std::mem::replace(&mut warned, true) => {
                        tracing::warn!(
                            "{name}: its table as an origin can't be restored yet: {}",
                            refusal.story()
                        );
                    }
                    Err(_) => {}
                }
                RETRY_STEP
            }
            Some(_) => return,
        };
        tokio::time::sleep(pause).await;
    }
}

pub(super) async fn handle_get_changed_ranges(
    State(registry): State<Arc<DeviceRegistry>>,
    DeviceNameExtractor(name): DeviceNameExtractor,
    QueryParams(page): QueryParams<api::ChangedRangesQuery>,
) -> JsonResult<api::ChangedRangesPage> {
    let (from, max) = (page.from.unwrap_or(0), page.max.unwrap_or(PAGE_MAX));
    Ok(Json(snapshot::list_changed_ranges(&registry, &name, page.against.as_deref(), from, max)?))
}
