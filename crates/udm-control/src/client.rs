//! A small client of the control socket, for the command line.
//!
//! Contract: one connection a request, blocking, answers of at most [`ANSWER_MAX`] bytes. It knows
//! HTTP and the shape of errors, not the verbs: some take as long as storage does, so a request has
//! no time limit. But a server that says nothing for [`PATIENCE`] is asked for its version beside,
//! and when it does not answer that either within the same time, the request is given up.

mod listen;

use crate::http::api;
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::task::AbortHandle;

/// How long a server may say nothing before it is asked whether it lives, and may take to answer
/// that.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// How far apart a connect is tried while the server's queue is full.
const CONNECT_PAUSE: Duration = Duration::from_millis(20);

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
pub struct ControlClient {
    path: PathBuf,
    patience: Duration,
}

impl ControlClient {
    /// A client of the server that listens on `path`. Nothing is opened yet.
    pub fn new(path: impl Into<PathBuf>) -> ControlClient {
        ControlClient { path: path.into(), patience: PATIENCE }
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
        let request = self.request(method, target, body)?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|e| self.broken(&e))?;
        let (status, bytes) = runtime.block_on(self.answered(request))?;
        if !status.is_success() {
            return Err(self.refused(status, &bytes));
        }
        // No content reads as null, which is what `()` reads from.
        let bytes = if bytes.is_empty() { &b"null"[..] } else { &bytes[..] };
        serde_json::from_slice(bytes).map_err(|e| self.broken(&format!("unexpected answer: {e}")))
    }

    /// What the server says that is no success.
    fn refused(&self, status: StatusCode, body: &[u8]) -> ClientError {
        match serde_json::from_slice::<api::Error>(body) {
            Ok(error) => ClientError::Refused(Box::new(error)),
            Err(_) => self.broken(&format!("the server answered {status}")),
        }
    }

    fn request(
        &self,
        method: Method,
        target: &str,
        body: Vec<u8>,
    ) -> Result<Request<Full<Bytes>>, ClientError> {
        let request = Request::builder().method(method).uri(target).header("host", "udm");
        let request = request.header("content-type", "application/json").body(Full::new(Bytes::from(body)));
        request.map_err(|e| self.broken(&e))
    }

    /// The answer, however long it takes, as long as the server lives.
    async fn answered(&self, request: Request<Full<Bytes>>) -> Result<(StatusCode, Bytes), ClientError> {
        let mut answer = std::pin::pin!(self.exchange(request));
        loop {
            if let Ok(answer) = tokio::time::timeout(self.patience, &mut answer).await {
                return answer;
            }
            let probe = self.exchange(self.request(Method::GET, "/v1/version", Vec::new())?);
            tokio::select! {
                answer = &mut answer => return answer,
                lives = tokio::time::timeout(self.patience, probe) => match lives {
                    Ok(Ok(_)) => {}
                    Ok(Err(error)) => return Err(error),
                    Err(_) => return Err(self.broken(&"the server does not answer: is it stopped, or stuck?")),
                },
            }
        }
    }

    async fn connect(&self) -> io::Result<UnixStream> {
        let mut tries = self.patience.as_millis() / CONNECT_PAUSE.as_millis();
        loop {
            match UnixStream::connect(&self.path).await {
                // Others wait to be accepted, too many of them.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && tries > 0 => tries -= 1,
                done => return done,
            }
            tokio::time::sleep(CONNECT_PAUSE).await;
        }
    }

    async fn exchange(&self, request: Request<Full<Bytes>>) -> Result<(StatusCode, Bytes), ClientError> {
        let (answer, _driver) = self.ask(request).await?;
        let status = answer.status();
        let body = Limited::new(answer.into_body(), ANSWER_MAX).collect().await.map_err(|e| {
            if e.is::<LengthLimitError>() { self.broken(&"the answer is too long") } else { self.broken(&e) }
        })?;
        Ok((status, body.to_bytes()))
    }

    /// The head of the answer; its body can be read as long as the connection is driven.
    async fn ask(
        &self,
        request: Request<Full<Bytes>>,
    ) -> Result<(Response<Incoming>, ConnectionTask), ClientError> {
        let unreachable = |source| ClientError::Unreachable { path: self.path.clone(), source };
        let stream = self.connect().await.map_err(unreachable)?;
        let lost = |error: hyper::Error| {
            if is_disconnect(&error) {
                self.broken(&"the server hung up without an answer")
            } else {
                self.broken(&error)
            }
        };
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(lost)?;
        let driven = ConnectionTask(tokio::spawn(connection).abort_handle());
        let answer = sender.send_request(request).await.map_err(lost)?;
        Ok((answer, driven))
    }
}

/// A connection that is driven, until it is dropped.
struct ConnectionTask(AbortHandle);

impl Drop for ConnectionTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// The connection ended, rather than that something else went wrong on it.
fn is_disconnect(error: &hyper::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset};
    let system = std::error::Error::source(error).and_then(|source| source.downcast_ref::<io::Error>());
    error.is_canceled()
        || error.is_incomplete_message()
        || error.is_closed()
        || system.is_some_and(|e| matches!(e.kind(), BrokenPipe | ConnectionReset))
}

/// The path of `name` under `/v1/devices`, with what a URL can't hold percent-encoded.
#[must_use]
pub fn device_path(name: &str, rest: &str) -> String {
    path_under("/v1/devices/", name, rest)
}

/// `root` and `name`, with what a URL can't hold percent-encoded, and `rest`.
#[must_use]
pub fn path_under(root: &str, name: &str, rest: &str) -> String {
    use std::fmt::Write as _;
    let mut path = String::from(root);
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
        let error = ControlClient::new("/nonexistent/udm.sock").get::<()>("/v1/version").unwrap_err();
        assert_eq!(error.to_string(), "/nonexistent/udm.sock: can't reach udm serve");
    }
    /// A server that is there but stopped: its socket takes connections and nothing comes back.
    #[test]
    fn a_silent_server_is_given_up_and_a_slow_one_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("udm.sock");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let client = ControlClient { path: path.clone(), patience: Duration::from_millis(50) };
        let said = client.get::<()>("/v1/devices").unwrap_err().to_string();
        assert_eq!(said, format!("{}: the server does not answer: is it stopped, or stuck?", path.display()));

        // Answers the first request only after it was asked twice whether it lives.
        drop(listener);
        std::fs::remove_file(&path).unwrap();
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let answer = |mut stream: std::os::unix::net::UnixStream, body: &str| {
            use std::io::{Read, Write};
            let _ = stream.read(&mut [0; 1024]).unwrap();
            let length = body.len();
            write!(stream, "HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n{body}").unwrap();
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let (first, _) = listener.accept().unwrap();
                for _ in 0..2 {
                    answer(listener.accept().unwrap().0, "{}");
                }
                answer(first, "7");
            });
            let client = ControlClient { path: path.clone(), patience: Duration::from_millis(200) };
            assert_eq!(client.get::<u32>("/v1/devices").unwrap(), 7);
        });
    }

    #[test]
    fn a_server_that_hangs_up_is_said_to() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("udm.sock");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| drop(listener.accept().unwrap()));
            let said = ControlClient::new(&path).get::<()>("/v1/devices").unwrap_err().to_string();
            assert!(said.ends_with("the server hung up without an answer"), "{said}");
        });
    }
}
