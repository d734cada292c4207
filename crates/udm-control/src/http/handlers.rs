//! The handlers of the routes: each calls a verb and returns its answer as JSON.
//!
//! A verb that changes a device runs in a task of its own, so it completes even if its client
//! disconnects. Verbs that open, close or look up devices may block on storage. They run on other
//! threads, with a limit per kind ([`super::concurrency`]). A verb that waits for requests in
//! flight or for a store is cancelled if its client disconnects.

use super::concurrency::{AppState, WAITS_MAX};
use super::error::{DeviceNameExtractor, ErrorResponse, JsonBody, QueryParams};
use super::openapi;
use crate::api;
use crate::error::VerbError;
use crate::metrics;
use crate::registry::{BaseDir, DeviceRegistry, NewName, RequestQueueParams};
use crate::stats::collect_stats;
use crate::verbs::{self, CancelToken, RemoveOptions};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use std::future::Future;
use std::path::Path;
use std::sync::{Arc, OnceLock};
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
pub(super) type StatusCodeResult = Result<StatusCode, ErrorResponse>;

/// True if the query asks for the inactive slot.
fn parse_inactive_param(query: &api::TableSlotQuery) -> Result<bool, ErrorResponse> {
    match query.inactive {
        None | Some(0) => Ok(false),
        Some(1) => Ok(true),
        Some(_) => Err(ErrorResponse::request(StatusCode::BAD_REQUEST, "inactive: 0 or 1")),
    }
}

/// Cancels a verb when it is dropped with the request, since no client waits for the answer.
#[derive(Default)]
pub(super) struct VerbCancelGuard(pub CancelToken, Option<AbortHandle>);

impl VerbCancelGuard {
    /// Also cancels after `timeout_ms`; the error text ends with `so`, the state of the device
    /// then.
    pub fn within(timeout_ms: Option<u64>, so: &str) -> VerbCancelGuard {
        let cancel_token = CancelToken::default();
        let timer = timeout_ms.map(|ms| {
            let (cancel_token, why) = (cancel_token.clone(), format!("not done within {ms} ms; {so}"));
            let timer = tokio::spawn(async move {
                tokio::time::sleep(Duration::from_millis(ms)).await;
                cancel_token.cancel(TargetError::errno(ETIMEDOUT).because(why));
            });
            timer.abort_handle()
        });
        VerbCancelGuard(cancel_token, timer)
    }
}

impl Drop for VerbCancelGuard {
    fn drop(&mut self) {
        self.1.iter().for_each(AbortHandle::abort);
        self.0.cancel(verbs::interrupted_error("the client hung up"));
    }
}

/// Error text of a suspend or resume that runs out of time, and the state of the device then.
const NOT_AT_REST: [&str; 2] = ["not at rest", "the device is active"];

/// The same for a removal.
const NOT_REMOVED: [&str; 2] = ["not done", "the device was not removed"];

/// Runs `verb` and cancels it if its client disconnects or after `timeout_ms`. A cancelled verb
/// still runs to its end. `late` is the text of the error after `timeout_ms`.
async fn run_verb_until_disconnect<F>(
    timeout_ms: Option<u64>,
    late: [&str; 2],
    verb: impl FnOnce(CancelToken) -> F,
) -> StatusCodeResult
where
    F: Future<Output = Result<(), VerbError>> + Send + 'static,
{
    let guard = VerbCancelGuard::default();
    let mut task = tokio::spawn(verb(guard.0.clone()));
    if let Some(ms) = timeout_ms {
        tokio::select! {
            biased;
            joined = &mut task => return flatten_join_result(joined).map(|()| StatusCode::NO_CONTENT),
            () = tokio::time::sleep(Duration::from_millis(ms)) => {
                let [what, state] = late;
                let reason = format!("{what} within {ms} ms; {state}");
                guard.0.cancel(TargetError::errno(ETIMEDOUT).because(reason));
            }
        }
    }
    flatten_join_result(task.await).map(|()| StatusCode::NO_CONTENT)
}

