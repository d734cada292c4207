//! Properties of any request, without a socket. The tests run them with generated requests, the
//! fuzzers with found ones.
//!
//! Each function takes any bytes and panics if a property is broken: a handler panics or does not
//! return, a route returns an unexpected status, an answer is not the expected JSON or is too long,
//! an error has more than one line.
//!
//! Requests whose table would open an existing file or connect to a server are skipped: storage is
//! not tested here.

use super::router;
use super::routes::{self, Route};
use crate::api;
use crate::metrics;
use crate::registry::DeviceRegistry;
use crate::verbs;
use axum::body::Body;
use axum::http::{Method, Request, StatusCode};
use axum::response::Response;
use http_body_util::{BodyExt, Limited};
use hyper::service::Service;
use hyper_util::service::TowerToHyperService;
use std::sync::Arc;
use std::time::Duration;
use udm_core::{CoreCommandSender, CoreId, DeviceId, LaneCommand};
use udm_wire::uri::{self, DeviceUri};

/// Devices at the begin of each run, with their tables. The second one is suspended and has a
/// loaded table.
const DEVICES: [(&str, &str); 2] = [
    (
        "m",
        "0 8 multipath 1 queue_if_no_path 0 2 2 round-robin 0 1 1 mem:4K 1 queue-length 0 1 1 null:size=4K 1",
    ),
    ("l", "0 8 linear mem:8K 8"),
];

/// Values of `{name}` for requests that select their route by number.
const NAMES: [&str; 8] = ["m", "l", "new", "254:0", "253:0", "%00", "a%2Fb", "%ff"];

/// Maximum number of requests per run.
const REQUESTS_MAX: usize = 32;

/// Time limit of a request. No request waits, so this only distinguishes a hang from a slow
/// machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// Cores without lanes: every command is acknowledged at once.
struct StubCores;

impl CoreCommandSender for StubCores {
    fn broadcast(&self, _: DeviceId, _: LaneCommand) {}
    fn wake_up(&self, _: CoreId, _: DeviceId) {}
    fn start(&self, _: udm_core::BioTaskFactory) -> udm_core::BioTaskHandle {
        udm_core::BioTaskHandle::new(drop)
    }
}

/// Parses the data as each type of request body: a parsed body must survive a round trip.
pub fn fuzz_request_body_round_trip(data: &[u8]) {
    for route in routes::all_http_routes() {
        if let Some(written) = (route.rewrite_body)(data) {
            assert_eq!((route.rewrite_body)(&written).as_ref(), Some(&written), "{}", route.id);
        }
    }
}

/// Sends one body to every route, on each device.
pub fn fuzz_body_on_all_routes(data: &[u8]) {
    let requests = routes::all_http_routes().into_iter().flat_map(|route| {
        NAMES[..2]
            .iter()
            .map(move |name| FuzzRequest::of_route(&route, name, false, data))
            .collect::<Vec<_>>()
    });
    run_fuzz_requests(requests);
}

/// Runs up to 32 requests in sequence on the same devices. A NUL ends each request. A request
/// starts with `METHOD path` and a newline, or with two bytes that are not capital letters: the
/// number of a route and of a name. The rest is its body.
pub fn fuzz_requests(data: &[u8]) {
    let routes = routes::all_http_routes();
    let asks = data.split(|b| *b == 0).take(REQUESTS_MAX).filter_map(|piece| match piece {
        [route, name, body @ ..] if !route.is_ascii_uppercase() => {
            let route = &routes[usize::from(*route) % routes.len()];
            let at = usize::from(*name) % (2 * NAMES.len());
            Some(FuzzRequest::of_route(route, NAMES[at % NAMES.len()], at >= NAMES.len(), body))
        }
        _ => FuzzRequest::of_text(piece),
    });
    run_fuzz_requests(asks);
}

/// A request.
struct FuzzRequest {
    method: Method,
    target: String,
    body: Vec<u8>,
    /// Status on success, if the route is known.
    success: Option<u16>,
}

impl FuzzRequest {
    fn of_route(route: &Route, name: &str, inactive: bool, body: &[u8]) -> FuzzRequest {
        let query = if inactive { "?inactive=1" } else { "" };
        FuzzRequest {
            method: route.method.clone(),
            target: route.path.replace("{name}", name) + query,
            body: body.to_vec(),
            success: Some(route.success()),
        }
    }

    fn of_text(text: &[u8]) -> Option<FuzzRequest> {
        let end = text.iter().position(|b| *b == b'\n').unwrap_or(text.len());
        let (head, body) = text.split_at(end);
        let (method, target) = std::str::from_utf8(head).ok()?.split_once(' ')?;
        Some(FuzzRequest {
            method: method.parse().ok()?,
            target: target.into(),
            body: body.get(1..).unwrap_or_default().to_vec(),
            success: None,
        })
    }

