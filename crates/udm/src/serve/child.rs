//! The command of `--run`, and the processes that it started.
//!
//! Contract: a signal that ends the server reaches every process below the command. Processes that
//! are left after [`END_MAX`] are killed. If the command ends by itself, its remaining processes
//! continue.

use super::sockets::ServerSockets;
use super::{SignalReceiver, descriptors, systemd};
use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, WaitOptions, getpid, kill_process, set_child_subreaper, waitpid};
use std::io::IsTerminal;
use std::os::unix::process::ExitStatusExt;
use std::process::{ExitCode, ExitStatus};
use std::time::Duration;
use udm_control::exports::DeviceExporter;

/// How long the command may take to end after a signal.
const END_MAX: Duration = Duration::from_secs(5);

/// Interval between checks whether all processes have ended.
const END_PAUSE: Duration = Duration::from_millis(10);

/// The running command. Dropping it kills the command.
pub(super) struct RunCommandProcess(tokio::process::Child);

impl RunCommandProcess {
    /// Starts `command` through the shell, with the exports in its environment.
    pub fn start(
        command: &str,
        sockets: &ServerSockets,
        exporter: &DeviceExporter,
    ) -> Result<RunCommandProcess> {
        // Orphaned descendants become children of this process, so that they can be found at the
        // end.
        set_child_subreaper(Some(getpid())).context("adopting its orphaned processes")?;
        let mut shell = descriptors::shell_with_original_ulimit(command);
        for variable in systemd::VARIABLES {
            shell.env_remove(variable);
        }
        shell.kill_on_drop(true).env("UDM_SOCKET", &sockets.control);
        if let Some(unix) = &sockets.unix {
            shell.env("unixsocket", unix);
        }
        let mut first = None;
        for export in exporter.list() {
            let Some(uri) = export.uris.into_iter().next() else { continue };
            shell.env(export_uri_env_name(&export.name), &uri);
            first.get_or_insert(uri);
        }
        shell.env("uri", first.unwrap_or_default());
        Ok(RunCommandProcess(shell.spawn().context("/bin/sh")?))
    }

    /// Waits for the end of the command; meanwhile passes signals on to it.
    pub async fn finish(&mut self, signals: &mut SignalReceiver) -> Result<ExitCode> {
        loop {
            let signal = tokio::select! {
                status = self.0.wait() => return Ok(shell_exit_code(status?)),
                signal = signals.next() => signal,
            };
            // Ctrl-C in a terminal has sent SIGINT to all processes already.
            if signal != Signal::INT || !std::io::stdin().is_terminal() {
                signal_descendants(signal);
            }
            if let Ok(status) = tokio::time::timeout(END_MAX, self.all_ended()).await {
                return Ok(shell_exit_code(status?));
            }
            signal_descendants(Signal::KILL);
        }
    }

    /// Waits for the command and for all processes that it started.
    async fn all_ended(&mut self) -> std::io::Result<ExitStatus> {
        let status = self.0.wait().await?;
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

/// The name of the variable with the URI of an export.
fn export_uri_env_name(name: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || c == '_' { c } else { '_' };
    format!("uri_{}", name.chars().map(plain).collect::<String>())
}

/// The exit status as in a shell: the status, or 128 plus the signal.
fn shell_exit_code(status: ExitStatus) -> ExitCode {
    let code = status.code().or_else(|| status.signal().map(|n| 128 + n)).unwrap_or(1);
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_words_of_the_shell() {
        assert_eq!(export_uri_env_name("a-b c_9ü"), "uri_a_b_c_9_");
    }

    #[test]
    fn exit_codes() {
        let code = |raw| format!("{:?}", shell_exit_code(ExitStatus::from_raw(raw)));
        assert_eq!(code(0x0300), format!("{:?}", ExitCode::from(3)));
        assert_eq!(code(9), format!("{:?}", ExitCode::from(137)));
    }
}
