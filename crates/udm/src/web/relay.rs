//! Forwards requests of the page to the control socket. Responses are forwarded as they arrive, so
//! a stream of events stays a stream.

use super::access::{HttpResponseBody, text_response};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::header::{self, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::net::UnixStream;
use udm_control::http::connections::ControlConnectionSlot;

/// Paths that are forwarded: verbs and metrics.
const PATHS: &[&str] = &["/v1/", "/metrics", "/openapi.json"];

/// The changes that the page can make, as the last part of `/v1/devices/NAME/...`.
const CHANGES: &[&str] = &["suspend", "resume", "path"];

/// True for a request that reads, or changes what a button of the page changes.
fn is_relayed_change(request: &Request<Incoming>) -> bool {
    if matches!(*request.method(), Method::GET | Method::HEAD) {
        return true;
    }
    let parts = request.uri().path().strip_prefix("/v1/devices/").and_then(|rest| rest.split_once('/'));
    *request.method() == Method::POST && parts.is_some_and(|(_, change)| CHANGES.contains(&change))
}

/// Request headers that are forwarded.
const HEAD: &[&str] = &[
    "accept",
    "content-type",
    "content-length",
    // Lets the stream of events resume after the last event that the page has.
    "last-event-id",
];

/// The content type of a stream of events.
const EVENTS: &str = "text/event-stream";

/// Forwards requests to one control socket.
pub(super) struct ControlSocketProxy {
    socket: PathBuf,
}

impl ControlSocketProxy {
    /// Opens nothing yet.
    pub fn new(socket: &Path) -> ControlSocketProxy {
        ControlSocketProxy { socket: socket.to_owned() }
    }

    /// Forwards a request on a connection of its own. While a stream of events is open, `slot`
    /// counts as listening, so no new connection takes it.
    pub async fn pass(
        &self,
        request: Request<Incoming>,
        slot: &Arc<ControlConnectionSlot>,
    ) -> Response<HttpResponseBody> {
        if !PATHS.iter().any(|path| request.uri().path().starts_with(path)) {
            return text_response(StatusCode::NOT_FOUND, "udm web: no such page\n");
        }
        if !is_relayed_change(&request) {
            return text_response(StatusCode::FORBIDDEN, "udm web: the page has no such change\n");
        }
        match self.exchange(request, slot).await {
            Ok(answer) => answer,
            Err(why) => text_response(
                StatusCode::BAD_GATEWAY,
                &format!("udm web: {}: {why}\n", self.socket.display()),
            ),
        }
    }

    async fn exchange(
        &self,
        request: Request<Incoming>,
        slot: &Arc<ControlConnectionSlot>,
    ) -> Result<Response<HttpResponseBody>, String> {
        let stream = UnixStream::connect(&self.socket)
            .await
            .map_err(|error| format!("can't reach udm serve: {error}"))?;
        let lost = |error: hyper::Error| error.to_string();
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(lost)?;
        // The task ends with the response, or when the page's connection drops it.
        tokio::spawn(connection);
        let answer = sender.send_request(request_for_control_socket(request)?).await.map_err(lost)?;
        let (head, body) = answer.into_parts();
        let kind = head.headers.get(header::CONTENT_TYPE);
        let body = if kind.is_some_and(|kind| kind == EVENTS) {
            let stream_guard = slot.begin_stream();
            let until_it_ends = move |frame| {
                let _ = &stream_guard;
                frame
            };
            body.map_frame(until_it_ends).boxed()
        } else {
            body.boxed()
        };
        let mut response = Response::new(body);
        *response.status_mut() = head.status;
        if let Some(kind) = kind {
            response.headers_mut().insert(header::CONTENT_TYPE, kind.clone());
        }
        Ok(response)
    }
}

/// The request to send to the control socket.
fn request_for_control_socket(request: Request<Incoming>) -> Result<Request<Incoming>, String> {
    let (head, body) = request.into_parts();
    let target = head.uri.path_and_query().map_or("/", |target| target.as_str());
    let mut builder = Request::builder().method(head.method).uri(target);
    builder = builder.header(header::HOST, HeaderValue::from_static("udm"));
    for name in HEAD {
        if let Some(value) = head.headers.get(*name) {
            builder = builder.header(*name, value);
        }
    }
    builder.body(body).map_err(|error| error.to_string())
}
