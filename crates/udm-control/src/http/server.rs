//! The control socket's server: HTTP for peers of the same user.
//!
//! Contract: a peer that is neither the same user nor root gets 403 for every request, or for every
//! request but reading ones (GET) if the socket has readers. Of these, [`READERS_MAX`] connections
//! are served at a time, so the owner always finds a place. At most
//! [`CONNECTIONS_MAX`] connections are open at a time; new connections replace quiet ones
//! ([`super::connections`]). A connection without progress for [`QUIET_MAX`] is closed; a slow body
//! gets an error response earlier. A few descriptors are kept in reserve, so a process that has run
//! out of them can still be controlled. Without connections no timer runs.

use super::BODY_MAX;
use super::connections::{BusyConnectionGuard, ControlConnectionSlot, EvictingConnectionLimit};
use super::error::ErrorResponse;
use super::progress_stream::ProgressTrackingStream;
use super::socket::ControlSocket;
use axum::Router;
use axum::body::Body;
use axum::http::{Method, Request, Response, StatusCode};
use axum::response::IntoResponse;
use http_body_util::{BodyExt, Limited};
use hyper::body::{Body as _, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use std::convert::Infallible;
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;
use udm_core::errno::{EBUSY, EPERM};
use udm_dm::TargetError;

/// Maximum number of open connections.
pub const CONNECTIONS_MAX: usize = 256;

/// Maximum number of connections of other users that are served at a time: less than may wait for
/// events, and less than may wait for a report on all devices.
pub const READERS_MAX: usize = 24;

/// Maximum length of the body of a reading request, which has no use for it.
const READ_BODY_MAX: usize = 4 << 10;

/// Maximum quiet time of a connection: idle, while it sends a request, or while it reads nothing of
/// its answer.
pub const QUIET_MAX: Duration = Duration::from_secs(30);

/// Maximum time for the body of a request.
pub const BODY_TIME_MAX: Duration = Duration::from_secs(15);

/// Number of descriptors in reserve.
const SPARE: usize = 4;

/// Pause if there is no descriptor left and no quiet connection to close.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What a peer may do.
#[derive(Clone)]
pub(super) enum PeerAccess {
    /// Nothing.
    Nothing,
    /// Nothing: other users have [`READERS_MAX`] connections.
    NoPlace,
    /// Use the routes that change nothing.
    Reads(Router),
    /// Use all routes.
    All(Router),
}

/// Serves `router` on `socket`, except while that is paused, until the future is dropped.
///
/// # Errors
/// If the socket can't be registered with the reactor.
pub async fn serve_control_socket(socket: &ControlSocket, router: Router) -> io::Result<()> {
    let listener = UnixListener::from_std(socket.listener.try_clone()?)?;
    let connections = EvictingConnectionLimit::new(CONNECTIONS_MAX);
    let readers = Arc::new(Semaphore::new(READERS_MAX));
    let mut spare = Vec::new();
    for number in 0.. {
        connections.wait_for_slot().await;
        while spare.len() < SPARE
            && let Ok(file) = File::open("/dev/null")
        {
            spare.push(file);
        }
        let stream = loop {
            socket.is_paused(false).await;
            tokio::select! {
                biased;
                () = socket.is_paused(true) => {}
                stream = accept_next_peer(&listener, &mut spare, &connections) => break stream,
            }
        };
        let (peer, is_owner) = stream.peer_cred().map_or((0, false), |peer| {
            (peer.pid().unwrap_or(0), is_same_user_or_root(peer.uid(), rustix::process::geteuid().as_raw()))
        });
        let place = (!is_owner).then(|| Arc::clone(&readers).try_acquire_owned().ok()).flatten();
        let access = match (is_owner, socket.has_readers()) {
            (true, _) => PeerAccess::All(router.clone()),
            // The file's permissions have let it in.
            (false, true) if place.is_none() => PeerAccess::NoPlace,
            (false, true) => PeerAccess::Reads(router.clone()),
            (false, false) => PeerAccess::Nothing,
        };
        let slot = connections.open_slot(number, peer);
        tokio::spawn(async move {
            serve_peer_until_idle(stream, access, slot, "control socket").await;
            drop(place);
        });
    }
    Ok(())
}

/// Serves a peer until it leaves, is idle for too long, or is closed for another one. `socket` is
/// for the log.
pub(super) async fn serve_peer_until_idle<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    stream: S,
    access: PeerAccess,
    slot: Arc<ControlConnectionSlot>,
    socket: &'static str,
) {
    tokio::select! {
        () = serve_peer(stream, access, Arc::clone(&slot)) => {}
        () = slot.evicted() => tracing::debug!("{socket}: a quiet connection was closed for a new one"),
        () = wait_until_idle_timeout(&slot) => tracing::debug!("{socket}: a connection ran out of time"),
    }
}