    /// True for requests that would wait for an event or never end.
    fn waits(&self) -> bool {
        self.target.starts_with("/v1/events") && self.method != Method::HEAD
            || self.target.ends_with("/wait")
                && serde_json::from_slice::<api::WaitDeviceEventRequest>(&self.body).is_ok()
    }

    /// True if a table may name a device outside this process.
    fn reaches_out(&self) -> bool {
        let create =
            serde_json::from_slice::<api::CreateDeviceRequest>(&self.body).ok().and_then(|new| new.table);
        let load = || serde_json::from_slice::<api::LoadTableRequest>(&self.body).ok().map(|load| load.table);
        let lines = create.or_else(load).and_then(|text| udm_wire::table::parse_table(&text).ok());
        lines.iter().flatten().flat_map(|line| &line.args).any(|word| match uri::parse_device_uri(word) {
            Ok(DeviceUri::File(file)) => file.path.exists(),
            Ok(DeviceUri::Nbd(_) | DeviceUri::Nvme(_)) => true,
            _ => false,
        })
    }
}

/// A registry with [`DEVICES`].
fn create_fuzz_registry() -> Arc<DeviceRegistry> {
    let registry = DeviceRegistry::new(Arc::new(StubCores), 2);
    for (name, table) in DEVICES {
        verbs::block_on_verb(verbs::create_mapped_device(&registry, name, None, Some(table)))
            .expect("a good table");
    }
    let (name, table) = DEVICES[1];
    verbs::block_on_verb(verbs::suspend_mapped_devices(&registry, &[name], false))
        .expect("nothing to wait for");
    verbs::load_inactive_table(&registry, name, table).expect("a good table");
    registry
}

fn run_fuzz_requests(asks: impl Iterator<Item = FuzzRequest>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
    let service = TowerToHyperService::new(router(create_fuzz_registry()));
    runtime.block_on(async {
        // Loaded tables appear in later answers.
        let mut given = 0;
        for ask in asks.filter(|ask| !ask.reaches_out() && !ask.waits()) {
            given += ask.target.len() + ask.body.len();
            let head = Request::builder().method(ask.method.clone()).uri(ask.target.as_str());
            let Ok(request) = head.body(Body::from(ask.body.clone())) else { continue };
            let answer = tokio::time::timeout(PATIENCE, service.call(request)).await;
            let Ok(answer) = answer.expect("a request comes to its end");
            check_fuzz_response(&ask, answer, given).await;
        }
    });
}

/// Checks the answer to `ask`, after requests of `given` bytes in total.
async fn check_fuzz_response(ask: &FuzzRequest, answer: Response, given: usize) {
    let about = format!("{} {} -> {}", ask.method, ask.target, answer.status());
    let (head, body) = answer.into_parts();
    // Metrics and stats have several lines per device, even if its name is short.
    let is_text = head.headers.get("content-type").is_some_and(|kind| kind == metrics::CONTENT_TYPE);
    let is_long = is_text || ask.target.starts_with("/v1/stats");
    // The description of the API has its own length, whatever the devices are.
    let base = if ask.target.starts_with("/openapi.json") { 256 << 10 } else { 64 << 10 };
    let limit = base + if is_long { 64 } else { 16 } * given;
    let body = Limited::new(body, limit).collect().await;
    let body = body.unwrap_or_else(|e| panic!("{about}: {e}: more than {limit} bytes")).to_bytes();
    let status = head.status;
    if status.is_success() {
        assert!(ask.success.is_none_or(|success| status == success), "{about}");
        if status == StatusCode::NO_CONTENT || ask.method == Method::HEAD {
            assert!(body.is_empty(), "{about}: {body:?}");
        } else if is_text {
            let text = std::str::from_utf8(&body).unwrap_or_else(|e| panic!("{about}: {e}"));
            let is_line = |line: &str| {
                line.starts_with("# ")
                    || line.rsplit_once(' ').is_some_and(|(_, value)| value.parse::<f64>().is_ok())
            };
            assert!(text.lines().all(is_line), "{about}: {text}");
        } else {
            serde_json::from_slice::<serde_json::Value>(&body).unwrap_or_else(|e| panic!("{about}: {e}"));
        }
        return;
    }
    // A verb that panics gives 500.
    let refusal = status.is_client_error() || status.is_server_error();
    assert!(refusal && status != StatusCode::INTERNAL_SERVER_ERROR, "{about}");
    assert_eq!(head.headers["content-type"], "application/json", "{about}");
    if ask.method == Method::HEAD {
        return;
    }
    let error: api::ApiError = serde_json::from_slice(&body).unwrap_or_else(|e| panic!("{about}: {e}"));
    assert!(error.errno > 0 && !error.error.is_empty(), "{about}: {error:?}");
    for text in [&error.error, &error.text, &error.reason] {
        assert!(!text.contains(|c: char| c.is_control()), "{about}: more than one line: {text:?}");
    }
}
