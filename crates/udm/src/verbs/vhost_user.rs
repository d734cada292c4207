//! `udm vhost-user`: sockets on which devices are served to virtual machines.

use crate::args::{OutputFormatArgs, ServerArgs};
use crate::output::{print_json_to_stdout, print_to_stdout};
use crate::requests::explain_client_error;
use anyhow::{Context, Result};
use clap::{Args, Subcommand};
use std::fmt::Write;
use std::path::{Path, PathBuf};
use udm_control::api::{self, verbs};

/// The arguments of `udm vhost-user`.
#[derive(Debug, Args)]
pub struct VhostUserArgs {
    #[command(subcommand)]
    pub verb: VhostUserVerb,
}

/// A verb of `udm vhost-user`.
#[derive(Debug, Subcommand)]
pub enum VhostUserVerb {
    /// Serve a device to a virtual machine on a new socket
    ///
    /// The socket has mode 0600. It ends with its device, follows a rename and goes over an
    /// upgrade. That of a snapshot made by name comes back with the snapshot when the server is
    /// started again; those of other devices end with the server.
    Add {
        #[command(flatten)]
        server: ServerArgs,
        /// The device
        name: String,
        /// Path of the socket; its folder exists
        path: PathBuf,
    },
    /// Remove a socket that was added
    Remove {
        #[command(flatten)]
        server: ServerArgs,
        /// The device
        name: String,
        /// Path of the socket
        path: PathBuf,
        /// Also while a machine is connected: its disk is gone then
        #[arg(long)]
        force: bool,
    },
    /// List all sockets
    List {
        #[command(flatten)]
        server: ServerArgs,
        #[command(flatten)]
        print: OutputFormatArgs,
    },
}

/// Runs `udm vhost-user`.
pub fn run(args: &VhostUserArgs) -> Result<()> {
    match &args.verb {
        VhostUserVerb::Add { server, name, path } => {
            let body = api::AddVhostUserSocketRequest { path: absolute_path(path)? };
            let added = server.client()?.call(verbs::ADD_VHOST_USER.on(name), &body);
            added.map(drop).map_err(|error| explain_client_error(error, None))
        }
        VhostUserVerb::Remove { server, name, path, force } => {
            let force = force.then_some(1);
            let query = api::RemoveVhostUserSocketQuery { path: absolute_path(path)?, force };
            let removed = server.client()?.call(verbs::REMOVE_VHOST_USER.on(name).with(&query), &());
            removed.map_err(|error| explain_client_error(error, None))
        }
        VhostUserVerb::List { server, print } => {
            let list = server.client()?.call(verbs::LIST_VHOST_USER, &());
            let list = list.map_err(|error| explain_client_error(error, None))?.sockets;
            if print.json {
                return print_json_to_stdout(&list);
            }
            print_to_stdout(&format_socket_list(&list))
        }
    }
}

/// The path as the server, which has another working directory, can use it.
fn absolute_path(path: &Path) -> Result<String> {
    let absolute = std::path::absolute(path).with_context(|| path.display().to_string())?;
    let text = absolute.into_os_string().into_string();
    text.map_err(|path| anyhow::anyhow!("{}: a path of a socket is UTF-8", Path::new(&path).display()))
}

fn format_socket_list(sockets: &[api::VhostUserSocketDescription]) -> String {
    if sockets.is_empty() {
        return "No device is served on a socket for virtual machines\n".into();
    }
    let mut out = String::new();
    for socket in sockets {
        let state = if socket.connected { "connected" } else { "no machine" };
        let origin = if socket.added { "added" } else { "option of the server" };
        // Writing to a String can't fail.
        let _ = writeln!(out, "{}: {}  {state}, {origin}", socket.device, socket.path);
    }
    out
}