pub(super) fn flatten_join_result<T>(
    joined: Result<Result<T, VerbError>, tokio::task::JoinError>,
) -> Result<T, ErrorResponse> {
    match joined {
        Ok(done) => done.map_err(ErrorResponse::from),
        Err(error) => Err(ErrorResponse::request(StatusCode::INTERNAL_SERVER_ERROR, error)),
    }
}

pub(super) async fn handle_list_devices(
    State(registry): State<Arc<DeviceRegistry>>,
) -> Json<api::DeviceList> {
    Json(api::DeviceList { devices: verbs::list_mapped_devices(&registry) })
}

pub(super) async fn handle_get_device(
    State(registry): State<Arc<DeviceRegistry>>,
    DeviceNameExtractor(name): DeviceNameExtractor,
) -> JsonResult<api::DeviceDescription> {
    Ok(Json(verbs::describe_device_by_name(&registry, &name)?))
}

/// The base directory of relative paths.
pub(super) fn base_dir(given: Option<&str>) -> Result<BaseDir, ErrorResponse> {
    let Some(path) = given else { return Ok(BaseDir::none()) };
    BaseDir::at(Path::new(path)).map_err(|why| ErrorResponse::request(StatusCode::BAD_REQUEST, why))
}

pub(super) async fn handle_create_device(
    State(AppState { registry, limits, .. }): State<AppState>,
    JsonBody(new): JsonBody<api::CreateDeviceRequest>,
) -> JsonResult<api::DeviceDescription> {
    let folder = base_dir(new.folder.as_deref())?;
    let name = new.name.clone();
    let guard = VerbCancelGuard::default();
    let cancel_token = guard.0.clone();
    let made = limits.loads.run(&name, move || {
        let (name, uuid) = (new.name.as_str(), new.uuid.as_deref());
        let requests =
            RequestQueueParams { queue_depth: new.dm_mq_queue_depth, nr_hw_queues: new.dm_mq_nr_hw_queues };
        let called =
            verbs::DeviceSpec { name, uuid, minor: new.minor, requests, ..verbs::DeviceSpec::default() };
        verbs::block_on_verb(verbs::create_device_with_table_fn(
            &registry,
            called,
            |_| Ok(new.table),
            &folder,
            &cancel_token,
        ))
    });
    Ok(Json(made.await?))
}

