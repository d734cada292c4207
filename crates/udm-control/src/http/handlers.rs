//! The handlers of the routes: each calls a verb and returns its answer as JSON.
//!
//! A verb that changes a device runs in a task of its own, so it completes even if its client
//! disconnects. Verbs that open, close or look up devices may block on storage. They run on other
//! threads, with a limit per kind ([`super::concurrency`]). A verb that waits for requests in
//! flight or for a store is cancelled if its client disconnects.

use super::concurrency::{AppState, WAITS_MAX};
use super::error::{DeviceName, ErrorResponse, JsonBody, QueryParams};
use super::openapi;
use crate::api;
use crate::error::VerbError;
use crate::metrics;
use crate::registry::{BaseDir, NewName, Registry, RequestQueueParams};
use crate::stats::collect_stats;
use crate::verbs::{self, CancelToken, RemoveOptions};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use std::future::Future;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::AbortHandle;
use udm_core::errno::{EBUSY, ETIMEDOUT};
use udm_dm::TargetError;

/// Maximum number of devices that change together: enough for any volume, and few enough that their
/// locks do not delay other verbs for long.
pub(super) const TOGETHER_MAX: usize = 1024;

/// Maximum time of one wait for an event.
const WAIT_MAX_MS: u64 = 60_000;

/// Maximum time that a client waits for a change of a queue.
const QUEUE_CHANGE_MAX: Duration = Duration::from_secs(10);

pub(super) type JsonResult<T> = Result<Json<T>, ErrorResponse>;
pub(super) type StatusResult = Result<StatusCode, ErrorResponse>;

/// True if the query asks for the inactive slot.
fn is_inactive(query: &api::SlotQuery) -> Result<bool, ErrorResponse> {
    match query.inactive {
        None | Some(0) => Ok(false),
        Some(1) => Ok(true),
        Some(_) => Err(ErrorResponse::request(StatusCode::BAD_REQUEST, "inactive: 0 or 1")),
    }
}

/// Cancels a verb when it is dropped with the request, since no client waits for the answer.
#[derive(Default)]
pub(super) struct CancelGuard(pub CancelToken, Option<AbortHandle>);

impl CancelGuard {
    /// Also cancels after `timeout_ms`; the error text ends with `so`, the state of the device
    /// then.
    pub fn within(timeout_ms: Option<u64>, so: &str) -> CancelGuard {
        let cancel_token = CancelToken::default();
        let timer = timeout_ms.map(|ms| {
            let (cancel_token, why) = (cancel_token.clone(), format!("not done within {ms} ms; {so}"));
            let timer = tokio::spawn(async move {
                tokio::time::sleep(Duration::from_millis(ms)).await;
                cancel_token.cancel(TargetError::errno(ETIMEDOUT).because(why));
            });
            timer.abort_handle()
        });
        CancelGuard(cancel_token, timer)
    }
}

impl Drop for CancelGuard {
    fn drop(&mut self) {
        self.1.iter().for_each(AbortHandle::abort);
        self.0.cancel(verbs::interrupted("the client hung up"));
    }
}

/// Error text of a suspend or resume that runs out of time, and the state of the device then.
const NOT_AT_REST: [&str; 2] = ["not at rest", "the device is active"];

/// The same for a removal.
const NOT_REMOVED: [&str; 2] = ["not done", "the device was not removed"];

/// Runs `verb` and cancels it if its client disconnects or after `timeout_ms`. A cancelled verb
/// still runs to its end. `late` is the text of the error after `timeout_ms`.
async fn run_cancellable<F>(
    timeout_ms: Option<u64>,
    late: [&str; 2],
    verb: impl FnOnce(CancelToken) -> F,
) -> StatusResult
where
    F: Future<Output = Result<(), VerbError>> + Send + 'static,
{
    let guard = CancelGuard::default();
    let mut task = tokio::spawn(verb(guard.0.clone()));
    if let Some(ms) = timeout_ms {
        tokio::select! {
            biased;
            joined = &mut task => return finished(joined).map(|()| StatusCode::NO_CONTENT),
            () = tokio::time::sleep(Duration::from_millis(ms)) => {
                let [what, state] = late;
                let reason = format!("{what} within {ms} ms; {state}");
                guard.0.cancel(TargetError::errno(ETIMEDOUT).because(reason));
            }
        }
    }
    finished(task.await).map(|()| StatusCode::NO_CONTENT)
}

pub(super) fn finished<T>(
    joined: Result<Result<T, VerbError>, tokio::task::JoinError>,
) -> Result<T, ErrorResponse> {
    match joined {
        Ok(done) => done.map_err(ErrorResponse::from),
        Err(error) => Err(ErrorResponse::request(StatusCode::INTERNAL_SERVER_ERROR, error)),
    }
}

