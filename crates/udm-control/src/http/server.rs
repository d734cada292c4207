//! The control socket: a Unix socket that speaks HTTP to peers of the same user.
//!
//! Contract: the socket has mode 0600 from the moment it exists; a stale one is replaced only when nobody answers on it; a peer that is
//! neither of the same user nor root gets 403 and the connection is closed; at most [`CONNECTIONS_MAX`] connections are open at a time, and
//! one that sends no request for [`HEADER_TIMEOUT`] is closed. With no connection open no timer runs. Removing the socket's file is the
//! dropped [`Socket`]'s work.

use axum::Router;
use axum::http::StatusCode;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener as StdListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;

/// Connections open at a time. Further ones wait to be accepted.
pub const CONNECTIONS_MAX: usize = 64;

/// How long a connection may take to send the head of a request, or stay idle.
pub const HEADER_TIMEOUT: Duration = Duration::from_secs(30);

/// A bound control socket. Dropping it removes its file, unless another server has put its own there meanwhile.
#[derive(Debug)]
pub struct Socket {
    listener: StdListener,
    path: PathBuf,
    inode: u64,
}

impl Socket {
    /// Binds `path`, and makes its folder (mode 0700) when only that is missing.
    ///
    /// # Errors
    /// EADDRINUSE when somebody answers there, EEXIST when it is something else than a socket, the system's own otherwise.
    pub fn bind(path: &Path) -> io::Result<Socket> {
        if let Some(folder) = path.parent().filter(|f| !f.as_os_str().is_empty() && !f.exists()) {
            // With its mode from the start: there is no moment at which others could put something in.
            fs::DirBuilder::new().mode(0o700).create(folder)?;
        }
        clear_stale(path)?;
        // Bound under a private name and then renamed: nobody finds it before it has its mode.
        let hidden = path.with_extension(format!("{}.new", std::process::id()));
        let _ = fs::remove_file(&hidden);
        let listener = StdListener::bind(&hidden)?;
        let placed = fs::set_permissions(&hidden, fs::Permissions::from_mode(0o600))
            .and_then(|()| fs::metadata(&hidden))
            .and_then(|meta| fs::rename(&hidden, path).map(|()| meta.ino()));
        if placed.is_err() {
            let _ = fs::remove_file(&hidden);
        }
        let inode = placed?;
        listener.set_nonblocking(true)?;
        Ok(Socket { listener, path: path.into(), inode })
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        if fs::symlink_metadata(&self.path).is_ok_and(|meta| meta.ino() == self.inode) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Removes a socket file on which nobody answers.
fn clear_stale(path: &Path) -> io::Result<()> {
    let meta = match fs::symlink_metadata(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    if !meta.file_type().is_socket() {
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, "it exists and is no socket"));
    }
    match std::os::unix::net::UnixStream::connect(path) {
        Ok(_) => Err(io::Error::new(io::ErrorKind::AddrInUse, "another udm answers there")),
        Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path),
        Err(e) => Err(e),
    }
}

/// Serves `router` on `socket`, until the future is dropped.
///
/// # Errors
/// When the socket can't be registered with the reactor.
pub async fn serve(socket: &Socket, router: Router) -> io::Result<()> {
    let listener = UnixListener::from_std(socket.listener.try_clone()?)?;
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let place = Arc::clone(&places).acquire_owned().await.map_err(io::Error::other)?;
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Out of descriptors, most likely: the waiting peer would wake us again at once.
                tracing::warn!(%error, "control socket: accept");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let router = router.clone();
        tokio::spawn(async move {
            if is_allowed(&stream) {
                talk(stream, router).await;
            } else {
                turn_away(stream).await;
            }
            drop(place);
        });
    }
}

/// The peer is of our user, or root.
fn is_allowed(stream: &UnixStream) -> bool {
    let own = rustix::process::geteuid().as_raw();
    stream.peer_cred().is_ok_and(|peer| may_control(peer.uid(), own))
}

/// The rule of [`is_allowed`].
fn may_control(peer: u32, own: u32) -> bool {
    peer == own || peer == 0
}

async fn talk(stream: UnixStream, router: Router) {
    let done = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router))
        .await;
    if let Err(error) = done {
        tracing::debug!(%error, "control socket: connection");
    }
}

async fn turn_away(mut stream: UnixStream) {
    let body = r#"{"error":"control socket: only its owner and root may use it: Operation not permitted","errno":1,"text":"","reason":"","line":null,"column":null,"width":null}"#;
    let head = format!(
        "HTTP/1.1 {}\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        StatusCode::FORBIDDEN,
        body.len()
    );
    let _ = stream.write_all(head.as_bytes()).await;
    let _ = stream.write_all(body.as_bytes()).await;
    let _ = stream.shutdown().await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_owner_and_root_may_control() {
        assert!(may_control(1000, 1000) && may_control(0, 1000) && may_control(0, 0));
        assert!(!may_control(1001, 1000) && !may_control(1000, 0));
    }

    #[test]
    fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new/udm.sock");
        let first = Socket::bind(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(fs::metadata(path.parent().unwrap()).unwrap().mode() & 0o777, 0o700);
        assert_eq!(Socket::bind(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        drop(first);
        assert!(!path.exists(), "the file goes with the socket");

        drop(StdListener::bind(&path).unwrap());
        assert!(path.exists(), "a stale file");
        let second = Socket::bind(&path).unwrap();
        fs::remove_file(&path).unwrap();
        fs::write(&path, "something else").unwrap();
        drop(second);
        assert!(path.exists(), "what is not ours stays");
        assert_eq!(Socket::bind(&path).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
    }
}
