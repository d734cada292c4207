//! `--fork` and `--pidfile`: report readiness to the process that starts a server.
//!
//! The background server is a new process of the same program, not a fork, because a fork of a
//! process with threads is not safe. It inherits standard error for its log, and writes to its
//! standard output when it serves. Then it closes standard output and leaves the terminal. It also
//! closes standard error if that is a pipe or a socket, because its reader waits for the end of
//! file. If standard error is a file, the log stays there.

use super::args::ServeArgs;
use super::supervisor::shell_exit_code;
use crate::log;
use anyhow::{Context, Result};
use rustix::fs::FileType;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

/// The text that reports readiness.
const READY: &str = "ready\n";

/// Starts this program again with the same arguments. Returns success when the server serves, or
/// the server's status if it ends first.
///
/// # Errors
/// The server cannot be started.
pub fn spawn_daemon_until_ready() -> Result<ExitCode> {
    let start = || -> std::io::Result<std::process::Child> {
        let mut arguments = std::env::args_os();
        // Starts this program, even if its file has been replaced.
        let mut server = Command::new("/proc/self/exe");
        server.arg0(arguments.next().unwrap_or_else(|| "udm".into()));
        server.args(arguments).arg("--ready-on-stdout");
        server.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()
    };
    let mut server = start().context("serve: --fork")?;
    let mut line = String::new();
    if let Some(out) = server.stdout.take() {
        BufReader::new(out).read_line(&mut line).context("serve: --fork")?;
    }
    if line == READY {
        return Ok(ExitCode::SUCCESS);
    }
    // The server has printed the reason.
    let status = server.wait().context("serve: --fork")?;
    Ok(shell_exit_code(status))
}

/// The file with the server's process ID. Dropping it removes the file, if it still has this ID.
pub(super) struct PidFile(PathBuf);

impl Drop for PidFile {
    fn drop(&mut self) {
        let own = format!("{}\n", std::process::id());
        if fs::read_to_string(&self.0).is_ok_and(|text| text == own) {
            let _ = fs::remove_file(&self.0);
        }
    }
}

/// Reports that the devices are served.
///
/// # Errors
/// The file cannot be written, or the process cannot detach.
pub(super) fn write_pidfile_and_detach(args: &ServeArgs) -> Result<Option<PidFile>> {
    let file = write_pidfile(args)?;
    if args.ready_on_stdout {
        detach_from_terminal().context("serve: --fork")?;
    }
    Ok(file)
}

/// Writes the file with the process ID, if there is to be one.
///
/// # Errors
/// The file cannot be written.
pub(super) fn write_pidfile(args: &ServeArgs) -> Result<Option<PidFile>> {
    let write = |file: &PathBuf| {
        write_pid(file).with_context(|| format!("serve: --pidfile {}", file.display()))?;
        Ok::<_, anyhow::Error>(PidFile(std::path::absolute(file).unwrap_or_else(|_| file.clone())))
    };
    args.pidfile.as_ref().map(write).transpose()
}

/// Replaces the file atomically, because a script may read it at any time.
fn write_pid(file: &Path) -> std::io::Result<()> {
    let folder = file.parent().filter(|f| !f.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut new = tempfile::Builder::new().prefix(".udm-pid-").tempfile_in(folder)?;
    writeln!(new, "{}", std::process::id())?;
    new.as_file().set_permissions(fs::Permissions::from_mode(0o644))?;
    new.persist(file)?;
    Ok(())
}

/// Leaves the terminal, so that its end does not end the server, and then reports readiness.
fn detach_from_terminal() -> std::io::Result<()> {
    rustix::process::setsid()?;
    let nothing = File::options().write(true).open("/dev/null")?;
    // Who waited for readiness finds the report of the start in the log.
    log::flush_log();
    let mut out = std::io::stdout();
    // The starting process may have ended meanwhile; the server continues.
    let _ = out.write_all(READY.as_bytes()).and_then(|()| out.flush());
    rustix::stdio::dup2_stdout(&nothing)?;
    let kind = rustix::fs::stat("/proc/self/fd/2").map(|found| FileType::from_raw_mode(found.st_mode));
    if matches!(kind, Ok(FileType::Fifo | FileType::Socket)) {
        rustix::stdio::dup2_stderr(&nothing)?;
        log::redirect_log_to_file(nothing);
    }
    Ok(())
}
