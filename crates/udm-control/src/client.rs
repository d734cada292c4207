//! A small client of the control socket, for the command line.
//!
//! Contract: one connection a request, blocking, answers of at most [`ANSWER_MAX`] bytes. It knows HTTP and the shape of errors, not the verbs.

use crate::http::api;
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::Bytes;
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io;
use std::path::{Path, PathBuf};

/// The longest answer in bytes that is read: status of the largest table.
pub const ANSWER_MAX: usize = 64 << 20;

/// Why a request came to nothing.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody answers.
    #[error("{}: can't reach udm serve", path.display())]
    Unreachable {
        /// The socket.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The conversation broke.
    #[error("{}: {why}", path.display())]
    Broken {
        /// The socket.
        path: PathBuf,
        /// Why.
        why: String,
    },
    /// The server refused.
    #[error("{}", .0.error)]
    Refused(Box<api::Error>),
}

/// A client of the server behind one socket.
#[derive(Debug, Clone)]
pub struct Client {
    path: PathBuf,
}

impl Client {
    /// A client of the server that listens on `path`. Nothing is opened yet.
    pub fn new(path: impl Into<PathBuf>) -> Client {
        Client { path: path.into() }
    }

    /// The socket.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// GET.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn get<T: DeserializeOwned>(&self, target: &str) -> Result<T, ClientError> {
        self.call(Method::GET, target, None::<&()>)
    }

    /// POST of `body`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn post<T: DeserializeOwned>(&self, target: &str, body: &impl Serialize) -> Result<T, ClientError> {
        self.call(Method::POST, target, Some(body))
    }

    /// PUT of `body`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn put<T: DeserializeOwned>(&self, target: &str, body: &impl Serialize) -> Result<T, ClientError> {
        self.call(Method::PUT, target, Some(body))
    }

    /// DELETE.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn delete<T: DeserializeOwned>(&self, target: &str) -> Result<T, ClientError> {
        self.call(Method::DELETE, target, None::<&()>)
    }

    fn broken(&self, why: &dyn ToString) -> ClientError {
        ClientError::Broken { path: self.path.clone(), why: why.to_string() }
    }

    fn call<T: DeserializeOwned>(
        &self,
        method: Method,
        target: &str,
        body: Option<&impl Serialize>,
    ) -> Result<T, ClientError> {
        let body = match body {
            Some(body) => serde_json::to_vec(body).map_err(|e| self.broken(&e))?,
            None => Vec::new(),
        };
        let request = Request::builder()
            .method(method)
            .uri(target)
            .header("host", "udm")
            .header("content-type", "application/json")
            .body(Full::new(Bytes::from(body)))
            .map_err(|e| self.broken(&e))?;
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_io().build().map_err(|e| self.broken(&e))?;
        let (status, bytes) = runtime.block_on(self.exchange(request))?;
        if !status.is_success() {
            let error = serde_json::from_slice::<api::Error>(&bytes)
                .map_err(|_| self.broken(&format!("the server answered {status}")))?;
            return Err(ClientError::Refused(Box::new(error)));
        }
        // No content reads as null, which is what `()` reads from.
        let bytes = if bytes.is_empty() { &b"null"[..] } else { &bytes[..] };
        serde_json::from_slice(bytes).map_err(|e| self.broken(&format!("unexpected answer: {e}")))
    }

    async fn exchange(&self, request: Request<Full<Bytes>>) -> Result<(StatusCode, Bytes), ClientError> {
        let unreachable = |source| ClientError::Unreachable { path: self.path.clone(), source };
        let stream = tokio::net::UnixStream::connect(&self.path).await.map_err(unreachable)?;
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(|e| self.broken(&e))?;
        let driver = tokio::spawn(connection);
        let answer = sender.send_request(request).await.map_err(|e| self.broken(&e))?;
        let status = answer.status();
        let body = Limited::new(answer.into_body(), ANSWER_MAX).collect().await.map_err(|e| {
            if e.is::<LengthLimitError>() { self.broken(&"the answer is too long") } else { self.broken(&e) }
        })?;
        driver.abort();
        Ok((status, body.to_bytes()))
    }
}

/// The path of `name` under `/v1/devices`, with what a URL can't hold percent-encoded.
#[must_use]
pub fn device_path(name: &str, rest: &str) -> String {
    use std::fmt::Write as _;
    let mut path = String::from("/v1/devices/");
    for byte in name.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            path.push(char::from(byte));
        } else {
            // Writing to a String can't fail.
            let _ = write!(path, "%{byte:02X}");
        }
    }
    path.push_str(rest);
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_encoded() {
        assert_eq!(device_path("a b/ü%", "/table"), "/v1/devices/a%20b%2F%C3%BC%25/table");
    }

    #[test]
    fn nobody_there_is_said_with_the_path() {
        let error = Client::new("/nonexistent/udm.sock").get::<()>("/v1/version").unwrap_err();
        assert_eq!(error.to_string(), "/nonexistent/udm.sock: can't reach udm serve");
    }
}
