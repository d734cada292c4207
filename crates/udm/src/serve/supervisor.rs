//! The supervisor of `--run`: a process of this program between the server and the command.
//!
//! Contract: a signal that ends the server reaches every process below the command. Processes that
//! are left after [`END_MAX`] are killed. If the command ends by itself, its remaining processes
//! continue. If the server is killed, the command gets SIGTERM, and the server's private folder is
//! removed.
//!
//! A killed server can do none of this itself. The kernel reports its death to the supervisor
//! (PR_SET_PDEATHSIG). The command could not ask for this signal: it would reach the shell alone,
//! and the supervisor also finds the processes that left the shell.

use super::shutdown::SignalStreams;
use anyhow::{Context, Result};
use rustix::process::{
    Pid, Signal, WaitOptions, getpid, getppid, kill_process, set_child_subreaper,
    set_parent_process_death_signal, waitpid,
};
use std::ffi::{OsStr, OsString};
use std::io::IsTerminal;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{ExitCode, ExitStatus};
use std::time::Duration;
use tokio::process::Command;

/// The name by which this program is a supervisor.
const PROGRAM: &str = "udm-supervisor";

/// How long the command may take to end after a signal.
const END_MAX: Duration = Duration::from_secs(5);

/// Interval between checks whether all processes have ended.
const END_PAUSE: Duration = Duration::from_millis(10);

/// The process that runs `shell`, a program with its arguments, under a supervisor of this server.
pub(super) fn supervised_command(private_folder: Option<&Path>, shell: &[String]) -> Command {
    // Starts this program, even if its file has been replaced.
    let mut process = Command::new("/proc/self/exe");
    process.arg0(PROGRAM).arg(getpid().to_string());
    process.arg(private_folder.unwrap_or_else(|| Path::new(""))).args(shell);
    process
}

/// True if the program was called as a supervisor.
pub fn is_supervisor(program: Option<&OsStr>) -> bool {
    program.is_some_and(|name| name == PROGRAM)
}

/// Runs the command in `words`, as [`supervised_command`] made them; returns its status.
///
/// # Errors
/// The command cannot be started.
pub fn run_supervisor(mut words: impl Iterator<Item = OsString>) -> Result<ExitCode> {
    let server = words.next().and_then(|word| Pid::from_raw(word.to_str()?.parse().ok()?));
    let (folder, shell) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    set_parent_process_death_signal(Some(Signal::TERM)).context("serve: --run: the signal of a death")?;
    // Orphaned descendants become children of this process, so that they can be found at the end.
    set_child_subreaper(Some(getpid())).context("serve: --run: adopting its orphaned processes")?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let code = runtime.block_on(async {
        let mut signals = SignalStreams::new()?;
        if getppid() != server {
            return Ok(ExitCode::FAILURE);
        }
        let command = Command::new(&shell).args(words).spawn();
        let mut command =
            command.with_context(|| format!("serve: --run: {}", Path::new(&shell).display()))?;
        wait_for_command(&mut command, &mut signals).await
    });
    // This process has another parent only if the server is dead.
    if getppid() != server && !folder.is_empty() {
        let _ = std::fs::remove_dir_all(folder);
    }
    code
}

/// Waits for the end of the command; meanwhile passes signals on to it.
async fn wait_for_command(
    command: &mut tokio::process::Child,
    signals: &mut SignalStreams,
) -> Result<ExitCode> {
    loop {
        let signal = tokio::select! {
            status = command.wait() => return Ok(shell_exit_code(status?)),
            signal = signals.next() => signal,
        };
        // Ctrl-C in a terminal has sent SIGINT to all processes already.
        if signal != Signal::INT || !std::io::stdin().is_terminal() {
            signal_descendants(signal);
        }
        if let Ok(status) = tokio::time::timeout(END_MAX, all_ended(command)).await {
            return Ok(shell_exit_code(status?));
        }
        signal_descendants(Signal::KILL);
    }
}

/// Waits for the command and for all processes that it started.
async fn all_ended(command: &mut tokio::process::Child) -> std::io::Result<ExitStatus> {
    let status = command.wait().await?;
    loop {
        let left = find_descendant_processes(getpid());
        for &pid in &left {
            // Succeeds only for adopted processes, which are children of this one.
            let _ = waitpid(Some(pid), WaitOptions::NOHANG);
        }
        if left.is_empty() {
            return Ok(status);
        }
        tokio::time::sleep(END_PAUSE).await;
    }
}

/// Sends `signal` to every process below this one.
fn signal_descendants(signal: Signal) {
    for pid in find_descendant_processes(getpid()) {
        // The process may have ended meanwhile.
        let _ = kill_process(pid, signal);
    }
}

/// The processes below `root`, parents before children.
fn find_descendant_processes(root: Pid) -> Vec<Pid> {
    let mut found = vec![root];
    let mut next = 0;
    while let Some(parent) = found.get(next) {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", parent.as_raw_pid()));
        for task in tasks.into_iter().flatten().flatten() {
            let children = std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
            found.extend(children.split_whitespace().filter_map(|pid| Pid::from_raw(pid.parse().ok()?)));
        }
        next += 1;
    }
    found.split_off(1)
}

/// The exit status as in a shell: the status, or 128 plus the signal.
pub(super) fn shell_exit_code(status: ExitStatus) -> ExitCode {
    let code = status.code().or_else(|| status.signal().map(|n| 128 + n)).unwrap_or(1);
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes() {
        let code = |raw| format!("{:?}", shell_exit_code(ExitStatus::from_raw(raw)));
        assert_eq!(code(0x0300), format!("{:?}", ExitCode::from(3)));
        assert_eq!(code(9), format!("{:?}", ExitCode::from(137)));
    }
}
