//! Sockets that the server inherits: systemd's socket activation, or an upgrade.
//!
//! Contract: `$LISTEN_FDS` has the number of descriptors. The one that `$LISTEN_FDNAMES` names
//! `control` is the control socket; all others are for NBD clients. The server does not remove the
//! files of inherited sockets.

use anyhow::{Context, Result, bail};
use listenfd::ListenFd;
use rustix::net::SocketAddrUnix;
use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use udm_frontends::nbd::InheritedListener;

/// The name of the control socket in `$LISTEN_FDNAMES`.
const CONTROL: &str = "control";

/// The inherited sockets of this process.
#[derive(Default)]
pub(super) struct InheritedSockets {
    /// The control socket.
    pub control: Option<UnixListener>,
    /// True if the server removes the file of the control socket at its end.
    pub removes_control_file: bool,
    /// The listening sockets for NBD clients.
    pub nbd: Vec<InheritedListener>,
}

impl InheritedSockets {
    /// The paths of the inherited Unix sockets for NBD clients.
    pub fn nbd_paths(&self) -> impl Iterator<Item = PathBuf> + '_ {
        self.nbd.iter().filter_map(|given| {
            let address = SocketAddrUnix::try_from(rustix::net::getsockname(&given.socket).ok()?).ok()?;
            Some(PathBuf::from(OsStr::from_bytes(address.path()?.to_bytes())))
        })
    }
}

/// Takes the inherited sockets. Must be called only once.
///
/// # Errors
/// A descriptor is no listening socket, or two are named `control`.
pub(super) fn take_inherited_sockets() -> Result<InheritedSockets> {
    let names = std::env::var("LISTEN_FDNAMES").unwrap_or_default();
    let mut names = names.split(':');
    let (mut sockets, mut inherited) = (ListenFd::from_env(), InheritedSockets::default());
    for i in 0..sockets.len() {
        let name = names.next().unwrap_or_default();
        let name_of_socket = || format!("serve: the socket {name:?}, number {i} of those that were given");
        if name == CONTROL {
            let control = sockets.take_unix_listener(i).with_context(name_of_socket)?;
            if inherited.control.is_some() {
                bail!("{}: there is another control socket", name_of_socket());
            }
            inherited.control = control;
            continue;
        }
        let fd = match sockets.take_unix_listener(i) {
            Ok(socket) => socket.map(OwnedFd::from),
            Err(_) => sockets.take_tcp_listener(i).with_context(name_of_socket)?.map(OwnedFd::from),
        };
        inherited.nbd.extend(fd.map(|socket| InheritedListener { socket, removes_file: false }));
    }
    Ok(inherited)
}
