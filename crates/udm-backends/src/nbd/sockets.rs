//! Fence commands of NBD lanes: of the real system or of a simulation.

use crate::blocking;
use crate::stream::{SocketOps, SystemSockets};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::io;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use udm_wire::uri::{NbdAddress, NbdUri};

/// Time limit of a fence command in seconds.
const COMMAND_MAX: i64 = 60;

/// Called with the result of fencing a server. An error is one line.
pub type FenceDone = Box<dyn FnOnce(Result<(), String>) + Send>;

/// Operations of an NBD lane that do not go through its core's ring.
pub trait NbdSocketAndFenceOps: SocketOps {
    /// Runs `command`, which must ensure that the server of `uri` executes nothing any more.
    /// Returns at once; calls `then` with the result later, on any thread.
    fn fence(&self, command: &Path, uri: &NbdUri, then: FenceDone);
}

impl NbdSocketAndFenceOps for SystemSockets {
    fn fence(&self, command: &Path, uri: &NbdUri, then: FenceDone) {
        let (mut prepared, name) = (build_fence_command(command, uri), command.display().to_string());
        let no_thread = || Err("there is no thread to run it".into());
        blocking::run_on_new_thread("udm-fence", then, no_thread, move || {
            run_fence_command(&mut prepared).map_err(|why| format!("{name}: {why}"))
        });
    }
}

/// Builds the command with arguments that name the server. It runs without a shell.
fn build_fence_command(command: &Path, uri: &NbdUri) -> Command {
    let mut prepared = Command::new(command);
    prepared.arg(uri.to_string()).env("UDM_FENCE_EXPORT", &uri.export);
    match &uri.address {
        NbdAddress::Unix(path) => prepared.env("UDM_FENCE_SOCKET", path),
        NbdAddress::Tcp { host, port } => {
            prepared.env("UDM_FENCE_HOST", host).env("UDM_FENCE_PORT", port.to_string())
        }
    };
    prepared.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    prepared
}

/// Runs the command until it ends or exceeds its time limit.
fn run_fence_command(command: &mut Command) -> Result<(), String> {
    let mut child = command.spawn().map_err(|error| error.to_string())?;
    match wait_for_fence_command(&mut child).map_err(|error| error.to_string())? {
        Some(status) if status.success() => Ok(()),
        Some(status) => Err(status.to_string()),
        None => Err(format!("not over after {COMMAND_MAX} s, and killed")),
    }
}

/// Waits for the command. Returns its status; `None` if it was killed.
fn wait_for_fence_command(child: &mut Child) -> io::Result<Option<ExitStatus>> {
    let process = pidfd_open(Pid::from_child(child), PidfdFlags::empty())?;
    let limit = Timespec { tv_sec: COMMAND_MAX, tv_nsec: 0 };
    while let Err(error) = poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&limit)) {
        if error != rustix::io::Errno::INTR {
            return Err(error.into());
        }
    }
    if let Some(status) = child.try_wait()? {
        return Ok(Some(status));
    }
    child.kill()?;
    child.wait()?;
    Ok(None)
}
