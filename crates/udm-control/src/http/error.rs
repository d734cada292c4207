//! Errors of the control socket, and extractors that return them for bad requests.

use crate::api;
use crate::error::{VerbError, escape_control_chars};
use axum::extract::rejection::{BytesRejection, FailedToBufferBody, QueryRejection};
use axum::extract::{FromRequest, FromRequestParts, Query, Request};
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use serde::de::DeserializeOwned;
use udm_core::errno::{
    E2BIG, EACCES, EAGAIN, EBUSY, EEXIST, EINTR, EINVAL, EIO, EMFILE, ENFILE, ENODATA, ENOLINK, ENOMEM,
    ENOSPC, EOPNOTSUPP, EPERM, EREMOTEIO, ETIMEDOUT,
};
use udm_dm::TargetError;

/// An error response: status and JSON body.
#[derive(Debug)]
pub(super) struct ErrorResponse(StatusCode, Box<api::ApiError>);

impl ErrorResponse {
    /// An error of the request itself, before any verb runs.
    pub fn request(status: StatusCode, why: impl std::fmt::Display) -> ErrorResponse {
        let errno = match status {
            StatusCode::PAYLOAD_TOO_LARGE => E2BIG,
            StatusCode::REQUEST_TIMEOUT => ETIMEDOUT,
            StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED => EOPNOTSUPP,
            _ => EINVAL,
        };
        let errno = errno.unsigned_abs();
        // serde's text may quote the input, so it is limited to one line and 300 characters.
        let reason: String =
            why.to_string().chars().map(|c| if c.is_control() { ' ' } else { c }).take(300).collect();
        let error = format!("request: {reason}");
        ErrorResponse(status, Box::new(api::ApiError { error, errno, reason, ..api::ApiError::default() }))
    }
}

impl ErrorResponse {
    /// The error text for the log.
    pub fn story(&self) -> &str {
        &self.1.error
    }
}

/// The HTTP status for the error of a verb.
fn http_status_for_error(error: &VerbError) -> StatusCode {
    match error.error.errno {
        _ if error.missing => StatusCode::NOT_FOUND,
        EPERM | EACCES => StatusCode::FORBIDDEN,
        EINTR | EBUSY | EEXIST => StatusCode::CONFLICT,
        ETIMEDOUT => StatusCode::GATEWAY_TIMEOUT,
        EIO | ENODATA | ENOLINK | EREMOTEIO => StatusCode::BAD_GATEWAY,
        EAGAIN | ENOMEM | ENFILE | EMFILE | ENOSPC => StatusCode::SERVICE_UNAVAILABLE,
        _ => StatusCode::BAD_REQUEST,
    }
}

impl From<VerbError> for ErrorResponse {
    fn from(error: VerbError) -> ErrorResponse {
        let status = http_status_for_error(&error);
        let TargetError { errno, text, reason, .. } = *error.error.clone();
        let position = error.position;
        let body = api::ApiError {
            error: error.to_string(),
            errno: errno.unsigned_abs(),
            text: escape_control_chars(&text),
            reason: escape_control_chars(&reason),
            line: position.map(|p| p.line as u64),
            column: position.map(|p| p.column as u64),
            width: position.map(|p| p.width as u64),
        };
        ErrorResponse(status, Box::new(body))
    }
}

impl IntoResponse for ErrorResponse {
    fn into_response(self) -> Response {
        (self.0, axum::Json(self.1)).into_response()
    }
}

/// Extracts a JSON body of any content type (so that `curl -d` works), with errors in our form.
pub(super) struct JsonBody<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for JsonBody<T> {
    type Rejection = ErrorResponse;

    async fn from_request(request: Request, state: &S) -> Result<JsonBody<T>, ErrorResponse> {
        let bytes =
            axum::body::Bytes::from_request(request, state).await.map_err(|rejection| match rejection {
                BytesRejection::FailedToBufferBody(FailedToBufferBody::LengthLimitError(_)) => {
                    ErrorResponse::request(StatusCode::PAYLOAD_TOO_LARGE, "the body is too long")
                }
                other => ErrorResponse::request(StatusCode::BAD_REQUEST, other),
            })?;
        // An empty body means an empty object, since all members may have defaults.
        let bytes = if bytes.is_empty() { &b"{}"[..] } else { &bytes[..] };
        serde_json::from_slice(bytes)
            .map(JsonBody)
            .map_err(|e| ErrorResponse::request(StatusCode::BAD_REQUEST, e))
    }
}

/// Extracts query parameters. Every error is an [`ErrorResponse`].
pub(super) struct QueryParams<T>(pub T);

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S> for QueryParams<T> {
    type Rejection = ErrorResponse;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<QueryParams<T>, ErrorResponse> {
        let query: Result<Query<T>, QueryRejection> = Query::from_request_parts(parts, state).await;
        query
            .map(|Query(query)| QueryParams(query))
            .map_err(|e| ErrorResponse::request(StatusCode::BAD_REQUEST, e.body_text()))
    }
}

/// Extracts the device name of the path, with errors in our form.
pub(super) struct DeviceNameExtractor(pub String);

impl<S: Send + Sync> FromRequestParts<S> for DeviceNameExtractor {
    type Rejection = ErrorResponse;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<DeviceNameExtractor, ErrorResponse> {
        let path = axum::extract::Path::<String>::from_request_parts(parts, state).await;
        path.map(|p| DeviceNameExtractor(p.0))
            .map_err(|e| ErrorResponse::request(StatusCode::BAD_REQUEST, e.body_text()))
    }
}