pub(super) async fn list(State(registry): State<Arc<Registry>>) -> Json<api::DeviceList> {
    Json(api::DeviceList { devices: verbs::ls(&registry) })
}

pub(super) async fn info(
    State(registry): State<Arc<Registry>>,
    DeviceName(name): DeviceName,
) -> JsonResult<api::Device> {
    Ok(Json(verbs::info(&registry, &name)?))
}

/// The base directory of relative paths.
pub(super) fn base_dir(given: Option<&str>) -> Result<BaseDir, ErrorResponse> {
    let Some(path) = given else { return Ok(BaseDir::none()) };
    BaseDir::at(Path::new(path)).map_err(|why| ErrorResponse::request(StatusCode::BAD_REQUEST, why))
}

pub(super) async fn create(
    State(AppState { registry, limits, .. }): State<AppState>,
    JsonBody(new): JsonBody<api::Create>,
) -> JsonResult<api::Device> {
    let folder = base_dir(new.folder.as_deref())?;
    let name = new.name.clone();
    let guard = CancelGuard::default();
    let cancel_token = guard.0.clone();
    let made = limits.loads.run(&name, move || {
        let (name, uuid) = (new.name.as_str(), new.uuid.as_deref());
        let requests =
            RequestQueueParams { queue_depth: new.dm_mq_queue_depth, nr_hw_queues: new.dm_mq_nr_hw_queues };
        let called =
            verbs::DeviceSpec { name, uuid, minor: new.minor, requests, ..verbs::DeviceSpec::default() };
        verbs::wait(verbs::create_with(&registry, called, |_| Ok(new.table), &folder, &cancel_token))
    });
    Ok(Json(made.await?))
}

pub(super) async fn create_multipath(
    State(AppState { registry, limits, .. }): State<AppState>,
    JsonBody(new): JsonBody<api::CreateMultipath>,
) -> JsonResult<api::Device> {
    let folder = base_dir(new.folder.as_deref())?;
    let name = new.name.clone();
    let guard = CancelGuard::default();
    let cancel_token = guard.0.clone();
    let made = limits.loads.run(&name, move || {
        let api::CreateMultipath { name, uuid, paths, policy, prio, prio_args, .. } = new;
        let (how, uuid) = (verbs::MultipathOptions { policy, prio, prio_args }, uuid.as_deref());
        verbs::wait(verbs::create_multipath_cancellable(
            &registry,
            &name,
            uuid,
            &paths,
            &how,
            &folder,
            &cancel_token,
        ))
    });
    Ok(Json(made.await?))
}

pub(super) async fn remove(
    State(registry): State<Arc<Registry>>,
    DeviceName(name): DeviceName,
    QueryParams(how): QueryParams<api::RemoveQuery>,
) -> StatusResult {
    let removal =
        RemoveOptions { force: how.force.unwrap_or(false), deferred: how.deferred.unwrap_or(false) };
    let verb = |cancel_token| async move {
        verbs::remove_cancellable(&registry, &name, removal, &cancel_token).await
    };
    run_cancellable(how.timeout_ms, NOT_REMOVED, verb).await
}

pub(super) async fn rename(
    State(AppState { registry, limits, .. }): State<AppState>,
    DeviceName(name): DeviceName,
    JsonBody(rename): JsonBody<api::Rename>,
) -> StatusResult {
    if rename.name.is_some() == rename.uuid.is_some() {
        return Err(ErrorResponse::request(StatusCode::BAD_REQUEST, "`name` or `uuid`: one of the two"));
    }
    let device = name.clone();
    let verb = move || match (&rename.name, &rename.uuid) {
        (Some(new), _) => verbs::rename(&registry, &device, NewName::Name(new)),
        (None, uuid) => verbs::rename(&registry, &device, NewName::Uuid(uuid.as_deref().unwrap_or_default())),
    };
    limits.renames.run(&name, verb).await?;
    Ok(StatusCode::NO_CONTENT)
}

pub(super) async fn wait(
    State(AppState { registry, limits, .. }): State<AppState>,
    DeviceName(name): DeviceName,
    JsonBody(wait): JsonBody<api::Wait>,
) -> JsonResult<api::Device> {
    let Ok(_place) = limits.waits.try_acquire() else {
        let why = format!("{WAITS_MAX} clients wait for events already");
        return Err(VerbError::new(name, TargetError::errno(EBUSY).because(why)).into());
    };
    let ms = wait.timeout_ms.unwrap_or(WAIT_MAX_MS).min(WAIT_MAX_MS);
    let cancel_token = CancelToken::default();
    let event = verbs::wait_event(&registry, &name, wait.event_nr, &cancel_token);
    let Ok(device) = tokio::time::timeout(Duration::from_millis(ms), event).await else {
        let why = format!("no event within {ms} ms");
        return Err(VerbError::new(name, TargetError::errno(ETIMEDOUT).because(why)).into());
    };
    Ok(Json(device?))
}

