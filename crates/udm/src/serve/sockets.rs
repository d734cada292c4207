//! The sockets of a server, and a private folder for those without a given path.

use super::args::ServeArgs;
use super::inherited_sockets::InheritedSockets;
use crate::args::resolve_control_socket_path;
use anyhow::{Context, Result};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use tempfile::TempDir;
use udm_control::exports::ServedAddress;
use udm_frontends::nbd::{BoundAddress, ListenAddress, NbdServer};
use udm_wire::uri::NbdAddress;

/// The sockets of one server. Dropping it removes the private folder.
pub(super) struct ServerSockets {
    /// The path of the control socket.
    pub control: PathBuf,
    /// The path of the NBD server's Unix socket.
    pub unix: Option<PathBuf>,
    /// All addresses on which the NBD server listens.
    pub listen: Vec<ListenAddress>,
    private: Option<TempDir>,
}

impl ServerSockets {
    /// The sockets that the command line names. With only `--run`, both sockets are private.
    /// Inherited NBD sockets are used in addition, and an inherited control socket instead. If
    /// there are only inherited sockets, the control socket is private too, because another program
    /// started this server for itself.
    pub fn new(args: &ServeArgs, given: &InheritedSockets) -> Result<ServerSockets> {
        let running = args.run.is_some();
        let has_disks = !args.vhost_user.is_empty() || !args.ublk.is_empty() || !args.nvme.is_empty();
        let is_anothers = args.config.is_none() && args.unix.is_none() && !args.has_port() && !has_disks;
        let unix_is_private = match &args.unix {
            Some(path) => path == Path::new("-"),
            None => running && !args.has_port(),
        };
        let control = given.control.as_ref().map(std::os::unix::net::UnixListener::local_addr).transpose()?;
        let control = control.as_ref().and_then(std::os::unix::net::SocketAddr::as_pathname);
        let is_private = running || is_anothers || args.private_control_socket;
        let control_is_private = is_private && args.socket.is_none() && control.is_none();
        let private = (unix_is_private || control_is_private)
            .then(|| crate::private_dir::private_temp_dir("udm-").context("serve: private folder"))
            .transpose()?;
        let inside = |name: &str| private.as_ref().map(|folder| folder.path().join(name));
        let unix = if unix_is_private {
            inside("nbd.sock")
        } else {
            args.unix.as_deref().map(make_path_absolute).transpose()?
        };
        let inside_control = inside("control.sock").filter(|_| control_is_private);
        let control = match control.map(Path::to_owned).or(inside_control) {
            Some(path) => path,
            None => make_path_absolute(&resolve_control_socket_path(args.socket.clone())?)?,
        };
        // An inherited socket already uses its path.
        let is_given = |path: &PathBuf| given.nbd_paths().any(|given| given == *path);
        let own = unix.clone().filter(|path| !is_given(path));
        let tcp = args.port.into_iter().flat_map(|port| {
            args.ipaddr.iter().map(move |address| ListenAddress::Tcp(SocketAddr::new(*address, port)))
        });
        let vsock = args.vsock.map(|port| ListenAddress::Vsock(port.into()));
        let listen = own.map(ListenAddress::Unix).into_iter().chain(tcp).chain(vsock).collect();
        Ok(ServerSockets { control, unix, listen, private })
    }

    /// The private folder, if any socket is in it.
    pub fn private_folder(&self) -> Option<&Path> {
        self.private.as_ref().map(TempDir::path)
    }

    /// The addresses of `server`, for NBD URIs.
    pub fn addresses(&self, server: &NbdServer) -> Vec<ServedAddress> {
        let address = |bound: &BoundAddress| match bound {
            BoundAddress::Unix(path) => ServedAddress::Nbd(NbdAddress::Unix(path.clone())),
            BoundAddress::Tcp(address) => {
                let host = host_for_local_clients(address.ip());
                ServedAddress::Nbd(NbdAddress::Tcp { host, port: address.port() })
            }
            BoundAddress::Vsock(port) => ServedAddress::Vsock(*port),
        };
        server.bound().iter().map(address).collect()
    }
}

/// An absolute path, which is valid in a URI and in a child process with another folder.
fn make_path_absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).with_context(|| path.display().to_string())
}

/// The host name for clients on this machine to reach `ip`.
fn host_for_local_clients(ip: IpAddr) -> String {
    if ip.is_unspecified() { "localhost".into() } else { ip.to_string() }
}
