//! Connections to web servers: HTTP/1.1 by hyper, with TLS by rustls. Connections are kept for the
//! next request.
//!
//! An answer to the request of a range that is not 206 becomes an [`UnexpectedAnswer`], before its
//! body is read: the body of an error is as hostile as the rest.

use crate::failure::UnexpectedAnswer;
use crate::tls;
use async_trait::async_trait;
use bytes::Bytes;
use http::header::{HOST, HeaderValue, LOCATION, RANGE};
use http::uri::Scheme;
use http::{StatusCode, Uri};
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use object_store::ClientOptions;
use object_store::client::{
    ClientConfigKey, HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpRequestBody,
    HttpResponse, HttpResponseBody, HttpService,
};
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use std::collections::HashMap;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::task::{Context, Poll, ready};
use tokio::net::TcpStream;
use udm_wire::words::quote_for_error_line;

/// Idle connections kept per server.
const IDLE_MAX: usize = 16;

type Connection = SendRequest<HttpRequestBody>;

/// Makes HTTP clients for `object_store`.
#[derive(Debug)]
pub(crate) struct Connector {
    tls: Arc<ClientConfig>,
}

impl Connector {
    /// Reads the certificates of the system once per process.
    ///
    /// # Errors
    /// There are none, in one line.
    pub(crate) fn new() -> Result<Connector, String> {
        static CONFIG: OnceLock<Result<Arc<ClientConfig>, String>> = OnceLock::new();
        let tls = CONFIG.get_or_init(tls::client_config).clone()?;
        Ok(Connector { tls })
    }
}

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let allows_http = options.get_config_value(&ClientConfigKey::AllowHttp).as_deref() == Some("true");
        let tls = Arc::clone(&self.tls);
        Ok(HttpClient::new(WebClient { tls, allows_http, idle: Arc::default() }))
    }
}

/// Idle connections by `scheme://host:port`.
type IdleConnections = Arc<Mutex<HashMap<String, Vec<Connection>>>>;

#[derive(Debug)]
struct WebClient {
    tls: Arc<ClientConfig>,
    allows_http: bool,
    idle: IdleConnections,
}

#[async_trait]
impl HttpService for WebClient {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let server = Server::of(request.uri(), self.allows_http)?;
        let is_range = request.headers().contains_key(RANGE);
        let (parts, body) = request.into_parts();
        let make = || {
            let mut request = http::Request::new(body.clone());
            *request.method_mut() = parts.method.clone();
            *request.headers_mut() = parts.headers.clone();
            let path = parts.uri.path_and_query().map_or("/", |path| path.as_str());
            *request.uri_mut() = path.parse().map_err(|e| fail(HttpErrorKind::Unknown, e))?;
            request.headers_mut().insert(HOST, server.host_header.clone());
            Ok::<_, HttpError>(request)
        };
        // The server may have closed a kept connection. Then a new one is used.
        while let Some(mut kept) = self.take_idle(&server.key) {
            if kept.ready().await.is_ok()
                && let Ok(response) = kept.send_request(make()?).await
            {
                return self.response(response, kept, server.key, is_range);
            }
        }
        let mut connection = self.open_connection(&server).await?;
        let response = connection.send_request(make()?).await;
        let response = response.map_err(|e| fail(HttpErrorKind::Interrupted, e))?;
        self.response(response, connection, server.key, is_range)
    }
}

impl WebClient {
    fn take_idle(&self, key: &str) -> Option<Connection> {
        lock(&self.idle).get_mut(key)?.pop()
    }

    async fn open_connection(&self, server: &Server) -> Result<Connection, HttpError> {
        let connect = |e: io::Error| fail(HttpErrorKind::Connect, e);
        let tcp = TcpStream::connect((server.host.as_str(), server.port)).await.map_err(connect)?;
        tcp.set_nodelay(true).map_err(connect)?;
        if !server.has_tls {
            return start_http(tcp).await;
        }
        let name = ServerName::try_from(server.host.clone()).map_err(|e| fail(HttpErrorKind::Unknown, e))?;
        let connector = tokio_rustls::TlsConnector::from(Arc::clone(&self.tls));
        start_http(connector.connect(name, tcp).await.map_err(connect)?).await
    }