pub(super) async fn handle_create_multipath(
    State(AppState { registry, limits, .. }): State<AppState>,
    JsonBody(new): JsonBody<api::CreateMultipathRequest>,
) -> JsonResult<api::DeviceDescription> {
    let folder = base_dir(new.folder.as_deref())?;
    let name = new.name.clone();
    let guard = VerbCancelGuard::default();
    let cancel_token = guard.0.clone();
    let made = limits.loads.run(&name, move || {
        let api::CreateMultipathRequest { name, uuid, paths, policy, prio, prio_args, .. } = new;
        let (how, uuid) = (verbs::PathGroupingOptions { policy, prio, prio_args }, uuid.as_deref());
        verbs::block_on_verb(verbs::create_multipath_cancellable(
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

pub(super) async fn handle_remove_device(
    State(registry): State<Arc<DeviceRegistry>>,
    DeviceNameExtractor(name): DeviceNameExtractor,
    QueryParams(how): QueryParams<api::RemoveDeviceQuery>,
) -> StatusCodeResult {
    let removal =
        RemoveOptions { force: how.force.unwrap_or(false), deferred: how.deferred.unwrap_or(false) };
    let verb = |cancel_token| async move {
        verbs::remove_device_cancellable(&registry, &name, removal, &cancel_token).await
    };
    run_verb_until_disconnect(how.timeout_ms, NOT_REMOVED, verb).await
}

pub(super) async fn handle_rename_device(
    State(AppState { registry, limits, .. }): State<AppState>,
    DeviceNameExtractor(name): DeviceNameExtractor,
    JsonBody(rename): JsonBody<api::RenameDeviceRequest>,
) -> StatusCodeResult {
    if rename.name.is_some() == rename.uuid.is_some() {
        return Err(ErrorResponse::request(StatusCode::BAD_REQUEST, "`name` or `uuid`: one of the two"));
    }
    let device = name.clone();
    let verb = move || match (&rename.name, &rename.uuid) {
        (Some(new), _) => verbs::rename_mapped_device(&registry, &device, NewName::Name(new)),
        (None, uuid) => verbs::rename_mapped_device(
            &registry,
            &device,
            NewName::Uuid(uuid.as_deref().unwrap_or_default()),
        ),
    };
    limits.renames.run(&name, verb).await?;
    Ok(StatusCode::NO_CONTENT)
}

pub(super) async fn handle_wait_device_event(
    State(AppState { registry, limits, .. }): State<AppState>,
    DeviceNameExtractor(name): DeviceNameExtractor,
    JsonBody(wait): JsonBody<api::WaitDeviceEventRequest>,
) -> JsonResult<api::DeviceDescription> {
    let Ok(_place) = limits.waits.try_acquire() else {
        let why = format!("{WAITS_MAX} clients wait for events already");
        return Err(VerbError::new(name, TargetError::errno(EBUSY).because(why)).into());
    };
    let ms = wait.timeout_ms.unwrap_or(WAIT_MAX_MS).min(WAIT_MAX_MS);
    let cancel_token = CancelToken::default();
    let event = verbs::wait_device_event(&registry, &name, wait.event_nr, &cancel_token);
    let Ok(device) = tokio::time::timeout(Duration::from_millis(ms), event).await else {
        let why = format!("no event within {ms} ms");
        return Err(VerbError::new(name, TargetError::errno(ETIMEDOUT).because(why)).into());
    };
    Ok(Json(device?))
}

pub(super) async fn handle_get_table_status(
    State(registry): State<Arc<DeviceRegistry>>,
    DeviceNameExtractor(name): DeviceNameExtractor,
    QueryParams(slot): QueryParams<api::TableSlotQuery>,
) -> JsonResult<api::TableStatus> {
    Ok(Json(verbs::table_status_by_device_name(&registry, &name, parse_inactive_param(&slot)?)?))
}

pub(super) async fn handle_get_table(
    State(registry): State<Arc<DeviceRegistry>>,
    DeviceNameExtractor(name): DeviceNameExtractor,
    QueryParams(slot): QueryParams<api::TableSlotQuery>,
) -> JsonResult<api::TableDescription> {
    Ok(Json(verbs::table_by_device_name(&registry, &name, parse_inactive_param(&slot)?)?))
}

/// Runs `verb` on all devices, on a thread that may block: with thousands of them it takes a while.
async fn for_all_devices<T: Send + 'static>(
    AppState { registry, limits, .. }: AppState,
    slot: &api::TableSlotQuery,
    verb: impl FnOnce(&DeviceRegistry, bool) -> T + Send + 'static,
) -> JsonResult<T> {
    let inactive = parse_inactive_param(slot)?;
    Ok(Json(limits.metrics.run("devices", move || Ok(verb(&registry, inactive))).await?))
}

pub(super) async fn handle_list_tables(
    State(shared): State<AppState>,
    QueryParams(slot): QueryParams<api::TableSlotQuery>,
) -> JsonResult<api::TableList> {
    for_all_devices(shared, &slot, verbs::all_device_tables).await
}

pub(super) async fn handle_list_table_statuses(
    State(shared): State<AppState>,
    QueryParams(slot): QueryParams<api::TableSlotQuery>,
) -> JsonResult<api::TableStatusList> {
    for_all_devices(shared, &slot, verbs::all_table_statuses).await
}

pub(super) async fn handle_load_table(
    State(AppState { registry, limits, .. }): State<AppState>,
    DeviceNameExtractor(name): DeviceNameExtractor,
    JsonBody(load): JsonBody<api::LoadTableRequest>,
) -> StatusCodeResult {
    let folder = base_dir(load.folder.as_deref())?;
    let device = name.clone();
    let guard = VerbCancelGuard::default();
    let cancel_token = guard.0.clone();
    let verb = move || {
        let read_only = load.read_only.unwrap_or(false);
        verbs::load_table_cancellable(&registry, &device, &load.table, read_only, &folder, &cancel_token)
    };
    limits.loads.run(&name, verb).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Goes on even if the client disconnects.
pub(super) async fn handle_upgrade_server(
    State(registry): State<Arc<DeviceRegistry>>,
    JsonBody(body): JsonBody<api::UpgradeServerRequest>,
) -> JsonResult<api::UpgradeReport> {
    Ok(Json(registry.upgrade(body).await?))
}

pub(super) async fn handle_clear_inactive_table(
    State(AppState { registry, limits, .. }): State<AppState>,
    DeviceNameExtractor(name): DeviceNameExtractor,
) -> StatusCodeResult {
    let device = name.clone();
    limits.clears.run(&name, move || verbs::clear_inactive_table(&registry, &device)).await?;
    Ok(StatusCode::NO_CONTENT)
}

pub(super) async fn handle_send_target_message(
    State(AppState { registry, limits, .. }): State<AppState>,
    DeviceNameExtractor(name): DeviceNameExtractor,
    JsonBody(message): JsonBody<api::TargetMessageRequest>,
) -> JsonResult<api::TargetMessageReply> {
    let folder = base_dir(message.folder.as_deref())?;
    let device = name.clone();
    let answer = limits.messages.run(&name, move || {
        verbs::send_message_with_base_dir(&registry, &device, message.sector, &message.message, &folder)
    });
    Ok(Json(api::TargetMessageReply { answer: answer.await? }))
}

pub(super) async fn handle_change_queue_settings(
    State(AppState { registry, .. }): State<AppState>,
    DeviceNameExtractor(name): DeviceNameExtractor,
    JsonBody(body): JsonBody<api::ChangeQueueSettingsRequest>,
) -> JsonResult<api::DeviceDescription> {
    let change = verbs::change_queue_settings(&registry, &name, body.disk.as_deref(), &body.settings);
    let late = |_| {
        let why = "requests that were sent before do not complete; the settings are as they were";
        VerbError::new(&name, TargetError::errno(ETIMEDOUT).because(why))
    };
    Ok(Json(tokio::time::timeout(QUEUE_CHANGE_MAX, change).await.map_err(late)??))
}

pub(super) async fn handle_set_disk_power(
    State(AppState { registry, limits, .. }): State<AppState>,
    DeviceNameExtractor(name): DeviceNameExtractor,
    JsonBody(body): JsonBody<api::SetDiskPowerRequest>,
) -> JsonResult<api::DeviceDescription> {
    let device = name.clone();
    let turn = move || {
        verbs::set_disk_power(&registry, &device, body.disk.as_deref(), body.on)?;
        verbs::describe_device_by_name(&registry, &device)
    };
    Ok(Json(limits.messages.run(&name, turn).await?))
}

pub(super) async fn handle_throttle_device(
    State(AppState { registry, limits, .. }): State<AppState>,
    DeviceNameExtractor(name): DeviceNameExtractor,
    JsonBody(body): JsonBody<api::ThrottleDeviceRequest>,
) -> JsonResult<api::DeviceDescription> {
    let device = name.clone();
    let set = move || {
        verbs::throttle_device(&registry, &device, &body)?;
        verbs::describe_device_by_name(&registry, &device)
    };
    Ok(Json(limits.messages.run(&name, set).await?))
}

pub(super) async fn handle_fail_or_reinstate_path(
    State(AppState { registry, limits, .. }): State<AppState>,
    DeviceNameExtractor(name): DeviceNameExtractor,
    JsonBody(body): JsonBody<api::FailOrReinstatePathRequest>,
) -> StatusCodeResult {
    let (device, folder) = (name.clone(), base_dir(body.folder.as_deref())?);
    let command =
        move || verbs::fail_or_reinstate_path(&registry, &device, &body.path, &body.action, &folder);
    limits.messages.run(&name, command).await?;
    Ok(StatusCode::NO_CONTENT)
}

pub(super) async fn handle_suspend_device(
    State(registry): State<Arc<DeviceRegistry>>,
    DeviceNameExtractor(name): DeviceNameExtractor,
    JsonBody(how): JsonBody<api::SuspendDeviceRequest>,
) -> StatusCodeResult {
    let noflush = how.noflush.unwrap_or(false);
    let verb = |cancel_token| async move {
        verbs::suspend_devices_cancellable(&registry, &[&name], noflush, &cancel_token).await
    };
    run_verb_until_disconnect(how.timeout_ms, NOT_AT_REST, verb).await
}

pub(super) async fn handle_resume_device(
    State(registry): State<Arc<DeviceRegistry>>,
    DeviceNameExtractor(name): DeviceNameExtractor,
    JsonBody(how): JsonBody<api::ResumeDeviceRequest>,
) -> StatusCodeResult {
    let verb = |cancel_token| async move {
        verbs::resume_devices_cancellable(&registry, &[&name], &cancel_token).await
    };
    run_verb_until_disconnect(how.timeout_ms, NOT_AT_REST, verb).await
}

pub(super) async fn handle_suspend_devices(
    State(registry): State<Arc<DeviceRegistry>>,
    JsonBody(how): JsonBody<api::SuspendDevicesRequest>,
) -> StatusCodeResult {
    let noflush = how.noflush.unwrap_or(false);
    let names = check_device_count(how.names)?;
    let verb = |cancel_token| async move {
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        verbs::suspend_devices_cancellable(&registry, &names, noflush, &cancel_token).await
    };
    run_verb_until_disconnect(how.timeout_ms, NOT_AT_REST, verb).await
}

pub(super) async fn handle_resume_devices(
    State(registry): State<Arc<DeviceRegistry>>,
    JsonBody(how): JsonBody<api::ResumeDevicesRequest>,
) -> StatusCodeResult {
    let names = check_device_count(how.names)?;
    let verb = |cancel_token| async move {
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        verbs::resume_devices_cancellable(&registry, &names, &cancel_token).await
    };
    run_verb_until_disconnect(how.timeout_ms, NOT_AT_REST, verb).await
}

/// Checks the number of devices that change together.
fn check_device_count(names: Vec<String>) -> Result<Vec<String>, ErrorResponse> {
    match names.len() {
        0 => Err(ErrorResponse::request(StatusCode::BAD_REQUEST, "`names` is empty: name the devices")),
        1..=TOGETHER_MAX => Ok(names),
        n => Err(ErrorResponse::request(
            StatusCode::BAD_REQUEST,
            format!("{n} devices at once, at most {TOGETHER_MAX} are allowed"),
        )),
    }
}

pub(super) async fn handle_list_exports(
    State(registry): State<Arc<DeviceRegistry>>,
) -> Json<api::ExportList> {
    Json(api::ExportList { exports: registry.exports() })
}

pub(super) async fn handle_get_version() -> Json<api::ServerVersions> {
    Json(verbs::server_versions())
}

pub(super) async fn handle_get_stats(State(shared): State<AppState>) -> Result<Response, ErrorResponse> {
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

pub(super) async fn handle_get_openapi() -> Response {
    // Built once: it takes longer than any other reading request.
    static DOCUMENT: OnceLock<String> = OnceLock::new();
    let text = DOCUMENT.get_or_init(|| openapi::build_openapi_document().to_string());
    ([(CONTENT_TYPE, "application/json")], text.as_str()).into_response()
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
