//! `--sandbox`: the server gives up what it does not need before it starts, so that who takes it
//! over gains little.
//!
//! * `files`: the files and folders that it may use, by Landlock.
//! * `system_calls`: the system calls that it may make, by seccomp.
//! * Of root, most capabilities.
//!
//! Both hold for a thread and the threads and programs that it starts later, and nothing takes them
//! back. So the thread that has read the options and the configuration file restricts itself and
//! starts this program again in its own place: no thread of the server has ever been without them.
//! The programs that the server starts, for an upgrade or to fence a path, are restricted too. A
//! program that takes over from a restricted server has its restrictions and adds none, because the
//! kernel allows only a few layers.

mod files;
mod system_calls;

use super::args::ServeArgs;
use crate::log;
use anyhow::{Context, Result, bail};
use files::{SandboxFiles, restrict_files};
use rustix::io::Errno;
use rustix::process::geteuid;
use rustix::thread::{CapabilitySet, remove_capability_from_bounding_set};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use system_calls::restrict_system_calls;
use udm_control::config::DesiredDevice;

/// The option by which the program knows that it is restricted.
const RESTRICTED: &str = "--sandboxed";

/// What to do if the system refuses a file to a restricted server.
pub(super) const ACCESS_ADVICE: &str =
    "--sandbox allows files that were named at the start, and those below --sandbox-path";

/// With `--sandbox`, restricts this thread and starts the program again. Returns if there is
/// nothing to do. `devices` are those of the configuration file `file`.
///
/// # Errors
/// The kernel cannot restrict a process, or the program cannot be started again.
pub(super) fn enter_sandbox(args: &ServeArgs, file: Option<&Path>, devices: &[DesiredDevice]) -> Result<()> {
    if !args.sandbox || args.sandboxed {
        return Ok(());
    }
    let restrict = || -> Result<()> {
        let files = SandboxFiles::of(args, file, devices)?;
        files.create_folders();
        restrict_capabilities(args)?;
        restrict_files(&files, &listening_ports(args))?;
        restrict_system_calls()
    };
    restrict().context("serve: sandbox")?;
    log::flush_log();
    let mut arguments = std::env::args_os();
    let name = arguments.next().unwrap_or_else(|| "udm".into());
    // This program, even if its file has been replaced.
    let error = Command::new("/proc/self/exe").arg0(name).args(arguments).arg(RESTRICTED).exec();
    bail!("serve: sandbox: this program cannot be started again: {error}")
}

/// Gives up what root may do and the server does not need: it opens files of other users, locks
/// memory for rings, listens on ports below 1024, and gives sockets to a group. Of a user without
/// privileges there is nothing to give up.
///
/// # Errors
/// The kernel refuses it.
fn restrict_capabilities(args: &ServeArgs) -> Result<()> {
    if !geteuid().is_root() {
        return Ok(());
    }
    let mut kept = CapabilitySet::DAC_OVERRIDE | CapabilitySet::IPC_LOCK | CapabilitySet::NET_BIND_SERVICE;
    if args.group.is_some() || args.control_group.is_some() {
        kept |= CapabilitySet::CHOWN;
    }
    // A program of root has what is in this set, also after the server has started it.
    for capability in CapabilitySet::all().difference(kept) {
        match remove_capability_from_bounding_set(capability) {
            // An older kernel does not know it.
            Ok(()) | Err(Errno::INVAL) => {}
            Err(error) => return Err(error).context("capabilities: CAP_SETPCAP is needed to give them up"),
        }
    }
    Ok(())
}

/// The TCP ports that the server listens on.
fn listening_ports(args: &ServeArgs) -> Vec<u16> {
    let nvme = args.nvme.iter().map(std::net::SocketAddr::port);
    args.port.into_iter().chain(args.metrics.map(|address| address.port())).chain(nvme).collect()
}