/// Accepts the next peer. If there is no free descriptor, one of the reserve is closed, and a quiet
/// connection is asked to close.
async fn accept_next_peer(
    listener: &UnixListener,
    spare: &mut Vec<File>,
    connections: &EvictingConnectionLimit,
) -> UnixStream {
    loop {
        let error = match listener.accept().await {
            Ok((stream, _)) => return stream,
            Err(error) => error,
        };
        let evicted = connections.evict_idle();
        if spare.pop().is_none() {
            tracing::warn!(%error, "control socket: accept");
            // The waiting peer would wake this task again at once.
            let pause = if evicted { Duration::from_millis(1) } else { ACCEPT_PAUSE };
            tokio::time::sleep(pause).await;
        }
    }
}

/// Completes when the connection has been quiet for too long.
async fn wait_until_idle_timeout(slot: &ControlConnectionSlot) {
    loop {
        let since = slot.idle_since();
        let until = since.unwrap_or_else(tokio::time::Instant::now) + QUIET_MAX;
        tokio::time::sleep_until(until).await;
        if since.is_some() && slot.idle_since() == since {
            return;
        }
    }
}

/// True for our user and root.
fn is_same_user_or_root(peer: u32, own: u32) -> bool {
    peer == own || peer == 0
}

/// Serves a peer's requests as far as it may make them.
async fn serve_peer<S: AsyncRead + AsyncWrite + Unpin + 'static>(
    stream: S,
    access: PeerAccess,
    slot: Arc<ControlConnectionSlot>,
) {
    let stream = TokioIo::new(ProgressTrackingStream::new(stream, Arc::clone(&slot)));
    let service = service_fn(move |request: Request<Incoming>| {
        let (access, slot) = (access.clone(), Arc::clone(&slot));
        async move { Ok::<_, Infallible>(serve_http_request(request, access, &slot).await) }
    });
    let done = hyper::server::conn::http1::Builder::new().serve_connection(stream, service).await;
    if let Err(error) = done {
        tracing::debug!(%error, "control socket: connection");
    }
}

async fn serve_http_request(
    request: Request<Incoming>,
    access: PeerAccess,
    slot: &Arc<ControlConnectionSlot>,
) -> Response<Body> {
    let router = match access {
        PeerAccess::All(router) => router,
        PeerAccess::NoPlace => return no_place_for_reader().into_response(),
        PeerAccess::Reads(router) if request.method() == Method::GET => router,
        PeerAccess::Reads(_) => return wrong_user("change anything").into_response(),
        PeerAccess::Nothing => return wrong_user("use it").into_response(),
    };
    let mut request = match read_body(request).await {
        Ok(request) => request,
        Err(refusal) => return refusal.into_response(),
    };
    // The event stream needs the slot of its connection.
    request.extensions_mut().insert(Arc::clone(slot));
    let _busy: BusyConnectionGuard = slot.begin_request();
    match hyper::service::Service::call(&TowerToHyperService::new(router), request).await {
        Ok(answer) => answer,
        Err(never) => match never {},
    }
}