    /// Checks the head of a response. Its connection is kept when its body is complete.
    fn response(
        &self,
        response: http::Response<Incoming>,
        connection: Connection,
        key: String,
        is_range: bool,
    ) -> Result<HttpResponse, HttpError> {
        let status = response.status();
        if is_range && status != StatusCode::PARTIAL_CONTENT {
            let location = response.headers().get(LOCATION).and_then(|to| to.to_str().ok());
            // A signature in the query is not shown.
            let location = location.map(|to| to.split('?').next().unwrap_or_default());
            let location = location.map(quote_for_error_line).map(|to| to.to_string());
            return Err(fail(HttpErrorKind::Unknown, UnexpectedAnswer { status, location }));
        }
        let idle = Arc::clone(&self.idle);
        Ok(response.map(|body| HttpResponseBody::new(KeptBody { body, kept: Some((connection, key, idle)) })))
    }
}

/// Starts HTTP on a stream. A task moves its bytes until the connection ends.
async fn start_http(
    stream: impl tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
) -> Result<Connection, HttpError> {
    let (connection, io) =
        handshake(TokioIo::new(stream)).await.map_err(|e| fail(HttpErrorKind::Connect, e))?;
    // Its errors are those of the requests.
    tokio::spawn(async move { drop(io.await) });
    Ok(connection)
}

/// A server, from the URI of a request.
struct Server {
    has_tls: bool,
    host: String,
    port: u16,
    host_header: HeaderValue,
    key: String,
}

impl Server {
    fn of(uri: &Uri, allows_http: bool) -> Result<Server, HttpError> {
        let refuse = |why: &str| fail(HttpErrorKind::Unknown, io::Error::other(why.to_owned()));
        let has_tls = match uri.scheme() {
            Some(scheme) if *scheme == Scheme::HTTPS => true,
            Some(scheme) if *scheme == Scheme::HTTP && allows_http => false,
            _ => return Err(refuse("plain HTTP is not allowed here")),
        };
        let authority = uri.authority().ok_or_else(|| refuse("a URL without a host"))?;
        let host = authority.host().trim_start_matches('[').trim_end_matches(']').to_owned();
        let port = authority.port_u16().unwrap_or(if has_tls { 443 } else { 80 });
        let shown = match authority.port_u16() {
            Some(port) => format!("{}:{port}", authority.host()),
            None => authority.host().to_owned(),
        };
        let host_header = HeaderValue::from_str(&shown).map_err(|e| fail(HttpErrorKind::Unknown, e))?;
        let key = format!("{}://{shown}", if has_tls { "https" } else { "http" });
        Ok(Server { has_tls, host, port, host_header, key })
    }
}

/// The body of a response. After its end, the connection is idle.
#[derive(Debug)]
struct KeptBody {
    body: Incoming,
    kept: Option<(Connection, String, IdleConnections)>,
}

impl Body for KeptBody {
    type Data = Bytes;
    type Error = HttpError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, HttpError>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        let ends = frame.is_none() || self.body.is_end_stream();
        if ends
            && !matches!(frame, Some(Err(_)))
            && let Some((connection, key, idle)) = self.kept.take()
        {
            let mut idle = lock(&idle);
            let idle = idle.entry(key).or_default();
            if idle.len() < IDLE_MAX {
                idle.push(connection);
            }
        }
        Poll::Ready(frame.map(|frame| frame.map_err(|e| fail(HttpErrorKind::Interrupted, e))))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

fn lock(idle: &IdleConnections) -> std::sync::MutexGuard<'_, HashMap<String, Vec<Connection>>> {
    idle.lock().unwrap_or_else(PoisonError::into_inner)
}

fn fail(kind: HttpErrorKind, error: impl std::error::Error + Send + Sync + 'static) -> HttpError {
    HttpError::new(kind, error)
}