pub(super) async fn status(
    State(registry): State<Arc<Registry>>,
    DeviceName(name): DeviceName,
    QueryParams(slot): QueryParams<api::SlotQuery>,
) -> JsonResult<api::Status> {
    Ok(Json(verbs::status(&registry, &name, is_inactive(&slot)?)?))
}

pub(super) async fn table(
    State(registry): State<Arc<Registry>>,
    DeviceName(name): DeviceName,
    QueryParams(slot): QueryParams<api::SlotQuery>,
) -> JsonResult<api::Table> {
    Ok(Json(verbs::table(&registry, &name, is_inactive(&slot)?)?))
}

/// Runs `verb` on all devices, on a thread that may block: with thousands of them it takes a while.
async fn for_all_devices<T: Send + 'static>(
    AppState { registry, limits, .. }: AppState,
    slot: &api::SlotQuery,
    verb: impl FnOnce(&Registry, bool) -> T + Send + 'static,
) -> JsonResult<T> {
    let inactive = is_inactive(slot)?;
    Ok(Json(limits.metrics.run("devices", move || Ok(verb(&registry, inactive))).await?))
}

pub(super) async fn tables(
    State(shared): State<AppState>,
    QueryParams(slot): QueryParams<api::SlotQuery>,
) -> JsonResult<api::TableList> {
    for_all_devices(shared, &slot, verbs::tables).await
}

pub(super) async fn statuses(
    State(shared): State<AppState>,
    QueryParams(slot): QueryParams<api::SlotQuery>,
) -> JsonResult<api::StatusList> {
    for_all_devices(shared, &slot, verbs::statuses).await
}

pub(super) async fn load(
    State(AppState { registry, limits, .. }): State<AppState>,
    DeviceName(name): DeviceName,
    JsonBody(load): JsonBody<api::Load>,
) -> StatusResult {
    let folder = base_dir(load.folder.as_deref())?;
    let device = name.clone();
    let guard = CancelGuard::default();
    let cancel_token = guard.0.clone();
    let verb = move || {
        let read_only = load.read_only.unwrap_or(false);
        verbs::load_cancellable(&registry, &device, &load.table, read_only, &folder, &cancel_token)
    };
    limits.loads.run(&name, verb).await?;
    Ok(StatusCode::NO_CONTENT)
}

pub(super) async fn clear(
    State(AppState { registry, limits, .. }): State<AppState>,
    DeviceName(name): DeviceName,
) -> StatusResult {
    let device = name.clone();
    limits.clears.run(&name, move || verbs::clear(&registry, &device)).await?;
    Ok(StatusCode::NO_CONTENT)
}

pub(super) async fn message(
    State(AppState { registry, limits, .. }): State<AppState>,
    DeviceName(name): DeviceName,
    JsonBody(message): JsonBody<api::Message>,
) -> JsonResult<api::Answer> {
    let folder = base_dir(message.folder.as_deref())?;
    let device = name.clone();
    let answer = limits.messages.run(&name, move || {
        verbs::message_from(&registry, &device, message.sector, &message.message, &folder)
    });
    Ok(Json(api::Answer { answer: answer.await? }))
}

pub(super) async fn change_queue(
    State(AppState { registry, .. }): State<AppState>,
    DeviceName(name): DeviceName,
    JsonBody(body): JsonBody<api::ChangeQueue>,
) -> JsonResult<api::Device> {
    let change = verbs::change_queues(&registry, &name, body.disk.as_deref(), &body.settings);
    let late = |_| {
        let why = "requests that were sent before do not complete; the settings are as they were";
        VerbError::new(&name, TargetError::errno(ETIMEDOUT).because(why))
    };
    Ok(Json(tokio::time::timeout(QUEUE_CHANGE_MAX, change).await.map_err(late)??))
}

pub(super) async fn turn_power(
    State(AppState { registry, limits, .. }): State<AppState>,
    DeviceName(name): DeviceName,
    JsonBody(body): JsonBody<api::TurnPower>,
) -> JsonResult<api::Device> {
    let device = name.clone();
    let turn = move || {
        verbs::turn_power(&registry, &device, body.disk.as_deref(), body.on)?;
        verbs::info(&registry, &device)
    };
    Ok(Json(limits.messages.run(&name, turn).await?))
}