/// Reads the whole body of a request, with a time limit.
async fn read_body(request: Request<Incoming>) -> Result<Request<Body>, ErrorResponse> {
    let (head, body) = request.into_parts();
    let max = if head.method == Method::GET { READ_BODY_MAX } else { BODY_MAX };
    if body.is_end_stream() {
        return Ok(Request::from_parts(head, Body::empty()));
    }
    let refuse = |status, why: &str| Err(ErrorResponse::request(status, why));
    match tokio::time::timeout(BODY_TIME_MAX, Limited::new(body, max).collect()).await {
        Ok(Ok(body)) => Ok(Request::from_parts(head, Body::from(body.to_bytes()))),
        Ok(Err(error)) if error.is::<http_body_util::LengthLimitError>() => {
            refuse(StatusCode::PAYLOAD_TOO_LARGE, "the body is too long")
        }
        Ok(Err(error)) => refuse(StatusCode::BAD_REQUEST, &error.to_string()),
        Err(_) => {
            let why = format!("its body did not come within {} s", BODY_TIME_MAX.as_secs());
            refuse(StatusCode::REQUEST_TIMEOUT, &why)
        }
    }
}

/// The error for a peer of another user if there are too many.
fn no_place_for_reader() -> ErrorResponse {
    let why = format!("other users have {READERS_MAX} connections, which is the maximum: close some");
    let error = TargetError::errno(EBUSY).because(why);
    crate::error::VerbError::new("control socket", error).into()
}

/// The error for a peer of another user, which may not do `what`.
fn wrong_user(what: &str) -> ErrorResponse {
    let why = format!("only the user that runs the server, and root, may {what}");
    let error = TargetError::errno(EPERM).because(why);
    crate::error::VerbError::new("control socket", error).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    #[test]
    fn only_the_owner_and_root_may_control() {
        assert!(
            is_same_user_or_root(1000, 1000) && is_same_user_or_root(0, 1000) && is_same_user_or_root(0, 0)
        );
        assert!(!is_same_user_or_root(1001, 1000) && !is_same_user_or_root(1000, 0));
    }
    /// A connection to a server whose only answer has the given length.
    fn connect(bytes: usize) -> (UnixStream, tokio::task::JoinHandle<bool>) {
        let (client, stream) = UnixStream::pair().unwrap();
        let slot = EvictingConnectionLimit::new(1).open_slot(0, 1);
        let router = Router::new().fallback(move || async move { vec![b'x'; bytes] });
        let server = tokio::spawn(async move {
            tokio::select! {
                () = serve_peer(stream, PeerAccess::All(router), Arc::clone(&slot)) => false,
                () = wait_until_idle_timeout(&slot) => true,
            }
        });
        (client, server)
    }

    const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nHost: udm\r\nConnection: close\r\n\r\n";

    /// A slow reader is not cut off as long as it reads.
    #[tokio::test(start_paused = true)]
    async fn a_slow_reader_is_quiet_when_it_stops() {
        const BYTES: usize = 4 << 20;
        let (mut client, server) = connect(BYTES);
        client.write_all(REQUEST).await.unwrap();
        let begin = tokio::time::Instant::now();
        let (mut buf, mut read) = (vec![0; 256 << 10], 0);
        loop {
            tokio::time::sleep(QUIET_MAX / 2).await;
            match client.read(&mut buf).await.unwrap() {
                0 => break,
                bytes => read += bytes,
            }
        }
        assert!(read > BYTES && begin.elapsed() > 4 * QUIET_MAX, "{read} bytes in {:?}", begin.elapsed());
        assert!(!server.await.unwrap());

        let (mut client, server) = connect(BYTES);
        client.write_all(REQUEST).await.unwrap();
        client.read_exact(&mut buf).await.unwrap();
        let begin = tokio::time::Instant::now();
        assert!(server.await.unwrap(), "it is cut off");
        assert!(begin.elapsed() <= 2 * QUIET_MAX);
    }
}
