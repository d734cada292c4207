//! A small client of the control socket, for the command line.
//!
//! Contract: one connection per request, blocking, answers of at most [`ANSWER_MAX`] bytes. It
//! knows HTTP and the form of errors; a verb is a constant of [`crate::api::verbs`]. Some verbs
//! take as long as storage does, so a request has no time limit. If the server is silent for
//! [`PATIENCE`], the client asks for its version on a second connection. If that gets no answer
//! within the same time, the request fails.

mod listen;

use crate::api;
use crate::api::verbs::{self, ApiVerbEndpoint};
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::task::AbortHandle;
use udm_core::errno::describe_errno;

/// Maximum silence of a server before it is probed, and time limit of the probe.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// Interval of attempts to connect while the server's queue is full.
const CONNECT_PAUSE: Duration = Duration::from_millis(20);

/// Maximum length of an answer in bytes: the status of the largest table.
pub const ANSWER_MAX: usize = 64 << 20;

/// What a user can do if no server answers.
const REMEDY: &str = "start it, or name its control socket with --socket or $UDM_SOCKET";

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum ControlClientError {
    /// No server answers.
    #[error("{}: can't reach udm serve: {why} ({REMEDY})", path.display())]
    Unreachable {
        /// Path of the socket.
        path: PathBuf,
        /// The system's error.
        why: String,
    },
    /// The exchange with the server failed.
    #[error("{}: {why}", path.display())]
    Broken {
        /// Path of the socket.
        path: PathBuf,
        /// The reason.
        why: String,
    },
    /// The server returned an error.
    #[error("{}", .0.error)]
    Refused(Box<api::ApiError>),
}

/// A client of the server at one socket.
#[derive(Debug, Clone)]
pub struct ControlClient {
    path: PathBuf,
    patience: Duration,
}

impl ControlClient {
    /// A client of the server that listens on `path`. Does not connect yet.
    pub fn new(path: impl Into<PathBuf>) -> ControlClient {
        ControlClient { path: path.into(), patience: PATIENCE }
    }

