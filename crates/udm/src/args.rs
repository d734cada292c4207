//! Arguments that several verbs share, and how they find the server and its state.

use anyhow::{Context, Result};
use clap::Args;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use udm_control::StateFolder;
use udm_control::client::ControlClient;

/// The address of the server.
#[derive(Debug, Args)]
pub struct ServerArgs {
    /// The control socket of the server [default: $UDM_SOCKET, or udm/udm.sock in $XDG_RUNTIME_DIR,
    /// /run/udm/udm.sock for root]
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
}

impl ServerArgs {
    /// A client of the server that the arguments name.
    pub fn client(&self) -> Result<ControlClient> {
        Ok(ControlClient::new(resolve_control_socket_path(self.socket.clone())?))
    }
}

/// The output format.
#[derive(Debug, Args)]
pub struct OutputFormatArgs {
    /// Print JSON: sizes in bytes, times in nanoseconds
    #[arg(long)]
    pub json: bool,
}

/// The arguments of verbs that list.
#[derive(Debug, Args)]
pub struct SharedListArgs {
    #[command(flatten)]
    pub server: ServerArgs,
    #[command(flatten)]
    pub print: OutputFormatArgs,
}

/// The time that a verb may wait for requests in flight.
#[derive(Debug, Args)]
pub struct DrainTimeoutArgs {
    /// Cancel after so many seconds, as Ctrl-C does: the device continues as before [default: no
    /// limit]
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    pub timeout: Option<Duration>,
}

impl DrainTimeoutArgs {
    /// The timeout in ms, as the control socket takes it.
    pub fn timeout_ms(&self) -> Option<u64> {
        self.timeout.map(|timeout| u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX))
    }
}

/// Parses seconds, with or without a fraction.
pub fn parse_seconds(word: &str) -> Result<Duration, String> {
    let seconds: f64 = word.parse().map_err(|_| "a number of seconds".to_owned())?;
    Duration::try_from_secs_f64(seconds).map_err(|e| e.to_string())
}

/// The state folder of a server.
#[derive(Debug, Args)]
pub struct StateFolderArgs {
    /// Folder for state that must survive a restart, such as the list of snapshot stores known to
    /// be invalid [default: $UDM_STATE, /var/lib/udm for root, or udm in $XDG_STATE_HOME or
    /// ~/.local/state]
    #[arg(long = "state", value_name = "FOLDER")]
    pub folder: Option<PathBuf>,
}

impl StateFolderArgs {
    /// Opens the state folder: the given one, `$UDM_STATE`, or the default of the user.
    pub fn open(&self) -> Result<Arc<StateFolder>> {
        Ok(StateFolder::new(self.path()?))
    }

    /// The absolute path of the state folder.
    pub fn path(&self) -> Result<PathBuf> {
        let given = self.folder.clone().or_else(|| env_path("UDM_STATE"));
        let path = given.or_else(|| match rustix::process::geteuid().is_root() {
            true => Some("/var/lib/udm".into()),
            false => {
                let home = || Some(env_path("HOME")?.join(".local/state"));
                Some(env_path("XDG_STATE_HOME").or_else(home)?.join("udm"))
            }
        });
        let path = path.context("state: neither XDG_STATE_HOME nor HOME is set: give --state FOLDER")?;
        std::path::absolute(&path).with_context(|| path.display().to_string())
    }
}

/// Parses the path of a socket that a server creates.
///
/// # Errors
/// A name in the abstract name space, as some programs write it.
pub fn parse_socket_path(word: &str) -> Result<PathBuf, String> {
    match word.strip_prefix('@') {
        Some(_) => Err(format!(
            "abstract sockets have no permissions, so every user could connect: expected a path; ./{word} is a file"
        )),
        None => Ok(word.into()),
    }
}

/// The path of the control socket: as given, `$UDM_SOCKET`, or the default of the user.
pub fn resolve_control_socket_path(given: Option<PathBuf>) -> Result<PathBuf> {
    if let Some(path) = given.or_else(|| env_path("UDM_SOCKET")) {
        return Ok(path);
    }
    if rustix::process::geteuid().is_root() {
        return Ok("/run/udm/udm.sock".into());
    }
    let folder = env_path("XDG_RUNTIME_DIR")
        .context("control socket: XDG_RUNTIME_DIR is not set: give --socket PATH")?;
    Ok(folder.join("udm/udm.sock"))
}

/// A path in an environment variable; `None` if it is unset or empty.
fn env_path(variable: &str) -> Option<PathBuf> {
    std::env::var_os(variable).filter(|value| !value.is_empty()).map(PathBuf::from)
}
