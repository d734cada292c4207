//! What the page asks of the server goes to the control socket, and its answer comes back as it
//! comes: a stream of events stays one.

use super::access::{Body, text_response};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::header::{self, HeaderValue};
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::net::UnixStream;
use udm_control::http::connections::ConnectionSlot;

/// What is handed on: verbs and metrics.
const PATHS: &[&str] = &["/v1/", "/metrics", "/openapi.json"];

/// What a request says of itself that the server should know.
const HEAD: &[&str] = &[
    "accept",
    "content-type",
    "content-length",
    // Events begin behind the last that the page has.
    "last-event-id",
];

/// The type of a stream of events.
const EVENTS: &str = "text/event-stream";

/// The way to one control socket.
pub(super) struct ControlRelay {
    socket: PathBuf,
}

impl ControlRelay {
    /// Nothing is opened yet.
    pub fn new(socket: &Path) -> ControlRelay {
        ControlRelay { socket: socket.to_owned() }
    }

    /// Hands a request on, on a connection of its own. A stream of events keeps its slot.
    pub async fn pass(&self, request: Request<Incoming>, slot: &Arc<ConnectionSlot>) -> Response<Body> {
        if !PATHS.iter().any(|path| request.uri().path().starts_with(path)) {
            return text_response(StatusCode::NOT_FOUND, "udm web: no such page\n");
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
        slot: &Arc<ConnectionSlot>,
    ) -> Result<Response<Body>, String> {
        let stream = UnixStream::connect(&self.socket)
            .await
            .map_err(|error| format!("can't reach udm serve: {error}"))?;
        let lost = |error: hyper::Error| error.to_string();
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(lost)?;
        // Ends when the answer does, or is dropped with the page's connection.
        tokio::spawn(connection);
        let answer = sender.send_request(forwarded_request(request)?).await.map_err(lost)?;
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
        let mut forwarded_request = Response::new(body);
        *forwarded_request.status_mut() = head.status;
        if let Some(kind) = kind {
            forwarded_request.headers_mut().insert(header::CONTENT_TYPE, kind.clone());
        }
        Ok(forwarded_request)
    }
}

/// The request as the control socket is asked.
fn forwarded_request(request: Request<Incoming>) -> Result<Request<Incoming>, String> {
    let (head, body) = request.into_parts();
    let target = head.uri.path_and_query().map_or("/", |target| target.as_str());
    let mut forwarded_request = Request::builder().method(head.method).uri(target);
    forwarded_request = forwarded_request.header(header::HOST, HeaderValue::from_static("udm"));
    for name in HEAD {
        if let Some(value) = head.headers.get(*name) {
            forwarded_request = forwarded_request.header(*name, value);
        }
    }
    forwarded_request.body(body).map_err(|error| error.to_string())
}