pub(super) async fn command_path(
    State(AppState { registry, limits, .. }): State<AppState>,
    DeviceName(name): DeviceName,
    JsonBody(body): JsonBody<api::CommandPath>,
) -> StatusResult {
    let (device, folder) = (name.clone(), base_dir(body.folder.as_deref())?);
    let command = move || verbs::command_path(&registry, &device, &body.path, &body.action, &folder);
    limits.messages.run(&name, command).await?;
    Ok(StatusCode::NO_CONTENT)
}

pub(super) async fn suspend(
    State(registry): State<Arc<Registry>>,
    DeviceName(name): DeviceName,
    JsonBody(how): JsonBody<api::Suspend>,
) -> StatusResult {
    let noflush = how.noflush.unwrap_or(false);
    let verb = |cancel_token| async move {
        verbs::suspend_cancellable(&registry, &[&name], noflush, &cancel_token).await
    };
    run_cancellable(how.timeout_ms, NOT_AT_REST, verb).await
}

pub(super) async fn resume(
    State(registry): State<Arc<Registry>>,
    DeviceName(name): DeviceName,
    JsonBody(how): JsonBody<api::Resume>,
) -> StatusResult {
    let verb =
        |cancel_token| async move { verbs::resume_cancellable(&registry, &[&name], &cancel_token).await };
    run_cancellable(how.timeout_ms, NOT_AT_REST, verb).await
}

pub(super) async fn suspend_together(
    State(registry): State<Arc<Registry>>,
    JsonBody(how): JsonBody<api::SuspendTogether>,
) -> StatusResult {
    let noflush = how.noflush.unwrap_or(false);
    let names = check_names(how.names)?;
    let verb = |cancel_token| async move {
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        verbs::suspend_cancellable(&registry, &names, noflush, &cancel_token).await
    };
    run_cancellable(how.timeout_ms, NOT_AT_REST, verb).await
}

pub(super) async fn resume_together(
    State(registry): State<Arc<Registry>>,
    JsonBody(how): JsonBody<api::ResumeTogether>,
) -> StatusResult {
    let names = check_names(how.names)?;
    let verb = |cancel_token| async move {
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        verbs::resume_cancellable(&registry, &names, &cancel_token).await
    };
    run_cancellable(how.timeout_ms, NOT_AT_REST, verb).await
}

/// Checks the number of devices that change together.
fn check_names(names: Vec<String>) -> Result<Vec<String>, ErrorResponse> {
    match names.len() {
        0 => Err(ErrorResponse::request(StatusCode::BAD_REQUEST, "`names` is empty: name the devices")),
        1..=TOGETHER_MAX => Ok(names),
        n => Err(ErrorResponse::request(
            StatusCode::BAD_REQUEST,
            format!("{n} devices at once, at most {TOGETHER_MAX} are allowed"),
        )),
    }
}

pub(super) async fn exports(State(registry): State<Arc<Registry>>) -> Json<api::ExportList> {
    Json(api::ExportList { exports: registry.exports() })
}

pub(super) async fn version() -> Json<api::Version> {
    Json(verbs::version())
}

pub(super) async fn stats(State(shared): State<AppState>) -> Result<Response, ErrorResponse> {
    let AppState { registry, limits, began } = shared;
    let json = move || {
        Ok(serde_json::to_vec(&collect_stats(&registry, began)).expect("plain structs can be written"))
    };
    let json = limits.metrics.run("stats", json).await?;
    Ok(([(CONTENT_TYPE, "application/json")], json).into_response())
}

pub(super) async fn metrics(State(shared): State<AppState>) -> Result<Response, ErrorResponse> {
    let AppState { registry, limits, began } = shared;
    let text = limits
        .metrics
        .run("metrics", move || Ok(metrics::prometheus_text(&collect_stats(&registry, began))))
        .await?;
    Ok(([(CONTENT_TYPE, metrics::CONTENT_TYPE)], text).into_response())
}

pub(super) async fn openapi() -> Json<serde_json::Value> {
    Json(openapi::document())
}

/// The error for an unknown path.
pub(super) async fn route_not_found() -> ErrorResponse {
    ErrorResponse::request(StatusCode::NOT_FOUND, "no such path; /openapi.json lists them")
}

/// The error for a method that the path does not have.
pub(super) async fn method_not_allowed() -> ErrorResponse {
    ErrorResponse::request(
        StatusCode::METHOD_NOT_ALLOWED,
        "the path has no such method; /openapi.json lists them",
    )
}