    /// Path of the socket.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn broken(&self, why: &dyn ToString) -> ControlClientError {
        ControlClientError::Broken { path: self.path.clone(), why: why.to_string() }
    }

    /// Sends a request for `verb` with `body`, `&()` for none.
    ///
    /// # Errors
    /// See [`ControlClientError`].
    pub fn call<Q, B: Serialize, R: DeserializeOwned>(
        &self,
        verb: ApiVerbEndpoint<Q, B, R>,
        body: &B,
    ) -> Result<R, ControlClientError> {
        let mut json = serde_json::to_vec(body).map_err(|e| self.broken(&e))?;
        // `()` is written and read as null. In HTTP it is an empty body.
        if json == b"null" {
            json.clear();
        }
        let request = self.request(verb, json)?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|e| self.broken(&e))?;
        let (status, bytes) = runtime.block_on(self.answered(request))?;
        if !status.is_success() {
            return Err(self.refused(status, &bytes));
        }
        let bytes = if bytes.is_empty() { &b"null"[..] } else { &bytes[..] };
        serde_json::from_slice(bytes).map_err(|e| self.broken(&format!("unexpected answer: {e}")))
    }

    /// The error for a response without success.
    fn refused(&self, status: StatusCode, body: &[u8]) -> ControlClientError {
        match serde_json::from_slice::<api::ApiError>(body) {
            Ok(error) => ControlClientError::Refused(Box::new(error)),
            Err(_) => self.broken(&format!("the server answered {status}")),
        }
    }

    fn request<Q, B, R>(
        &self,
        verb: ApiVerbEndpoint<Q, B, R>,
        body: Vec<u8>,
    ) -> Result<Request<Full<Bytes>>, ControlClientError> {
        let request = Request::builder().method(verb.method).uri(&*verb.path).header("host", "udm");
        let request = request.header("content-type", "application/json").body(Full::new(Bytes::from(body)));
        request.map_err(|e| self.broken(&e))
    }

    /// Waits for the answer as long as the server responds to probes.
    async fn answered(
        &self,
        request: Request<Full<Bytes>>,
    ) -> Result<(StatusCode, Bytes), ControlClientError> {
        let mut answer = std::pin::pin!(self.exchange(request));
        loop {
            if let Ok(answer) = tokio::time::timeout(self.patience, &mut answer).await {
                return answer;
            }
            let probe = self.exchange(self.request(verbs::GET_VERSION, Vec::new())?);
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
                // The server's accept queue is full.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && tries > 0 => tries -= 1,
                done => return done,
            }
            tokio::time::sleep(CONNECT_PAUSE).await;
        }
    }

    async fn exchange(
        &self,
        request: Request<Full<Bytes>>,
    ) -> Result<(StatusCode, Bytes), ControlClientError> {
        let (answer, _driver) = self.ask(request).await?;
        let status = answer.status();
        let body = Limited::new(answer.into_body(), ANSWER_MAX).collect().await.map_err(|e| {
            if e.is::<LengthLimitError>() { self.broken(&"the answer is too long") } else { self.broken(&e) }
        })?;
        Ok((status, body.to_bytes()))
    }

    /// The head of the answer. The body can be read as long as the [`AbortConnectionOnDrop`]
    /// exists.
    async fn ask(
        &self,
        request: Request<Full<Bytes>>,
    ) -> Result<(Response<Incoming>, AbortConnectionOnDrop), ControlClientError> {
        let unreachable = |error: io::Error| ControlClientError::Unreachable {
            path: self.path.clone(),
            why: error.raw_os_error().map_or_else(|| error.to_string(), describe_errno),
        };
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
        let driven = AbortConnectionOnDrop(tokio::spawn(connection).abort_handle());
        let answer = sender.send_request(request).await.map_err(lost)?;
        Ok((answer, driven))
    }
}

/// The task that drives a connection, aborted when dropped.
struct AbortConnectionOnDrop(AbortHandle);

impl Drop for AbortConnectionOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// True if the error means that the connection ended.
fn is_disconnect(error: &hyper::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset};
    let system = std::error::Error::source(error).and_then(|source| source.downcast_ref::<io::Error>());
    error.is_canceled()
        || error.is_incomplete_message()
        || error.is_closed()
        || system.is_some_and(|e| matches!(e.kind(), BrokenPipe | ConnectionReset))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_there_is_said_with_the_path() {
        let error = ControlClient::new("/nonexistent/udm.sock").call(verbs::GET_VERSION, &()).unwrap_err();
        let shown =
            format!("/nonexistent/udm.sock: can't reach udm serve: No such file or directory ({REMEDY})");
        assert_eq!(error.to_string(), shown);
    }

    /// The socket of a stopped server accepts connections, but no answer comes.
    #[test]
    fn a_silent_server_is_given_up_and_a_slow_one_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("udm.sock");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let client = ControlClient { path: path.clone(), patience: Duration::from_millis(50) };
        let text = client.call(verbs::LIST_DEVICES, &()).unwrap_err().to_string();
        assert_eq!(text, format!("{}: the server does not answer: is it stopped, or stuck?", path.display()));

        // Answers the first request only after two probes.
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
                answer(first, r#"{"devices":[]}"#);
            });
            let client = ControlClient { path: path.clone(), patience: Duration::from_millis(200) };
            assert_eq!(client.call(verbs::LIST_DEVICES, &()).unwrap(), api::DeviceList::default());
        });
    }

    #[test]
    fn a_server_that_hangs_up_is_said_to() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("udm.sock");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| drop(listener.accept().unwrap()));
            let text = ControlClient::new(&path).call(verbs::LIST_DEVICES, &()).unwrap_err().to_string();
            assert!(text.ends_with("the server hung up without an answer"), "{text}");
        });
    }
}
