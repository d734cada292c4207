//! The files of the page, which are part of the binary.

use super::access::{HttpResponseBody, text_response};
use hyper::header::{self, HeaderValue};
use hyper::{Response, StatusCode};

/// A file of the page: its path, its content type, its text.
type WebAsset = (&'static str, &'static str, &'static str);

const SCRIPT: &str = "text/javascript; charset=utf-8";

/// All files of the page.
const ASSETS: &[WebAsset] = &[
    ("/", "text/html; charset=utf-8", include_str!("page/index.html")),
    ("/page.css", "text/css; charset=utf-8", include_str!("page/page.css")),
    ("/icon.svg", "image/svg+xml", include_str!("page/icon.svg")),
    ("/main.js", SCRIPT, include_str!("page/main.js")),
    ("/server.js", SCRIPT, include_str!("page/server.js")),
    ("/model.js", SCRIPT, include_str!("page/model.js")),
    ("/tree.js", SCRIPT, include_str!("page/tree.js")),
    ("/detail.js", SCRIPT, include_str!("page/detail.js")),
    ("/plot.js", SCRIPT, include_str!("page/plot.js")),
    ("/events.js", SCRIPT, include_str!("page/events.js")),
    ("/text.js", SCRIPT, include_str!("page/text.js")),
];

/// Returns the file at `path`, with `write` filled in.
pub(super) fn web_asset_response(path: &str, write: bool) -> Option<Response<HttpResponseBody>> {
    let (_, kind, text) = ASSETS.iter().find(|(at, ..)| *at == path)?;
    let text = text.replace("data-write=\"\"", &format!("data-write=\"{write}\""));
    let mut answer = text_response(StatusCode::OK, &text);
    answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    Some(answer)
}
