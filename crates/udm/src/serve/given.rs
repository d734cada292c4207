//! Sockets that were opened for the server before it was started: systemd's socket activation.
//!
//! Contract: of the descriptors that `$LISTEN_FDS` counts the one that `$LISTEN_FDNAMES` calls
//! `control` is the control socket, and all others are for NBD clients. Whoever opened them keeps
//! their files.

use anyhow::{Context, Result, bail};
use listenfd::ListenFd;
use rustix::net::SocketAddrUnix;
use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;

/// What the control socket is called.
const CONTROL: &str = "control";

/// What was given to this process.
#[derive(Default)]
pub(super) struct InheritedSockets {
    /// The control socket.
    pub control: Option<UnixListener>,
    /// For NBD clients.
    pub nbd: Vec<OwnedFd>,
}

impl InheritedSockets {
    /// Where those for NBD clients are that are Unix sockets.
    pub fn nbd_paths(&self) -> impl Iterator<Item = PathBuf> + '_ {
        self.nbd.iter().filter_map(|fd| {
            let address = SocketAddrUnix::try_from(rustix::net::getsockname(fd).ok()?).ok()?;
            Some(PathBuf::from(OsStr::from_bytes(address.path()?.to_bytes())))
        })
    }
}

/// Takes what was given. Once.
///
/// # Errors
/// What was given is no socket that listens, or two are called `control`.
pub(super) fn take() -> Result<InheritedSockets> {
    let names = std::env::var("LISTEN_FDNAMES").unwrap_or_default();
    let mut names = names.split(':');
    let (mut sockets, mut given) = (ListenFd::from_env(), InheritedSockets::default());
    for i in 0..sockets.len() {
        let name = names.next().unwrap_or_default();
        let what = || format!("serve: the socket {name:?}, number {i} of those that were given");
        if name == CONTROL {
            let control = sockets.take_unix_listener(i).with_context(what)?;
            if given.control.is_some() {
                bail!("{}: there is another control socket", what());
            }
            given.control = control;
            continue;
        }
        let fd = match sockets.take_unix_listener(i) {
            Ok(socket) => socket.map(OwnedFd::from),
            Err(_) => sockets.take_tcp_listener(i).with_context(what)?.map(OwnedFd::from),
        };
        given.nbd.extend(fd);
    }
    Ok(given)
}
